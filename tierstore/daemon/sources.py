"""Where a connected store's saves begin: a caller's buffers, or pages of the engine's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierstore import copying
from tierstore.store.endpoints import Buffers
from tierstore.tiers.hbm import PagePool


class Source(Protocol):
    """Pages to save."""

    def copy(
        self, pages: Sequence[tuple[int, int]], page_bytes: int, *, read_next: bool
    ) -> Sequence[int | None]:
        """Copy pages to host memory, (position, address), and return the XXH3-64 of each; None for one that
        could not be copied, and is not to be stored. ``read_next``: see
        :func:`tierstore.copying.copy_all`. Runs on a mover thread."""


class BufferSource:
    """Memory of the caller's."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers  # keeps them alive

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int, *, read_next: bool) -> list[int]:
        copies = ((address, self._buffers.addresses[position]) for position, address in pages)
        return copying.copy_and_hash(copies, page_bytes, read_next=read_next)


class HbmSource:
    """The engine's pool: position ``i`` is whatever pool page the index has for it. What the processor cannot
    read is copied by the pool, and hashed where it has come to."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.hbm_pages = list(hbm_pages)
        self._pool = pool
        self._computed = pool.computed()  # now: what is computed from here on need not be waited for

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int, *, read_next: bool) -> list[int]:
        if self._pool.overlaps:
            copies = [(self.hbm_pages[position], address) for position, address in pages]
            self._pool.read_pages(copies, after=self._computed)
            return copying.hash_all([address for _, address in pages], page_bytes)
        start = self._pool.address
        return copying.copy_and_hash(
            ((address, start + self.hbm_pages[position] * page_bytes) for position, address in pages),
            page_bytes,
            read_next=read_next,
        )
