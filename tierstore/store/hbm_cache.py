"""The engine's page pool as a tier: which of its pages are in the index."""

from __future__ import annotations

from collections.abc import Iterable

from tierstore.index import Index, Page, Tier
from tierstore.tiers.hbm import PagePool


class HbmCache:
    """Needs the state's lock. Nothing here may be called for a store without a pool."""

    def __init__(self, index: Index, pool: PagePool | None) -> None:
        self._index = index
        self._pool = pool
        self.published: dict[int, Page] = {}  # HBM pages that are in the index

    def publish(self, page: Page, hbm_page: int) -> bool:
        """Make an engine's private HBM page the copy of ``page``, leased to the engine. False when the tier
        has one already: the engine's stays private."""
        if hbm_page in self.published or page.copies[Tier.HBM] is not None:
            return False
        self._index.add_copy(page, Tier.HBM, hbm_page, ready=True, leases=1)
        self.published[hbm_page] = page
        return True

    def release(self, hbm_pages: Iterable[int]) -> None:
        """An engine is done with these pages: published ones stay cached, private ones are free."""
        assert self._pool is not None
        for hbm_page in hbm_pages:
            page = self.published.get(hbm_page)
            if page is None:
                self._pool.free([hbm_page])
            else:
                self._index.unlease(page, Tier.HBM)

    def unpublish(self, hbm_page: int) -> None:
        """The copy has left the index: its page is free."""
        assert self._pool is not None
        del self.published[hbm_page]
        self._pool.free([hbm_page])

    def held_up(self) -> int:
        """Cached pages that nobody holds, but that have a held page behind them."""
        seen: set[Page] = set()
        for page in self.published.values():
            if self._index.copy(page, Tier.HBM).leases:
                above = page.parent
                while above is not None and above not in seen and above.copies[Tier.HBM] is not None:
                    seen.add(above)
                    above = above.parent
        return sum(not self._index.copy(page, Tier.HBM).leases for page in seen)
