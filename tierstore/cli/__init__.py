"""The command ``tierstore``.

Exit codes: 0 for success, 1 for a failed run or a check that found an error, 2 for bad usage. An error is one
line on stderr that says what was wrong and what to do. ``--json`` writes one document to stdout, whose field
names contain the units. Each subcommand has its own file and imports its dependencies when it runs, so that
``--help`` is quick.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

from tierstore.cli import (
    disk_key,
    doctor,
    evict,
    forget,
    fsck,
    ls,
    pack,
    pin,
    prefetch,
    run,
    serve,
    size,
    stats,
    top,
    why,
)
from tierstore.command_line import make_app, one_line_errors, version_option

app = make_app()


def main() -> None:
    """Run the command and end the process."""
    try:
        with one_line_errors("tierstore"):
            app()
    except SystemExit as end:
        if "obstore" not in sys.modules:
            raise
        # obstore's threads still run. They can crash the interpreter while it shuts down.
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)


@app.callback()
def _commands(version: Annotated[bool, version_option("tierstore")] = False) -> None:
    """Keep the KV cache of LLM inference in tiers."""


app.command("fsck")(fsck.command)
app.command("ls")(ls.command)
app.command("doctor")(doctor.command)
app.command("size")(size.command)
app.command("serve")(serve.serve)
app.command("run", context_settings=run.ARGUMENTS_OF_THE_COMMAND)(run.command)
app.command("keygen")(serve.keygen)
app.command("stats")(stats.command)
app.command("top")(top.command)
app.command("why")(why.command)
app.command("evict")(evict.command)
app.command("forget")(forget.command)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("prefetch")(prefetch.command)
app.add_typer(pack.app, name="pack")
app.add_typer(disk_key.app, name="disk-key")
