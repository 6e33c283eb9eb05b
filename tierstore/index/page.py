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
    """The tiers that hold copies, fastest first."""

    HBM = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        return self.name.lower()


LABELS = tuple(tier.label for tier in Tier)


class Copy(QueueEntry, gc=False, eq=False):
    """One page in one tier. The tier alone interprets ``place``. Only ``ready`` copies are served."""

    page: Page
    place: int
    ready: bool  # False while it is being filled, and again after damage was found
    leases: int
    damaged: bool = False  # if true, the copy is dropped when its last lease is released
    children: int = 0  # copies of child pages in the same tier


class Page(Struct, gc=False, eq=False):
    """A node of the tree: ``tokens`` (uint32 bytes, possibly less than a full chunk) after ``parent``.

    Python's garbage collector does not track pages and copies: there may be hundreds of thousands, and each
    full collection would stop the process while it visits them. The index breaks the reference cycles of a
    page that leaves (with its child, with its copy), and the tree breaks all cycles when it is deleted.
    """

    parent: Page | None
    identity: bytes
    key: PageKey
    tokens: bytes
    nbytes: int  # size of every copy; all pages under one identity have the same size
    depth: int
    children: dict[PageKey, Page] = field(default_factory=dict)
    collision: Page | None = None
    copies: list[Copy | None] = field(default_factory=lambda: [None, None, None])
    pins: int = 0  # holds that users have placed
    holds: int = 0  # holds that the code places for the duration of one operation
    last_use: int = 0
    hits: int = 0
    hint: PageHint = NO_HINT  # about the page's next use; invalid once the page was used after ``hinted``
    hinted: int = 0  # tick of the hint
    key_session: bytes = b""  # hash of the session whose key encrypts it on disk; empty: the tenant's key
    session: int = 0  # the only session that saved the page or one below it; 0: no session, or several
    serial: int = 0  # the page's number on disk; 0: not on disk
    record: PageRecord | None = None  # the disk tier's record of the page
    made_s: float = 0.0  # time at which the page was saved, on the clock of the tree's Ages
    checksum: int | None = None  # XXH3-64 of the host copy; None while it is unknown
    tombstone: bool = False  # the disk copy was lost, but pages below it are still on disk
    pool: int = 0  # in HBM: number of the layer group's pool
    worth: int = 0  # see LayerGroup.worth

    @classmethod
    def root(cls, identity: Identity, nbytes: int, pool: int = 0) -> Page:
        """Return the root of all pages of ``nbytes`` under an identity."""
        worth = worth_of(identity.layout)
        return cls(None, identity.digest, PageKey(b""), b"", nbytes, 0, pool=pool, worth=worth)

    @classmethod
    def below(cls, parent: Page, key: PageKey, tokens: bytes) -> Page:
        """Return a new page below ``parent``, without adding it to the parent's children."""
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
        """Whether a pin or hold requires the page to stay in some tier."""
        return self.pins > 0 or self.holds > 0

    @property
    def memory_cost(self) -> int:
        """Bytes of memory that the page takes besides the KV bytes of its copies. The tokens count twice,
        because the record of a page on disk also contains them."""
        return _PAGE_COST + 2 * len(self.tokens)

    @property
    def on_disk_only(self) -> bool:
        """Whether the page is on disk but in no memory tier."""
        hbm, host, disk = self.copies
        return disk is not None and hbm is None and host is None

    @property
    def done(self) -> bool:
        """Whether a hint said that the page will not be used again, and the page was not used since."""
        return self.hint.reuse == Reuse.DONE and self.last_use <= self.hinted

    def ready_tier(self) -> Tier | None:
        """Return the fastest tier with a complete copy."""
        # Not a loop, because this method runs for each page of each lookup and iterating over an enum is
        # slow.
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
        """Return whether the copy in ``tier`` can be dropped: this must break no pin, hold or lease, and must
        not make pages below unreachable."""
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
