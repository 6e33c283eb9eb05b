"""A page's memory while it is read or written, and its checksum."""

from __future__ import annotations

import mmap
import threading

import xxhash

from tierstore.memory import ALIGNMENT, address_of
from tierstore.tiers.slabs import slot_bytes


class PageBuffer:
    """The payload bytes of one page, as O_DIRECT wants them: in whole blocks.

    Where the payload does not end on a block's border, its last bytes go through a block of their own, so
    that nothing beyond the caller's view is ever read or written.
    """

    __slots__ = ("_pieces", "_tail", "_tail_start", "checksum", "nbytes", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = slot_bytes(view.nbytes)  # on disk
        self.checksum: int | None = None  # XXH3-64 of the payload, once all of it was transferred
        self._tail_start = view.nbytes // ALIGNMENT * ALIGNMENT
        self._tail = memoryview(mmap.mmap(-1, ALIGNMENT)) if self._tail_start < self.nbytes else None
        self._pieces: _PieceHash | None = None

    @property
    def aligned(self) -> bool:
        return address_of(self.view, writable=False) % ALIGNMENT == 0

    def fill_tail(self) -> None:
        """Before writing: put the payload's end into its block."""
        if self._tail is not None:
            self._tail[: self.view.nbytes - self._tail_start] = self.view[self._tail_start :]

    def empty_tail(self) -> None:
        """After reading: take the payload's end out of its block."""
        if self._tail is not None:
            self.view[self._tail_start :] = self._tail[: self.view.nbytes - self._tail_start]

    def expect_pieces(self) -> None:
        """To be called before the page is transferred in more than one piece."""
        self._pieces = _PieceHash(self.view)

    def memory(self, start: int, stop: int) -> list[memoryview]:
        """The memory for bytes ``start … stop`` of the extent, both multiples of 4096."""
        if self._tail is None or stop <= self._tail_start:
            return [self.view[start:stop]]
        if start == self._tail_start:
            return [self._tail]
        return [self.view[start : self._tail_start], self._tail]

    def hash(self, start: int, stop: int) -> None:
        """Bytes ``start … stop`` have just been transferred, and are in this core's cache."""
        if self._pieces is None:
            self.checksum = xxhash.xxh3_64_intdigest(self.view)
        else:
            self.checksum = self._pieces.add(start, min(stop, self.view.nbytes))


class _PieceHash:
    """XXH3-64 over pieces that come in any order, from several threads."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._hash = xxhash.xxh3_64()
        self._hashed = 0
        self._waiting: dict[int, int] = {}  # start -> stop

    def add(self, start: int, stop: int) -> int | None:
        """Hash this piece if all before it has been; else the thread that closes the gap does. Returns the
        checksum when nothing is missing."""
        with self._lock:
            self._waiting[start] = stop
            while self._hashed in self._waiting:
                stop = self._waiting.pop(self._hashed)
                self._hash.update(self._view[self._hashed : stop])
                self._hashed = stop
            return self._hash.intdigest() if self._hashed == self._view.nbytes else None
