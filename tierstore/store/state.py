"""Everything in a store that can change, and every decision. No thread, no copy, no I/O is here.

All methods and attributes need :attr:`StoreState.lock`, and so do those of the parts, which have a file each.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from tierstore.errors import StoreClosedError
from tierstore.index import Index, Match, Page, Tier
from tierstore.keys import Identity
from tierstore.policy import Policy
from tierstore.store.fills import Fills
from tierstore.store.hbm_cache import HbmCache
from tierstore.store.health import STALL_S, Health
from tierstore.store.holdings import Holdings
from tierstore.store.leases import Lease, Leases
from tierstore.store.lookout import Lookout
from tierstore.store.room import Room
from tierstore.store.sessions import Sessions
from tierstore.store.stats import Counters, TierStats
from tierstore.store.uses import Uses
from tierstore.tiers.disk import DiskTier, Ledger, PageRecord, ReadBatch
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier

_AWAKE_PAGES = 1 << 15  # on disk only, and kept in memory all the same: 1 KiB each


class StoreState:
    """One store: its index, its tiers' space, its leases and its counters."""

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
        self.pending_saves = 0
        self.identities: dict[bytes, Identity] = {}  # by digest, of everything saved in this life
        self._awake_pages = awake_pages
        # The parts. Each knows those before it.
        self.uses = Uses(self.index, disk)
        self.hbm = HbmCache(self.index, pool)
        self.holdings = Holdings(
            self.index,
            hbm=self.hbm,
            host=host,
            uses=self.uses,
            counters=self.counters,
            changed=self.changed,
        )
        self.leases = Leases(self.index, self.holdings, self.counters, clock)
        self.room = Room(
            self.index,
            holdings=self.holdings,
            leases=self.leases,
            uses=self.uses,
            host=host,
            pool=pool,
            disk_policy=policies[Tier.DISK],
            counters=self.counters,
            clock=clock,
        )
        self.fills = Fills(self.index, self.holdings, self.room, self.changed)

    @staticmethod
    def give_way() -> None:
        """To be called between two holds of the lock by who does a long job in pieces: a lock goes to whoever
        is quickest, which would be the same thread again."""
        time.sleep(0)

    # -- lookups -------------------------------------------------------------------------------------

    def root(self, identity: Identity, page_bytes: int) -> Page:
        """The root of everything stored under ``identity``, all pages of which have ``page_bytes``."""
        root = self.index.tree.root(identity.digest, page_bytes)
        assert root.nbytes == page_bytes, (
            f"pages of {root.nbytes} bytes, not {page_bytes}, have this identity"
        )
        if not root.serial and self.disk is not None:
            root.serial = self.disk.serials.root(identity.digest) or 0
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
        self.leases.expire()
        held = [(page, tier) for page in match.pages if (tier := page.ready_tier()) is not None]
        lease = self.leases.take(held, lease_s)
        self.uses.touch(match.pages, hit=True)
        self.counters.lookups += 1
        self.counters.lookup_tokens += lookup_tokens
        self.let_sleep()
        return lease

    # -- pages on disk -------------------------------------------------------------------------------

    def was_read(self, read: ReadBatch) -> None:
        """Pages were read from disk, or were to be."""
        self.counters.disk_read_pages += read.good
        if read.good:
            self.health.was_read()  # first: where other pages come back, one that does not is not the disk
        if read.error is not None:
            self.counters.disk_read_errors += 1
            self.health.read_failed(read.error)
            self.changed.notify_all()

    @property
    def ledger(self) -> Ledger | None:
        """What is on disk; None without a disk, and until it has been surveyed."""
        return self.uses.ledger

    def surveyed(self) -> None:
        """The ledger is there: drop what was found before it, and cannot be."""
        assert self.ledger is not None
        for page in list(self.index.by_serial.values()):
            copy = self.index.copy(page, Tier.DISK)
            if page.serial not in self.ledger:
                self.index.set_damaged(page, Tier.DISK)
            if copy.damaged:
                self.holdings.drop_damaged(page, Tier.DISK)

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
            if self.holdings.feed is not None:
                self.holdings.feed.stored(parent, Tier.DISK)  # perhaps again: it may be of an earlier life
        return True

    def let_sleep(self) -> None:
        """Take pages that nobody has to do with out of the tree, down to a limit: they are on disk."""
        idle = self.index.exits.idle
        while len(idle) > self._awake_pages and self.ledger is not None:
            page = next(iter(idle))
            if not page.may_sleep():
                del idle[page]
                continue
            self.uses.note_before_sleep(page)
            self.index.sleep(page)

    # -- seeing --------------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the store is closed")

    def available_hbm(self) -> int:
        """Pages of the pool that are free or could be evicted, one after the other."""
        assert self.pool is not None
        cached = self.index.copies[Tier.HBM] - self.index.leases[Tier.HBM]
        if self.pending_saves:
            # A save holds single pages, and what is before them cannot leave either. (All other leases are on
            # whole prefixes.)
            cached -= self.hbm.held_up()
        return self.pool.free_pages + cached

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
            assert published == self.hbm.published, "the pool and the index disagree on cached pages"
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
