"""Where the pages of a save come from, and those of a load go to: an engine's pool, a caller's buffers, or
whatever else reads and takes pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from tierstore import copying, memory
from tierstore.errors import UsageError
from tierstore.tiers.hbm import PagePool


class PageSource(Protocol):
    """Pages to save. Called on mover threads, by several at once."""

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> Sequence[int | None]:
        """Copy pages to host memory, (position, address), and return the XXH3-64 of each; None for one that
        could not be copied, and is not to be stored."""

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        """Pages as frames of a message, whose memory lasts for as long as they do, and their XXH3-64
        likewise. What is in them may change once the save has ended."""


class PageTarget(Protocol):
    """Where a load ends that is neither the pool nor a buffer for each page."""

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        """Take pages from host memory: (position, address). Runs on a mover thread, must not raise, and has
        taken all of them when it returns."""


def copied_frames(
    source: PageSource, positions: Sequence[int], page_bytes: int
) -> tuple[list[memoryview], Sequence[int | None]]:
    """:meth:`PageSource.frames` where pages have to be copied: one piece of memory for a message, which the
    allocator has again for the next."""
    memory = np.empty(len(positions) * page_bytes, np.uint8)
    starts = range(0, memory.nbytes, page_bytes)
    address = memory.ctypes.data
    targets = [(at, address + start) for at, start in zip(positions, starts, strict=True)]
    checksums = source.copy(targets, page_bytes)
    return [memory.data[start : start + page_bytes] for start in starts], checksums


class Buffers:
    """Caller's memory, one contiguous buffer of ``page_bytes`` for each page: a source of pages, or where
    they go. They must not move or be reused until the transfer has ended. Raises :class:`UsageError` for
    buffers of another size or kind."""

    def __init__(
        self, buffers: Sequence[memoryview | bytearray | bytes], page_bytes: int, *, writable: bool
    ) -> None:
        if not isinstance(buffers, Iterable):
            raise UsageError(f"pages are a sequence of buffers, not {type(buffers).__name__}")
        self.views = [_bytes_of(position, buffer) for position, buffer in enumerate(buffers)]
        for position, view in enumerate(self.views):
            if view.nbytes != page_bytes:
                raise UsageError(f"page buffer {position} has {view.nbytes} bytes, a page has {page_bytes}")
        self.addresses = [memory.address_of(view, writable=writable) for view in self.views]

    def __len__(self) -> int:
        return len(self.views)

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int]:
        copies = ((address, self.addresses[position]) for position, address in pages)
        return copying.copy_and_hash(copies, page_bytes)

    def frames(self, positions: Sequence[int], page_bytes: int) -> tuple[list[memoryview], list[int]]:
        addresses = [self.addresses[position] for position in positions]
        return [self.views[at] for at in positions], copying.hash_all(addresses, page_bytes)


def _bytes_of(position: int, buffer: memoryview | bytearray | bytes) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"page buffer {position} is no contiguous memory: {error}") from error


class HbmPages:
    """The engine's pool as a source: position ``i`` is whatever pool page the index has for it. What the
    processor cannot read is copied by the pool, and hashed where it has come to."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.hbm_pages = list(hbm_pages)
        self._pool = pool
        self._computed = pool.computed()  # now: what is computed from here on need not be waited for

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int]:
        if self._pool.overlaps:
            copies = [(self.hbm_pages[position], address) for position, address in pages]
            self._pool.read_pages(copies, after=self._computed)
            return copying.hash_all([address for _, address in pages], page_bytes)
        address_of = self._pool.page_address
        sources = ((address, address_of(self.hbm_pages[position])) for position, address in pages)
        return copying.copy_and_hash(sources, page_bytes)

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)
