"""``tierstore prefetch``: bring a prompt's pages from the disk into the host tier before anybody asks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import Connect, Keys, Operator, ServerKey
from tierstore.cli.prompts import (
    IdentityDigest,
    Model,
    Tokens,
    choose_model,
    connected_store,
    known_identities,
    open_model,
    read_tokens,
)


def command(
    file: Tokens,
    model: Model = None,
    identity: IdentityDigest = None,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0.0, max=3600.0, metavar="SECONDS", help="At most so long")
    ] = 60.0,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """Bring the pages of a prompt that are on disk into the host tier.

    They stay there as long as the policy lets them. What is not there when the time is over still comes.
    """
    from rich.console import Console

    tokens = read_tokens(file)
    where = connect, keys, server_key
    with Console(file=sys.stderr).status("prefetching"):
        with Operator(*where) as operator:
            groups = choose_model(known_identities(operator), model, identity)
        with (
            open_model(groups, [tokens], lambda each: connected_store(each, *where)) as (store, [prompt]),
            store.lookup(prompt) as hit,
        ):
            on_disk = hit.by_tier.get("disk", 0)
            above = hit.prefetch(deadline_s=wait_s).wait()
    show.line(
        f"{hit.tokens:,} of {len(tokens):,} tokens are held; {above:,} of them are in the host tier now "
        f"({on_disk:,} were on disk only)"
    )
