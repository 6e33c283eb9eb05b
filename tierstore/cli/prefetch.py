"""``tierstore prefetch``: bring a prompt's pages from the disk into the host tier before anybody asks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import Connect, Keys, Operator, ServerKey
from tierstore.cli.prompts import IdentityDigest, Model, Tokens, named

_LOOK_S = 10.0  # for what is on disk
_ANSWER_S = 5.0  # beyond what the daemon was told to wait


def command(
    tokens: Tokens,
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

    from tierstore.wire import messages

    with Operator(connect, keys, server_key) as operator, Console(file=sys.stderr).status("prefetching"):
        prompt, count = named(operator, tokens, model, identity)
        looked = messages.Lookup(0, prompt, count, _LOOK_S)
        found = operator.ask(looked, messages.Found, wait_s=_LOOK_S + _ANSWER_S)
        pages = 0
        if found.lease:
            wanted = messages.Prefetch(0, found.lease, wait_s)
            pages = operator.ask(wanted, messages.Prefetched, wait_s=wait_s + _ANSWER_S).pages
    on_disk = sum(each for tier, each in found.tiers if tier == "disk")
    held = sum(each for _, each in found.tiers)
    show.line(
        f"{found.tokens:,} of {count:,} tokens are held; {pages:,} of their {held:,} pages are in the host "
        f"tier now ({on_disk:,} were on disk only)"
    )
