"""``tierstore prefetch``: load a prompt's pages from disk into the host tier before they are needed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.cli.prompts import (
    ModelChoice,
    Tokens,
    connected_store,
    known_identities,
    open_model,
    read_tokens,
)
from tierstore.command_line import with_options


@with_options
def command(
    file: Tokens,
    which: ModelChoice,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0.0, max=3600.0, metavar="SECONDS", help="Wait at most this long")
    ] = 60.0,
    *,
    where: ConnectOptions,
) -> None:
    """Load a prompt's pages from disk into the host tier.

    The pages stay there until the policy evicts them. Pages that miss the deadline are still loaded in the
    background.
    """
    from rich.console import Console

    tokens = read_tokens(file)
    with Console(file=sys.stderr).status("prefetching"):
        with where.operator() as operator:
            groups = which.of(known_identities(operator))
        with (
            open_model(groups, [tokens], lambda each: connected_store(each, where)) as (store, [prompt]),
            store.lookup(prompt) as hit,
        ):
            on_disk = hit.by_tier.get("disk", 0)
            above = hit.prefetch(deadline_s=wait_s).wait()
    show.line(
        f"{hit.tokens:,} of {len(tokens):,} tokens are held; {above:,} of them are in the host tier now "
        f"({on_disk:,} were on disk only)"
    )
