"""Which copies may leave their tier and which pages may fall asleep, and in what order."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.index.page import Copy, Page, Tier
from tierstore.policy import NO_HINT, EvictionQueue, PageFacts, Policy


class EvictionQueues:
    """For each memory tier, the queue of copies that may leave; for the disk, the pages that may fall idle.

    The index says when a page may have become free to go (:meth:`offer`). Not thread-safe.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        """``policies`` by tier; the disk's orders the ledger, not a queue."""
        self._queues = [_queue(policies[tier], tier) for tier in (Tier.HBM, Tier.HOST)]
        self.idle: dict[Page, None] = {}  # that may have fallen idle, the first one first

    def offer(self, page: Page, tier: Tier) -> None:
        """Queue the copy in ``tier`` if it is there and may leave."""
        copy = page.copies[tier]
        if tier is Tier.DISK:
            if page.may_sleep():
                self.idle.setdefault(page)
        elif copy is not None and not copy.queued and page.may_leave(tier):
            self._queues[tier].offer(copy)

    def offer_all(self, page: Page) -> None:
        """Do the same in every tier."""
        # Spelled out: this runs several times for each page that comes or leaves.
        hbm, host, disk = page.copies
        if hbm is not None and not hbm.queued:
            self.offer(page, Tier.HBM)
        if host is not None and not host.queued:
            self.offer(page, Tier.HOST)
        if disk is not None and not disk.queued:
            self.offer(page, Tier.DISK)

    def offer_again(self, page: Page) -> None:
        """Queue a page's copies anew: its score may have fallen."""
        for tier in (Tier.HBM, Tier.HOST):
            copy = page.copies[tier]
            if copy is not None:
                copy.queued = False
                if page.may_leave(tier):
                    self._queues[tier].offer(copy)

    def victim(self, tier: Tier, tick: int) -> Page | None:
        """Return the page whose copy in ``tier`` (not the disk, which keeps its own order) leaves next, by
        the tier's policy; None if none may."""
        copy = self._queues[tier].victim(tick)
        return copy.page if copy is not None else None

    def queued(self, tier: Tier) -> set[int]:
        """Return the ids of the queued copies (for checks)."""
        if tier is Tier.DISK:
            return {id(page.copies[tier]) for page in self.idle}
        return self._queues[tier].queued()


def _queue(policy: Policy, tier: Tier) -> EvictionQueue[Copy]:
    return EvictionQueue(policy, _facts, lambda copy: copy.page.may_leave(tier))


def _facts(copy: Copy) -> PageFacts:
    page = copy.page
    hint = page.hint if page.last_use <= page.hinted else NO_HINT
    return PageFacts(page.nbytes, page.depth, page.last_use, page.hits, hint.reuse, hint.priority)
