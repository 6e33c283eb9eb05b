"""Room in the host tier for a pack's pages, where the tier is smaller than the pack."""

from __future__ import annotations

from tierstore.store import Store

_FLUSH_S = 300.0


def make_room(store: Store, pages: int) -> bool:
    """Have some pages leave the host tier for the disk. Whether there may be room now.

    A chain longer than the tier finds no room by itself: what a page comes after stays while the page does.
    Without a disk nothing is done, because these would be the only copies."""
    if "disk" not in store.stats().tiers or not store.flush(_FLUSH_S):
        return False
    return store.evict("host", pages) > 0
