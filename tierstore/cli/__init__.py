"""``tierstore``: the store from the command line.

Exit codes: 0 done, 1 the run failed (or a check found something), 2 bad usage. An error is one line on stderr
that says what was wrong and what to do. ``--json`` writes one document to stdout, with units in the names of
its fields. One file per command; what a command needs is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tierstore.cli import doctor, evict, fsck, ls, pack, pin, prefetch, serve, size, stats, top
from tierstore.command_line import one_line_errors

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Run the command line, and end the process."""
    with one_line_errors("tierstore"):
        app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"tierstore {metadata.version('tierstore')}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Keep the KV cache of LLM inference in tiers."""


app.command("fsck")(fsck.command)
app.command("ls")(ls.command)
app.command("doctor")(doctor.command)
app.command("size")(size.command)
app.command("serve")(serve.serve)
app.command("keygen")(serve.keygen)
app.command("stats")(stats.command)
app.command("top")(top.command)
app.command("evict")(evict.command)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("prefetch")(prefetch.command)
app.add_typer(pack.app, name="pack")
