"""The large pages of a pool, which of them have memory, and how a pool grows and shrinks at run time.

A pool's *addresses* are reserved once, for its largest number of large pages. So a page in use never moves,
and an array over all pages stays valid. A large page that has memory is *present*. ::

    large pages   [ in use ][ free ][ in use ][ absent ][ absent ]     present: 3 of 5

:meth:`LargePages.resize` sets a target. Growing maps memory at once. Shrinking releases free large pages at
once, those with the highest numbers first, and later each large page that becomes free, until the target is
reached. (The owner of cached pages evicts pages so that the target is reached.) Memory is mapped and released
in granules of the operating system or the driver, whose size may differ from that of large pages. A granule
is released when all large pages that overlap it are absent, so every byte of a present large page always has
memory.

The memory can have *parts* of equal size, one after the other, for several processes that have one part each.
Large pages are taken from the part with the most free large pages, so that all parts fill evenly. The parts
also grow and shrink evenly.

Large page 0 is always present, because libraries access the first byte of device memory when they make an
array of it.

>>> large_pages = LargePages(4096, 4)
>>> large_pages.take(2), large_pages.resize(1), large_pages.present
([0, 1], 2, 2)
>>> large_pages.give([1, 0]), large_pages.present
(None, 1)
>>> large_pages.resize(3)
3
>>> LargePages(4096, 6, parts=2).take(5)
[0, 3, 1, 4, 2]
"""

from __future__ import annotations

import heapq
import itertools
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
    """The size of a pool's memory: now, after the excess has been released (``target_bytes``), and at
    most."""

    nbytes: int
    target_bytes: int
    most_bytes: int


class Backing(Protocol):
    """Maps and releases memory by *granules*, which are numbered from the pool's first byte."""

    @property
    def granule_bytes(self) -> int: ...

    def back(self, granules: range) -> bool:
        """Map memory for these granules, which have no memory or were released. Return False, and change
        nothing, if there is not enough memory."""

    def release(self, granules: range) -> None:
        """Release the memory of these granules. Work that was started on the memory may still be running, so
        the memory is unmapped only after this work."""


class HostBacking:
    """Ordinary memory. The kernel frees released memory at once, and provides new memory on first use."""

    granule_bytes = ALIGNMENT

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def back(self, granules: range) -> bool:
        return self._memory.populate_range(*_bytes(granules))

    def release(self, granules: range) -> None:
        start, stop = _bytes(granules)
        try:
            self._memory.discard(start, stop)
        except OSError as error:  # for example, the memory is locked: then the pool keeps it
            _log.warning("%s of a pool's memory could not be released: %s", format_size(stop - start), error)


def _bytes(granules: range) -> tuple[int, int]:
    return granules.start * ALIGNMENT, granules.stop * ALIGNMENT


class LargePages:
    """``count`` large pages of ``large_bytes`` bytes each: which of them are free, and which have memory (at
    first, ``present`` of them). Thread-safe, because pools with separate locks share one object. There are
    ``parts`` of ``part_size`` large pages each.

    Without a ``backing``, no memory is mapped or released. If ``fixed`` is not empty, :meth:`resize` raises
    :class:`UsageError` with this text.
    """

    def __init__(
        self,
        large_bytes: int,
        count: int,
        *,
        present: int | None = None,
        backing: Backing | None = None,
        fixed: str = "",
        parts: int = 1,
    ) -> None:
        self.large_bytes = large_bytes
        self.count = count
        self.parts = parts
        self.part_size = count // parts
        self.present = self.target = count if present is None else present
        self._backing = backing
        self._fixed = fixed
        self._lock = threading.Lock()
        self._order = sorted(range(count), key=self._turn)  # the order in which large pages become present
        # Guarded by the lock: all mutable state.
        self._there = bytearray(count)  # 1 for each present large page
        self._free: list[list[int]] = [[] for _ in range(parts)]  # by part; the lowest number is at the end
        for large_page in reversed(self._order[: self.present]):
            self._there[large_page] = 1
            self._free[large_page // self.part_size].append(large_page)

    @property
    def nbytes(self) -> int:
        """Bytes of the present large pages."""
        return self.present * self.large_bytes

    @property
    def size(self) -> PoolSize:
        large = self.large_bytes
        return PoolSize(self.present * large, self.target * large, self.count * large)

    @property
    def free(self) -> int:
        """Number of large pages that no pool has taken."""
        return sum(map(len, self._free))

    @property
    def used(self) -> tuple[int, ...]:
        """Number of large pages that pools have taken, in each part."""
        present = self.present_parts()
        return tuple(there - len(free) for (_, there), free in zip(present, self._free, strict=True))

    def present_parts(self) -> list[tuple[int, int]]:
        """Return for each part its first large page, and how many of its large pages are present."""
        starts = [part * self.part_size for part in range(self.parts)]
        with self._lock:
            return [(at, sum(self._there[at : at + self.part_size])) for at in starts]

    @property
    def free_large(self) -> frozenset[int]:
        """The large pages that no pool has taken, for checks."""
        with self._lock:
            return frozenset(itertools.chain(*self._free))

    @property
    def excess(self) -> int:
        """Number of large pages above the target, which are released when they become free."""
        return max(self.present - self.target, 0)

    def take(self, count: int = 1) -> list[int] | None:
        """Take ``count`` free large pages, each from the part with the most free large pages, preferably with
        low numbers. Return None if fewer are free."""
        with self._lock:
            if count > self.free:
                return None
            return [max(self._free, key=len).pop() for _ in range(count)]

    def give(self, large_pages: Sequence[int]) -> None:
        """Return large pages that are free again."""
        with self._lock:
            for large_page in reversed(large_pages):
                self._free[large_page // self.part_size].append(large_page)
            if self.present > self.target:
                self._shrink()

    def resize(self, target: int) -> int:
        """Change the number of present large pages to ``target``, as far as possible now. Return the new
        number. Raise :class:`UsageError` for a target outside the limits."""
        if self._fixed:
            raise UsageError(self._fixed)
        if not 1 <= target <= self.count:
            raise UsageError(f"the pool must have 1 to {self.count} pages, got {target}")
        with self._lock:
            self.target = target
            try:
                self._shrink()
                self._grow()
            finally:  # even if the device raises an error
                self.target = min(target, self.present)
            return self.present

    def check(self) -> None:
        """Assert that the bookkeeping is consistent."""
        with self._lock:
            free = set(itertools.chain(*self._free))
            assert len(free) == self.free, "a large page is free twice"
            assert all(each // self.part_size == part for part, own in enumerate(self._free) for each in own)
            assert all(self._there[large_page] for large_page in free), "a large page without memory is free"
            assert sum(self._there) == self.present
            assert not (self.excess and free - {0}), "a large page is kept that should have been given back"

    # -- inside, under the lock ------------------------------------------------------------------------

    def _shrink(self) -> None:
        last = heapq.nlargest(self.excess, itertools.chain(*self._free), key=self._turn)
        going = [large_page for large_page in last if large_page]
        gone = set(going)
        self._free = [[each for each in free if each not in gone] for free in self._free]
        for large_page in going:
            self._there[large_page] = 0
            self.present -= 1
            granules = self._granules(large_page)
            if self._backing is not None and granules:
                self._backing.release(granules)

    def _grow(self) -> None:
        come: list[int] = []
        absent = iter([large_page for large_page in self._order if not self._there[large_page]])
        try:
            while self.present < self.target:
                large_page = next(absent)
                missing = self._granules(large_page)
                if self._backing is not None and missing and not self._backing.back(missing):
                    break
                self._there[large_page] = 1
                self.present += 1
                come.append(large_page)
        finally:
            for part, free in enumerate(self._free):  # take() uses large pages that were present before first
                free[:0] = [each for each in reversed(come) if each // self.part_size == part]

    def _turn(self, large_page: int) -> tuple[int, int]:
        """Return a key that sorts large pages by their position in their part."""
        part, place = divmod(large_page, self.part_size)
        return place, part

    def _granules(self, large_page: int) -> range:
        """Return the granules that overlap ``large_page`` but no other present large page."""
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
        large_pages = self._there[start // self.large_bytes : -(-stop // self.large_bytes)]
        return start < stop and any(large_pages)


class Books(Protocol):
    """The allocator of a pool's pages. Page ``p`` is in large page ``p // per_large``. A large page belongs
    to the pool as long as one of its pages is in use."""

    @property
    def large_pages(self) -> LargePages: ...

    @property
    def per_large(self) -> int: ...

    @property
    def free_pages(self) -> int:
        """Number of pages that can be allocated."""

    @property
    def used_pages(self) -> int: ...

    @property
    def taken(self) -> int:
        """Number of large pages that have a page in use."""

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """Allocate ``count`` pages, or return None if fewer are free. ``near`` are pages that will be freed
        at about the same time."""

    def free(self, pages: Sequence[int]) -> None: ...

    def emptied_by(self, pages: Iterable[int]) -> int:
        """Return how many large pages would become free if these pages, which are in use, were freed. The
        result is approximate if other threads free pages at the same time."""


class WholePages:
    """The allocator of a pool that does not share its memory: each large page is one page. Implements
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
