"""``tierstore serve`` runs the daemon. ``tierstore keygen`` makes keys for clients on other machines."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from tierstore.command_line import option, take
from tierstore.daemon.settings import SETTINGS, Settings
from tierstore.units import written_size

_DEFAULTS = Settings()


def _default(name: str) -> str:
    """Return a setting's default as a user would write it; empty if it has none, or if it depends on another
    setting."""
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
            return written_size(size)
    return ""


def _option(name: str) -> inspect.Parameter:
    """Return the command-line option for a setting. The value of an option that the user does not give is
    None."""
    help, default, metavar = SETTINGS[name]["help"], _default(name), SETTINGS[name]["metavar"]
    text = f"{help} [default: {default}]" if default else help
    kind = list[str] | None if name == "listen" else str | None
    return option(name, kind, typer.Option(help=text, show_default=False, metavar=metavar))


def serve(*, config: Path | None, **flags: Any) -> None:
    """Run the daemon that keeps pages for engines until SIGTERM.

    Every option is also a setting in the --config file (host_bytes = "8GiB") and in the environment
    (TIERSTORE_HOST_BYTES). SIGHUP reads the file and the keys of tenants again.
    """
    from tierstore.daemon import daemon

    if flags["listen"] is not None:
        flags["listen"] = ",".join(flags["listen"])
    daemon.serve(Settings.load(flags, file=config), reload=lambda: Settings.load_again(flags, file=config))


_CONFIG = typer.Option(metavar="FILE", help="Read settings from this TOML file", show_default=False)
take(serve, [*map(_option, SETTINGS), option("config", Path | None, _CONFIG)])


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
