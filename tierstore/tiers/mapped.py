"""Device memory that is mapped and unmapped in pieces (granules).

The addresses are reserved once. Pieces of memory are mapped to these addresses and unmapped again. The driver
unmaps a piece even if work on it is running, and this work fails. So a released piece is *leaving* until all
work has ended that was on the pool's streams at its release. Then it is unmapped. A leaving piece can be used
again without a new mapping.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierstore.tiers.device import Device, DeviceError, DeviceMemoryError, Event, Stream
from tierstore.units import round_up

_MOST_PIECES = 4096  # most pieces of a pool: each needs a few driver calls


class MappedMemory:
    """``nbytes`` of reserved addresses of ``device``, at first without memory. Implements
    :class:`tierstore.tiers.large_pages.Backing`. Thread-safe. ``streams`` is a list of the streams that use
    the memory; the caller may add streams later."""

    def __init__(self, device: Device, nbytes: int, streams: Sequence[Stream]) -> None:
        self.granule_bytes = round_up(-(-nbytes // _MOST_PIECES), device.granule_bytes)
        self.nbytes = round_up(nbytes, self.granule_bytes)
        self._device = device
        self._streams = streams
        self._lock = threading.Lock()
        # Guarded by the lock: all below.
        self._mapped: set[int] = set()
        self._leaving: dict[int, tuple[Event, ...]] = {}
        self.address = device.reserve(self.nbytes)

    def back(self, granules: range) -> bool:
        with self._lock:
            new = [granule for granule in granules if granule not in self._mapped]
            done: list[int] = []
            try:
                for granule in new:
                    self._device.map(*self._place(granule))
                    done.append(granule)
            except DeviceError as error:
                self._unmap(done)
                if isinstance(error, DeviceMemoryError):
                    return False
                raise
            self._mapped.update(new)
            for granule in granules:
                self._leaving.pop(granule, None)
        return True

    def release(self, granules: range) -> None:
        with self._lock:
            under_way = tuple(self._device.record(stream) for stream in self._streams)
            self._leaving.update((granule, under_way) for granule in granules)
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        """Unmap leaving pieces on which no work is running. With ``wait``, wait for the work on all leaving
        pieces, and unmap them all."""
        with self._lock:
            over = [
                granule
                for granule, events in self._leaving.items()
                if all(wait or self._device.reached(event) for event in events)
            ]
            for event in {event for granule in over for event in self._leaving[granule] if wait}:
                self._device.synchronize(event)
            for granule in over:
                del self._leaving[granule]
            self._unmap(over)
            self._mapped.difference_update(over)

    @property
    def leaving(self) -> bool:
        """Whether there are leaving pieces to :meth:`settle`."""
        return bool(self._leaving)

    def close(self) -> None:
        """Wait for all work on the memory, unmap it, and release the addresses."""
        with self._lock:
            for stream in self._streams:
                self._device.synchronize(self._device.record(stream))
            self._unmap(self._mapped)
            self._mapped.clear()
            self._leaving.clear()
            self._device.unreserve(self.address, self.nbytes)

    def _unmap(self, granules: Iterable[int]) -> None:
        for granule in granules:
            self._device.unmap(*self._place(granule))

    def _place(self, granule: int) -> tuple[int, int]:
        return self.address + granule * self.granule_bytes, self.granule_bytes
