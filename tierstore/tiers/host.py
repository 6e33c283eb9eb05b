"""The host tier: one arena of page-aligned shared memory, carved in two levels.

The arena is a shared-memory file (0600) so that a process on the same host can map it and move its own bytes;
see :class:`tierstore.memory.Memory` for why it has no name. Its pages are populated by a background thread
from the first byte on, and slots are handed out from the first byte on: the two seldom meet.
"""

from __future__ import annotations

import threading

from tierstore import memory
from tierstore.memory import Memory
from tierstore.tiers.slabs import SlabAllocator


class HostTier:
    """``capacity_bytes`` of arena. Slots are named by their byte offset. Not thread-safe: the store locks.

    ``shared`` says whether it has to be a shared-memory file; None leaves it to what is faster.
    ``used_bytes`` never exceeds ``capacity_bytes``.
    """

    def __init__(self, capacity_bytes: int, *, shared: bool | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._memory = Memory(capacity_bytes, shared=memory.shared_huge_pages() if shared is None else shared)
        self._space = SlabAllocator(capacity_bytes)
        self._closing = threading.Event()
        self._populating = threading.Thread(target=self._populate, name="tierstore-populate", daemon=True)
        self._populating.start()

    @property
    def shared_fd(self) -> int | None:
        """The arena's file for another process to map, None where it is ordinary memory."""
        return self._memory.fd

    @property
    def used_bytes(self) -> int:
        return self._space.used_bytes

    def pages_for(self, nbytes: int) -> int:
        """How many pages of ``nbytes`` fit into the empty arena."""
        return self._space.slots_for(nbytes)

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """The offsets of up to ``count`` of them: fewer when there are no more."""
        return self._space.allocate_many(nbytes, count)

    def free(self, place: int, nbytes: int) -> None:
        self._space.free(place, nbytes)

    def view(self, place: int, nbytes: int) -> memoryview:
        """A slot's bytes, writable. Valid while the caller holds a lease on the page or is filling it."""
        return self._memory.view(place, nbytes)

    def address(self, place: int) -> int:
        return self._memory.address + place

    def wait_populated(self) -> None:
        """Block until every page of the arena is backed by memory (benchmarks measure from here)."""
        self._populating.join()

    def check(self) -> None:
        self._space.check()
        assert self.used_bytes <= self.capacity_bytes, f"{self._space} is over its capacity"

    def close(self) -> None:
        self._closing.set()
        self._populating.join()
        self._memory.close()

    def _populate(self) -> None:
        self._memory.populate(lambda: not self._closing.is_set())
