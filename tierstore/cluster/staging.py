"""Staging memory: the agent's own memory, which the shared store writes to and reads from. It is divided into
lanes."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tierstore.cluster.objects import PageObject
from tierstore.cluster.shared_store import Memory

_LANE_BYTES = 16 << 20


class StagingLane:
    """Memory for several objects, one behind the other. A lane is ``sound`` until a call on it fails. After
    that, the shared store may still write to the lane or read from it, so it is not used again."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.sound = True

    def places(self, objects: Sequence[PageObject]) -> list[Memory]:
        """Return the address and size of each object in the lane. All objects have the same size."""
        size = objects[0].nbytes
        step = -(-size // 64) * 64
        return [(self.address + at * step, size) for at in range(len(objects))]


class StagingMemory:
    """Lanes of 16 MiB each (or of one object, if that is larger). They have at most ``nbytes`` in total and
    are allocated on demand. A lane that is not sound is never used again, but counts against ``nbytes``."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._lock = threading.Condition()
        self._free: list[StagingLane] = []
        self._taken_bytes = 0
        self._poisoned_bytes = 0

    @property
    def worn_out(self) -> bool:
        """Whether more than half of the memory is in lanes that are not sound."""
        return self._poisoned_bytes * 2 > self._nbytes

    def objects_in_a_lane(self, nbytes: int) -> int:
        """Return how many objects of ``nbytes`` bytes fit a lane."""
        return max(_LANE_BYTES // (-(-nbytes // 64) * 64), 1)

    @contextmanager
    def lane(self, nbytes: int, timeout: float) -> Iterator[StagingLane | None]:
        """Yield a lane of at least ``nbytes``; None if no lane is available within ``timeout`` seconds."""
        lane = self._take(max(nbytes, _LANE_BYTES), timeout)
        try:
            yield lane
        except BaseException:
            if lane is not None:
                lane.sound = False
            raise
        finally:
            if lane is not None:
                self._give_back(lane)

    def _take(self, nbytes: int, timeout: float) -> StagingLane | None:
        with self._lock:
            if not self._lock.wait_for(lambda: self._find(nbytes) or self._fits(nbytes), timeout):
                return None
            lane = self._find(nbytes)
            if lane is not None:
                self._free.remove(lane)
                return lane
            if self._taken_bytes + nbytes > self._nbytes:  # replace free lanes, which are too small
                self._taken_bytes -= sum(each.nbytes for each in self._free)
                self._free.clear()
            self._taken_bytes += nbytes
        return StagingLane(nbytes)

    def _find(self, nbytes: int) -> StagingLane | None:
        return next((lane for lane in self._free if lane.nbytes >= nbytes), None)

    def _fits(self, nbytes: int) -> bool:
        free = sum(each.nbytes for each in self._free)
        return self._taken_bytes - free + nbytes <= max(self._nbytes, nbytes)

    def _give_back(self, lane: StagingLane) -> None:
        with self._lock:
            if lane.sound:
                self._free.append(lane)
            else:
                self._poisoned_bytes += lane.nbytes
                _GRAVEYARD.append(lane)  # keeps its memory mapped: the shared store may still write to it
            self._lock.notify_all()


_GRAVEYARD: list[StagingLane] = []
