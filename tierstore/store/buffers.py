"""Sources of pages to save and targets of loaded pages: an engine's pool, a caller's buffers, or any object
with the methods of :class:`PageSource` or :class:`PageTarget`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from tierstore import copying, memory
from tierstore.errors import UsageError
from tierstore.tiers.hbm import PagePool


class PageSource(Protocol):
    """A source of pages to save. Several mover threads call it at the same time."""

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> Sequence[int | None]:
        """Copy pages, given as (position, address), to host memory. Return the XXH3-64 of each page; None for
        a page that could not be copied and must not be stored."""

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        """Return pages as frames of a message, and the XXH3-64 of each page as :meth:`copy` does. The frames
        keep their memory alive. The content of that memory may change after the save has ended."""


class PageTarget(Protocol):
    """A target of loads other than the pool and buffers."""

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        """Read pages, given as (position, address), from host memory. Runs on a mover thread and must not
        raise. The addresses are invalid after it has returned."""


def copied_frames(
    source: PageSource, positions: Sequence[int], page_bytes: int
) -> tuple[list[memoryview], Sequence[int | None]]:
    """Implement :meth:`PageSource.frames` with :meth:`PageSource.copy`. All pages of a message are copied to
    one block of memory, which the allocator can reuse for the next message."""
    memory = np.empty(len(positions) * page_bytes, np.uint8)
    starts = range(0, memory.nbytes, page_bytes)
    address = memory.ctypes.data
    targets = [(at, address + start) for at, start in zip(positions, starts, strict=True)]
    checksums = source.copy(targets, page_bytes)
    return [memory.data[start : start + page_bytes] for start in starts], checksums


class Buffers:
    """A caller's memory, one contiguous buffer of ``page_bytes`` for each page, as the source of a save or
    the target of a load. The buffers must not be moved or reused before the transfer has ended. The
    constructor raises :class:`UsageError` for buffers of another size, and for objects that are no contiguous
    buffers."""

    def __init__(
        self, buffers: Sequence[memoryview | bytearray | bytes], page_bytes: int, *, writable: bool
    ) -> None:
        if not isinstance(buffers, Iterable):
            raise UsageError(f"pages must be a sequence of buffers, got {type(buffers).__name__}")
        self.views = [_bytes_of(position, buffer) for position, buffer in enumerate(buffers)]
        for position, view in enumerate(self.views):
            if view.nbytes != page_bytes:
                raise UsageError(f"page buffer {position} must have {page_bytes} bytes, got {view.nbytes}")
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
        raise UsageError(f"page buffer {position} is not contiguous memory: {error}") from error


class HbmPages:
    """The engine's pool as the source of a save: position ``i`` is the pool page ``hbm_pages[i]``."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.hbm_pages = list(hbm_pages)
        self._pool = pool
        self._computed = pool.computed()  # the work so far, so that copies do not wait for later work

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> Sequence[int | None]:
        copies = [(self.hbm_pages[position], address) for position, address in pages]
        return self._pool.read_and_hash(copies, after=self._computed)

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)
