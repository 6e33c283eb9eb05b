"""Bookkeeping of the pages in the engine's own pools: which pages the store knows, and what holds them. One
lock guards the bookkeeping. This module neither copies pages nor waits.

Each layer group has a pool, and all pools share one memory (:mod:`tierstore.tiers.two_level`), which is
divided into large pages. If a pool has too few pages, cached pages of the other pools are evicted until a
large page is empty. One index has the cached pages of all pools, and a queue of evictable pages for each
pool.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from tierstore.backend import Backend, ForgottenPages, LookupRequest, SaveHints
from tierstore.errors import StoreClosedError, UsageError
from tierstore.index import LABELS, Ages, Index, Leaving, Match, Page, Tier
from tierstore.index.leases import Leases, PageLease
from tierstore.index.sessions import HintTracker, Sessions
from tierstore.keys import Identity, PageKey
from tierstore.policy import POLICIES
from tierstore.stats import Counters, StoreStats, TierStats
from tierstore.store.buffers import HbmPages
from tierstore.tiers import two_level
from tierstore.tiers.group_pools import room_for
from tierstore.tiers.hbm import PagePool
from tierstore.types import Forgettable

NO_MATCH = Match((), 0, 0)
_GONE_BYTES = 32 << 20  # memory of pages that have left the tree, after which references to them are dropped

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
    """The hbm tier of one store (empty without ``pools``), and the store's lock and counters.

    A page of a pool is *private* while the engine writes it. :meth:`publish` makes it the HBM copy of a
    chunk, without moving it. When nothing holds a published page any more, it stays cached until its space is
    needed. Callers must hold :attr:`lock` for methods and attributes, unless a docstring says that the method
    takes the lock. ``group`` is the number of a layer group, whose pool is ``pools[group]``.
    """

    def __init__(
        self, pools: Sequence[PagePool], policy: str, clock: Callable[[], float], backend: Backend
    ) -> None:
        self.pools = tuple(pools)
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # notified when copies or saves end
        self.clock = clock
        self.counters = Counters()
        policies = [POLICIES[policy]() for _ in Tier]
        self.index = Index(policies, more_pools=[POLICIES[policy]() for _ in pools[1:]])
        self.forgetting = PoolForgetting(self)
        self.leases = Leases(self.index, clock, self.drop_damaged)
        self.sessions = Sessions(clock, self.index.hint)
        self.published: list[dict[int, Page]] = [{} for _ in self.pools]  # cached pages of each pool
        self.identities: dict[bytes, Identity] = {}  # of pages that may be in HBM, by digest
        self.pending_saves = 0  # number of pages that saves still have to copy
        self.closed = False
        self._leaving = Leaving([Tier.HBM], self._leave)
        self._pid = os.getpid()
        self._forgotten_bytes = 0  # value of ``index.forgotten_bytes`` at the last _forget_gone()
        if self.pools:
            backend.follow_forgets(self.forgetting.was_forgotten, self.forgetting.limit_age)

    @property
    def forked(self) -> bool:
        """Whether this process is a forked child of the process that opened the store. A child has none of
        the store's threads, and a lock may never be released in it. So check ``forked`` before taking a
        lock."""
        return os.getpid() != self._pid

    def require_process(self) -> None:
        """Raise :class:`StoreClosedError` in a forked child. Needs no lock."""
        if self.forked:
            raise StoreClosedError(
                "this store was opened by another process: open or connect a new one after fork"
            )

    def require_open(self) -> None:
        if self.closed:
            raise StoreClosedError("the store is closed")

    # -- finding -------------------------------------------------------------------------------------

    def pool(self, group: int) -> PagePool:
        """Return the pool of a layer group. Raise :class:`UsageError` for a store without pools."""
        if not self.pools:
            raise UsageError("this store has no page pool: give it one, or use buffers")
        return self.pools[group]

    def root(self, request: LookupRequest, group: int) -> Page:
        self.forgetting.forget_old()
        self.identities.setdefault(request.identity.digest, request.identity)
        return self.index.tree.root(request.identity, request.page_bytes, group)

    def match(self, request: LookupRequest, group: int) -> Match:
        """Return the leading pages of a prompt that are in HBM. Takes the lock."""
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
        """Return the named pages of a request that are in HBM, by position. Takes the lock."""
        if not self.pools:
            return {}
        with self.lock:
            pages = enumerate(self._named(request, group))
            return {at: page for at, page in pages if page is not None and page.ready_tier() is Tier.HBM}

    def has_all(self, request: LookupRequest, group: int) -> bool:
        """Return whether all whole chunks of a request are in HBM. Takes the lock."""
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
        """Return each named page of a request; None for a page that the index does not have."""
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
        """Lease pages that a lookup has found, and record their use. ``positions`` is given for named
        pages."""
        if not pages:
            return PageLease()
        lease = self.hold(pages, lease_s)
        request.touch(self.index, pages, positions, hit=True)
        return lease

    def hold(self, pages: Iterable[Page], lease_s: float) -> PageLease:
        """Lease pages for one operation, without counting this as a use."""
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
        """Make the pages of ``source`` the HBM copies of the chunks from ``first`` on. If a chunk already has
        a copy, make ``source`` read that copy. Return the pages by position, each with a lease for the save.
        If a page cannot be held, it and all pages after it are missing in the result. ``tail_key`` is the key
        of the partial tail. Takes the lock."""
        held: dict[int, Page] = {}
        tracker = HintTracker(self.sessions, hints.hint, hints.session, named=request.named)
        with self.lock, ExitStack() as on_error:
            on_error.callback(lambda: self.leases.release_all(list(held.values()), Tier.HBM))
            self.require_open()
            root = page = self.root(request, group)
            for chunk in range(request.saved_from(first), first + len(source.hbm_pages)):
                if chunk >= len(request.keys) and request.identity.whole_pages:
                    break  # a lookup could never find the page
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
            on_error.pop_all()
        return held

    def supersede(self, request: LookupRequest, group: int, hints: SaveHints) -> None:
        """Apply a hint to a request's named pages. Evict the pages that the hint declares superseded as soon
        as nothing holds them. Takes the lock."""
        tracker = HintTracker(self.sessions, hints.hint, hints.session, named=True)
        with self.lock:
            self.require_open()
            tracker.begin(self.root(request, group))
            pages = [page for page in self._named(request, group) if page is not None]
            tracker.about(pages)
            self._leaving.evict_when_idle(pages)

    def _forget_gone(self) -> None:
        """If pages that have left the tree take enough memory, drop the remaining references to them."""
        if self.index.forgotten_bytes - self._forgotten_bytes > _GONE_BYTES:
            self._forgotten_bytes = self.index.forgotten_bytes
            self.sessions.forget_gone()
            self.index.hints.forget_gone()

    def _publish_or_read(self, page: Page, source: HbmPages, position: int) -> bool:
        if not self.publish(page, source.hbm_pages[position]):
            copy = page.copies[Tier.HBM]
            if copy is None or not copy.ready:  # the copy was lost or forgotten, but something still holds it
                return False
            source.hbm_pages[position] = copy.place
        self.index.lease(page, Tier.HBM)
        return True

    def publish(self, page: Page, hbm_page: int) -> bool:
        """Make an engine's private HBM page the copy of ``page``, leased to the engine. Return False if
        ``page`` already has a copy; then the engine's page stays private."""
        published = self.published[page.pool]
        if hbm_page in published or page.copies[Tier.HBM] is not None:
            return False
        self.index.add_copy(page, Tier.HBM, hbm_page, ready=True, leases=1)
        published[hbm_page] = page
        self.forgetting.ages.begin(page)
        return True

    # -- room ----------------------------------------------------------------------------------------

    def allocate(self, count: int, group: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """Return ``count`` pages of a group's pool, and evict cached pages if needed; None if there are not
        enough. ``near``: see :meth:`PagePool.allocate <tierstore.tiers.hbm.PagePool.allocate>`."""
        for _ in self.pools[:2]:  # at the second try, this pool has no idle pages, so other pools are emptied
            self.make_room(count, group)
            pages = self.allocate_own(count, group, near=near)
            if pages is not None:
                return pages
        return None

    def allocate_own(self, count: int, group: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """Do :meth:`allocate`, but evict only pages of this pool."""
        pool = self.pools[group]
        if count > pool.free_pages:
            self.evict(count - pool.free_pages, group)
        return pool.allocate(count, near=near)

    def make_room(self, count: int, group: int) -> None:
        """Make other pools give up large pages while ``group`` has fewer than ``count`` free pages, and
        either has too few idle pages, too, or another pool has more idle bytes than ``group``."""
        pool, others = self.pools[group], self._sharing(group)
        while others and pool.free_pages < count:
            enough = pool.free_pages + self._idle_pages(group) >= count
            if enough and max(map(self._idle_bytes, others)) <= self._idle_bytes(group):
                break
            if not self._empty_any(others):
                break

    def _sharing(self, group: int) -> list[int]:
        memory = self.pools[group].large_pages
        return [at for at, pool in enumerate(self.pools) if at != group and pool.large_pages is memory]

    def _idle_pages(self, group: int) -> int:
        """Return how many cached pages of a pool could be evicted, one after another."""
        cached = self.index.unleased(group)
        if self.pending_saves:
            # A save leases single pages, and the pages before a leased page cannot be evicted either. (All
            # other leases cover whole prefixes.)
            cached -= self._before_held(group)
        return max(cached - self.pools[group].excess, 0)

    def _idle_bytes(self, group: int) -> int:
        return self._idle_pages(group) * self.pools[group].spec.page_bytes

    def _before_held(self, group: int) -> int:
        """Return how many cached pages have no lease but have a leased page behind them."""
        seen: set[Page] = set()
        for page in self.published[group].values():
            if self.index.copy(page, Tier.HBM).leases:
                above = page.parent
                while above is not None and above not in seen and above.copies[Tier.HBM] is not None:
                    seen.add(above)
                    above = above.parent
        return sum(not self.index.copy(page, Tier.HBM).leases for page in seen)

    def available(self, group: int) -> int:
        """Return how many pages of a pool :meth:`allocate` could return: free pages, evictable cached pages,
        and whole large pages of the other pools."""
        own = self.pool(group)
        available = own.free_pages + self._idle_pages(group)
        for other in self._sharing(group):
            idle, pool = self._idle_pages(other), self.pools[other]
            whole = pool.books.taken if idle == pool.used_pages else idle // pool.books.per_large
            available += whole * own.books.per_large
        return available

    def has_room(self, counts: Sequence[int]) -> bool:
        """Return whether :meth:`allocate` could return these numbers of pages, one for each pool, all at the
        same time. Raise :class:`UsageError` if there is not one number for each pool."""
        if len(counts) != len(self.pools):
            raise UsageError(
                f"counts must have one number for each of the {len(self.pools)} pools, got {len(counts)}"
            )
        self.leases.expire()
        if len(self.pools) == 1:
            return counts[0] <= self.available(0)

        def idle_large(group: int) -> int:
            return self.pools[group].books.emptied_by(self.idle(group))

        idle = [self._idle_pages(group) for group in range(len(self.pools))]
        return room_for(self.pools, counts, idle, idle_large)

    def evict(self, count: int, group: int) -> int:
        """Evict up to ``count`` cached pages of a pool in the policy's order. Return the number of evicted
        pages."""
        self.leases.expire()
        self.index.hints.expire(self.clock())
        evicted = 0
        while evicted < count and (page := self.index.victim(Tier.HBM, group)) is not None:
            self.drop(page)
            evicted += 1
        self.counters.evicted_pages[Tier.HBM.label] += evicted
        return evicted

    def evict_from(self, groups: Iterable[int], count: int | None) -> int:
        """Do :meth:`evict` for the given pools, one after another, up to ``count`` pages in total (None:
        all). Takes the lock."""
        evicted = 0
        with self.lock:
            for group in groups:
                room = self.pools[group].num_pages
                evicted += self.evict(room if count is None else min(count - evicted, room), group)
        return evicted

    def _empty_any(self, groups: Iterable[int]) -> bool:
        """Do :meth:`_empty_one` for one pool after another until it succeeds, the pool with the most idle
        bytes first."""
        return any(self._empty_one(each) for each in sorted(groups, key=self._idle_bytes, reverse=True))

    def _empty_one(self, group: int) -> bool:
        """Evict cached pages of a pool until one of its large pages is empty. Return whether this
        succeeded."""
        books = self.pools[group].books
        self.leases.expire()
        if not books.emptied_by(self.idle(group)):
            return False  # every large page has a page in use
        before = books.taken
        while self.evict(books.per_large, group):
            if books.taken < before:
                return True
        return False

    def idle(self, group: int) -> list[int]:
        """Return the cached pages of a pool that have no lease."""
        copies = ((place, page.copies[Tier.HBM]) for place, page in self.published[group].items())
        return [place for place, copy in copies if copy is not None and not copy.leases]

    def drop(self, page: Page) -> None:
        """Evict a cached page that may leave, and damaged ancestors that only this page has kept."""
        leaving: Page | None = page
        while leaving is not None:
            above = leaving.parent
            hbm_page = self.index.drop_copy(leaving, Tier.HBM)
            del self.published[leaving.pool][hbm_page]
            self.pools[leaving.pool].free([hbm_page])
            leaving = above if above is not None and self._damaged_and_idle(above) else None

    def _leave(self, page: Page, tier: Tier) -> None:
        self.drop(page)
        self.counters.evicted_pages[tier.label] += 1

    def lose(self, hbm_pages: Iterable[int], group: int) -> None:
        """Stop serving pages whose content is lost. Each page is dropped when nothing holds it any more.
        Takes the lock."""
        with self.lock:
            for hbm_page in hbm_pages:
                page = self.published[group].get(hbm_page)
                if page is not None:
                    self.index.set_damaged(page, Tier.HBM)
                    self.drop_damaged(page, Tier.HBM)

    def drop_damaged(self, page: Page, tier: Tier) -> None:
        """Drop a damaged copy if nothing holds it."""
        if self._damaged_and_idle(page):
            self.drop(page)

    def _damaged_and_idle(self, page: Page) -> bool:
        copy = page.copies[Tier.HBM]
        return copy is not None and copy.damaged and not copy.leases and not copy.children

    def release(self, hbm_pages: Iterable[int], group: int) -> None:
        """Release pages that an engine holds: published pages stay cached, private pages become free."""
        pool, published = self.pools[group], self.published[group]
        for hbm_page in hbm_pages:
            page = published.get(hbm_page)
            if page is None:
                pool.free([hbm_page])
            else:
                self.leases.release_all([page], Tier.HBM)
        self._leaving.leave()
        self.shrink()

    def release_copy(self, page: Page) -> None:
        """Release a lease on a page that is not part of a lookup's lease."""
        self.leases.release_all([page], Tier.HBM)
        self._leaving.leave()
        self.shrink()

    def shrink(self) -> None:
        """Evict cached pages while the pools have more memory than their size allows."""
        if not self.pools or not self.pools[0].excess:
            return
        if len(self.pools) == 1:
            while self.pools[0].excess and self.evict(self.pools[0].excess, 0):
                pass
        else:
            while self.pools[0].excess and self._empty_any(range(len(self.pools))):
                pass

    def wait_saved(self, timeout: float | None) -> bool:
        """Wait until no save is running. Return False if ``timeout`` seconds pass first. Takes the lock."""
        with self.lock:
            return self.changed.wait_for(lambda: not self.pending_saves, timeout)

    def declined(self, tokens: Mapping[str, int]) -> None:
        """Count tokens that were found but not loaded, by tier and reason. Takes the lock."""
        with self.lock:
            self.counters.decline(tokens)

    # -- seeing --------------------------------------------------------------------------------------

    def stats_over(self, below: StoreStats, *, failed_tasks: int) -> StoreStats:
        """Return a snapshot of a store. This object counts HBM and the requests to the store; the backend
        counts everything below HBM. Takes the lock."""
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
        memories = {id(pool.large_pages): pool.large_pages.nbytes for pool in self.pools}
        one = len(self.pools) == 1
        total = first.capacity * first.spec.page_bytes if one else sum(memories.values())
        used = sum(pool.used_pages * pool.spec.page_bytes for pool in self.pools)
        pages, leased = self.index.copies[Tier.HBM], self.index.leases[Tier.HBM]
        return {Tier.HBM.label: TierStats(total, used, pages, leased)}

    def check(self) -> None:
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


class PoolForgetting:
    """Forgets pages of the pools: on request, when the backend forgets them, and when they are too old."""

    def __init__(self, hbm: HbmTier) -> None:
        self._hbm = hbm
        # Guarded by the tier's lock.
        self.ages = Ages(hbm.index.tree, math.inf, hbm.clock)
        self.times = 0  # how many times pages were forgotten
        self.pages = 0  # how many pages were forgotten

    def forget(self, what: Forgettable) -> None:
        """Stop serving the pages of all pools that ``what`` covers. Each page is dropped when its last holder
        releases it. Takes the lock."""
        hbm = self._hbm
        with hbm.lock:
            if what.session is not None:
                pages = hbm.index.of_session(hbm.sessions.forget("", what.session))
            else:
                covered = {
                    digest
                    for digest, identity in hbm.identities.items()
                    if what.covers(identity.tenant, identity.model)
                }
                pages = [page for page in hbm.index.tree.walk() if page.identity in covered]
            self._forget(pages)

    def was_forgotten(self, forgotten: ForgottenPages) -> None:
        """Stop serving pages that the backend has forgotten, as :meth:`forget` does. Takes the lock."""
        hbm = self._hbm
        with hbm.lock:
            chosen: dict[Page, None] = {}
            for page in hbm.index.tree.walk():  # parents before children
                named = page.identity in forgotten.identities or (page.identity, page.key) in forgotten.pages
                if named or page.parent in chosen:
                    chosen[page] = None
            self._forget(list(chosen))

    def limit_age(self, most_s: float) -> None:
        """Stop serving each page ``most_s`` seconds after it entered a pool. Takes the lock."""
        hbm = self._hbm
        with hbm.lock:
            if most_s != self.ages.most_s:
                self.ages = Ages(hbm.index.tree, most_s, hbm.clock)
                for page in hbm.index.tree.walk():
                    if page.copies[Tier.HBM] is not None:
                        self.ages.begin(page, page.made_s)

    def forget_old(self) -> None:
        """Stop serving the pages that are too old. Needs the lock."""
        old = self.ages.take_old()
        if old:
            self._forget(sorted(old, key=lambda page: page.depth))

    def _forget(self, pages: Sequence[Page]) -> None:
        """Stop serving these pages. In ``pages``, each page comes after its parent."""
        hbm = self._hbm
        self.times += 1
        for page in reversed(pages):
            copy = page.copies[Tier.HBM]
            if copy is not None and copy.ready:
                self.pages += 1
                hbm.index.set_damaged(page, Tier.HBM)
                hbm.drop_damaged(page, Tier.HBM)
