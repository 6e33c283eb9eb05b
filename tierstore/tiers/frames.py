"""The large pages of a pool, and which of them have memory: a pool grows and shrinks while it runs.

A pool's *addresses* are reserved once, for as many large pages as it may ever have, so a page in use never
moves and an array over all of them stays what it is. Memory is behind those that are *present*. ::

    frames   [ in use ][ free ][ in use ][ absent ][ absent ]     present: 3 of 5

:meth:`Frames.resize` sets a target. Growing maps memory at once. Shrinking gives back free frames at once,
the last ones first, and every frame that becomes free later until the target is reached; who owns cached
pages lets these leave meanwhile. Memory is given and taken in granules of the operating system's or the
driver's, which need not be frames: one goes when all frames that it has a part of are absent, so no byte of a
present frame ever has no memory.

Frame 0 stays: whoever makes a view of a device's memory looks at its first byte.

>>> frames = Frames(4096, 4)
>>> frames.take(2), frames.resize(1), frames.present
([0, 1], 2, 2)
>>> frames.give([1, 0]), frames.present
(None, 1)
>>> frames.resize(3)
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


class Frames:
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
        self._free = list(range(self.present - 1, -1, -1))  # popped from the end: frame 0 first
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
    def free_frames(self) -> frozenset[int]:
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

    def give(self, frames: Sequence[int]) -> None:
        """They are free again."""
        with self._lock:
            self._free.extend(reversed(frames))
            if self.present > self.target:
                self._shrink()

    def resize(self, target: int) -> int:
        """Have ``target`` frames from now on, of those that there may be, or as close to it as can be; how
        many there are now. Raises :class:`UsageError` for a number that cannot be."""
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
            assert len(free) == len(self._free), "a frame is free twice"
            assert all(self._there[frame] for frame in free), "a frame without memory is free"
            assert sum(self._there) == self.present
            assert not (self.excess and free - {0}), "a frame is kept that should have been given back"

    # -- inside, under the lock ------------------------------------------------------------------------

    def _shrink(self) -> None:
        going = [frame for frame in heapq.nlargest(self.excess, self._free) if frame]
        gone = set(going)
        self._free = [frame for frame in self._free if frame not in gone]
        for frame in going:
            self._there[frame] = 0
            self.present -= 1
            granules = self._granules(frame)
            if self._backing is not None and granules:
                self._backing.release(granules)

    def _grow(self) -> None:
        come: list[int] = []
        frame = -1
        try:
            while self.present < self.target:
                frame = self._there.index(0, frame + 1)
                missing = self._granules(frame)
                if self._backing is not None and missing and not self._backing.back(missing):
                    break
                self._there[frame] = 1
                self.present += 1
                come.append(frame)
        finally:
            self._free[:0] = reversed(come)  # those that were there before are taken first

    def _granules(self, frame: int) -> range:
        """The granules that have a part of ``frame`` and of no present frame beside it."""
        if self._backing is None:
            return range(0)
        size = self._backing.granule_bytes
        start, stop = frame * self.large_bytes, (frame + 1) * self.large_bytes
        first, last = start // size, -(-stop // size)
        if self._present_in(first * size, start):
            first += 1
        if self._present_in(stop, last * size):
            last -= 1
        return range(first, max(last, first))

    def _present_in(self, start: int, stop: int) -> bool:
        """Whether a present frame has any of these bytes."""
        frames = self._there[start // self.large_bytes : -(-stop // self.large_bytes)]
        return start < stop and any(frames)


class Books(Protocol):
    """Which of a pool's pages are free. Page ``p`` is in frame ``p // per_frame``, which is the pool's alone
    as long as one of its pages is in use."""

    @property
    def frames(self) -> Frames: ...

    @property
    def per_frame(self) -> int: ...

    @property
    def free_pages(self) -> int:
        """Pages that could be had."""

    @property
    def used_pages(self) -> int: ...

    @property
    def taken(self) -> int:
        """Frames that have a page in use."""

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` pages, or None if fewer are free. ``near`` are pages that will be given back at about the
        same time."""

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back."""

    def emptied_by(self, pages: Iterable[int]) -> int:
        """How many frames would be free without these pages, which are in use; about, where other threads
        give pages back meanwhile."""


class WholePages:
    """The books of a pool that is its memory's only one: each frame is a page. Implements :class:`Books`."""

    per_frame = 1

    def __init__(self, frames: Frames) -> None:
        self.frames = frames

    @property
    def free_pages(self) -> int:
        return self.frames.free

    @property
    def used_pages(self) -> int:
        return self.frames.present - self.frames.free

    @property
    def taken(self) -> int:
        return self.used_pages

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        return self.frames.take(count)

    def free(self, pages: Sequence[int]) -> None:
        self.frames.give(pages)

    def emptied_by(self, pages: Iterable[int]) -> int:
        return sum(1 for _ in pages)
