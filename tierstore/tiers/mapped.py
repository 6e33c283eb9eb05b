"""A device's memory that is mapped piece by piece, and given back likewise.

Addresses are reserved once; pieces of memory are put behind them and taken away. A device does not look who
still works on a piece that is taken away: what reads there then reads nothing, and fails. So a piece is
*leaving* from the moment that nobody is going to use it until all that was put on the pool's streams before
that has happened, and is unmapped only then. Until then it can be had back as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierstore.tiers.device import Device, DeviceError, DeviceMemoryError, Event, Stream
from tierstore.units import round_up

_MOST_PIECES = 4096  # that a pool is mapped in: each is a few calls of the driver


class MappedMemory:
    """``nbytes`` of reserved addresses of ``device``, none of which has memory at first. Implements
    :class:`tierstore.tiers.large_pages.Backing`. Thread-safe.

    ``streams`` are those that work on it. Their owner may add to the list.
    """

    def __init__(self, device: Device, nbytes: int, streams: Sequence[Stream]) -> None:
        self.granule_bytes = round_up(-(-nbytes // _MOST_PIECES), device.granule_bytes)
        self.nbytes = round_up(nbytes, self.granule_bytes)
        self._device = device
        self._streams = streams
        self._lock = threading.Lock()
        # Guarded by it: all below.
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
        """Unmap what leaves, as far as nothing works on it any more; ``wait`` until that is so for all."""
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
        """Whether there is something to :meth:`settle`."""
        return bool(self._leaving)

    def close(self) -> None:
        """Give back all of it, and the addresses, once nothing works on it."""
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
