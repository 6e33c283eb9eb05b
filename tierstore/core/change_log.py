"""A log of the pages that enter and leave the tiers, in order, for followers outside of the store.

The store logs changes under its lock, as they happen; another thread takes and publishes them. The log is
bounded: a full log drops all changes and reports :class:`Lost`, so that the follower starts again.
``held.py`` lists the pages that the store holds at that time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from tierstore.backend import Registration
from tierstore.index import Page, Tier
from tierstore.keys import TOKEN_BYTES, Identity
from tierstore.spec import is_hashed

_MOST = 1 << 16  # most changes that may wait to be taken


class Stored(NamedTuple):
    """A page has entered a tier and can be served from it."""

    tier: Tier
    identity: bytes  # the digest
    key: bytes
    parent: bytes  # the key of the page before it; empty for a prompt's first page
    tokens: bytes


class PageRemoved(NamedTuple):
    """A page has left a tier."""

    tier: Tier
    identity: bytes
    key: bytes


class Named(NamedTuple):
    """Pages of an identity are reported from now on. Pages that the store already holds were not reported."""

    identity: bytes


class Lost(NamedTuple):
    """Changes were dropped because they were not taken in time: the follower must start again."""


Change: TypeAlias = Stored | PageRemoved | Named | Lost


class Followed(NamedTuple):
    """An identity whose pages are reported, and the number of tokens in its chunks."""

    identity: Identity
    chunk_tokens: int


class ChangeLog:
    """The changes of one store for one follower. Guarded by the store's lock, including :meth:`take`.

    ``wake`` is called, under the lock, when the log is no longer empty. The log reports only whole chunks of
    identities passed to :meth:`register`, because followers cannot interpret other pages. The log skips pages
    named by a hash: followers identify a block by its tokens and the block before it, and a named page has
    neither. The log also skips identities for which ``wants`` returns False.
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
        """Return the followed identity of this digest, which must have been registered."""
        return self._followed[identity]

    @property
    def identities(self) -> list[bytes]:
        return list(self._followed)

    def tells(self, identity: bytes, tokens: bytes) -> bool:
        """Return whether the page with these tokens is reported to followers."""
        followed = self._followed.get(identity)
        return followed is not None and len(tokens) == followed.chunk_tokens * TOKEN_BYTES

    def stored(self, page: Page, tier: Tier) -> None:
        if self.tells(page.identity, page.tokens):
            self._add(stored(page, tier))

    def removed(self, tier: Tier, identity: bytes, key: bytes, tokens: bytes) -> None:
        if self.tells(identity, tokens):
            self._add(PageRemoved(tier, identity, key))

    def take(self) -> list[Change]:
        """Return the changes since the last call."""
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
    """Return the change that reports ``page`` in ``tier``."""
    parent = page.parent
    assert parent is not None, "roots are in no tier"
    return Stored(tier, page.identity, page.key, parent.key, page.tokens)
