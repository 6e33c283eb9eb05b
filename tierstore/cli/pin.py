"""``tierstore pin`` and ``tierstore unpin``: protect a prompt's pages from eviction, or end the
protection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions
from tierstore.cli.prompts import (
    ModelChoice,
    Tokens,
    TokensAsForPin,
    connected_store,
    is_chain,
    known_identities,
    open_model,
    read_tokens,
    register,
)
from tierstore.command_line import with_options
from tierstore.errors import UsageError

_PATIENCE_S = 30.0  # the daemon may search the disk for 10 s


@with_options
def pin(tokens: Tokens, which: ModelChoice, where: ConnectOptions) -> None:
    """Keep the stored pages of a prompt until it is unpinned.

    Pins end when the daemon ends. A tenant's pin ends after an hour, and a tenant can pin half of its quota.
    Only whole chunks can be pinned. A pinned page stays in the coldest tier that has it. If this is the host
    tier, less of it is left for other pages. A prompt that is pinned twice needs two unpins.
    """
    _change(where, tokens, which, undo=False)


@with_options
def unpin(
    tokens: TokensAsForPin = None,
    *,
    which: ModelChoice,
    where: ConnectOptions,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="Undo all pins of this tenant", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Undo all pins of all tenants")] = False,
) -> None:
    """Undo the pins of a prompt, of a tenant or of all.

    FILE must hold the same tokens as for pin. Pages that other pins cover stay pinned.
    """
    if (tokens is not None) + (tenant is not None) + everything != 1:
        raise UsageError("give one of FILE, --tenant NAME and --all")
    if tokens is not None:
        _change(where, tokens, which, undo=True)
        return
    from tierstore.wire import messages

    with where.operator() as operator:
        pages = operator.ask(messages.Unpin(0, tenant), messages.Unpinned).pages
    show.line(f"{pages:,} pages unpinned")


def _change(where: ConnectOptions, file: Path, which: ModelChoice, *, undo: bool) -> None:
    from tierstore.wire import messages

    tokens = read_tokens(file)
    with where.operator() as operator:
        groups = which.of(known_identities(operator))
        if is_chain(groups):  # the daemon's error says why a pin is refused
            asked = messages.Pin(0, register(operator, tokens, groups[0]), undo)
            kept = operator.ask(asked, messages.Pinned, wait_s=_PATIENCE_S).tokens
    if not is_chain(groups):
        with open_model(groups, [tokens], lambda each: connected_store(each, where)) as (store, [prompt]):
            kept = store.unpin(prompt) if undo else store.pin(prompt)
    show.line(f"{kept:,} of {len(tokens):,} tokens {'unpinned' if undo else 'pinned'}")
