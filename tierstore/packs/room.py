"""Room in the host tier for a pack's pages, if the tier is smaller than the pack."""

from __future__ import annotations

from tierstore.store import Store

_FLUSH_S = 300.0


def make_room(store: Store, pages: int) -> bool:
    """Evict some pages from the host tier. Return whether there may be room now.

    A chain longer than the tier cannot find room by itself, because the ancestors of its pages stay as long
    as the pages do. Without a disk nothing is evicted, because these would be the only copies.
    """
    if "disk" not in store.stats().tiers or not store.flush(_FLUSH_S):
        return False
    return store.evict("host", pages) > 0
