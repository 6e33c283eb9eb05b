"""The index adds and drops copies, records uses and holds, and unloads and reloads pages."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tierstore.index.page import Copy, Page, Tier
from tierstore.index.tree import Tree
from tierstore.keys import PageKey
from tierstore.policy import (
    EXPIRED,
    NO_HINT,
    EvictionQueue,
    GhostTable,
    PageFacts,
    PageHint,
    Policy,
    Reuse,
    fingerprint,
)

_HBM = Tier.HBM  # a global name is faster to look up than an attribute
_PAGES_A_TICK = 64  # named pages that count as used in the same tick, see touch_named


class EvictionQueues:
    """The copies that may be evicted: one queue for each pool in HBM, and one queue for the host tier. The
    pages on disk that may be unloaded are in ``idle``.

    The index reports when a copy may have become evictable (:meth:`offer`). Not thread-safe.
    """

    def __init__(self, policies: Sequence[Policy], more_pools: Sequence[Policy] = ()) -> None:
        """Create empty queues. ``policies`` are by tier, and ``more_pools`` are the policies of the second
        and later pools in HBM. (The disk's policy orders the page table, not a queue.)"""
        self._hbm = [_queue(policy, Tier.HBM) for policy in (policies[Tier.HBM], *more_pools)]
        self._host = _queue(policies[Tier.HOST], Tier.HOST)
        self.idle: dict[Page, None] = {}  # pages that may be unloaded, in the order of their offers

    def offer(self, page: Page, tier: Tier) -> None:
        """Queue the copy in ``tier`` if it exists and may leave."""
        copy = page.copies[tier]
        if tier is Tier.DISK:
            if page.may_unload():
                self.idle.setdefault(page)
        elif copy is not None and not copy.queued and page.may_leave(tier):
            self.queue(tier, page.pool).offer(copy)

    def queue(self, tier: Tier, pool: int) -> EvictionQueue[Copy]:
        return self._host if tier is Tier.HOST else self._hbm[pool]

    def offer_all(self, page: Page) -> None:
        """Queue those of the page's copies that may leave."""
        # Not a loop, because this method runs several times for each page that is added or removed.
        hbm, host, disk = page.copies
        if hbm is not None and not hbm.queued:
            self.offer(page, Tier.HBM)
        if host is not None and not host.queued:
            self.offer(page, Tier.HOST)
        if disk is not None and not disk.queued:
            self.offer(page, Tier.DISK)

    def offer_again(self, page: Page) -> None:
        """Queue the page's copies in memory again, because the page's score may have fallen."""
        for tier in (Tier.HBM, Tier.HOST):
            copy = page.copies[tier]
            if copy is not None:
                copy.queued = False
                if page.may_leave(tier):
                    self.queue(tier, page.pool).offer(copy)

    def queued(self, tier: Tier) -> set[int]:
        """Return the ids of the queued copies (for checks)."""
        if tier is Tier.DISK:
            return {id(page.copies[tier]) for page in self.idle}
        queues = self._hbm if tier is Tier.HBM else [self._host]
        return set().union(*(queue.queued() for queue in queues))


def _queue(policy: Policy, tier: Tier) -> EvictionQueue[Copy]:
    return EvictionQueue(policy, _facts, lambda copy: copy.page.may_leave(tier))


def _facts(copy: Copy) -> PageFacts:
    page = copy.page
    hint = page.hint if page.last_use <= page.hinted else NO_HINT
    return PageFacts(page.nbytes, page.depth, page.last_use, page.hits, hint.reuse, hint.priority, page.worth)


_SPARE_HINTS = 1024
_MOST_LEAVING = 4096  # finished pages that wait until they are no longer held


class Hints:
    """Hints about the next use of pages, with the time at which each hint expires. Not thread-safe."""

    def __init__(self, eviction: EvictionQueues) -> None:
        self._eviction = eviction
        self._ending: list[tuple[float, int, Page, PageHint]] = []  # a heap by ``expires_s``
        self._order = itertools.count()

    def give(self, pages: Sequence[Page], hint: PageHint, *, tick: int, held: int) -> None:
        """Store ``hint`` about the next use of these pages. ``held`` is the number of pages in the tree. If
        the heap has more than twice as many entries, outdated entries are dropped."""
        for page in pages:
            page.hint = hint
            page.hinted = tick
            if hint.expires_s < math.inf:
                heapq.heappush(self._ending, (hint.expires_s, next(self._order), page, hint))
            self._eviction.offer_again(page)
        if len(self._ending) > 2 * held + _SPARE_HINTS:
            self.forget_gone()

    def forget_gone(self) -> None:
        """Drop entries of pages that have left the tree, and outdated hints."""
        self._ending = [each for each in self._ending if each[2].hint is each[3] and any(each[2].copies)]
        heapq.heapify(self._ending)

    def expire(self, now_s: float) -> None:
        """Treat pages whose time to live is over as finished."""
        while self._ending and self._ending[0][0] <= now_s:
            _, _, page, hint = heapq.heappop(self._ending)
            if page.hint is hint and page.last_use <= page.hinted:
                page.hint = PageHint(Reuse.DONE, hint.priority, EXPIRED)
                self._eviction.offer_again(page)


class Ages:
    """The times at which pages were saved. Pages older than ``most_s`` seconds on ``clock`` are too old
    (``most_s`` is inf: no page is). Not thread-safe."""

    def __init__(self, tree: Tree, most_s: float, clock: Callable[[], float]) -> None:
        self.most_s = most_s
        self.clock = clock
        self._tree = tree
        self._ending: list[tuple[float, int, Page]] = []  # a heap by ``made_s``
        self._order = itertools.count()

    def begin(self, page: Page, made_s: float | None = None) -> None:
        """Record that a page without other copies was saved at ``made_s`` (None: now)."""
        page.made_s = self.clock() if made_s is None else made_s
        if self.most_s < math.inf:
            heapq.heappush(self._ending, (page.made_s, next(self._order), page))
            if len(self._ending) > 2 * self._tree.pages + _SPARE_HINTS:
                self._ending = [each for each in self._ending if _is_current(each)]
                heapq.heapify(self._ending)

    def is_over(self, made_s: float) -> bool:
        """Whether a page that was saved at ``made_s`` is too old."""
        return made_s + self.most_s <= self.clock()

    def take_old(self) -> list[Page]:
        """Return the pages that are too old, each page once. A page whose host copy is still being filled is
        returned by a call after that."""
        old: list[Page] = []
        incomplete = []
        while self._ending and self.is_over(self._ending[0][0]):
            each = heapq.heappop(self._ending)
            if not _is_current(each):
                continue
            host = each[2].copies[Tier.HOST]
            if host is not None and not host.ready and not host.damaged:
                incomplete.append(each)
            else:
                old.append(each[2])
        for each in incomplete:
            heapq.heappush(self._ending, each)
        return old


def _is_current(entry: tuple[float, int, Page]) -> bool:
    made_s, _, page = entry
    return page.made_s == made_s and any(page.copies)


class Leaving:
    """Finished named pages that wait to leave their tiers: each leaves as soon as nothing holds it. (Chained
    pages leave by the policy, the last page of a chain first.) ``drop`` drops a copy. Not thread-safe."""

    def __init__(self, tiers: Sequence[Tier], drop: Callable[[Page, Tier], None]) -> None:
        self._tiers = tiers
        self._drop = drop
        self._waiting: dict[Page, None] = {}

    def __contains__(self, page: Page) -> bool:
        return page in self._waiting and page.done

    def evict_when_idle(self, pages: Iterable[Page]) -> int:
        """Evict the finished ones (``Page.done``) of these pages, now or as soon as nothing holds them.
        Return the number of copies that this call has dropped."""
        self._waiting.update((page, None) for page in pages if page.done)
        while len(self._waiting) > _MOST_LEAVING:  # the policy evicts the forgotten pages first in any case
            del self._waiting[next(iter(self._waiting))]
        return self.leave()

    def leave(self) -> int:
        """Drop the waiting pages' copies that are no longer held. Return the number of dropped copies."""
        left = 0
        for page in list(self._waiting):
            for tier in self._tiers:
                if page.done and page.may_leave(tier):
                    self._drop(page, tier)
                    left += 1
            if not page.done or not any(page.copies):
                del self._waiting[page]
        return left


if TYPE_CHECKING:
    from tierstore.tiers.disk.records import PageRecord


class Index:
    """The prefix tree, and all operations on its pages. Not thread-safe: the store's lock guards it."""

    def __init__(
        self, policies: Sequence[Policy], *, more_pools: Sequence[Policy] = (), tick: int = 0
    ) -> None:
        """Create an empty index. ``policies`` are by tier, and ``more_pools`` are the policies of the second
        and later pools in HBM. ``tick`` is the logical clock's first value."""
        self.tree = Tree()
        self.eviction = EvictionQueues(policies, more_pools)
        self.hints = Hints(self.eviction)
        self._ghosts = GhostTable()
        self.tick = tick
        self.by_serial: dict[int, Page] = {}  # pages with a disk copy, ready or not, and tombstones
        self.copies = [0] * len(Tier)
        self.leases = [0] * len(Tier)  # copies with at least one lease
        self._in_pool = [0] * (1 + len(more_pools))  # copies in HBM by pool
        self._leased_in_pool = [0] * len(self._in_pool)  # leased copies in HBM by pool, if there are several
        self._several_pools = bool(more_pools)
        self.disk_only_bytes = 0  # memory cost of the pages in the tree that are only on disk
        self.forgotten_bytes = 0  # memory cost of all pages that have left the tree so far
        self.changes = 0  # increases whenever the result of a match may change

    # -- adding and removing -------------------------------------------------------------------------

    def add(self, parent: Page, key: PageKey, tokens: bytes) -> Page:
        """Return the child of ``parent`` with ``tokens``. Create it without copies if it does not exist."""
        page = self.tree.child(parent, key, tokens)
        if page is None:
            page = self.tree.make(parent, key, tokens, self.tick)
            hits = self._ghosts.recall(_fingerprint(page))
            if hits is not None:
                page.hits = hits + 1  # if the page had stayed, this use would have been a hit
            self._ghosts.make_room(self.tree.pages)
        return page

    def add_copy(self, page: Page, tier: Tier, place: int, *, ready: bool, leases: int = 0) -> Copy:
        """Record a copy of ``page`` in a tier that has none."""
        assert page.copies[tier] is None, f"{page} already has a copy in {tier.label}"
        was_only_on_disk = page.on_disk_only
        copy = page.copies[tier] = Copy(page, place, ready=ready, leases=leases)
        self.disk_only_bytes += (page.on_disk_only - was_only_on_disk) * page.memory_cost
        self.copies[tier] += 1
        if leases:
            self._count_lease(page, tier, 1)
        self._in_pool[page.pool] += tier is Tier.HBM
        self.changes += 1
        above = page.parent.copies[tier] if page.parent else None
        if above is not None:
            above.children += 1
        # A tombstone that is filled again may already have children in this tier.
        if page.children:
            for child in page.all_children():
                copy.children += child.copies[tier] is not None
        if ready:
            self.eviction.offer_all(page)
        return copy

    def complete(self, pages: Sequence[Page], tier: Tier, *, release: bool) -> None:
        """Mark these copies as complete. With ``release``, also release the lease that each filler held."""
        for page in pages:
            copy = self.copy(page, tier)
            assert copy.leases > 0, f"{page} has no lease in {tier.label}"
            copy.ready = True
            if release:
                copy.leases -= 1
                if not copy.leases:
                    self._count_lease(page, tier, -1)
        self.changes += 1
        for page in pages:
            self.eviction.offer_all(page)

    def set_damaged(self, page: Page, tier: Tier) -> None:
        copy = self.copy(page, tier)
        copy.ready = False
        copy.damaged = True
        self.changes += 1

    def drop_copy(self, page: Page, tier: Tier) -> int:
        """Drop a copy and return its place. Remove the page from the tree if nothing needs it any more."""
        copy = self._take_copy(page, tier)
        if tier is Tier.DISK:
            page.record = None
            if not page.tombstone:
                self.by_serial.pop(page.serial, None)
                page.serial = 0
        if page.parent is not None and not self._needed(page):
            self.prune(page)
        else:
            if page.parent is not None:
                self.eviction.offer(page.parent, tier)
            self.eviction.offer_all(page)
        return copy.place

    def _take_copy(self, page: Page, tier: Tier) -> Copy:
        copy = self.copy(page, tier)
        assert copy.leases == 0, f"{page} leaves {tier.label} under a lease"
        was_only_on_disk = page.on_disk_only
        page.copies[tier] = None
        self.disk_only_bytes += (page.on_disk_only - was_only_on_disk) * page.memory_cost
        copy.queued = False
        self.copies[tier] -= 1
        self._in_pool[page.pool] -= tier is Tier.HBM
        self.changes += 1
        above = page.parent.copies[tier] if page.parent else None
        if above is not None:
            above.children -= 1
        return copy

    def fill_tombstone(self, page: Page) -> None:
        """Clear the page's tombstone flag, because no page below it is on disk any more."""
        page.tombstone = False
        if page.copies[Tier.DISK] is None:
            self.by_serial.pop(page.serial, None)
            page.serial = 0
        self.prune(page)

    def copy(self, page: Page, tier: Tier) -> Copy:
        """Return the copy of ``page`` in ``tier``, which must exist."""
        copy = page.copies[tier]
        assert copy is not None, f"{page} has no copy in {tier.label}"
        return copy

    def prune(self, page: Page) -> None:
        """Remove ``page`` and its ancestors from the tree, up to the first page that has a copy, a child, a
        pin or a hold."""
        while page.parent is not None and not self._needed(page):
            parent = page.parent
            self._unlink(page)
            self._ghosts.remember(_fingerprint(page), page.hits)
            self.eviction.offer_all(parent)
            page = parent

    @staticmethod
    def _needed(page: Page) -> bool:
        hbm, host, disk = page.copies
        return bool(page.children or host or disk or hbm or page.kept or page.tombstone)

    def _unlink(self, page: Page) -> None:
        self.tree.unlink(page)
        self.forgotten_bytes += page.memory_cost
        self.eviction.idle.pop(page, None)
        self.by_serial.pop(page.serial, None)

    # -- unloading and reloading ---------------------------------------------------------------------

    def in_tree(self, page: Page) -> bool:
        """Return whether a page (one with a disk copy, or a root) is still in the tree."""
        if page.parent is None:
            return self.tree.is_root(page)
        return self.by_serial.get(page.serial) is page

    def reload(self, parent: Page, record: PageRecord, hits: int) -> Page:
        """Add the page of ``record``, which is on disk, to the tree, unless it is in the tree already. Return
        the page."""
        key = PageKey(record.key)
        page = self.tree.child(parent, key, record.tokens)
        if page is None:
            page = self.tree.make(parent, key, record.tokens, self.tick)
        if page.copies[Tier.DISK] is None and not page.tombstone:
            page.hits = max(page.hits, hits)
            self.put_on_disk(page, record, ready=True)
        return page

    def put_on_disk(self, page: Page, record: PageRecord, *, ready: bool, leases: int = 0) -> None:
        page.record = record
        page.serial = record.serial
        page.tombstone = False
        self.by_serial[record.serial] = page
        self.add_copy(page, Tier.DISK, record.place, ready=ready, leases=leases)

    def of_session(self, number: int, key_session: bytes = b"") -> list[Page]:
        """Return the pages in the tree that belong only to session ``number`` (0: no session) or that
        ``key_session``'s key encrypts, and all pages below those. Parents precede children."""
        found: dict[Page, None] = {}
        if number or key_session:
            for page in self.tree.walk():
                own = page.session == number != 0 or page.key_session == key_session != b""
                if own or page.parent in found:
                    found[page] = None
        return list(found)

    def unload(self, page: Page) -> None:
        """Remove an idle page from the tree. The page object then has no copies."""
        assert page.may_unload(), f"{page} is not idle"
        self._take_copy(page, Tier.DISK)
        parent = page.parent
        assert parent is not None
        self._unlink(page)
        self.eviction.offer_all(parent)

    # -- use, leases, pins ---------------------------------------------------------------------------

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """Advance the logical clock by one tick, and record a use of these pages by a lookup (``hit``) or by
        a save."""
        self.tick += 1
        tick = self.tick
        for page in pages:
            page.last_use = tick
        if hit:
            for page in pages:
                page.hits += 1

    def touch_named(self, depths: Mapping[Page, int], *, hit: bool) -> None:
        """Do :meth:`touch` for named pages, given with the number of pages before each in its prompt. A named
        page has no parent that must stay longer, and one prompt's pages arrive in several requests. So a
        named page counts as used slightly earlier than the pages before it."""
        self.tick += 1
        for page, depth in depths.items():
            page.depth = depth + 1
            page.last_use = max(self.tick - depth // _PAGES_A_TICK, 0)
            page.hits += hit

    def hint(self, pages: Sequence[Page], hint: PageHint) -> None:
        """Store ``hint`` about the next use of these pages."""
        self.hints.give(pages, hint, tick=self.tick, held=self.tree.pages)

    def victim(self, tier: Tier, pool: int = 0) -> Page | None:
        """Return the page whose copy in a memory tier (HBM: in this ``pool``) leaves next by the tier's
        policy; None if no copy may leave."""
        copy = self.eviction.queue(tier, pool).victim(self.tick)
        return copy.page if copy is not None else None

    def unleased(self, pool: int) -> int:
        """Return how many copies of a pool in HBM have no lease."""
        if not self._several_pools:
            return self.copies[Tier.HBM] - self.leases[Tier.HBM]
        return self._in_pool[pool] - self._leased_in_pool[pool]

    def _count_lease(self, page: Page, tier: Tier, change: int) -> None:
        self.leases[tier] += change
        self._leased_in_pool[page.pool] += change if tier is Tier.HBM else 0

    def lease(self, page: Page, tier: Tier) -> None:
        self.lease_all([(page, tier)])

    def lease_all(self, held: Sequence[tuple[Page, Tier]]) -> None:
        """Add a lease to each of these copies. ``lease_all`` and ``release_all`` call no function for each
        page, because they run at every lookup."""
        leases, in_pool, several = self.leases, self._leased_in_pool, self._several_pools
        for page, tier in held:
            copy = page.copies[tier]
            assert copy is not None, f"{page} has no copy in {tier.label}"
            if not copy.leases:
                leases[tier] += 1
                if several and tier is _HBM:
                    in_pool[page.pool] += 1
            copy.leases += 1

    def release_all(self, held: Sequence[tuple[Page, Tier]]) -> list[tuple[Page, Tier]]:
        """Release one lease on each of these copies. Return the damaged copies that have no lease left."""
        leases, in_pool, several = self.leases, self._leased_in_pool, self._several_pools
        damaged = []
        for page, tier in held:
            copy = page.copies[tier]
            assert copy is not None, f"{page} has no copy in {tier.label}"
            assert copy.leases > 0, f"{page} has no lease in {tier.label}"
            copy.leases -= 1
            if copy.leases:
                continue
            leases[tier] -= 1
            if several and tier is _HBM:
                in_pool[page.pool] -= 1
            if copy.damaged:
                damaged.append((page, tier))
            elif not copy.children:  # a copy with children may not leave
                self.eviction.offer(page, tier)
        return damaged

    def pin(self, page: Page) -> None:
        page.pins += 1

    def unpin(self, page: Page, times: int = 1) -> None:
        assert page.pins >= times, f"{page} is not pinned {times} times"
        page.pins -= times
        self._offer(page)

    def hold(self, page: Page) -> None:
        """Keep a page during one operation, independent of its pins."""
        page.holds += 1

    def unhold(self, page: Page) -> None:
        assert page.holds > 0, f"{page} is not held"
        page.holds -= 1
        self._offer(page)

    def _offer(self, page: Page) -> None:
        if not page.kept:
            self.eviction.offer_all(page)
            self.prune(page)

    # -- checks --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert that counts, parents, children and queues agree."""
        pages = list(self.tree.walk())
        counted = self.tree.pages
        assert len(pages) == counted, f"{len(pages)} pages in the tree, {counted} counted"
        for tier in Tier:
            held = [(page, copy) for page in pages if (copy := page.copies[tier]) is not None]
            assert len(held) == self.copies[tier], (
                f"{len(held)} copies in {tier.label}, {self.copies[tier]} counted"
            )
            assert sum(copy.leases > 0 for _, copy in held) == self.leases[tier], f"leases in {tier.label}"
            queued = self.eviction.queued(tier)
            if tier is Tier.HBM:
                for pool in range(len(self._in_pool)):
                    free = sum(page.pool == pool and not copy.leases for page, copy in held)
                    assert free == self.unleased(pool), (
                        f"{free} copies in pool {pool} without a lease, {self.unleased(pool)} counted"
                    )
            for page, copy in held:
                below = sum(child.copies[tier] is not None for child in page.all_children())
                assert copy.children == below, (
                    f"{page}: {below} children in {tier.label}, {copy.children} counted"
                )
                may_go = page.may_unload() if tier is Tier.DISK else page.may_leave(tier)
                assert not may_go or id(copy) in queued, f"{page} is missing in a queue"
        for page in pages:
            assert page.children or page.kept or page.tombstone or any(page.copies), f"{page} should be gone"
        counted = sum(page.memory_cost for page in pages if page.on_disk_only)
        assert counted == self.disk_only_bytes, (
            f"{counted} bytes of pages are only on disk, {self.disk_only_bytes} counted"
        )
        on_disk = {
            page.serial: page for page in pages if page.copies[Tier.DISK] is not None or page.tombstone
        }
        assert on_disk == self.by_serial, "pages on disk and serials do not agree"


def _fingerprint(page: Page) -> int:
    return fingerprint(int.from_bytes(page.key[:8], "big"))
