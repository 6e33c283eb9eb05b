"""The pages of the engine's own pools: which of them the store knows, and who holds them. Pure bookkeeping
behind one lock; nothing here copies or waits.

Each layer group has a pool, and all pools lie in one memory (:mod:`tierstore.tiers.two_level`): where one has
too few pages, cached pages of the others leave until a large page is empty. One index knows the cached pages
of all pools, with a queue of those that may leave for each.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from tierstore.backend import LookupRequest, SaveHints
from tierstore.errors import StoreClosedError, UsageError
from tierstore.index import LABELS, Index, Leaving, Match, Page, Tier
from tierstore.index.leases import Leases, PageLease
from tierstore.index.sessions import HintTracker, Sessions
from tierstore.keys import PageKey
from tierstore.policy import POLICIES
from tierstore.stats import Counters, StoreStats, TierStats
from tierstore.store.buffers import HbmPages
from tierstore.tiers import two_level
from tierstore.tiers.group_pools import room_for
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.large_pages import PoolSize

NO_MATCH = Match((), 0, 0)
_GONE_BYTES = 32 << 20  # of pages that have left the tree and may still be remembered somewhere

_COUNTED_HERE = (
    "lookups",
    "lookup_tokens",
    "hit_tokens",
    "loaded_pages",
    "loads_cut_short",
    "saved_pages",
    "already_stored_pages",
    "not_stored_pages",
    "declined_tokens",
)


class HbmTier:
    """The hbm tier of one store (without ``pools`` it is empty), and the store's lock and counters.

    A page is *private* while the engine writes it; :meth:`publish` makes it the copy of a chunk, in place.
    When nobody holds it any more it is cached until its room is needed. Methods and attributes need
    :attr:`lock`, except where they say that they take it. ``group`` is the number of a layer group, whose
    pool is ``pools[group]``.
    """

    def __init__(self, pools: Sequence[PagePool], policy: str, clock: Callable[[], float]) -> None:
        self.pools = tuple(pools)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # copies have ended, or a save has
        self.clock = clock
        self.counters = Counters()
        policies = [POLICIES[policy]() for _ in Tier]
        self.index = Index(policies, more_pools=[POLICIES[policy]() for _ in pools[1:]])
        self.leases = Leases(self.index, clock, self._drop_damaged)
        self.sessions = Sessions(clock, self.index.hint)
        self.published: list[dict[int, Page]] = [{} for _ in self.pools]  # by pool, those in the index
        self.pending_saves = 0  # pages
        self.closed = False
        self._leaving = Leaving([Tier.HBM], self._leave)
        self._pid = os.getpid()
        self._forgotten_bytes = 0  # of the index, at the last _forget_gone()

    @property
    def forked(self) -> bool:
        """Whether this is the copy in a forked child: it has none of the threads, and a lock may be held for
        good. To be asked without the lock, before anything takes it."""
        return os.getpid() != self._pid

    def require_process(self) -> None:
        """Raises :class:`StoreClosedError` in a forked child. Without the lock."""
        if self.forked:
            raise StoreClosedError(
                "this store was opened by another process: open or connect one here after fork"
            )

    def require_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the store is closed")

    # -- finding -------------------------------------------------------------------------------------

    def pool(self, group: int) -> PagePool:
        """The pool of a layer group. Raises :class:`UsageError` for a store without pools."""
        if not self.pools:
            raise UsageError("this store has no page pool: give it one, or use buffers")
        return self.pools[group]

    def root(self, request: LookupRequest, group: int) -> Page:
        return self.index.tree.root(request.identity.digest, request.page_bytes, group)

    def match(self, request: LookupRequest, group: int) -> Match:
        """The leading pages of a prompt that are in HBM. Takes the lock."""
        if not self.pools:
            return NO_MATCH
        tokens = request.tokens_from(0)
        with self.lock:
            return self.index.tree.match_below(
                self.root(request, group),
                request.keys,
                tokens,
                request.chunk_tokens,
                request.num_tokens,
                whole=request.identity.whole_pages,
            )

    def match_named(self, request: LookupRequest, group: int) -> dict[int, Page]:
        """Those of a request's named pages that are in HBM, by their positions. Takes the lock."""
        if not self.pools:
            return {}
        with self.lock:
            pages = enumerate(self._named(request, group))
            return {at: page for at, page in pages if page is not None and page.ready_tier() is Tier.HBM}

    def has_all(self, request: LookupRequest, group: int) -> bool:
        """Whether all whole chunks of a request are in HBM. Takes the lock."""
        if not self.pools:
            return False
        child = self.index.tree.child
        with self.lock:
            root = page = self.root(request, group)
            for at, key in enumerate(request.keys):
                found = child(request.parent(root, page), key, request.chunk(at))
                if found is None or found.ready_tier() is not Tier.HBM:
                    return False
                page = found
        return True

    def _named(self, request: LookupRequest, group: int) -> list[Page | None]:
        """Each named page, as far as it is known here."""
        root, child = self.root(request, group), self.index.tree.child
        return [child(root, key, request.chunk(at)) for at, key in enumerate(request.keys)]

    def use(
        self,
        request: LookupRequest,
        pages: Sequence[Page],
        lease_s: float,
        *,
        positions: Iterable[int] = (),
    ) -> PageLease:
        """A lookup has found these pages of a request: lease them. ``positions`` are those of named pages."""
        if not pages:
            return PageLease()
        lease = self.hold(pages, lease_s)
        request.touch(self.index, pages, positions, hit=True)
        return lease

    def hold(self, pages: Iterable[Page], lease_s: float) -> PageLease:
        """Lease pages for the time of one operation, without counting that as a use."""
        self.leases.expire()
        held = [(page, Tier.HBM) for page in pages if page.copies[Tier.HBM] is not None]
        return self.leases.take(held, lease_s)

    # -- publishing ----------------------------------------------------------------------------------

    def save(
        self,
        request: LookupRequest,
        group: int,
        tail_key: PageKey | None,
        source: HbmPages,
        first: int,
        hints: SaveHints,
    ) -> dict[int, Page]:
        """Make the pages of ``source`` the HBM copies of chunks ``first …``, or have it read those there are.
        Returns the pages by position, each under a lease for whoever copies it; fewer when one cannot be
        held, and then nothing behind it either. ``tail_key`` is that of the partial tail. Takes the lock."""
        held: dict[int, Page] = {}
        tracker = HintTracker(self.sessions, hints.hint, hints.session, named=request.named)
        with self.lock, self._released_on_error(held):
            self.require_open()
            root = page = self.root(request, group)
            for chunk in range(request.saved_from(first), first + len(source.hbm_pages)):
                if chunk >= len(request.keys) and request.identity.whole_pages:
                    break  # it could never be found
                key = request.keys[chunk] if chunk < len(request.keys) else tail_key
                assert key is not None, "a prompt with a partial tail has a key for it"
                if chunk == first:
                    tracker.begin(page)
                page = self.index.add(request.parent(root, page), key, request.chunk(chunk))
                if chunk >= first:
                    tracker.comes_to(page)
                    if not self._publish_or_read(page, source, chunk - first):
                        self.index.prune(page)
                        break
                    held[chunk - first] = page
            request.touch(self.index, list(held.values()), (first + at for at in held), hit=False)
            tracker.saved(list(held.values()))
            self._forget_gone()
        return held

    def supersede(self, request: LookupRequest, group: int, hints: SaveHints) -> None:
        """Pass a hint on to a request's named pages, and let those leave that are done by it, as soon as
        nothing holds them. Takes the lock."""
        tracker = HintTracker(self.sessions, hints.hint, hints.session, named=True)
        with self.lock:
            self.require_open()
            tracker.begin(self.root(request, group))
            pages = [page for page in self._named(request, group) if page is not None]
            tracker.about(pages)
            self._leaving.evict_when_idle(pages)

    @contextmanager
    def _released_on_error(self, held: dict[int, Page]) -> Iterator[None]:
        """Give the leases on the HBM copies of ``held`` back if anything is raised."""
        try:
            yield
        except BaseException:
            self.leases.release_all(list(held.values()), Tier.HBM)
            raise

    def _forget_gone(self) -> None:
        """Let go of pages that have left the tree, where they are still remembered: now and then."""
        if self.index.forgotten_bytes - self._forgotten_bytes > _GONE_BYTES:
            self._forgotten_bytes = self.index.forgotten_bytes
            self.sessions.forget_gone()
            self.index.hints.forget_gone()

    def _publish_or_read(self, page: Page, source: HbmPages, position: int) -> bool:
        if not self.publish(page, source.hbm_pages[position]):
            copy = page.copies[Tier.HBM]
            if copy is None:
                return False
            source.hbm_pages[position] = copy.place
        self.index.lease(page, Tier.HBM)
        return True

    def publish(self, page: Page, hbm_page: int) -> bool:
        """Make an engine's private HBM page the copy of ``page``, leased to the engine. False when the tier
        has one already: the engine's stays private."""
        published = self.published[page.pool]
        if hbm_page in published or page.copies[Tier.HBM] is not None:
            return False
        self.index.add_copy(page, Tier.HBM, hbm_page, ready=True, leases=1)
        published[hbm_page] = page
        return True

    # -- room ----------------------------------------------------------------------------------------

    def allocate(self, count: int, group: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` pages of a group's pool, evicting cached ones; None when that many cannot be had.
        ``near``: see :meth:`PagePool.allocate <tierstore.tiers.hbm.PagePool.allocate>`."""
        for _ in self.pools[:2]:  # after the first try nothing of its own is idle: then the others' is used
            self.make_room(count, group)
            pages = self.allocate_own(count, group, near=near)
            if pages is not None:
                return pages
        return None

    def allocate_own(self, count: int, group: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """:meth:`allocate`, evicting pages of this pool only."""
        pool = self.pools[group]
        if count > pool.free_pages:
            self.evict(count - pool.free_pages, group)
        return pool.allocate(count, near=near)

    def make_room(self, count: int, group: int) -> None:
        """Have the other pools give large pages back, as long as one of them has more idle bytes than
        ``group`` has, or ``group`` has too few pages for ``count`` more."""
        if len(self.pools) == 1:
            return
        pool = self.pools[group]
        others = [other for other in range(len(self.pools)) if other != group]
        while pool.free_pages < count:
            enough = pool.free_pages + self._idle_pages(group) >= count
            if enough and max(map(self._idle_bytes, others)) <= self._idle_bytes(group):
                break
            if not self._empty_any(others):
                break

    def _idle_pages(self, group: int) -> int:
        """Cached pages of a pool that could be evicted, one after the other."""
        cached = self.index.unleased(group)
        if self.pending_saves:
            # A save holds single pages, and what is before them cannot leave either. (All other leases are on
            # whole prefixes.)
            cached -= self._before_held(group)
        return max(cached - self.pools[group].excess, 0)

    def _idle_bytes(self, group: int) -> int:
        return self._idle_pages(group) * self.pools[group].spec.page_bytes

    def _before_held(self, group: int) -> int:
        """Cached pages that nobody holds, but that have a held page behind them."""
        seen: set[Page] = set()
        for page in self.published[group].values():
            if self.index.copy(page, Tier.HBM).leases:
                above = page.parent
                while above is not None and above not in seen and above.copies[Tier.HBM] is not None:
                    seen.add(above)
                    above = above.parent
        return sum(not self.index.copy(page, Tier.HBM).leases for page in seen)

    def available(self, group: int) -> int:
        """Pages of a pool that :meth:`allocate` could find: free ones and cached ones that may leave; of the
        other pools as far as they make up whole large pages."""
        own = self.pool(group)
        available = own.free_pages + self._idle_pages(group)
        for other, pool in enumerate(self.pools):
            if other != group:
                idle, books = self._idle_pages(other), pool.books
                whole = books.taken if idle == pool.used_pages else idle // books.per_large
                available += whole * own.books.per_large
        return available

    def has_room(self, counts: Sequence[int]) -> bool:
        """Return whether :meth:`allocate` could find so many pages of each pool together."""
        if len(self.pools) == 1:
            return counts[0] <= self.available(0)

        def idle_large(group: int) -> int:
            return self.pools[group].books.emptied_by(self.idle(group))

        idle = [self._idle_pages(group) for group in range(len(self.pools))]
        return room_for(self.pools, counts, idle, idle_large)

    def evict(self, count: int, group: int) -> int:
        """Let up to ``count`` cached pages of a pool leave, the policy's worst first. Returns how many
        left."""
        self.leases.expire()
        self.index.hints.expire(self.clock())
        evicted = 0
        while evicted < count and (page := self.index.victim(Tier.HBM, group)) is not None:
            self.drop(page)
            evicted += 1
        self.counters.evicted_pages[Tier.HBM.label] += evicted
        return evicted

    def evict_from(self, groups: Iterable[int], count: int | None) -> int:
        """:meth:`evict` up to ``count`` pages (None: all) of these pools, one after the other. Takes the
        lock."""
        evicted = 0
        with self.lock:
            for group in groups:
                room = self.pools[group].num_pages
                evicted += self.evict(room if count is None else min(count - evicted, room), group)
        return evicted

    def _empty_any(self, groups: Iterable[int]) -> bool:
        """:meth:`_empty_one` of the pool with most idle bytes, or of the next that can."""
        return any(self._empty_one(each) for each in sorted(groups, key=self._idle_bytes, reverse=True))

    def _empty_one(self, group: int) -> bool:
        """Let cached pages of a pool leave until a large page of it is empty, or given back."""
        books = self.pools[group].books
        self.leases.expire()
        if not books.emptied_by(self.idle(group)):
            return False  # what is in use lies everywhere
        before = books.taken
        while self.evict(books.per_large, group):
            if books.taken < before:
                return True
        return False

    def idle(self, group: int) -> list[int]:
        """The cached pages of a pool that nobody uses."""
        copies = ((place, page.copies[Tier.HBM]) for place, page in self.published[group].items())
        return [place for place, copy in copies if copy is not None and not copy.leases]

    def drop(self, page: Page) -> None:
        """Let a cached page that may leave do so."""
        hbm_page = self.index.drop_copy(page, Tier.HBM)
        del self.published[page.pool][hbm_page]
        self.pools[page.pool].free([hbm_page])

    def _leave(self, page: Page, tier: Tier) -> None:
        self.drop(page)
        self.counters.evicted_pages[tier.label] += 1

    def _drop_damaged(self, page: Page, tier: Tier) -> None:
        raise AssertionError("pages in HBM are not checked, and never found damaged")

    def release(self, hbm_pages: Iterable[int], group: int) -> None:
        """An engine is done with these pages: published ones stay cached, private ones are free."""
        pool, published = self.pools[group], self.published[group]
        for hbm_page in hbm_pages:
            page = published.get(hbm_page)
            if page is None:
                pool.free([hbm_page])
            else:
                self.index.release_copy(page, Tier.HBM)
        self._leaving.leave()
        self.shrink()

    def release_copy(self, page: Page) -> None:
        """Give up a hold that is no part of a lookup's lease."""
        self.leases.release_copy(page, Tier.HBM)
        self._leaving.leave()
        self.shrink()

    def resize(self, nbytes: int) -> PoolSize:
        """Have ``nbytes`` for all pools from now on; see :meth:`Store.resize_hbm`."""
        pool = self.pool(0)
        pool.resize(nbytes)
        self.shrink()
        return pool.large_pages.size

    def shrink(self) -> None:
        """As long as the pools have more memory than they should, cached pages leave them."""
        if not self.pools or not self.pools[0].excess:
            return
        if len(self.pools) == 1:
            while self.pools[0].excess and self.evict(self.pools[0].excess, 0):
                pass
        else:
            while self.pools[0].excess and self._empty_any(range(len(self.pools))):
                pass

    def wait_saved(self, timeout: float | None) -> bool:
        """Wait until no save is under way; False when ``timeout`` seconds pass. Takes the lock."""
        with self.lock:
            return self.changed.wait_for(lambda: not self.pending_saves, timeout)

    def declined(self, tokens: Mapping[str, int]) -> None:
        """Count what was found and not loaded, by tier and reason. Takes the lock."""
        with self.lock:
            self.counters.decline(tokens)

    # -- seeing --------------------------------------------------------------------------------------

    def stats_over(self, below: StoreStats, *, failed_tasks: int) -> StoreStats:
        """A snapshot of a store: HBM and what is asked of the store are counted here, everything below HBM by
        the backend. Takes the lock."""
        with self.lock:
            own = asdict(self.counters)
            tiers = self.tier_stats()
            pages, collisions = self.index.tree.pages, self.index.tree.key_collisions
            open_leases, expired, pending = self.leases.open, self.leases.expired, self.pending_saves
        counters: dict[str, Any] = {**own, **below.counters, **{name: own[name] for name in _COUNTED_HERE}}
        counters["expired_leases"] = own["expired_leases"] + expired + below.counters.get("expired_leases", 0)
        evicted: Any = below.counters.get("evicted_pages", {})
        counters["evicted_pages"] = {
            tier: own["evicted_pages"][tier] + evicted.get(tier, 0) for tier in LABELS
        }
        return replace(
            below,
            tiers={**tiers, **below.tiers},
            pages=max(pages, below.pages),
            key_collisions=collisions + below.key_collisions,
            open_hits=open_leases + below.open_hits,
            pending_saves=pending,
            failed_tasks=failed_tasks + below.failed_tasks,
            counters=counters,
        )

    def tier_stats(self) -> dict[str, TierStats]:
        if not self.pools:
            return {}
        first = self.pools[0]
        total = first.capacity * first.spec.page_bytes if len(self.pools) == 1 else first.large_pages.nbytes
        used = sum(pool.used_pages * pool.spec.page_bytes for pool in self.pools)
        pages, leased = self.index.copies[Tier.HBM], self.index.leases[Tier.HBM]
        return {Tier.HBM.label: TierStats(total, used, pages, leased)}

    def check(self) -> None:
        """Assert that the index and the pools agree."""
        self.index.check()
        published: list[dict[int, Page]] = [{} for _ in self.pools]
        for page in self.index.tree.walk():
            copy = page.copies[Tier.HBM]
            if copy is not None:
                published[page.pool][copy.place] = page
        assert published == self.published, "the pools and the index disagree on cached pages"
        shared = [pool.books for pool in self.pools if isinstance(pool.books, two_level.SmallPages)]
        if shared:
            two_level.check(shared)
