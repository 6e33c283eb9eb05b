"""A page of the tree, and its copies in the tiers."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierstore.keys import TOKEN_BYTES, PageKey
from tierstore.policy import NO_HINT
from tierstore.policy.departed import MOST_WATCHED, fingerprint
from tierstore.policy.queue import Standing

if TYPE_CHECKING:
    from tierstore.tiers.disk.records import PageRecord


class Tier(enum.IntEnum):
    """Where a copy can be, fastest first."""

    HBM = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class Copy(Standing):
    """One page in one tier. ``place`` means something to that tier only. Only ``ready`` copies are served."""

    __slots__ = ("children", "damaged", "leases", "page", "place", "ready")

    def __init__(self, page: Page, place: int, *, ready: bool, leases: int) -> None:
        super().__init__()
        self.page = page
        self.place = place
        self.ready = ready  # False while it is being filled, and again once it is found damaged
        self.damaged = False  # to be dropped with its last lease
        self.leases = leases
        self.children = 0  # copies of child pages in the same tier


class Page:
    """A node of the tree: ``tokens`` (uint32 bytes, possibly less than a full chunk) after ``parent``."""

    __slots__ = (
        "checksum",
        "children",
        "copies",
        "depth",
        "fingerprint",
        "hint",
        "hinted",
        "hits",
        "hole",
        "identity",
        "key",
        "last_use",
        "nbytes",
        "parent",
        "pins",
        "record",
        "sampled",
        "serial",
        "session",
        "tokens",
        "twin",
    )

    def __init__(
        self, parent: Page | None, identity: bytes, key: PageKey, tokens: bytes, nbytes: int
    ) -> None:
        self.parent = parent
        self.identity = identity
        self.key = key
        self.tokens = tokens
        self.nbytes = nbytes  # of every copy, and of all pages under one identity
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[PageKey, Page] = {}
        self.twin: Page | None = None
        self.copies: list[Copy | None] = [None, None, None]
        self.pins = 0
        self.last_use = 0
        self.hits = 0
        self.fingerprint = fingerprint(int.from_bytes(key[:8], "big"))
        self.sampled = self.fingerprint < MOST_WATCHED
        self.hint = NO_HINT  # about its next use: void once it was used after tick ``hinted``
        self.hinted = 0
        self.session = 0  # that alone has saved it or a page behind it; 0: nobody alone
        self.serial = 0  # what the disk tier knows it by; 0: nothing of it is on disk
        self.record: PageRecord | None = None  # of its disk copy
        self.checksum: int | None = None  # XXH3-64 of its host copy, where that came with it
        self.hole = False  # its disk copy was lost, pages below it are still there

    def __repr__(self) -> str:
        where = ",".join(tier.label for tier in Tier if self.copies[tier] is not None)
        return f"Page(depth {self.depth}, {self.num_tokens} tokens, {where or 'hole'})"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def ready_tier(self) -> Tier | None:
        """The fastest tier with a complete copy."""
        # Spelled out: this runs for each page of each lookup, and iterating over an enum is slow.
        hbm, host, disk = self.copies
        if hbm is not None and hbm.ready:
            return Tier.HBM
        if host is not None and host.ready:
            return Tier.HOST
        if disk is not None and disk.ready:
            return Tier.DISK
        return None

    def all_children(self) -> Iterator[Page]:
        """The children, newest first, twins included."""
        for child in reversed(self.children.values()):
            twin: Page | None = child
            while twin is not None:
                yield twin
                twin = twin.twin

    def may_leave(self, tier: Tier) -> bool:
        """Whether the copy in ``tier`` can go without breaking a promise or cutting off a held page."""
        copy = self.copies[tier]
        if copy is None or not copy.ready or copy.leases or copy.children:
            return False
        if self.pins and not any(c is not None and c.ready for c in self.copies[tier + 1 :]):
            return False  # a pinned page keeps its coldest copy
        return not self.children or any(c is not None and c.ready for c in self.copies if c is not copy)

    def may_sleep(self) -> bool:
        """Whether the page is on disk only, and nobody has to do with it."""
        hbm, host, disk = self.copies
        if disk is None or hbm is not None or host is not None:
            return False
        return disk.ready and not disk.leases and not self.children and not self.pins
