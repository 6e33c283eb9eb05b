"""Which copies may leave their tier and which pages may fall asleep, and in what order."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.index.page import Copy, Page, Tier
from tierstore.policy import NO_HINT, PageFacts, Policy
from tierstore.policy.queue import Accesses, Queue


class Exits:
    """For each memory tier, the queue of copies that may leave; for the disk, the pages that may fall idle.

    The index says when a page may have become free to go (:meth:`offer`). Not thread-safe.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        """``policies`` by tier; the one for the disk only hears of uses."""
        self.queues = [_queue(policies[tier], tier) for tier in (Tier.HBM, Tier.HOST)]
        self.disk_accesses = Accesses(policies[Tier.DISK])
        accesses = [*(queue.accesses for queue in self.queues), self.disk_accesses]
        self._watching = [each for each in accesses if each.policy.watched]
        self.idle: dict[Page, None] = {}  # that may have fallen idle, the first one first

    @property
    def watched(self) -> bool:
        """Whether a policy wants to hear of the use of sampled pages."""
        return bool(self._watching)

    def used(self, fingerprints: Sequence[int]) -> None:
        """Sampled pages with these fingerprints are in use."""
        for accesses in self._watching:
            accesses.add(fingerprints)

    def offer(self, page: Page, tier: Tier) -> None:
        """The copy in ``tier`` goes in line if it is there and may leave."""
        copy = page.copies[tier]
        if tier is Tier.DISK:
            if page.may_sleep():
                self.idle.setdefault(page)
        elif copy is not None and not copy.queued and page.may_leave(tier):
            self.queues[tier].offer(copy)

    def offer_all(self, page: Page) -> None:
        """The same in every tier."""
        # Spelled out: this runs several times for each page that comes or leaves.
        hbm, host, disk = page.copies
        if hbm is not None and not hbm.queued:
            self.offer(page, Tier.HBM)
        if host is not None and not host.queued:
            self.offer(page, Tier.HOST)
        if disk is not None and not disk.queued:
            self.offer(page, Tier.DISK)

    def offer_again(self, page: Page) -> None:
        """A page may be worth less than it was when it was last offered."""
        for tier in (Tier.HBM, Tier.HOST):
            copy = page.copies[tier]
            if copy is not None:
                copy.queued = False  # where it stands is not where it belongs any more
                if page.may_leave(tier):
                    self.queues[tier].offer(copy)

    def victim(self, tier: Tier, tick: int) -> Page | None:
        """The page whose copy in ``tier`` (not the disk, which keeps its own order) should leave next, by the
        tier's policy; None if none may."""
        copy = self.queues[tier].victim(tick)
        return copy.page if copy is not None else None

    def in_line(self, tier: Tier) -> set[int]:
        """The ids of the copies that wait to leave (for checks)."""
        if tier is Tier.DISK:
            return {id(page.copies[tier]) for page in self.idle}
        return self.queues[tier].queued()


def _queue(policy: Policy, tier: Tier) -> Queue[Copy]:
    return Queue(policy, _facts, lambda copy: copy.page.may_leave(tier))


def _facts(copy: Copy) -> PageFacts:
    page = copy.page
    hint = page.hint if page.last_use <= page.hinted else NO_HINT
    return PageFacts(
        page.nbytes,
        page.depth,
        page.last_use,
        page.hits,
        copy.arrived,
        hint.reuse,
        hint.priority,
        copy.segment,
        copy.spent,
    )
