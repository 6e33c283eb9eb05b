"""``tierstore-proxy``: from the command line.

Exit codes: 0 ended, 1 the run failed, 2 bad usage. An error is one line on stderr.
"""

from __future__ import annotations

import inspect
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import typer

from tierstore.command_line import make_app, one_line_errors, option, take, version_option
from tierstore.units import written_size
from tierstore_proxy.settings import SIZES, ProxySettings

app = make_app()


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore-proxy", extra="proxy"):
        app()


def serve(*, config: Path | None, version: bool, **flags: object) -> None:
    """Serve one address for engines that prefill and engines that decode, until SIGTERM.

    If no decode engine holds a prompt, a prefill engine computes it first and saves its pages in the store.
    Without --prefill, a request goes to the engine that holds its prompt. See docs/handover.md.
    """
    from tierstore_proxy.app import run

    run(ProxySettings.load(flags, file=config))


def _option(field: Field[Any]) -> inspect.Parameter:
    """Return the option for a setting. Its value is None if the option is not given."""
    help, default = field.metadata["help"], cast(Any, field.default)
    kind: Any = get_type_hints(ProxySettings)[field.name]
    if default == ():
        kind = list[str]
    elif field.name in SIZES:
        kind = str
    if default not in ((), "", None):
        shown = written_size(default) if field.name in SIZES else str(default)
        help = f"{help} [default: {shown.removesuffix('.0')}]"
    envvar = "TIERSTORE_API_KEY" if field.name == "api_key" else None
    declared = typer.Option(help=help, metavar=field.metadata["metavar"], show_default=False, envvar=envvar)
    return option(field.name, kind | None, declared)


_CONFIG = typer.Option(metavar="FILE", help="TOML file with these options: prefill = [URL, …], prefill_s = 9")
take(
    serve,
    [
        *map(_option, fields(ProxySettings)),
        option("config", Path | None, _CONFIG),
        option("version", bool, version_option("tierstore-proxy"), False),
    ],
)
app.command()(serve)


if __name__ == "__main__":
    main()
