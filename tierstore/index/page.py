"""A page of the tree, and its copies in the tiers."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct, field

from tierstore.keys import TOKEN_BYTES, Identity, PageKey
from tierstore.policy import NO_HINT, PageHint, QueueEntry, Reuse
from tierstore.spec import worth_of

if TYPE_CHECKING:
    from tierstore.tiers.disk.records import PageRecord


_PAGE_COST = 1536  # bytes of memory for the objects of a page with two copies


class Tier(enum.IntEnum):
    """The places of copies, fastest first."""

    HBM = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        return self.name.lower()


LABELS = tuple(tier.label for tier in Tier)


class Copy(QueueEntry, gc=False, eq=False):
    """One page in one tier. ``place`` has a meaning only for that tier. Only ``ready`` copies are served."""

    page: Page
    place: int
    ready: bool  # False while it is being filled, and again after damage was found
    leases: int
    damaged: bool = False  # dropped with its last lease
    children: int = 0  # copies of child pages in the same tier


class Page(Struct, gc=False, eq=False):
    """A node of the tree: ``tokens`` (uint32 bytes, possibly less than a full chunk) after ``parent``.

    Pages and copies are hidden from Python's garbage collector. There may be hundreds of thousands, and each
    full collection would stop the process while it visits them. The index breaks their reference cycles (page
    and child, page and copy), and so does the tree at its end.
    """

    parent: Page | None
    identity: bytes
    key: PageKey
    tokens: bytes
    nbytes: int  # of every copy, and of all pages under one identity
    depth: int
    children: dict[PageKey, Page] = field(default_factory=dict)
    collision: Page | None = None
    copies: list[Copy | None] = field(default_factory=lambda: [None, None, None])
    pins: int = 0  # set by users
    holds: int = 0  # set by the code, for the time of one operation
    last_use: int = 0
    hits: int = 0
    hint: PageHint = NO_HINT  # about its next use; no longer valid once it was used after tick ``hinted``
    hinted: int = 0
    key_session: bytes = b""  # hash of the session whose key encrypts it on disk; empty: its tenant's key
    session: int = 0  # the only session that saved it or a page behind it; 0: none, or several
    serial: int = 0  # its number on disk; 0: not on disk
    record: PageRecord | None = None  # record of its disk copy
    made_s: float = 0.0  # when it was saved, on the clock of the tree's Ages
    checksum: int | None = None  # XXH3-64 of its host copy, if it is known
    tombstone: bool = False  # its disk copy was lost, but pages below it are still there
    pool: int = 0  # in HBM: number of the layer group's pool
    worth: int = 0  # see LayerGroup.worth

    @classmethod
    def root(cls, identity: Identity, nbytes: int, pool: int = 0) -> Page:
        """Return the root of all pages of ``nbytes`` under an identity."""
        worth = worth_of(identity.layout)
        return cls(None, identity.digest, PageKey(b""), b"", nbytes, 0, pool=pool, worth=worth)

    @classmethod
    def below(cls, parent: Page, key: PageKey, tokens: bytes) -> Page:
        """Return a new page below ``parent``, which does not know it yet."""
        page = cls(parent, parent.identity, key, tokens, parent.nbytes, parent.depth + 1)
        page.pool, page.worth = parent.pool, parent.worth
        return page

    def __repr__(self) -> str:
        where = ",".join(tier.label for tier in Tier if self.copies[tier] is not None)
        return f"Page(depth {self.depth}, {self.num_tokens} tokens, {where or 'tombstone'})"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def kept(self) -> bool:
        """Whether the page has to stay in some tier."""
        return self.pins > 0 or self.holds > 0

    @property
    def memory_cost(self) -> int:
        """Bytes of memory that it takes besides its copies. The record of a page on disk has the tokens,
        too."""
        return _PAGE_COST + 2 * len(self.tokens)

    @property
    def on_disk_only(self) -> bool:
        """Whether the page is on disk but in no memory tier."""
        hbm, host, disk = self.copies
        return disk is not None and hbm is None and host is None

    @property
    def done(self) -> bool:
        """Whether a hint said that the page will not be used again, and it has not been used since."""
        return self.hint.reuse == Reuse.DONE and self.last_use <= self.hinted

    def ready_tier(self) -> Tier | None:
        """Return the fastest tier with a complete copy."""
        # Not a loop: this runs for each page of each lookup, and iterating over an enum is slow.
        hbm, host, disk = self.copies
        if hbm is not None and hbm.ready:
            return Tier.HBM
        if host is not None and host.ready:
            return Tier.HOST
        if disk is not None and disk.ready:
            return Tier.DISK
        return None

    def all_children(self) -> Iterator[Page]:
        """Yield the children, newest first, including collisions."""
        for child in reversed(self.children.values()):
            collision: Page | None = child
            while collision is not None:
                yield collision
                collision = collision.collision

    def may_leave(self, tier: Tier) -> bool:
        """Return whether the copy in ``tier`` can be dropped without violating a pin or lease or cutting off
        a held page."""
        copy = self.copies[tier]
        if copy is None or not copy.ready or copy.leases or copy.children:
            return False
        if self.kept and not any(c is not None and c.ready for c in self.copies[tier + 1 :]):
            return False  # a page that is pinned or held keeps its coldest copy
        return not self.children or any(c is not None and c.ready for c in self.copies if c is not copy)

    def may_unload(self) -> bool:
        """Return whether the page is only on disk and not in use."""
        hbm, host, disk = self.copies
        if disk is None or hbm is not None or host is not None:
            return False
        return disk.ready and not disk.leases and not self.children and not self.kept
