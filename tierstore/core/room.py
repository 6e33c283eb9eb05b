"""Room in the tiers: places for new copies, and who leaves when there are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from tierstore.core.holdings import Holdings
from tierstore.core.uses import Uses
from tierstore.index import Index, Tier
from tierstore.index.leases import Leases
from tierstore.policy import Policy
from tierstore.stats import Counters
from tierstore.tiers.host import HostTier

_MOST_PASSES = 3  # over the page table, before an eviction gives up


class Evicted(NamedTuple):
    """Pages that left the disk, and the bytes they had."""

    pages: int
    nbytes: int


class Room:
    """Needs the state's lock. (Room on disk is more than pages that leave: see ``disk_room.py``.)"""

    def __init__(
        self,
        index: Index,
        *,
        holdings: Holdings,
        leases: Leases,
        uses: Uses,
        host: HostTier | None,
        disk_policy: Policy,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.disk_policy = disk_policy
        self._index = index
        self._holdings = holdings
        self._leases = leases
        self._uses = uses
        self._host = host
        self._counters = counters
        self._clock = clock

    def host_slots(self, nbytes: int, count: int) -> list[int]:
        """``count`` host slots for ``nbytes`` each, evicting as the policy says; fewer when all others are
        held or being filled."""
        assert self._host is not None
        places = self._host.allocate_many(nbytes, count)
        while (missing := count - len(places)) and self._free(Tier.HOST, missing * nbytes):
            places += self._host.allocate_many(nbytes, missing)
        return places

    def give_back(self, place: int, nbytes: int) -> None:
        """A host slot is not needed after all."""
        assert self._host is not None
        self._host.free(place, nbytes)

    def evict(self, tier: Tier, count: int) -> int:
        """Let up to ``count`` copies leave ``tier``, the policy's worst first. Returns how many left."""
        if tier is Tier.DISK:
            return self.evict_from_disk(count).pages
        self._expire()
        return self._leave(tier, count)

    def _free(self, tier: Tier, nbytes: int) -> int:
        """Let copies of ``nbytes`` together leave a memory tier: where they are smaller than what is to come,
        one would not do. Returns how many left."""
        self._expire()
        return self._leave(tier, math.inf, nbytes)

    def _expire(self) -> None:
        self._leases.expire()
        self._index.hints.expire(self._clock())

    def _leave(self, tier: Tier, count: float, nbytes: float = math.inf) -> int:
        evicted = freed = 0
        while evicted < count and freed < nbytes and (page := self._index.victim(tier)) is not None:
            self._holdings.drop(page, tier)
            evicted += 1
            freed += page.nbytes
        self._counters.evicted_pages[tier.label] += evicted
        return evicted

    def evict_from_disk(
        self,
        count: int,
        *,
        nbytes: float = math.inf,
        size_class: int | None = None,
        until: float = math.inf,
    ) -> Evicted:
        """Let up to ``count`` pages leave the disk, no more than it takes to free ``nbytes``; of one size
        class, and those that score up to ``until``. Returns what left."""
        page_table = self._uses.page_table
        if page_table is None:
            return Evicted(0, 0)
        self._leases.expire()
        self._uses.note()
        page_table.expire_hints(self._clock())
        removed = self._holdings.removed
        before = len(removed)
        evicted = freed = passes = 0
        while evicted < count and freed < nbytes and passes < _MOST_PASSES:
            serials = page_table.next_to_leave(
                self.disk_policy, count - evicted, nbytes=nbytes - freed, size_class=size_class, until=until
            )
            evicted += sum(self.leaves_disk(serial) for serial in serials)
            freed += sum(removal.nbytes for removal in removed[before:])
            before = len(removed)
            passes += not serials  # an end was reached: what was held back, or is new since, gets its turn
        self._counters.evicted_pages[Tier.DISK.label] += evicted
        return Evicted(evicted, freed)

    def leaves_disk(self, serial: int) -> bool:
        """Let a page leave the disk, if it may."""
        page = self._index.by_serial.get(serial)
        page_table = self._uses.page_table
        assert page_table is not None, "pages leave a disk that is not known yet"
        if serial not in page_table or page_table.children(serial):
            return False
        if page is None:
            self._holdings.remove(serial)
        elif page.may_leave(Tier.DISK):
            self._holdings.drop(page, Tier.DISK)
        else:
            return False
        return True
