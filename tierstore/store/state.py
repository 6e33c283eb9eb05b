"""Everything in a store that can change, and every decision. No thread, no copy, no I/O is here.

All methods and attributes need :attr:`StoreState.lock`, unless they say otherwise.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tierstore import memory
from tierstore.errors import StoreClosedError
from tierstore.index import Index, Match, Page, Tier
from tierstore.keys import Identity
from tierstore.policy import NO_HINT, PageHint, Policy
from tierstore.store.feed import Feed
from tierstore.store.health import STALL_S, Health
from tierstore.store.lookout import Lookout
from tierstore.store.sessions import Sessions
from tierstore.store.stats import Counters, TierStats
from tierstore.tiers.disk import DiskTier, Ledger, PageRecord, PageUse, ReadBatch, Removal
from tierstore.tiers.hbm import Filling, PagePool
from tierstore.tiers.host import HostTier

_MOST_PASSES = 3  # over the ledger, before an eviction gives up
_SPARE_LEASES = 4096
_AWAKE_PAGES = 1 << 15  # on disk only, and kept in memory all the same: 1 KiB each


class Lease:
    """A hold on copies, with an end. Each page is held in one tier, the fastest that had it."""

    __slots__ = ("ends", "held", "released")

    def __init__(self) -> None:
        self.held: list[tuple[Page, Tier]] = []
        self.ends = 0.0
        self.released = True


class StoreState:
    """The index, the tiers' space, the leases and the counters of one store."""

    def __init__(
        self,
        policies: Sequence[Policy],
        *,
        host: HostTier | None,
        pool: PagePool | None,
        disk: DiskTier | None,
        clock: Callable[[], float] = time.monotonic,
        awake_pages: int = _AWAKE_PAGES,
        stall_s: float = STALL_S,
    ) -> None:
        self.host = host
        self.pool = pool
        self.disk = disk
        self.clock = clock
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # a copy became ready or went away, a queue moved
        self.index = Index(policies, tick=disk.tick if disk is not None else 0)
        self.counters = Counters()
        self.health = Health(Tier.DISK.label, clock, stall_s=stall_s)
        self.lookout = Lookout(disk, self.health, self.changed)
        self.sessions = Sessions()
        self.closed = False
        self.open_hits = 0
        self.pending_saves = 0
        self.host_bytes: Counter[bytes] = Counter()  # in the host tier, by identity digest
        self.loading: set[Page] = set()  # being read from disk by a load that is running
        self.in_transit = 0  # pages that loads are bringing through the host tier
        self.published: dict[int, Page] = {}  # HBM pages that are in the index
        self.identities: dict[bytes, Identity] = {}  # by digest, of everything saved in this life
        self.removed: list[Removal] = []  # pages to delete from disk with the next commit
        self.used: set[Page] = set()  # pages on disk used since note_uses
        self.noted: dict[int, PageUse] = {}  # uses by serial, for the next commit
        self.disk_policy = policies[Tier.DISK]
        self.feed: Feed | None = None  # told of what comes into the tiers below HBM and leaves them
        self._awake_pages = awake_pages
        self._leases: list[tuple[float, int, Lease]] = []
        self._lease_order = itertools.count()

    # -- lookup and leases ---------------------------------------------------------------------------

    def root(self, identity: Identity, page_bytes: int) -> Page:
        """The root of everything stored under ``identity``, all pages of which have ``page_bytes``."""
        root = self.index.tree.root(identity.digest, page_bytes)
        assert root.nbytes == page_bytes, (
            f"pages of {root.nbytes} bytes, not {page_bytes}, have this identity"
        )
        if not root.serial and self.disk is not None:
            root.serial = self.disk.root(identity.digest) or 0
        return root

    def reachable(self, match: Match, chunk_tokens: int) -> Match:
        """As much of a match as can be loaded now: where the disk is offline, what is above it."""
        if self.health.readable:
            return match
        there = itertools.takewhile(lambda page: page.ready_tier() is not Tier.DISK, match.pages)
        pages = tuple(there)
        if len(pages) == len(match.pages):
            return match
        return Match(pages, len(pages) * chunk_tokens, chunk_tokens if pages else 0)

    def use(self, match: Match, lookup_tokens: int, lease_s: float) -> Lease:
        """Lease what a lookup found, each page where it is fastest to load from."""
        self.expire_leases()
        held = [(page, tier) for page in match.pages if (tier := page.ready_tier()) is not None]
        lease = self.lease(held, lease_s)
        self.touch(match.pages, hit=True)
        self.counters.lookups += 1
        self.counters.lookup_tokens += lookup_tokens
        self.let_sleep()
        return lease

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """These pages are in use now."""
        self.index.touch(pages, hit=hit)
        if self.disk is not None:
            self.used.update([page for page in pages if page.copies[Tier.DISK] is not None])

    def hint(self, pages: Sequence[Page], hint: PageHint) -> None:
        """``hint`` is about the next use of these pages, in every tier."""
        self.index.hint(pages, hint)
        for page in pages:
            self.pass_hint_on(page)

    def pass_hint_on(self, page: Page) -> None:
        """Let the disk tier know what is hinted of a page, if it is there and was not used since."""
        copy = page.copies[Tier.DISK]
        if self.ledger is not None and copy is not None and copy.ready and page.last_use <= page.hinted:
            self.ledger.hint(page.serial, page.hint)

    def lease(self, held: list[tuple[Page, Tier]], lease_s: float) -> Lease:
        lease = Lease()
        self._hold(lease, held, lease_s)
        return lease

    def renew(self, lease: Lease, pages: Sequence[Page], lease_s: float) -> None:
        """If the lease has ended, hold its pages again as far as they are still there."""
        if lease.released:
            held = [(page, page.ready_tier()) for page in pages]
            there = itertools.takewhile(lambda each: each[1] is not None, held)
            self._hold(lease, [(page, tier) for page, tier in there if tier is not None], lease_s)

    def _hold(self, lease: Lease, held: list[tuple[Page, Tier]], lease_s: float) -> None:
        self.index.lease_all(held)
        lease.held = held
        lease.ends = self.clock() + lease_s
        lease.released = False
        self.open_hits += 1
        heapq.heappush(self._leases, (lease.ends, next(self._lease_order), lease))

    def release(self, lease: Lease) -> None:
        """End a lease; repeating it does nothing."""
        if not lease.released:
            lease.released = True
            self.open_hits -= 1
            for page, tier in self.index.unlease_all(lease.held):
                self._drop_damaged(page, tier)
            lease.held.clear()

    def expire_leases(self) -> None:
        """End the leases whose time is over."""
        now = self.clock()
        while self._leases and (self._leases[0][0] <= now or self._leases[0][2].released):
            lease = heapq.heappop(self._leases)[2]
            if not lease.released and lease.ends <= now:  # else it was renewed, and has a later entry
                self.counters.expired_leases += 1
                self.release(lease)
        if len(self._leases) > 2 * self.open_hits + _SPARE_LEASES:  # released long before their end
            self._leases = [entry for entry in self._leases if not entry[2].released]
            heapq.heapify(self._leases)

    def unlease(self, page: Page, tier: Tier) -> None:
        self.index.unlease(page, tier)
        copy = page.copies[tier]
        if copy is not None and copy.damaged:
            self._drop_damaged(page, tier)

    def move_lease(self, lease: Lease, position: int, tier: Tier) -> None:
        """The page of a lease is now held in another tier."""
        page, held_in = lease.held[position]
        if held_in is not tier:
            self.index.lease(page, tier)
            lease.held[position] = (page, tier)
            self.unlease(page, held_in)

    # -- room ----------------------------------------------------------------------------------------

    def host_slot(self, nbytes: int) -> int | None:
        """A host slot for ``nbytes``, evicting as the policy says; None when everything is leased or being
        filled."""
        assert self.host is not None
        while (place := self.host.allocate(nbytes)) is None:
            if not self.evict(Tier.HOST, 1):
                return None
        return place

    def hbm_pages(self, count: int) -> list[int] | None:
        """``count`` pages of the pool, evicting cached ones; None when that many cannot be had."""
        assert self.pool is not None
        if count > self.pool.free_pages:
            self.evict(Tier.HBM, count - self.pool.free_pages)
        return self.pool.allocate(count)

    def available_hbm(self) -> int:
        """Pages of the pool that are free or could be evicted, one after the other."""
        assert self.pool is not None
        cached = self.index.copies[Tier.HBM] - self.index.leases[Tier.HBM]
        if self.pending_saves:
            # A save holds single pages, and what is before them cannot leave either. (All other leases are on
            # whole prefixes.)
            cached -= self._held_up_in_hbm()
        return self.pool.free_pages + cached

    def _held_up_in_hbm(self) -> int:
        """Cached pages that nobody holds, but that have a held page behind them."""
        seen: set[Page] = set()
        for page in self.published.values():
            if self.index.copy(page, Tier.HBM).leases:
                above = page.parent
                while above is not None and above not in seen and above.copies[Tier.HBM] is not None:
                    seen.add(above)
                    above = above.parent
        return sum(not self.index.copy(page, Tier.HBM).leases for page in seen)

    def evict(self, tier: Tier, count: int) -> int:
        """Let up to ``count`` copies leave ``tier``, the policy's worst first. Returns how many left."""
        if tier is Tier.DISK:
            return self.evict_from_disk(count)
        self.expire_leases()
        self.index.hints.expire(self.clock())
        evicted = 0
        while evicted < count and (page := self.index.victim(tier)) is not None:
            self.drop(page, tier)
            evicted += 1
        self.counters.evicted_pages[tier.label] += evicted
        return evicted

    def evict_from_disk(
        self,
        count: int,
        *,
        nbytes: float = math.inf,
        size_class: int | None = None,
        until: float = math.inf,
    ) -> int:
        """Let up to ``count`` pages leave the disk, no more than it takes to free ``nbytes``; of one size
        class, and those that score up to ``until``. Returns how many left."""
        ledger = self.ledger
        if ledger is None:
            return 0
        self.expire_leases()
        self.note_uses()
        self.index.exits.disk_accesses.tell(len(ledger))
        ledger.expire_hints(self.clock())
        before = len(self.removed)
        evicted = passes = 0
        while evicted < count and nbytes > 0 and passes < _MOST_PASSES:
            serials = ledger.next_to_leave(
                self.disk_policy, count - evicted, nbytes=nbytes, size_class=size_class, until=until
            )
            evicted += sum(self.leaves_disk(serial) for serial in serials)
            nbytes -= sum(removal.nbytes for removal in self.removed[before:])
            before = len(self.removed)
            passes += not serials  # an end was reached: what was held back, or is new since, gets its turn
        self.counters.evicted_pages[Tier.DISK.label] += evicted
        return evicted

    def leaves_disk(self, serial: int) -> bool:
        """Let a page leave the disk, if it may."""
        page = self.index.by_serial.get(serial)
        ledger = self.ledger
        assert ledger is not None, "pages leave a disk that is not known yet"
        if serial not in ledger or ledger.children(serial):
            return False
        if page is None:
            self._remove(serial)
        elif page.may_leave(Tier.DISK):
            self.drop(page, Tier.DISK)
        else:
            return False
        return True

    def drop(self, page: Page, tier: Tier) -> None:
        """Forget an unleased copy and give its place back (disk: with the next commit)."""
        if tier is Tier.DISK:
            self._drop_from_disk(page)
            return
        above = page.parent
        copy = self.index.copy(page, tier)
        served = copy.ready or copy.damaged
        place = self.index.drop_copy(page, tier)
        if tier is Tier.HBM:
            assert self.pool is not None
            del self.published[place]
            self.pool.free([place])
        else:
            assert self.host is not None
            self.host.free(place, page.nbytes)
            self.host_bytes[page.identity] -= page.nbytes
            if served and self.feed is not None:
                self.feed.removed(tier, page.identity, page.key, page.tokens)
        kept = above.copies[tier] if above is not None else None
        if above is not None and kept is not None and kept.damaged:
            self._drop_damaged(above, tier)

    def _drop_from_disk(self, page: Page) -> None:
        assert self.ledger is not None, f"{page} leaves a disk that is not known yet"
        serial = page.serial
        self.used.discard(page)
        page.hole = self.ledger.children(serial) > 0
        self.index.drop_copy(page, Tier.DISK)
        if serial in self.ledger:  # else it was found before the survey said that it cannot be
            self._remove(serial)

    def _remove(self, serial: int) -> None:
        ledger = self.ledger
        assert ledger is not None
        removal = ledger.remove(serial)
        self.noted.pop(serial, None)
        self.removed.append(removal)
        above = self.index.by_serial.get(removal.parent)
        if above is not None and above.hole and not ledger.children(removal.parent):
            self.index.fill_hole(above)
        self.changed.notify_all()

    def unwrite(self, page: Page) -> int:
        """Take a disk copy back that did not become durable. Returns the place it had."""
        assert self.ledger is not None
        page.hole = self.ledger.children(page.serial) > 0
        return self.index.drop_copy(page, Tier.DISK)

    # -- pages arriving ------------------------------------------------------------------------------

    def begin_host_fill(self, page: Page) -> int | None:
        """Reserve a host slot for ``page`` and lease it to whoever fills it; None when there is no room."""
        page.pins += 1  # making room may take the last page below a hole, and with it the hole itself
        place = self.host_slot(page.nbytes)
        page.pins -= 1
        if place is not None:
            self.index.add_copy(page, Tier.HOST, place, ready=False, leases=1)
            self.host_bytes[page.identity] += page.nbytes
            page.checksum = page.record.checksum if page.record is not None else None
        return place

    def end_host_fill(self, page: Page, *, filled: bool) -> None:
        """The filler is done: the copy is ready, or gone. The filler's lease stays with it if filled."""
        if filled:
            self.index.set_ready(page, Tier.HOST)
            if self.feed is not None:
                self.feed.stored(page, Tier.HOST)
        else:
            self.index.unlease(page, Tier.HOST)
            self.drop(page, Tier.HOST)
        self.changed.notify_all()

    def publish(self, page: Page, hbm_page: int) -> bool:
        """Make an engine's private HBM page the copy of ``page``, leased to the engine. False when the tier
        has one already: the engine's stays private."""
        if hbm_page in self.published or page.copies[Tier.HBM] is not None:
            return False
        self.index.add_copy(page, Tier.HBM, hbm_page, ready=True, leases=1)
        self.published[hbm_page] = page
        return True

    def release_hbm(self, hbm_pages: Iterable[int]) -> None:
        """An engine is done with these pages: published ones stay cached, private ones are free."""
        assert self.pool is not None
        for hbm_page in hbm_pages:
            page = self.published.get(hbm_page)
            if page is None:
                self.pool.free([hbm_page])
            else:
                self.unlease(page, Tier.HBM)

    def was_read(self, read: ReadBatch) -> None:
        """Pages were read from disk, or were to be."""
        self.counters.disk_read_pages += read.good
        if read.good:
            self.health.was_read()  # first: where other pages come back, one that does not is not the disk
        if read.error is not None:
            self.counters.disk_read_errors += 1
            self.health.read_failed(read.error)
            self.changed.notify_all()

    def damaged(self, page: Page) -> None:
        """The disk copy did not read back as it was saved: never serve it, free its place."""
        if page.copies[Tier.DISK] is None:
            return
        self.counters.damaged_pages += 1
        self.index.set_damaged(page, Tier.DISK)
        self._drop_damaged(page, Tier.DISK)

    def damaged_in_host(self, page: Page) -> None:
        """The host copy is not what its writer said it is: never serve it, free its place."""
        self.counters.damaged_pages += 1
        self.index.set_damaged(page, Tier.HOST)
        self._drop_damaged(page, Tier.HOST)

    def _drop_damaged(self, page: Page, tier: Tier) -> None:
        copy = self.index.copy(page, tier)
        if copy.leases:
            return
        if tier is Tier.DISK:
            # While the disk is still being surveyed, the copy just stays where nobody is served from it.
            if self.ledger is not None:
                self.drop(page, tier)
        elif not copy.children:  # whoever holds a page below reads this one too, under the same lease
            self.drop(page, tier)

    # -- bytes (without the lock: the caller holds leases) --------------------------------

    def copy_to_memory(self, copies: Sequence[tuple[Tier, int, int]], page_bytes: int) -> None:
        """Copy pages of the HBM and host tiers to host memory: (tier, place, address)."""
        if self.pool is not None:
            self.pool.read_pages((place, address) for tier, place, address in copies if tier is Tier.HBM)
        if self.host is not None:
            start = self.host.address(0)
            pairs = ((address, start + place) for tier, place, address in copies if tier is Tier.HOST)
            memory.copy_all(pairs, page_bytes)

    def copy_to_hbm(self, copies: Sequence[tuple[Tier, int, int]]) -> list[Filling]:
        """Copy pages of the HBM and host tiers into pages of the pool: (tier, place, HBM page). Where they
        came from must be held until all of the result has been waited for."""
        assert self.pool is not None
        within = [(page, place) for tier, place, page in copies if tier is Tier.HBM]
        fillings = [self.pool.start_copying(within)]
        if self.host is not None:
            start = self.host.address(0)
            up = [(page, start + place) for tier, place, page in copies if tier is Tier.HOST]
            fillings.append(self.pool.start_writing(up))
        return fillings

    # -- pages that are only on disk --------------------------------------------------------------

    @property
    def ledger(self) -> Ledger | None:
        """What is on disk; None without a disk, and until it has been surveyed."""
        return self.disk.ledger if self.disk is not None else None

    def surveyed(self) -> None:
        """The ledger is there: drop what was found before it, and cannot be."""
        assert self.ledger is not None
        for page in list(self.index.by_serial.values()):
            copy = self.index.copy(page, Tier.DISK)
            if page.serial not in self.ledger:
                self.index.set_damaged(page, Tier.DISK)
            if copy.damaged:
                self._drop_damaged(page, Tier.DISK)

    def wake(self, parent: Page, records: Sequence[PageRecord]) -> bool:
        """Bring pages that were found on disk, one below the other, into the tree. False when things have
        changed since they were looked for."""
        ledger = self.ledger
        for record in records:
            if not self.index.in_tree(parent):
                return False
            if ledger is not None and ledger.place(record.serial) != record.place:
                return False  # removed since, or moved
            if record.nbytes != parent.nbytes:
                return False  # saved under this identity by somebody whose pages had another size
            hits = ledger.use(record.serial).hits if ledger is not None else 0
            parent = self.index.wake(parent, record, hits)
            if parent.serial != record.serial:
                return False  # the same page is on disk twice, or on its way there once more
            if self.feed is not None:
                self.feed.stored(parent, Tier.DISK)  # perhaps again: it may be of an earlier life
        return True

    def let_sleep(self) -> None:
        """Take pages that nobody has to do with out of the tree, down to a limit: they are on disk."""
        idle = self.index.exits.idle
        while len(idle) > self._awake_pages and self.ledger is not None:
            page = next(iter(idle))
            if not page.may_sleep():
                del idle[page]
                continue
            if page in self.used:
                self.note_uses()
            self.index.sleep(page)

    def note_uses(self) -> None:
        """Pass on what lookups and saves have said of pages on disk: to the ledger, and to the next
        commit."""
        now = time.time()
        noted = {page.serial: PageUse(page.last_use, now, page.hits) for page in self.used if page.serial}
        if self.ledger is not None:
            self.ledger.touch(noted)
            for page in self.used:
                if page.hint is not NO_HINT:
                    self.pass_hint_on(page)
        self.used.clear()
        self.noted.update(noted)

    # -- seeing --------------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the store is closed")

    def tier_stats(self) -> dict[str, TierStats]:
        sizes: dict[Tier, tuple[int, int]] = {}
        if self.pool is not None:
            free = self.pool.free_pages
            total = self.pool.num_pages
            page_bytes = self.pool.spec.page_bytes
            sizes[Tier.HBM] = (total * page_bytes, (total - free) * page_bytes)
        if self.host is not None:
            sizes[Tier.HOST] = (self.host.capacity_bytes, self.host.used_bytes)
        if self.disk is not None:
            disk = self.disk.stats()
            sizes[Tier.DISK] = (disk.capacity_bytes, disk.used_bytes)
        pages = list(self.index.copies)
        if self.disk is not None:
            pages[Tier.DISK] = len(self.ledger) if self.ledger is not None else disk.pages
        return {
            tier.label: TierStats(capacity, used, pages[tier], self.index.leases[tier])
            for tier, (capacity, used) in sizes.items()
        }

    def check(self) -> None:
        """Assert that index, pool, arena and leases agree."""
        self.index.check()
        pages = list(self.index.tree.walk())
        if self.pool is not None:
            published = {c.place: p for p in pages if (c := p.copies[Tier.HBM]) is not None}
            assert published == self.published, "the pool and the index disagree on cached pages"
        if self.host is not None:
            self.host.check()
            places = [c.place for p in pages if (c := p.copies[Tier.HOST]) is not None]
            assert len(set(places)) == len(places), "two pages share a host slot"
        if self.ledger is not None:
            for page in pages:
                copy = page.copies[Tier.DISK]
                durable = copy is not None and (copy.ready or copy.damaged)
                assert not durable or page.serial in self.ledger, f"{page} is on disk and in no ledger"
                assert page.hole <= (self.ledger.children(page.serial) > 0), f"{page} is no hole"
