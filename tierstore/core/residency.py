"""What the tiers hold: how pages come into them, what is noted of their use, and how they leave."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tierstore.backend import Registration
from tierstore.core.change_log import ChangeLog
from tierstore.index import Index, Leaving, Page, Tier
from tierstore.index.leases import Leases
from tierstore.policy import NO_HINT, PageHint, Policy
from tierstore.stats import Counters
from tierstore.tiers.disk import DiskTier, PageTable, PageUse, Removal
from tierstore.tiers.host import HostTier
from tierstore.tiers.slabs import slot_bytes


class AccessLog:
    """All of it needs the state's lock."""

    def __init__(self, index: Index, disk: DiskTier | None) -> None:
        self._index = index
        self._disk = disk
        self._used: set[Page] = set()  # pages on disk, since note()
        self._noted: dict[int, PageUse] = {}  # by serial, for the next commit

    @property
    def page_table(self) -> PageTable | None:
        """What is on disk; None without a disk, and until it has been scanned."""
        return self._disk.page_table if self._disk is not None else None

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """These pages are in use now."""
        self._index.touch(pages, hit=hit)
        if self._disk is not None:
            self._used.update([page for page in pages if page.copies[Tier.DISK] is not None])

    def touch_named(self, depths: Mapping[Page, int], *, hit: bool) -> None:
        """The same for named pages, with what is known of their places in a prompt."""
        self._index.touch_named(depths, hit=hit)
        if self._disk is not None:
            self._used.update([page for page in depths if page.copies[Tier.DISK] is not None])

    def hint(self, pages: Sequence[Page], hint: PageHint) -> None:
        """``hint`` is about the next use of these pages, in every tier."""
        self._index.hint(pages, hint)
        for page in pages:
            self.pass_hint_on(page)

    def pass_hint_on(self, page: Page) -> None:
        """Let the disk tier know what is hinted of a page, if it is there and was not used since."""
        page_table = self.page_table
        copy = page.copies[Tier.DISK]
        if page_table is not None and copy is not None and copy.ready and page.last_use <= page.hinted:
            page_table.hint(page.serial, page.hint)

    def note(self) -> None:
        """Pass on what has been said of pages on disk: to the page table, and to the next commit."""
        now = time.time()
        noted = {page.serial: PageUse(page.last_use, now, page.hits) for page in self._used if page.serial}
        page_table = self.page_table
        if page_table is not None:
            page_table.touch(noted)
            for page in self._used:
                if page.hint is not NO_HINT:
                    self.pass_hint_on(page)
        self._used.clear()
        self._noted.update(noted)

    def note_before_unload(self, page: Page) -> None:
        """Nobody will know ``page`` any more: what was said of it is passed on now."""
        if page in self._used:
            self.note()

    # -- for a commit --------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the next commit has uses to write."""
        return bool(self._used or self._noted)

    def take(self, added: Iterable[Page]) -> dict[int, PageUse]:
        """The uses by serial that a commit is to write, those of the pages it adds among them."""
        self._used.update(added)
        self.note()
        taken, self._noted = self._noted, {}
        return taken

    def put_back(self, taken: dict[int, PageUse]) -> None:
        """The commit failed."""
        self._noted = taken | self._noted

    def forget(self, page: Page) -> None:
        """``page`` leaves the disk."""
        self._used.discard(page)

    def forget_serial(self, serial: int) -> None:
        self._noted.pop(serial, None)


class Residency:
    """Needs the state's lock."""

    def __init__(
        self,
        index: Index,
        *,
        host: HostTier | None,
        access_log: AccessLog,
        counters: Counters,
        changed: threading.Condition,
    ) -> None:
        self._index = index
        self._host = host
        self._access_log = access_log
        self._counters = counters
        self._changed = changed
        self.host_bytes: Counter[bytes] = Counter()  # slots of the host tier, by identity digest
        self.removed: list[Removal] = []  # pages to delete from disk with the next commit
        self.followers: list[ChangeLog] = []  # told of what comes into the tiers below HBM and leaves them

    def drop(self, page: Page, tier: Tier) -> None:
        """Forget an unleased copy and give its place back (disk: with the next commit)."""
        if tier is Tier.DISK:
            self._drop_from_disk(page)
            return
        above = page.parent
        copy = self._index.copy(page, tier)
        served = copy.ready or copy.damaged
        place = self._index.drop_copy(page, tier)
        assert self._host is not None
        self._host.free(place, page.nbytes)
        self.host_bytes[page.identity] -= slot_bytes(page.nbytes)
        if served:
            self.left(tier, page.identity, page.key, page.tokens)
        kept = above.copies[tier] if above is not None else None
        if above is not None and kept is not None and kept.damaged:
            self.drop_damaged(above, tier)

    def _drop_from_disk(self, page: Page) -> None:
        page_table = self._access_log.page_table
        assert page_table is not None, f"{page} leaves a disk that is not known yet"
        serial = page.serial
        self._access_log.forget(page)
        page.tombstone = page_table.children(serial) > 0
        self._index.drop_copy(page, Tier.DISK)
        if serial in page_table:  # else it was found before the scan said that it cannot be
            self.remove(serial)

    def remove(self, serial: int) -> None:
        """A page that is not in the tree leaves the disk, with the next commit."""
        page_table = self._access_log.page_table
        assert page_table is not None
        removal = page_table.remove(serial)
        self._access_log.forget_serial(serial)
        self.removed.append(removal)
        above = self._index.by_serial.get(removal.parent)
        if above is not None and above.tombstone and not page_table.children(removal.parent):
            self._index.fill_tombstone(above)
        self._changed.notify_all()

    def unwrite(self, page: Page) -> int:
        """Take a disk copy back that did not become durable. Returns the place it had."""
        page_table = self._access_log.page_table
        assert page_table is not None
        page.tombstone = page_table.children(page.serial) > 0
        return self._index.drop_copy(page, Tier.DISK)

    # -- who follows ---------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        """Pages under this identity are going to come and go."""
        for log in self.followers:
            log.register(registration)

    def stored(self, pages: Sequence[Page], tier: Tier) -> None:
        """These pages can be served from a tier now."""
        for log in self.followers:
            for page in pages:
                log.stored(page, tier)

    def left(self, tier: Tier, identity: bytes, key: bytes, tokens: bytes) -> None:
        """A page has left a tier."""
        for log in self.followers:
            log.removed(tier, identity, key, tokens)

    # -- damage --------------------------------------------------------------------------------------

    def damaged_on_disk(self, page: Page) -> None:
        """The disk copy did not read back as it was saved: never serve it, free its place."""
        if page.copies[Tier.DISK] is None:
            return
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.DISK)
        self.drop_damaged(page, Tier.DISK)

    def damaged_in_host(self, page: Page) -> None:
        """The host copy is not what its writer said it is: never serve it, free its place, or have it filled
        anew where pages behind it are held."""
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.HOST)
        self.drop_damaged(page, Tier.HOST)

    def drop_damaged(self, page: Page, tier: Tier) -> None:
        """Drop a damaged copy, if it can go now. (If not, it goes with what holds it.)"""
        copy = self._index.copy(page, tier)
        if copy.leases:
            return
        if tier is Tier.DISK:
            # While the disk is still being scanned, the copy just stays where nobody is served from it.
            if self._access_log.page_table is not None:
                self.drop(page, tier)
        elif not copy.children:  # whoever holds a page below reads this one too, under the same lease
            self.drop(page, tier)


_MOST_PASSES = 3  # over the page table, before an eviction gives up


class EvictedFromDisk(NamedTuple):
    """Pages that left the disk, and the bytes they had."""

    pages: int
    nbytes: int


class Eviction:
    """Needs the state's lock. (Room on disk is more than pages that leave: see ``disk_room.py``.)"""

    def __init__(
        self,
        index: Index,
        *,
        residency: Residency,
        leases: Leases,
        access_log: AccessLog,
        host: HostTier | None,
        disk_policy: Policy,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.disk_policy = disk_policy
        self._index = index
        self._residency = residency
        self._leases = leases
        self._access_log = access_log
        self._host = host
        self._counters = counters
        self._clock = clock
        self.leaving = Leaving((Tier.HOST, Tier.DISK), self._drop)

    def _drop(self, page: Page, tier: Tier) -> None:
        if tier is not Tier.DISK or self._access_log.page_table is not None:  # else it is not known yet
            self._residency.drop(page, tier)
            self._counters.evicted_pages[tier.label] += 1

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
            self._residency.drop(page, tier)
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
    ) -> EvictedFromDisk:
        """Let up to ``count`` pages leave the disk, no more than it takes to free ``nbytes``; of one size
        class, and those that score up to ``until``. Returns what left."""
        page_table = self._access_log.page_table
        if page_table is None:
            return EvictedFromDisk(0, 0)
        self._leases.expire()
        self._access_log.note()
        page_table.expire_hints(self._clock())
        removed = self._residency.removed
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
        return EvictedFromDisk(evicted, freed)

    def leaves_disk(self, serial: int) -> bool:
        """Let a page leave the disk, if it may."""
        page = self._index.by_serial.get(serial)
        page_table = self._access_log.page_table
        assert page_table is not None, "pages leave a disk that is not known yet"
        if serial not in page_table or page_table.children(serial):
            return False
        if page is None:
            self._residency.remove(serial)
        elif page.may_leave(Tier.DISK):
            self._residency.drop(page, Tier.DISK)
        else:
            return False
        return True


class PendingFills:
    """Host slots from the moment they are reserved until their bytes are there. Needs the state's lock."""

    def __init__(
        self, index: Index, residency: Residency, eviction: Eviction, changed: threading.Condition
    ) -> None:
        self._index = index
        self._residency = residency
        self._eviction = eviction
        self._changed = changed
        self.loading: set[Page] = set()  # being read from disk by a load that is running
        self.in_transit = 0  # pages that loads are bringing through the host tier
        self.copying = 0  # pages that are held in it while they are copied to somebody
        self._ahead: list[int] = []  # slots taken for pages that are about to begin
        self._ahead_bytes = 0  # of each

    def begin(self, page: Page, *, following: int = 0) -> int | None:
        """Reserve a host slot for ``page`` and lease it to whoever fills it; None when there is no room.

        ``following`` pages of the same size are likely to begin next: room is made for them too, which at one
        stroke is quicker. Who says so calls :meth:`none_follows` before the lock is released. A copy that is
        damaged and cannot leave is filled anew where it is.
        """
        copy = page.copies[Tier.HOST]
        if copy is not None:
            assert copy.damaged, f"{page} is in host memory already"
            copy.damaged = False
            self._index.lease(page, Tier.HOST)
            page.checksum = page.record.checksum if page.record is not None else None
            return copy.place
        if not self._ahead:
            page.holds += 1  # making room may take the last page below a tombstone, and the tombstone with it
            self._ahead = self._eviction.host_slots(page.nbytes, 1 + following)
            self._ahead.reverse()  # in order: what lies side by side is copied and written together
            self._ahead_bytes = page.nbytes
            page.holds -= 1
            if not self._ahead:
                return None
        assert page.nbytes == self._ahead_bytes, f"slots of {self._ahead_bytes} bytes were taken ahead"
        place = self._ahead.pop()
        self._index.add_copy(page, Tier.HOST, place, ready=False, leases=1)
        self._residency.host_bytes[page.identity] += slot_bytes(page.nbytes)
        page.checksum = page.record.checksum if page.record is not None else None
        return place

    def none_follows(self) -> None:
        """Give back the slots that were taken ahead and not needed."""
        for place in self._ahead:
            self._eviction.give_back(place, self._ahead_bytes)
        self._ahead.clear()

    def complete(self, pages: Sequence[Page], *, release: bool = True) -> None:
        """The fillers of these pages are done: the copies are ready. They ``release`` their leases, or keep
        them holding them."""
        self._index.complete(pages, Tier.HOST, release=release)
        self._residency.stored(pages, Tier.HOST)
        self._changed.notify_all()

    def give_up(self, pages: Iterable[Page]) -> None:
        """The fillers of these pages have failed: the copies are gone."""
        for page in pages:
            self._index.release_copy(page, Tier.HOST)
            copy = self._index.copy(page, Tier.HOST)
            if copy.children or copy.leases:
                copy.damaged = True
            else:
                self._residency.drop(page, Tier.HOST)
        self._changed.notify_all()
