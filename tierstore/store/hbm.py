"""The pages of the engine's own pool: which of them the store knows, and who holds them. Pure bookkeeping
behind one lock; nothing here copies or waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tierstore.backend import LookupRequest, SaveHints
from tierstore.errors import StoreClosedError
from tierstore.index import Index, Leaving, Match, Page, Tier
from tierstore.index.leases import Leases, PageLease
from tierstore.index.sessions import HintTracker, Sessions
from tierstore.keys import Identity, PageKey
from tierstore.policy import POLICIES
from tierstore.stats import Counters, TierStats
from tierstore.store.buffers import HbmPages
from tierstore.tiers.hbm import PagePool

NO_MATCH = Match((), 0, 0)
_GONE_BYTES = 32 << 20  # of pages that have left the tree and may still be remembered somewhere


class HbmTier:
    """The hbm tier of one store (``pool`` may be None: then it is empty), and the store's lock and counters.

    A page is *private* while the engine writes it; :meth:`publish` makes it the copy of a chunk, in place.
    When nobody holds it any more it is cached until its room is needed. Methods and attributes need
    :attr:`lock`, except where they say that they take it.
    """

    def __init__(
        self, pool: PagePool | None, page_bytes: int, policy: str, clock: Callable[[], float]
    ) -> None:
        self.pool = pool
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # copies have ended, or a save has
        self.clock = clock
        self.counters = Counters()
        self.index = Index([POLICIES[policy]() for _ in Tier])
        self.leases = Leases(self.index, clock, self._drop_damaged)
        self.sessions = Sessions(clock, self.index.hint)
        self.published: dict[int, Page] = {}  # pages of the pool that are in the index
        self.pending_saves = 0  # pages
        self.closed = False
        self._leaving = Leaving([Tier.HBM], self._leave)
        self._pid = os.getpid()
        self._page_bytes = page_bytes
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

    def root(self, identity: Identity) -> Page:
        return self.index.tree.root(identity.digest, self._page_bytes)

    def match(self, request: LookupRequest) -> Match:
        """The leading pages of a prompt that are in HBM. Takes the lock."""
        if self.pool is None:
            return NO_MATCH
        tokens = request.tokens_from(0)
        with self.lock:
            return self.index.tree.match_below(
                self.root(request.identity),
                request.keys,
                tokens,
                request.chunk_tokens,
                request.num_tokens,
                whole=request.identity.whole_pages,
            )

    def match_loose(self, request: LookupRequest) -> dict[int, Page]:
        """Those of a request's loose pages that are in HBM, by their positions. Takes the lock."""
        if self.pool is None:
            return {}
        with self.lock:
            pages = enumerate(self._loose(request))
            return {at: page for at, page in pages if page is not None and page.ready_tier() is Tier.HBM}

    def _loose(self, request: LookupRequest) -> list[Page | None]:
        """The page of each loose chunk, as far as it is known here."""
        root, child = self.root(request.identity), self.index.tree.child
        return [child(root, key, request.chunk(at)) for at, key in enumerate(request.keys)]

    def use(self, match: Match, lookup_tokens: int, lease_s: float) -> PageLease:
        """Count a lookup, and lease what it has found here."""
        self.counters.lookups += 1
        self.counters.lookup_tokens += lookup_tokens
        if not match.pages:
            return PageLease()
        lease = self._lease(match.pages, lease_s)
        self.index.touch(match.pages, hit=True)
        return lease

    def use_loose(self, here: Mapping[int, Page], request: LookupRequest, lease_s: float) -> PageLease:
        """:meth:`use` of loose pages."""
        self.counters.lookups += 1
        self.counters.lookup_tokens += request.num_tokens
        if not here:
            return PageLease()
        lease = self._lease(here.values(), lease_s)
        self.index.touch_named({page: request.depth + at for at, page in here.items()}, hit=True)
        return lease

    def _lease(self, pages: Iterable[Page], lease_s: float) -> PageLease:
        self.leases.expire()
        held = [(page, Tier.HBM) for page in pages if page.copies[Tier.HBM] is not None]
        return self.leases.take(held, lease_s)

    # -- publishing ----------------------------------------------------------------------------------

    def save(
        self, request: LookupRequest, tail_key: PageKey | None, source: HbmPages, first: int, hints: SaveHints
    ) -> dict[int, Page]:
        """Make the pages of ``source`` the HBM copies of chunks ``first …``, or have it read those there are.
        Returns the pages by position, each under a lease for whoever copies it; fewer when one cannot be
        held, and then nothing behind it either. ``tail_key`` is that of the partial tail. Takes the lock."""
        held: dict[int, Page] = {}
        tracker = HintTracker(self.sessions, hints.hint, hints.session, named=request.loose)
        with self.lock, self._let_go_on_error(held):
            self.require_open()
            root = page = self.root(request.identity)
            for chunk in range(first if request.loose else 0, first + len(source.hbm_pages)):
                if chunk >= len(request.keys) and request.identity.whole_pages:
                    break  # it could never be found
                key = request.keys[chunk] if chunk < len(request.keys) else tail_key
                assert key is not None, "a prompt with a partial tail has a key for it"
                if chunk == first:
                    tracker.begin(page)
                page = self.index.add(root if request.loose else page, key, request.chunk(chunk))
                if chunk >= first:
                    tracker.comes_to(page)
                    if not self._publish_or_read(page, source, chunk - first):
                        self.index.prune(page)
                        break
                    held[chunk - first] = page
            if request.loose:
                depths = {page: request.depth + first + at for at, page in held.items()}
                self.index.touch_named(depths, hit=False)
            else:
                self.index.touch(list(held.values()), hit=False)
            tracker.saved(list(held.values()))
            self._forget_gone()
        return held

    def let_go(self, request: LookupRequest, hints: SaveHints) -> None:
        """Pass a hint on to a request's loose pages, and let those leave that are done by it, as soon as
        nothing holds them. Takes the lock."""
        tracker = HintTracker(self.sessions, hints.hint, hints.session, named=True)
        with self.lock:
            self.require_open()
            tracker.begin(self.root(request.identity))
            pages = [page for page in self._loose(request) if page is not None]
            tracker.about(pages)
            self._leaving.let_go(pages)

    @contextmanager
    def _let_go_on_error(self, held: dict[int, Page]) -> Iterator[None]:
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
        if hbm_page in self.published or page.copies[Tier.HBM] is not None:
            return False
        self.index.add_copy(page, Tier.HBM, hbm_page, ready=True, leases=1)
        self.published[hbm_page] = page
        return True

    # -- room ----------------------------------------------------------------------------------------

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` pages of the pool, evicting cached ones; None when that many cannot be had. ``near``: see
        :meth:`PagePool.allocate <tierstore.tiers.hbm.PagePool.allocate>`."""
        assert self.pool is not None, "this store has no page pool"
        if count > self.pool.free_pages:
            self.evict(count - self.pool.free_pages)
        return self.pool.allocate(count, near=near)

    def evict(self, count: int) -> int:
        """Let up to ``count`` cached pages leave, the policy's worst first. Returns how many left."""
        self.leases.expire()
        self.index.hints.expire(self.clock())
        evicted = 0
        while evicted < count and (page := self.index.victim(Tier.HBM)) is not None:
            self._drop(page)
            evicted += 1
        self.counters.evicted_pages[Tier.HBM.label] += evicted
        return evicted

    def idle(self) -> list[int]:
        """The cached pages that nobody uses."""
        copies = ((place, page.copies[Tier.HBM]) for place, page in self.published.items())
        return [place for place, copy in copies if copy is not None and not copy.leases]

    def _drop(self, page: Page) -> None:
        assert self.pool is not None
        hbm_page = self.index.drop_copy(page, Tier.HBM)
        del self.published[hbm_page]
        self.pool.free([hbm_page])

    def _leave(self, page: Page, tier: Tier) -> None:
        self._drop(page)
        self.counters.evicted_pages[tier.label] += 1

    def _drop_damaged(self, page: Page, tier: Tier) -> None:
        raise AssertionError("pages in HBM are not checked, and never found damaged")

    def release(self, hbm_pages: Iterable[int]) -> None:
        """An engine is done with these pages: published ones stay cached, private ones are free."""
        assert self.pool is not None, "this store has no page pool"
        for hbm_page in hbm_pages:
            page = self.published.get(hbm_page)
            if page is None:
                self.pool.free([hbm_page])
            else:
                self.index.release_copy(page, Tier.HBM)
        self._leaving.leave()
        self.shrink()

    def release_copy(self, page: Page) -> None:
        """Give up a hold that is no part of a lookup's lease."""
        self.leases.release_copy(page, Tier.HBM)
        self._leaving.leave()
        self.shrink()

    def shrink(self) -> None:
        """As long as the pool has more memory than it should, cached pages leave it."""
        while self.pool is not None and self.pool.excess and self.evict(self.pool.excess):
            pass

    def available(self) -> int:
        """Pages of the pool that are free or could be evicted, one after the other."""
        assert self.pool is not None, "this store has no page pool"
        cached = self.index.copies[Tier.HBM] - self.index.leases[Tier.HBM]
        if self.pending_saves:
            # A save holds single pages, and what is before them cannot leave either. (All other leases are on
            # whole prefixes.)
            cached -= self._before_held()
        return self.pool.free_pages + max(cached - self.pool.excess, 0)

    def _before_held(self) -> int:
        """Cached pages that nobody holds, but that have a held page behind them."""
        seen: set[Page] = set()
        for page in self.published.values():
            if self.index.copy(page, Tier.HBM).leases:
                above = page.parent
                while above is not None and above not in seen and above.copies[Tier.HBM] is not None:
                    seen.add(above)
                    above = above.parent
        return sum(not self.index.copy(page, Tier.HBM).leases for page in seen)

    def declined(self, tokens: Mapping[str, int]) -> None:
        """Count what was found and not loaded, by tier and reason. Takes the lock."""
        with self.lock:
            self.counters.decline(tokens)

    # -- seeing --------------------------------------------------------------------------------------

    def tier_stats(self) -> dict[str, TierStats]:
        if self.pool is None:
            return {}
        page_bytes, total = self.pool.spec.page_bytes, self.pool.capacity
        used = self.pool.used_pages * page_bytes
        pages, leased = self.index.copies[Tier.HBM], self.index.leases[Tier.HBM]
        return {Tier.HBM.label: TierStats(total * page_bytes, used, pages, leased)}

    def check(self) -> None:
        """Assert that the index and the pool agree."""
        self.index.check()
        pages: Sequence[Page] = list(self.index.tree.walk())
        published = {copy.place: page for page in pages if (copy := page.copies[Tier.HBM]) is not None}
        assert published == self.published, "the pool and the index disagree on cached pages"
