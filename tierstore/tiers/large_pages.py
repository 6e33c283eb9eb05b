"""The large pages of a pool, and which of them have memory: a pool grows and shrinks while it runs.

A pool's *addresses* are reserved once, for as many large pages as it may ever have, so a page in use never
moves and an array over all of them stays what it is. Memory is behind those that are *present*. ::

    large pages   [ in use ][ free ][ in use ][ absent ][ absent ]     present: 3 of 5

:meth:`LargePages.resize` sets a target. Growing maps memory at once. Shrinking gives back free large pages at
once, the last ones first, and every large page that becomes free later until the target is reached; who owns
cached pages lets these leave meanwhile. Memory is given and taken in granules of the operating system's or
the driver's, which need not be large pages: one goes when all large pages that it has a part of are absent,
so no byte of a present large page ever has no memory.

Large page 0 stays: whoever makes a view of a device's memory looks at its first byte.

>>> large_pages = LargePages(4096, 4)
>>> large_pages.take(2), large_pages.resize(1), large_pages.present
([0, 1], 2, 2)
>>> large_pages.give([1, 0]), large_pages.present
(None, 1)
>>> large_pages.resize(3)
3
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT, Memory
from tierstore.units import format_size

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool's memory: what it has, what it will have once all that is too much is free, and the most that it
    may have."""

    nbytes: int
    target_bytes: int
    most_bytes: int


class Backing(Protocol):
    """Gives memory to addresses, and takes it back, by *granules*, numbered from the pool's first byte."""

    @property
    def granule_bytes(self) -> int: ...

    def back(self, granules: range) -> bool:
        """See to it that these, which have none or are about to lose it, have memory. False, and nothing
        changed, where there is none left."""

    def release(self, granules: range) -> None:
        """Give the memory of these back: nobody is going to use it. What has been put to work on it already
        may still be under way, and ends before."""


class HostBacking:
    """Ordinary memory: the kernel takes pages that are given back at once, and maps new ones when they are
    touched."""

    granule_bytes = ALIGNMENT

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def back(self, granules: range) -> bool:
        return self._memory.populate_range(*_bytes(granules))

    def release(self, granules: range) -> None:
        start, stop = _bytes(granules)
        try:
            self._memory.discard(start, stop)
        except OSError as error:  # such as memory that is locked: it is kept, and nothing is wrong with it
            _log.warning("%s of a pool's memory stay: %s", format_size(stop - start), error)


def _bytes(granules: range) -> tuple[int, int]:
    return granules.start * ALIGNMENT, granules.stop * ALIGNMENT


class LargePages:
    """``count`` large pages of ``large_bytes`` bytes each, of which at first ``present`` have memory, and
    which of them are free. Thread-safe: pools of several locks share one.

    Without a ``backing`` nothing can be given back, and :meth:`resize` raises :class:`UsageError` with
    ``fixed``, the reason.
    """

    def __init__(
        self,
        large_bytes: int,
        count: int,
        *,
        present: int | None = None,
        backing: Backing | None = None,
        fixed: str = "",
    ) -> None:
        self.large_bytes = large_bytes
        self.count = count
        self.present = self.target = count if present is None else present
        self._backing = backing
        self._fixed = fixed
        self._lock = threading.Lock()
        # Guarded by it: all that changes.
        self._free = list(range(self.present - 1, -1, -1))  # popped from the end: large page 0 first
        self._there = bytearray(b"\1" * self.present + b"\0" * (count - self.present))

    @property
    def nbytes(self) -> int:
        """Of those that are present."""
        return self.present * self.large_bytes

    @property
    def size(self) -> PoolSize:
        large = self.large_bytes
        return PoolSize(self.present * large, self.target * large, self.count * large)

    @property
    def free(self) -> int:
        """How many nobody has."""
        return len(self._free)

    @property
    def free_large(self) -> frozenset[int]:
        """Those, for who checks the books."""
        with self._lock:
            return frozenset(self._free)

    @property
    def excess(self) -> int:
        """How many more there are than there should be: each goes when it is given back."""
        return max(self.present - self.target, 0)

    def take(self, count: int = 1) -> list[int] | None:
        """So many of the free ones, lowest first where possible, or None."""
        with self._lock:
            if count > len(self._free):
                return None
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
        return taken[::-1]

    def give(self, large_pages: Sequence[int]) -> None:
        """They are free again."""
        with self._lock:
            self._free.extend(reversed(large_pages))
            if self.present > self.target:
                self._shrink()

    def resize(self, target: int) -> int:
        """Have ``target`` large pages from now on, of those that there may be, or as close to it as can be;
        how many there are now. Raises :class:`UsageError` for a number that cannot be."""
        if self._fixed:
            raise UsageError(self._fixed)
        if not 1 <= target <= self.count:
            raise UsageError(f"a pool of {target} pages cannot be: it may have 1 to {self.count}")
        with self._lock:
            self.target = target
            try:
                self._shrink()
                self._grow()
            finally:  # a device may fail
                self.target = min(target, self.present)
            return self.present

    def check(self) -> None:
        """Assert that the books agree."""
        with self._lock:
            free = set(self._free)
            assert len(free) == len(self._free), "a large page is free twice"
            assert all(self._there[large_page] for large_page in free), "a large page without memory is free"
            assert sum(self._there) == self.present
            assert not (self.excess and free - {0}), "a large page is kept that should have been given back"

    # -- inside, under the lock ------------------------------------------------------------------------

    def _shrink(self) -> None:
        going = [large_page for large_page in heapq.nlargest(self.excess, self._free) if large_page]
        gone = set(going)
        self._free = [large_page for large_page in self._free if large_page not in gone]
        for large_page in going:
            self._there[large_page] = 0
            self.present -= 1
            granules = self._granules(large_page)
            if self._backing is not None and granules:
                self._backing.release(granules)

    def _grow(self) -> None:
        come: list[int] = []
        large_page = -1
        try:
            while self.present < self.target:
                large_page = self._there.index(0, large_page + 1)
                missing = self._granules(large_page)
                if self._backing is not None and missing and not self._backing.back(missing):
                    break
                self._there[large_page] = 1
                self.present += 1
                come.append(large_page)
        finally:
            self._free[:0] = reversed(come)  # those that were there before are taken first

    def _granules(self, large_page: int) -> range:
        """The granules that have a part of ``large_page`` and of no present large page beside it."""
        if self._backing is None:
            return range(0)
        size = self._backing.granule_bytes
        start, stop = large_page * self.large_bytes, (large_page + 1) * self.large_bytes
        first, last = start // size, -(-stop // size)
        if self._present_in(first * size, start):
            first += 1
        if self._present_in(stop, last * size):
            last -= 1
        return range(first, max(last, first))

    def _present_in(self, start: int, stop: int) -> bool:
        """Whether a present large page has any of these bytes."""
        large_pages = self._there[start // self.large_bytes : -(-stop // self.large_bytes)]
        return start < stop and any(large_pages)


class Books(Protocol):
    """Which of a pool's pages are free. Page ``p`` is in large page ``p // per_large``, which is the pool's
    alone as long as one of its pages is in use."""

    @property
    def large_pages(self) -> LargePages: ...

    @property
    def per_large(self) -> int: ...

    @property
    def free_pages(self) -> int:
        """Pages that could be had."""

    @property
    def used_pages(self) -> int: ...

    @property
    def taken(self) -> int:
        """Large pages that have a page in use."""

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` pages, or None if fewer are free. ``near`` are pages that will be given back at about the
        same time."""

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back."""

    def emptied_by(self, pages: Iterable[int]) -> int:
        """How many large pages would be free without these pages, which are in use; about, where other
        threads give pages back meanwhile."""


class WholePages:
    """The books of a pool that is its memory's only one: each large page is a page. Implements
    :class:`Books`."""

    per_large = 1

    def __init__(self, large_pages: LargePages) -> None:
        self.large_pages = large_pages

    @property
    def free_pages(self) -> int:
        return self.large_pages.free

    @property
    def used_pages(self) -> int:
        return self.large_pages.present - self.large_pages.free

    @property
    def taken(self) -> int:
        return self.used_pages

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        return self.large_pages.take(count)

    def free(self, pages: Sequence[int]) -> None:
        self.large_pages.give(pages)

    def emptied_by(self, pages: Iterable[int]) -> int:
        return sum(1 for _ in pages)
