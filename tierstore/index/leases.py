"""Leases on pages: a leased page stays in its tier until the lease is released or ends."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from tierstore.index.index import Index
from tierstore.index.page import Page, Tier

_SPARE_LEASES = 4096


class PageLease:
    """A hold on copies, with an end. The lease holds each page in the fastest tier that had it."""

    __slots__ = ("ends", "held", "released")

    def __init__(self) -> None:
        self.held: list[tuple[Page, Tier]] = []
        self.ends = 0.0
        self.released = True


class Leases:
    """All leases of a store. The caller holds the store's lock. ``drop_damaged`` is called with each damaged
    copy that has no lease left."""

    def __init__(
        self,
        index: Index,
        clock: Callable[[], float],
        drop_damaged: Callable[[Page, Tier], None],
    ) -> None:
        self._index = index
        self._clock = clock
        self._drop_damaged = drop_damaged
        self._by_end: list[tuple[float, int, PageLease]] = []
        self._order = itertools.count()
        self.open = 0
        self.expired = 0  # number of leases that ended because their time was over

    def take(self, held: list[tuple[Page, Tier]], lease_s: float) -> PageLease:
        """Return a lease on these copies for ``lease_s`` seconds."""
        lease = PageLease()
        self._hold(lease, held, lease_s)
        return lease

    def renew(self, lease: PageLease, pages: Sequence[Page], lease_s: float) -> None:
        """If the lease has ended, take it again on its pages, up to the first page that is in no tier."""
        if lease.released:
            held = [(page, page.ready_tier()) for page in pages]
            present = itertools.takewhile(lambda each: each[1] is not None, held)
            self._hold(lease, [(page, tier) for page, tier in present if tier is not None], lease_s)

    def _hold(self, lease: PageLease, held: list[tuple[Page, Tier]], lease_s: float) -> None:
        self._index.lease_all(held)
        lease.held = held
        lease.ends = self._clock() + lease_s
        lease.released = False
        self.open += 1
        heapq.heappush(self._by_end, (lease.ends, next(self._order), lease))

    def joined(self, one: PageLease, other: PageLease) -> PageLease:
        """Return one lease that replaces both leases and lasts until the later end of the two."""
        if one.released or other.released:
            return other if one.released else one
        both = self.take([*one.held, *other.held], max(one.ends, other.ends) - self._clock())
        self.release(one)
        self.release(other)
        return both

    def release(self, lease: PageLease) -> None:
        """End a lease. Repeated calls do nothing."""
        if not lease.released:
            lease.released = True
            self.open -= 1
            self.release_held(lease.held)
            lease.held.clear()

    def expire(self) -> None:
        now = self._clock()
        while self._by_end and (self._by_end[0][0] <= now or self._by_end[0][2].released):
            lease = heapq.heappop(self._by_end)[2]
            if not lease.released and lease.ends <= now:  # otherwise it was renewed and has a later entry
                self.expired += 1
                self.release(lease)
        if len(self._by_end) > 2 * self.open + _SPARE_LEASES:  # many leases were released before their end
            self._by_end = [entry for entry in self._by_end if not entry[2].released]
            heapq.heapify(self._by_end)

    def release_all(self, pages: Sequence[Page], tier: Tier) -> None:
        """Release one hold on each page's copy in ``tier``."""
        self.release_held([(page, tier) for page in pages])

    def release_held(self, held: Sequence[tuple[Page, Tier]]) -> None:
        """Release one hold on each of these copies."""
        for page, tier in self._index.release_all(held):
            self._drop_damaged(page, tier)

    def hold_on_disk(self, lease: PageLease, position: int) -> bool:
        """Move a lease's hold on the page at ``position`` from the host tier to the disk, so that the page
        can leave the host tier. Return False if the page is not on disk."""
        page, held_in = lease.held[position]
        on_disk = page.copies[Tier.DISK]
        if held_in is not Tier.HOST or on_disk is None or not on_disk.ready:
            return False
        self.move(lease, position, Tier.DISK)
        return True

    def move(self, lease: PageLease, position: int, tier: Tier) -> None:
        """Move a lease's hold on the page at ``position`` to ``tier``."""
        page, held_in = lease.held[position]
        if held_in is not tier:
            self._index.lease(page, tier)
            lease.held[position] = (page, tier)
            self.release_all([page], held_in)
