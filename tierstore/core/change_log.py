"""What comes into the tiers and what leaves them, in order: for whoever follows a store from outside.

The store notes changes under its lock, as they happen; somebody else takes and tells them. What is not taken
is bounded: when there are too many, all are dropped and the follower is told that it has to begin anew. What
is held at some moment is in ``held.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tierstore.backend import Registration
from tierstore.index import Page, Tier
from tierstore.keys import TOKEN_BYTES, Identity
from tierstore.spec import is_hashed

_MOST = 1 << 16  # changes that wait to be taken


class Stored(NamedTuple):
    """A page is in a tier now, and can be served from it."""

    tier: Tier
    identity: bytes  # the digest
    key: bytes
    parent: bytes  # the key of the page before it; empty for the first one
    tokens: bytes


class PageRemoved(NamedTuple):
    """A page has left a tier."""

    tier: Tier
    identity: bytes
    key: bytes


class Named(NamedTuple):
    """Pages of an identity are told of from now on; those that are held already were not."""

    identity: bytes


class Lost(NamedTuple):
    """Changes were not taken in time, and nobody knows any more which: begin anew."""


Change: TypeAlias = Stored | PageRemoved | Named | Lost


class Followed(NamedTuple):
    """What the pages of an identity are."""

    identity: Identity
    chunk_tokens: int


class ChangeLog:
    """Guarded by the store's lock, :meth:`take` included. ``wake`` is called, under the lock, when there is
    something to take again.

    Only whole chunks of identities that were :meth:`register`-ed are told of: of others nobody could make
    sense. Nor of pages that are named by a hash: followers know a block by its tokens and by the block before
    it, and such a page says neither. Nor of those that ``wants`` says no to.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        wants: Callable[[Registration], bool] = lambda registration: True,
        most: int = _MOST,
    ) -> None:
        self._wake = wake
        self._wants = wants
        self._most = most
        self._changes: list[Change] = []
        self._followed: dict[bytes, Followed] = {}
        self.lost = 0

    def register(self, registration: Registration) -> None:
        identity = registration.identity
        if identity.digest in self._followed or is_hashed(identity.layout) or not self._wants(registration):
            return
        self._followed[identity.digest] = Followed(identity, registration.chunk_tokens)
        self._add(Named(identity.digest))

    def followed(self, identity: bytes) -> Followed:
        """The one with this digest, which must have been registered."""
        return self._followed[identity]

    @property
    def identities(self) -> list[bytes]:
        """All that are followed."""
        return list(self._followed)

    def tells(self, identity: bytes, tokens: bytes) -> bool:
        """Whether followers are told of a page."""
        followed = self._followed.get(identity)
        return followed is not None and len(tokens) == followed.chunk_tokens * TOKEN_BYTES

    def stored(self, page: Page, tier: Tier) -> None:
        if self.tells(page.identity, page.tokens):
            self._add(stored(page, tier))

    def removed(self, tier: Tier, identity: bytes, key: bytes, tokens: bytes) -> None:
        if self.tells(identity, tokens):
            self._add(PageRemoved(tier, identity, key))

    def take(self) -> list[Change]:
        """What has happened since the last time."""
        changes, self._changes = self._changes, []
        return changes

    def _add(self, change: Change) -> None:
        if len(self._changes) >= self._most:
            self.lost += len(self._changes)
            self._changes = [Lost()]
        self._changes.append(change)
        if len(self._changes) == 1:
            self._wake()


def stored(page: Page, tier: Tier) -> Stored:
    """That ``page`` is in ``tier``."""
    parent = page.parent
    assert parent is not None, "roots are in no tier"
    return Stored(tier, page.identity, page.key, parent.key, page.tokens)
