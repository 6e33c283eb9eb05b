"""The mutable state of a store, and its decisions. This module starts no thread, copies no pages and does no
I/O.

Callers must hold :attr:`StoreState.lock` for all methods and attributes, also those of the parts in other
files.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tierstore.core.departures import Departures
from tierstore.core.health import Health, StallDetector
from tierstore.core.residency import AccessLog, Eviction, PendingFills, Residency
from tierstore.core.write_admission import WriteBudget
from tierstore.defaults import STALL_S
from tierstore.errors import StoreClosedError
from tierstore.index import Ages, Index, Match, Page, Tier
from tierstore.index.leases import Leases
from tierstore.index.sessions import Sessions
from tierstore.keys import Identity
from tierstore.planner import RateEstimate, TierRate
from tierstore.policy import Policy
from tierstore.stats import Counters, TierStats
from tierstore.tiers.disk import DiskTier, PageRecord, PageTable, ReadBatch
from tierstore.tiers.host import HostTier

# Limits for pages that are only on disk but still in the tree:
_LOADED_PAGES = 1 << 15  # number of disk-only pages without children in the tree
_LOADED_BYTES = 128 << 20  # memory of disk-only pages
# memory of disk-only pages, including held ones, at which lookups stop loading pages into the tree
_MOST_LOADED_BYTES = 256 << 20
_UNLOADED_AT_ONCE = 1024  # takes several milliseconds
GONE_BYTES = 32 << 20  # memory of pages that have left the tree, after which references to them are dropped


class StoreState:
    """The state of one store: index, space of the tiers, leases, counters."""

    def __init__(
        self,
        policies: Sequence[Policy],
        *,
        host: HostTier | None,
        disk: DiskTier | None,
        clock: Callable[[], float] = time.monotonic,
        loaded_pages_most: int = _LOADED_PAGES,
        stall_s: float = STALL_S,
        write_bytes_per_day: int = 0,
        max_age_s: float = math.inf,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.host = host
        self.disk = disk
        self.clock = clock
        self.lock = threading.Lock()
        # notified when a copy has become ready or was dropped, or when a queue has changed
        self.changed = threading.Condition(self.lock)
        self.index = Index(policies, tick=disk.tick if disk is not None else 0)
        self.counters = Counters()
        if disk is not None:
            self.counters.evicted_pages["disk"] += disk.fitted.evicted_pages
            self.counters.disk_lost_pages += disk.fitted.lost_pages
        self.health = Health(Tier.DISK.label, clock, stall_s=stall_s)
        self.stall_detector = StallDetector(disk, self.health, self.changed)
        self.closed = False
        # by digest: the identities of everything saved since the store was opened
        self.identities: dict[bytes, Identity] = {}
        # model names by identity digest, as far as known
        self.names = {} if disk is None else disk.serials.names()
        self._loaded_pages_most = loaded_pages_most
        self._forgotten_bytes = 0  # ``index.forgotten_bytes`` at the last forget_gone()
        # The parts, in the order of their dependencies.
        self.access_log = AccessLog(self.index, disk)
        host_bytes = host.capacity_bytes if host is not None else 0
        self.departures = Departures(host_bytes + (disk.stats().capacity_bytes if disk is not None else 0))
        if disk is not None:
            self.departures.load(disk.departures())
        self.residency = Residency(
            self.index,
            host=host,
            access_log=self.access_log,
            counters=self.counters,
            changed=self.changed,
            departures=self.departures,
        )
        self.leases = Leases(self.index, clock, self.residency.drop_damaged)
        self.sessions = Sessions(clock, self.access_log.hint)
        self.eviction = Eviction(
            self.index,
            residency=self.residency,
            leases=self.leases,
            access_log=self.access_log,
            host=host,
            disk_policy=policies[Tier.DISK],
            counters=self.counters,
            clock=clock,
        )
        self.ages = Ages(self.index.tree, max_age_s, wall)
        self.too_old: list[Page] = []  # pages that are no longer served but not dropped yet
        self.fills = PendingFills(self.index, self.residency, self.eviction, self.changed, self.ages)
        self.write_budget = WriteBudget(clock, bytes_per_day=write_bytes_per_day)
        self.disk_rate = RateEstimate()
        self.queued_reads = 0  # bytes that loads have requested but not read yet

    @staticmethod
    def yield_lock() -> None:
        """Let another thread take the lock. Long jobs call this between two holds of the lock: otherwise the
        same thread would usually get the lock again."""
        time.sleep(0)

    # -- rates ---------------------------------------------------------------------------------------

    def rates(self) -> dict[str, TierRate]:
        """Return the disk's rate, including the time that its read queue takes; empty before the first read.
        Clients measure the rate of host memory themselves."""
        rate = self.disk_rate.rate(self.clock())
        if rate is None:
            return {}
        return {Tier.DISK.label: replace(rate, backlog_s=self.queued_reads / rate.bytes_per_s)}

    # -- lookups -------------------------------------------------------------------------------------

    def root(self, identity: Identity, page_bytes: int) -> Page:
        """Return the root of all pages of ``identity``. Every page of an identity has ``page_bytes``."""
        self.expire()
        root = self.index.tree.root(identity, page_bytes)
        assert root.nbytes == page_bytes, (
            f"identity has pages of {root.nbytes} bytes, got page_bytes={page_bytes}"
        )
        if not root.serial and self.disk is not None:
            root.serial = self.disk.serials.root(identity.digest) or 0
        return root

    def expire(self) -> None:
        """Stop serving pages that are too old. :mod:`tierstore.core.forgetting` drops them later."""
        old = self.ages.take_old()
        for page in old:
            self.residency.condemn(page, erased=True)
        if old:
            self.too_old += old
            self.changed.notify_all()

    def reachable(self, match: Match, chunk_tokens: int) -> Match:
        """Return the part of a match that can be loaded now: while the disk is offline, only the pages before
        the first page that is only on disk."""
        if self.health.readable:
            return match
        pages = tuple(itertools.takewhile(lambda page: page.ready_tier() is not Tier.DISK, match.pages))
        if len(pages) == len(match.pages):
            return match
        return Match(pages, len(pages) * chunk_tokens, chunk_tokens if pages else 0)

    # -- pages on disk -------------------------------------------------------------------------------

    def was_read(self, read: ReadBatch) -> None:
        """Record the outcome of a read from disk."""
        self.counters.disk_read_pages += read.good
        if read.good:
            self.health.was_read()  # first, so that one bad page among good ones is no disk failure
        if read.error is not None:
            self.counters.disk_read_errors += 1
            self.health.read_failed(read.error)
            self.changed.notify_all()

    @property
    def page_table(self) -> PageTable | None:
        """The pages on disk; None without a disk, and until the disk has been scanned."""
        return self.access_log.page_table

    def scanned(self) -> None:
        """Drop disk copies that were loaded before the scan if the scanned page table does not have them."""
        assert self.page_table is not None
        for page in list(self.index.by_serial.values()):
            copy = self.index.copy(page, Tier.DISK)
            if page.serial not in self.page_table:
                self.index.set_damaged(page, Tier.DISK)
            if copy.damaged:
                self.residency.drop_damaged(page, Tier.DISK)

    def reload(self, parent: Page, records: Sequence[PageRecord]) -> bool:
        """Add pages found on disk, each the child of the previous one, to the tree. Return False if the store
        has changed since the search."""
        page_table = self.page_table
        for record in records:
            if not self.index.in_tree(parent) or parent.serial != record.parent:
                return False  # the root was forgotten meanwhile: then it has another serial, or none
            if page_table is not None and page_table.place(record.serial) != record.place:
                return False  # the page was removed or moved meanwhile
            if record.nbytes != parent.nbytes:
                return False  # the page was saved under this identity with another page size
            if self.ages.is_over(record.created_s) or record.serial in self.residency.erased:
                return False
            hits = page_table.use(record.serial).hits if page_table is not None else 0
            parent = self.index.reload(parent, record, hits)
            if parent.record is record and self.disk is not None:
                parent.key_session = self.disk.session_keys.of(record)
            if parent.record is record and parent.copies[Tier.HOST] is None:
                self.ages.begin(parent, record.created_s)
                parent.session = page_table.session(record.serial) if page_table is not None else 0
            if parent.serial != record.serial:
                return False  # the page is on disk twice, or is being written a second time
        return True

    def unload_idle(self) -> bool:
        """Unload idle pages from the tree until the tree is within its limits, but at most
        ``_UNLOADED_AT_ONCE`` pages. Return whether more may remain."""
        idle = self.index.eviction.idle
        page: Page | None = None
        for _ in range(_UNLOADED_AT_ONCE):
            if page is None or not page.may_unload():
                page = next(iter(idle), None)
            if page is None or self.page_table is None or not self._too_many_loaded():
                return False
            if not page.may_unload():
                del idle[page]
                continue
            above = page.parent
            self.access_log.note_before_unload(page)
            self.index.unload(page)
            # Unload one prompt after another; otherwise all prompts would lose their last pages.
            page = above
        return True

    def forget_gone(self) -> None:
        """Drop references to pages that have left the tree, if these pages take enough memory."""
        if self.index.forgotten_bytes - self._forgotten_bytes > GONE_BYTES:
            self._forgotten_bytes = self.index.forgotten_bytes
            self.sessions.forget_gone()
            self.index.hints.forget_gone()

    def _too_many_loaded(self) -> bool:
        return (
            len(self.index.eviction.idle) > self._loaded_pages_most
            or self.index.disk_only_bytes > _LOADED_BYTES
        )

    @property
    def may_reload(self) -> bool:
        """Whether there is memory for more pages that are only on disk."""
        return self.index.disk_only_bytes < _MOST_LOADED_BYTES

    # -- statistics and checks -----------------------------------------------------------------------

    def require_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the store is closed")

    def tier_stats(self) -> dict[str, TierStats]:
        sizes: dict[Tier, tuple[int, int]] = {}
        if self.host is not None:
            sizes[Tier.HOST] = (self.host.capacity_bytes, self.host.used_bytes)
        if self.disk is not None:
            disk = self.disk.stats()
            sizes[Tier.DISK] = (disk.capacity_bytes, disk.used_bytes)
        pages = list(self.index.copies)
        if self.disk is not None:
            pages[Tier.DISK] = len(self.page_table) if self.page_table is not None else disk.pages
        return {
            tier.label: TierStats(capacity, used, pages[tier], self.index.leases[tier])
            for tier, (capacity, used) in sizes.items()
        }

    def check(self) -> None:
        """Assert that index, arena, disk and leases agree."""
        self.index.check()
        pages = list(self.index.tree.walk())
        if self.host is not None:
            self.host.check()
            places = [c.place for p in pages if (c := p.copies[Tier.HOST]) is not None]
            assert len(set(places)) == len(places), "two pages share a host slot"
        if self.page_table is not None:
            for page in pages:
                copy = page.copies[Tier.DISK]
                durable = copy is not None and (copy.ready or copy.damaged)
                assert not durable or page.serial in self.page_table, (
                    f"{page} is on disk but not in the page table"
                )
                assert page.tombstone <= (self.page_table.children(page.serial) > 0), (
                    f"{page} is a tombstone without children on disk"
                )
