"""Where a connected store's saves begin: a caller's buffers, or pages of the engine's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tierstore import copying
from tierstore.store.endpoints import Buffers
from tierstore.tiers.hbm import PagePool


class Source(Protocol):
    """Pages to save."""

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> Sequence[int | None]:
        """Copy pages to host memory, (position, address), and return the XXH3-64 of each; None for one that
        could not be copied, and is not to be stored. Runs on a mover thread."""

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        """Pages as frames of a message, whose memory lasts for as long as they do, and their XXH3-64
        likewise. What is in them may change once the save has ended."""


def copied_frames(
    source: Source, positions: Sequence[int], page_bytes: int
) -> tuple[list[memoryview], Sequence[int | None]]:
    """:meth:`Source.frames` where pages have to be copied: one piece of memory for a message, which the
    allocator has again for the next."""
    memory = np.empty(len(positions) * page_bytes, np.uint8)
    starts = range(0, memory.nbytes, page_bytes)
    address = memory.ctypes.data
    targets = [(at, address + start) for at, start in zip(positions, starts, strict=True)]
    checksums = source.copy(targets, page_bytes)
    return [memory.data[start : start + page_bytes] for start in starts], checksums


class BufferSource:
    """Memory of the caller's."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers  # keeps them alive

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int]:
        copies = ((address, self._buffers.addresses[position]) for position, address in pages)
        return copying.copy_and_hash(copies, page_bytes)

    def frames(self, positions: Sequence[int], page_bytes: int) -> tuple[list[memoryview], list[int]]:
        addresses = [self._buffers.addresses[position] for position in positions]
        return [self._buffers.views[at] for at in positions], copying.hash_all(addresses, page_bytes)


class HbmSource:
    """The engine's pool: position ``i`` is whatever pool page the index has for it. What the processor cannot
    read is copied by the pool, and hashed where it has come to."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.hbm_pages = list(hbm_pages)
        self._pool = pool
        self._computed = pool.computed()  # now: what is computed from here on need not be waited for

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int]:
        if self._pool.overlaps:
            copies = [(self.hbm_pages[position], address) for position, address in pages]
            self._pool.read_pages(copies, after=self._computed)
            return copying.hash_all([address for _, address in pages], page_bytes)
        start = self._pool.address
        return copying.copy_and_hash(
            ((address, start + self.hbm_pages[position] * page_bytes) for position, address in pages),
            page_bytes,
        )

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)
