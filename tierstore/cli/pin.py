"""``tierstore pin`` and ``tierstore unpin``: keep a prompt's pages, or no longer."""

from __future__ import annotations

from pathlib import Path
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
    is_chain,
    known_identities,
    open_model,
    read_tokens,
    register,
)
from tierstore.errors import UsageError

_PATIENCE_S = 30.0  # the daemon may look on disk for ten


def pin(
    tokens: Tokens,
    model: Model = None,
    identity: IdentityDigest = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """Keep the pages of a prompt that are held, until unpinned or the daemon ends.

    What a tenant pins is kept for an hour, and is half of its quota at most. Only whole chunks can be pinned.
    Pinned pages stay in the coldest tier they are in; where that is the host tier, their room is gone for
    others. A prompt that is pinned twice needs two unpins.
    """
    _change((connect, keys, server_key), tokens, model, identity, undo=False)


def unpin(
    tokens: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The prompt's token ids, as for pin", allow_dash=True),
    ] = None,
    model: Model = None,
    identity: IdentityDigest = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", metavar="NAME", help="All that a tenant has pinned", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that anybody has pinned")] = False,
) -> None:
    """No longer keep the pages of a prompt, of a tenant's prompts, or of any.

    FILE must hold the same tokens as for pin. Pins of other prompts on the same pages stay.
    """
    if (tokens is not None) + (tenant is not None) + everything != 1:
        raise UsageError("say what to unpin: a FILE with a prompt, --tenant NAME, or --all")
    if tokens is not None:
        _change((connect, keys, server_key), tokens, model, identity, undo=True)
        return
    from tierstore.wire import messages

    with Operator(connect, keys, server_key) as operator:
        pages = operator.ask(messages.Unpin(0, tenant), messages.Unpinned).pages
    show.line(f"{pages:,} pages unpinned")


def _change(
    where: tuple[Connect, Keys, ServerKey],
    file: Path,
    model: Model,
    identity: IdentityDigest,
    *,
    undo: bool,
) -> None:
    from tierstore.wire import messages

    tokens = read_tokens(file)
    with Operator(*where) as operator:
        groups = choose_model(known_identities(operator), model, identity)
        if is_chain(groups):  # the daemon says why it refuses a pin
            asked = messages.Pin(0, register(operator, tokens, groups[0]), undo)
            kept = operator.ask(asked, messages.Pinned, wait_s=_PATIENCE_S).tokens
    if not is_chain(groups):
        with open_model(groups, [tokens], lambda each: connected_store(each, *where)) as (store, [prompt]):
            kept = store.unpin(prompt) if undo else store.pin(prompt)
    show.line(f"{kept:,} of {len(tokens):,} tokens {'unpinned' if undo else 'pinned'}")
