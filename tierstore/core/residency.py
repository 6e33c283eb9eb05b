"""The pages that the tiers hold: how they enter a tier, how uses are recorded, how they are evicted."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tierstore.backend import Registration
from tierstore.core.change_log import ChangeLog
from tierstore.core.departures import Cause, Departures
from tierstore.index import Ages, Index, Leaving, Page, Tier
from tierstore.index.leases import Leases
from tierstore.index.page import Copy
from tierstore.policy import EXPIRED, NO_HINT, PageHint, Policy
from tierstore.stats import Counters
from tierstore.tiers.disk import DiskTier, PageRecord, PageTable, PageUse, Removal
from tierstore.tiers.host import HostTier
from tierstore.tiers.slabs import slot_bytes


class AccessLog:
    """Records uses of pages for the page table and for the next commit to disk. Needs the state's lock."""

    def __init__(self, index: Index, disk: DiskTier | None) -> None:
        self._index = index
        self._disk = disk
        self._used: set[Page] = set()  # pages on disk that were used since the last note()
        self._noted: dict[int, PageUse] = {}  # by serial, for the next commit

    @property
    def page_table(self) -> PageTable | None:
        """The pages on disk; None without a disk, and until the disk has been scanned."""
        return self._disk.page_table if self._disk is not None else None

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """Record that these pages are used now."""
        self._index.touch(pages, hit=hit)
        if self._disk is not None:
            self._used.update([page for page in pages if page.copies[Tier.DISK] is not None])

    def touch_named(self, depths: Mapping[Page, int], *, hit: bool) -> None:
        """Record that these named pages are used now. ``depths`` are their positions in a prompt, if
        known."""
        self._index.touch_named(depths, hit=hit)
        if self._disk is not None:
            self._used.update([page for page in depths if page.copies[Tier.DISK] is not None])

    def hint(self, pages: Sequence[Page], hint: PageHint) -> None:
        """Store ``hint`` about the next use of these pages, in every tier."""
        self._index.hint(pages, hint)
        for page in pages:
            self.pass_hint_on(page)

    def pass_hint_on(self, page: Page) -> None:
        """Send a page's hint to the disk tier, if the page is on disk and was not used since the hint."""
        page_table = self.page_table
        copy = page.copies[Tier.DISK]
        if page_table is not None and copy is not None and copy.ready and page.last_use <= page.hinted:
            page_table.hint(page.serial, page.hint)

    def note(self) -> None:
        """Send the recorded uses and hints of pages on disk to the page table, and keep the uses for the next
        commit."""
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
        """Send the uses and the session of ``page`` to the page table before the page is unloaded."""
        if page in self._used:
            self.note()
        if self.page_table is not None:
            self.page_table.keep_session(page.serial, page.session)

    # -- for a commit --------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether there are uses for the next commit to write."""
        return bool(self._used or self._noted)

    def take(self, added: Iterable[Page]) -> dict[int, PageUse]:
        """Return the uses by serial that a commit must write, including uses of the pages that it adds."""
        self._used.update(added)
        self.note()
        taken, self._noted = self._noted, {}
        return taken

    def put_back(self, taken: dict[int, PageUse]) -> None:
        """Keep the uses of a failed commit for the next one."""
        self._noted = taken | self._noted

    def forget(self, page: Page) -> None:
        """Drop the recorded uses of ``page``, which leaves the disk."""
        self._used.discard(page)

    def forget_serial(self, serial: int) -> None:
        self._noted.pop(serial, None)


class Residency:
    """Adds copies of pages to the tiers and removes them, and reports both to the change logs. Needs the
    state's lock."""

    def __init__(
        self,
        index: Index,
        *,
        host: HostTier | None,
        access_log: AccessLog,
        counters: Counters,
        changed: threading.Condition,
        departures: Departures,
    ) -> None:
        self.departures = departures
        self.choice = Cause.EVICTED  # why the policy currently evicts pages
        self.committing = 0  # number of removals in a running commit
        self.erased: set[int] = set()  # serials of pages on disk to overwrite when they leave
        self._index = index
        self._host = host
        self._access_log = access_log
        self._counters = counters
        self._changed = changed
        self.host_bytes: Counter[bytes] = Counter()  # bytes of slots in the host tier, by identity digest
        self.removed: list[Removal] = []  # pages that the next commit deletes from disk
        self.followers: list[ChangeLog] = []  # logs of the pages that enter and leave the tiers below HBM

    def drop(self, page: Page, tier: Tier, cause: Cause | None = None) -> None:
        """Drop an unleased copy and free its place (on disk: with the next commit). Also drop damaged host
        copies of the page's ancestors that only this copy has kept. If it was the last copy, record ``cause``
        (None: the page was damaged, was finished, or was chosen by the policy)."""
        leaving: Page | None = page
        while leaving is not None:  # a loop instead of recursion, because a whole prompt may be forgotten
            copy = self._index.copy(leaving, tier)
            why = cause
            if why is None:
                over = leaving.hint.expires_s == EXPIRED
                why = Cause.DAMAGED if copy.damaged else self._cause(done=leaving.done, expired=over)
            if tier is Tier.DISK:
                self._drop_from_disk(leaving, why)
                return
            leaving = self._drop_from_host(leaving, copy, why)

    def _drop_from_host(self, page: Page, copy: Copy, cause: Cause) -> Page | None:
        """Drop a copy. Return the page's parent if the parent's copy is damaged and can be dropped now."""
        above = page.parent
        served = copy.ready or copy.damaged
        place = self._index.drop_copy(page, Tier.HOST)
        assert self._host is not None
        self._host.free(place, page.nbytes)
        self.host_bytes[page.identity] -= slot_bytes(page.nbytes)
        if served:
            self.left(Tier.HOST, page.identity, page.key, page.tokens)
            if page.copies[Tier.DISK] is None:
                self.departures.note(page.identity, page.key, cause, Tier.HOST, page.nbytes)
        kept = above.copies[Tier.HOST] if above is not None else None
        free = kept is not None and kept.damaged and not kept.leases and not kept.children
        return above if free else None

    def _cause(self, *, done: bool, expired: bool) -> Cause:
        """Return why the policy has chosen a page. ``expired`` says that a done page's time to live is
        over."""
        if not done:
            return self.choice
        return Cause.EXPIRED if expired else Cause.LET_GO

    def _drop_from_disk(self, page: Page, cause: Cause) -> None:
        page_table = self._access_log.page_table
        assert page_table is not None, f"{page} leaves a disk that has not been scanned"
        serial = page.serial
        self._access_log.forget(page)
        page.tombstone = page_table.children(serial) > 0
        self._index.drop_copy(page, Tier.DISK)
        if page.copies[Tier.HOST] is None:
            self.departures.note(page.identity, page.key, cause, Tier.DISK, page.nbytes)
        if serial in page_table:  # false if the scan has shown that the page is not on disk
            self._remove(page_table.remove(serial))

    def remove(self, serial: int) -> None:
        """Remove a page that is not in the tree from disk, with the next commit."""
        page_table = self._access_log.page_table
        assert page_table is not None
        removal = page_table.remove(serial)
        # The commit reads the page's key from its record.
        self._remove(removal._replace(cause=self._cause(done=removal.done, expired=removal.expired)))

    def was_removed(
        self, removed: Sequence[Removal], records: Mapping[int, PageRecord], *, report: bool
    ) -> None:
        """Record why these pages have left the disk, unless the reason is recorded already. With ``report``,
        report them to the change logs."""
        for removal in removed:
            record = records.get(removal.serial)
            if record is None:
                continue
            if removal.cause:
                cause = Cause(removal.cause)
                self.departures.note(record.identity, record.key, cause, Tier.DISK, removal.nbytes)
            if report:
                self.left(Tier.DISK, record.identity, record.key, record.tokens)

    @property
    def uncommitted(self) -> int:
        """Number of removals from disk that are not durable yet."""
        return len(self.removed) + self.committing

    def _remove(self, removal: Removal) -> None:
        page_table = self._access_log.page_table
        assert page_table is not None
        self._access_log.forget_serial(removal.serial)
        if removal.serial in self.erased:
            self.erased.discard(removal.serial)
            removal = removal._replace(erased=True)
        self.removed.append(removal)
        above = self._index.by_serial.get(removal.parent)
        if above is not None and above.tombstone and not page_table.children(removal.parent):
            self._index.fill_tombstone(above)
        self._changed.notify_all()

    def unwrite(self, page: Page) -> int:
        """Drop a disk copy that did not become durable. Return its place."""
        page_table = self._access_log.page_table
        assert page_table is not None
        page.tombstone = page_table.children(page.serial) > 0
        self.erased.discard(page.serial)
        return self._index.drop_copy(page, Tier.DISK)

    # -- change logs ---------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        """Tell the change logs about an identity whose pages they may have to report."""
        for log in self.followers:
            log.register(registration)

    def stored(self, pages: Sequence[Page], tier: Tier) -> None:
        """Report that these pages can now be served from a tier."""
        for log in self.followers:
            for page in pages:
                log.stored(page, tier)

    def left(self, tier: Tier, identity: bytes, key: bytes, tokens: bytes) -> None:
        """Report that a page has left a tier."""
        for log in self.followers:
            log.removed(tier, identity, key, tokens)

    # -- damage --------------------------------------------------------------------------------------

    def damaged_on_disk(self, page: Page) -> None:
        """Stop serving a disk copy whose bytes are not those of the saved page, and free its place."""
        copy = page.copies[Tier.DISK]
        if copy is None:
            return
        self._counters.damaged_pages += not copy.damaged  # a forgotten copy is marked as damaged, too
        self._index.set_damaged(page, Tier.DISK)
        self.drop_damaged(page, Tier.DISK)

    def damaged_in_host(self, page: Page) -> None:
        """Stop serving a host copy whose bytes are not those of the saved page. Free the copy's slot. If
        pages after this page are held, keep the slot, and a later save fills it again."""
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.HOST)
        self.drop_damaged(page, Tier.HOST)

    def condemn(self, page: Page, *, erased: bool) -> bool:
        """Stop serving all copies of a forgotten page. Return whether a copy was in host memory. With
        ``erased``, the page's bytes on disk are overwritten when they leave."""
        _, host, disk = page.copies
        in_host = host is not None and host.ready
        if in_host:
            self._index.set_damaged(page, Tier.HOST)
        if disk is not None:
            disk.damaged = True  # if the copy is still being written, it is dropped when the write ends
            disk.ready = False
            if erased:
                self.erased.add(page.serial)
        self._index.changes += 1
        return in_host

    def drop_damaged(self, page: Page, tier: Tier) -> None:
        """Drop a damaged copy if nothing holds it. A held copy is dropped when its last holder releases
        it."""
        copy = self._index.copy(page, tier)
        if copy.leases:
            return
        if tier is Tier.DISK:
            # Until the disk has been scanned, the copy is kept but not served.
            if self._access_log.page_table is not None:
                self.drop(page, tier)
        elif not copy.children:  # a lease on a page below also holds this page
            self.drop(page, tier)


_MOST_PASSES = 3  # passes over the page table before an eviction ends with too few pages


class EvictedFromDisk(NamedTuple):
    """The number of pages evicted from disk, and their total size in bytes."""

    pages: int
    nbytes: int


class Eviction:
    """Evicts pages in the order of the policy. Needs the state's lock. ``disk_room.py`` decides when to evict
    from disk."""

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
        # Until the disk has been scanned, there is no page table, and nothing leaves the disk.
        if tier is not Tier.DISK or self._access_log.page_table is not None:
            self._residency.drop(page, tier, Cause.SUPERSEDED)
            self._counters.evicted_pages[tier.label] += 1

    def host_slots(self, nbytes: int, count: int) -> list[int]:
        """Return ``count`` host slots for ``nbytes`` each. Evict pages by policy if necessary. Return fewer
        slots if all other pages are held or being filled."""
        assert self._host is not None
        places = self._host.allocate_many(nbytes, count)
        while missing := count - len(places):
            # Evict by bytes, because one small page may not make room for a larger one.
            self._expire()
            if not self._leave(Tier.HOST, math.inf, missing * nbytes):
                break
            places += self._host.allocate_many(nbytes, missing)
        return places

    def give_back(self, place: int, nbytes: int) -> None:
        """Free a host slot that was not needed."""
        assert self._host is not None
        self._host.free(place, nbytes)

    def evict(self, tier: Tier, count: int) -> int:
        """Evict up to ``count`` copies from ``tier`` at a user's request, in the policy's order. Return the
        number of evicted copies."""
        self._residency.choice = Cause.BY_REQUEST
        try:
            if tier is Tier.DISK:
                return self.evict_from_disk(count).pages
            self._expire()
            return self._leave(tier, count)
        finally:
            self._residency.choice = Cause.EVICTED

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
        """Evict up to ``count`` pages from disk, but stop when ``nbytes`` are freed. ``size_class`` limits
        this to one size class, and ``until`` to pages with at most this score."""
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
            # At the end of a pass, start again: held pages may have been released, and new pages added.
            passes += not serials
        self._counters.evicted_pages[Tier.DISK.label] += evicted
        return EvictedFromDisk(evicted, freed)

    def leaves_disk(self, serial: int) -> bool:
        """Remove a page from disk if nothing holds it. Return whether it was removed."""
        page = self._index.by_serial.get(serial)
        page_table = self._access_log.page_table
        assert page_table is not None, "a page leaves a disk that has not been scanned"
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
    """Host slots that are being filled, from their reservation on. Needs the state's lock."""

    def __init__(
        self,
        index: Index,
        residency: Residency,
        eviction: Eviction,
        changed: threading.Condition,
        ages: Ages,
    ) -> None:
        self._index = index
        self._ages = ages
        self._residency = residency
        self._eviction = eviction
        self._changed = changed
        self.loading: set[Page] = set()  # pages that a running load reads from disk
        self.in_transit = 0  # pages that loads are moving through the host tier
        self.copying = 0  # pages held in the host tier while they are copied to a client
        self._ahead: list[int] = []  # slots allocated for the pages that begin next
        self._ahead_bytes = 0  # size of each slot in ``_ahead``

    def begin(self, page: Page, *, following: int = 0) -> int | None:
        """Reserve a host slot for ``page`` and lease it for the caller, which fills it. Return None if there
        is no room.

        If ``following`` pages of the same size are likely to begin next, make room for all of them in one
        step, which is faster. The caller must then call :meth:`none_follows` before it releases the lock. A
        damaged copy that cannot leave is filled again in its slot.
        """
        copy = page.copies[Tier.HOST]
        disk = page.copies[Tier.DISK]
        if disk is None or disk.damaged:
            self._ages.begin(page)
        if copy is not None:
            assert copy.damaged, f"{page} is in host memory already"
            copy.damaged = False
            self._index.lease(page, Tier.HOST)
            page.checksum = page.record.checksum if page.record is not None else None
            return copy.place
        if not self._ahead:
            # Hold the page: making room may evict the last page below a tombstone, and then the tombstone.
            page.holds += 1
            self._ahead = self._eviction.host_slots(page.nbytes, 1 + following)
            self._ahead.reverse()  # pop() then returns ascending slots: neighbours are copied together
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
        """Free the slots that were allocated ahead and not used."""
        for place in self._ahead:
            self._eviction.give_back(place, self._ahead_bytes)
        self._ahead.clear()

    def complete(self, pages: Sequence[Page], *, release: bool = True) -> None:
        """Mark the copies of these pages as ready. With ``release``, also release the leases of the callers
        that filled them."""
        self._index.complete(pages, Tier.HOST, release=release)
        self._residency.stored(pages, Tier.HOST)
        self._changed.notify_all()

    def give_up(self, pages: Iterable[Page]) -> None:
        """Drop the copies of these pages, because filling them has failed."""
        for page in pages:
            self._index.release_all([(page, Tier.HOST)])
            copy = self._index.copy(page, Tier.HOST)
            if copy.children or copy.leases:
                copy.damaged = True
            else:
                self._residency.drop(page, Tier.HOST)
        self._changed.notify_all()
