"""The host tier: one arena of page-aligned shared memory, allocated in two levels.

The arena is a shared-memory file (0600), so that another process on the same host can map it and copy its
pages; :class:`tierstore.memory.Memory` says why the file has no name. After opening, a background thread
touches the memory from the first byte on, so that the kernel provides it before pages are written there.
"""

from __future__ import annotations

import threading

from tierstore import memory
from tierstore.memory import Memory
from tierstore.tiers.slabs import SlabAllocator


class HostTier:
    """An arena of ``capacity_bytes``. Slots are identified by their byte offset. Not thread-safe: the store
    locks. ``shared`` says whether the arena must be a shared-memory file; with None, it is one if huge pages
    are available for shared memory. ``used_bytes`` never exceeds ``capacity_bytes``.
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
        """The arena's file, for another process to map; None if it is ordinary memory."""
        return self._memory.fd

    @property
    def used_bytes(self) -> int:
        return self._space.used_bytes

    def pages_for(self, nbytes: int) -> int:
        """Return how many pages of ``nbytes`` fit into the empty arena."""
        return self._space.slots_for(nbytes)

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """Return the offsets of up to ``count`` free slots for ``nbytes``; fewer if no more are free."""
        return self._space.allocate_many(nbytes, count)

    def free(self, place: int, nbytes: int) -> None:
        self._space.free(place, nbytes)

    def view(self, place: int, nbytes: int) -> memoryview:
        """Return a writable view of a slot. The view may be used while the caller has a lease on the page or
        is filling the slot."""
        return self._memory.view(place, nbytes)

    def address(self, place: int) -> int:
        return self._memory.address + place

    def wait_populated(self) -> None:
        """Block until the kernel has provided all memory of the arena. Benchmarks call this first."""
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
