"""``tierstore serve`` runs the daemon. ``tierstore keygen`` makes keys for clients on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.daemon.settings import HELP, Settings
from tierstore.units import format_size

_DEFAULTS = Settings()


def _option(name: str, metavar: str) -> typer.models.OptionInfo:
    flag = f"--{name.replace('_', '-')}"
    default = _default(name)
    text = f"{HELP[name]} [default: {default}]" if default else HELP[name]
    option: typer.models.OptionInfo = typer.Option(flag, help=text, show_default=False, metavar=metavar)
    return option


def _default(name: str) -> str:
    """Return the default as a user would write it; empty if there is none or another setting decides it."""
    match getattr(_DEFAULTS, name):
        case str(text):
            return text
        case float(number):
            return f"{number:g}"
        case tuple(urls):
            return ",".join(urls)
        case bool(flag):
            return str(flag).lower()
        case int(size) if name in ("host_bytes", "disk_bytes", "page_bytes", "cluster_staging"):
            return format_size(size).replace(" ", "")
    return ""


def serve(
    listen: Annotated[list[str] | None, _option("listen", "URL")] = None,
    host_bytes: Annotated[str | None, _option("host_bytes", "SIZE")] = None,
    disk: Annotated[str | None, _option("disk", "DIR")] = None,
    disk_bytes: Annotated[str | None, _option("disk_bytes", "SIZE")] = None,
    disk_write_budget: Annotated[str | None, _option("disk_write_budget", "SIZE")] = None,
    disk_codec: Annotated[str | None, _option("disk_codec", "NAME")] = None,
    page_bytes: Annotated[str | None, _option("page_bytes", "SIZE")] = None,
    policy: Annotated[str | None, _option("policy", "NAME")] = None,
    lease_s: Annotated[float | None, _option("lease_s", "SECONDS")] = None,
    reserve_bytes: Annotated[str | None, _option("reserve_bytes", "SIZE")] = None,
    server_key: Annotated[str | None, _option("server_key", "FILE")] = None,
    tenants: Annotated[str | None, _option("tenants", "DIR")] = None,
    quotas: Annotated[str | None, _option("quotas", "NAME=SIZE,…")] = None,
    metrics_port: Annotated[int | None, _option("metrics_port", "PORT")] = None,
    metrics_host: Annotated[str | None, _option("metrics_host", "ADDRESS")] = None,
    dashboard_token: Annotated[str | None, _option("dashboard_token", "FILE")] = None,
    events: Annotated[str | None, _option("events", "URL")] = None,
    events_replay: Annotated[str | None, _option("events_replay", "URL")] = None,
    events_topic: Annotated[str | None, _option("events_topic", "TEXT")] = None,
    events_encoding: Annotated[str | None, _option("events_encoding", "NAME")] = None,
    events_block_tokens: Annotated[str | None, _option("events_block_tokens", "N")] = None,
    events_tenants: Annotated[str | None, _option("events_tenants", "BOOL")] = None,
    events_connect: Annotated[str | None, _option("events_connect", "BOOL")] = None,
    events_anywhere: Annotated[str | None, _option("events_anywhere", "BOOL")] = None,
    cluster: Annotated[str | None, _option("cluster", "URL")] = None,
    cluster_publish: Annotated[str | None, _option("cluster_publish", "NAME")] = None,
    cluster_min_tokens: Annotated[str | None, _option("cluster_min_tokens", "N")] = None,
    cluster_look_s: Annotated[float | None, _option("cluster_look_s", "SECONDS")] = None,
    cluster_bytes_per_s: Annotated[str | None, _option("cluster_bytes_per_s", "SIZE")] = None,
    cluster_staging: Annotated[str | None, _option("cluster_staging", "SIZE")] = None,
    cluster_secret: Annotated[str | None, _option("cluster_secret", "FILE")] = None,
    cluster_protocol: Annotated[str | None, _option("cluster_protocol", "NAME")] = None,
    cluster_devices: Annotated[str | None, _option("cluster_devices", "NAMES")] = None,
    cluster_host: Annotated[str | None, _option("cluster_host", "ADDRESS")] = None,
    drain_s: Annotated[float | None, _option("drain_s", "SECONDS")] = None,
    log_level: Annotated[str | None, _option("log_level", "LEVEL")] = None,
    log_format: Annotated[str | None, _option("log_format", "FORMAT")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="Read settings from this TOML file", show_default=False
        ),
    ] = None,
) -> None:
    """Run the daemon that keeps pages for engines until SIGTERM.

    Every option is also a setting in the --config file (host_bytes = "8GiB") and in the environment
    (TIERSTORE_HOST_BYTES). SIGHUP reads the file and the keys of tenants again.
    """
    from tierstore.daemon import daemon

    flags = {name: value for name, value in locals().items() if name not in ("config", "daemon")}
    if listen is not None:
        flags["listen"] = ",".join(listen)
    daemon.serve(Settings.load(flags, file=config), reload=lambda: Settings.load_again(flags, file=config))


def keygen(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the key's owner: a tenant, or any name for the daemon", show_default=False
        ),
    ],
    directory: Annotated[Path, typer.Option("--dir", help="Directory for NAME.secret and NAME.key")] = Path(),
) -> None:
    """Make a key pair for connections over tcp://.

    The daemon needs its own NAME.secret (--server-key) and a directory with the NAME.key of each client
    (--tenants). A client needs its own .secret file and the daemon's .key file.
    """
    from tierstore.wire import keys

    pair, half = keys.generate(directory, name)
    typer.echo(f"{pair}\n{half}")
