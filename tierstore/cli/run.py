"""``tierstore run``: start an engine with the environment variable ``TIERSTORE``."""

from __future__ import annotations

import os
import shutil
from typing import Annotated

import typer

from tierstore.errors import TierStoreError, UsageError

# Options that follow the engine's program are passed to the engine.
ARGUMENTS_OF_THE_COMMAND = {"allow_interspersed_args": False}


def command(
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- COMMAND...", help="The engine's program and arguments", show_default=False
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="TIERSTORE",
            help="The daemon: auto (this user's, started if necessary), ipc://PATH, tcp://HOST:PORT, or off",
        ),
    ] = "auto",
) -> None:
    """Run an engine with the cache of a daemon.

    Example: tierstore run -- vllm serve MODEL. The command replaces this process, with TIERSTORE set to
    --store in its environment. vLLM and SGLang must be in the same environment as tierstore, because they
    load its plug-in. Other programs ignore the variable.
    """
    from tierstore.daemon.background import VARIABLE, checked_choice

    if not program:
        raise UsageError("give a command: tierstore run -- vllm serve MODEL")
    found = shutil.which(program[0])
    if found is None:
        raise TierStoreError(f"there is no program {program[0]!r}: check its name and PATH")
    os.environ[VARIABLE] = checked_choice(store)
    try:
        os.execv(found, program)
    except OSError as error:
        raise TierStoreError(f"cannot run {found}: {error.strerror}") from error
