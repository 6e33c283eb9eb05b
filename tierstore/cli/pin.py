"""``tierstore pin`` and ``tierstore unpin``: keep a prompt's pages, or no longer."""

from __future__ import annotations

from tierstore.cli import show
from tierstore.cli.operator import Connect, Keys, Operator, ServerKey
from tierstore.cli.prompts import IdentityDigest, Model, Tokens, named

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

    Only whole chunks can be pinned. Pinned pages stay in the coldest tier they are in; where that is the host
    tier, their room is gone for others. Pinning twice needs unpinning twice.
    """
    _change(Operator(connect, keys, server_key), tokens, model, identity, undo=False)


def unpin(
    tokens: Tokens,
    model: Model = None,
    identity: IdentityDigest = None,
    connect: Connect = None,
    keys: Keys = None,
    server_key: ServerKey = None,
) -> None:
    """No longer keep the pages of a prompt."""
    _change(Operator(connect, keys, server_key), tokens, model, identity, undo=True)


def _change(
    operator: Operator, tokens: Tokens, model: Model, identity: IdentityDigest, *, undo: bool
) -> None:
    from tierstore.daemon import protocol

    with operator:
        prompt, count = named(operator, tokens, model, identity)
        pinned = operator.ask(protocol.Pin(0, prompt, undo), protocol.Pinned, wait_s=_PATIENCE_S)
    show.line(f"{pinned.tokens:,} of {count:,} tokens {'unpinned' if undo else 'pinned'}")
