"""A device's memory for pools of pages, and the work in flight on freed pages.

Each layer group of a model has a pool. All of these pools share one region, and large pages move between the
pools as needed. A pool tracks the work in flight on its own pages. When pages are freed, the region records
their work in flight by large page, so that the next pool that uses the large page waits for this work. All
pools compute on one stream of the region.

Tracking by large page waits longer than necessary if a large page has several pages: a copy into one page
also waits for computation on other pages of the large page that were freed last. The additional wait is at
most one step.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierstore.tiers.device import Device, DeviceMemoryError, Event, Stream
from tierstore.tiers.large_pages import LargePages
from tierstore.tiers.mapped import MappedMemory
from tierstore.tiers.pinned import Reach

_log = logging.getLogger(__name__)


class Filling:
    """A copy into pages, with one event per layer, or one event for all layers."""

    def __init__(self, device: Device, events: Sequence[Event]) -> None:
        self._device = device
        self._events = events

    def event(self, layer: int) -> Event:
        return self._events[min(layer, len(self._events) - 1)]

    @property
    def last(self) -> Event:
        return self._events[-1]

    @property
    def done(self) -> bool:
        return self._device.reached(self.last)

    def reached(self, layer: int) -> bool:
        return self._device.reached(self.event(layer))

    def wait(self) -> None:
        self._device.synchronize(self.last)


@dataclass(frozen=True, slots=True)
class _Left:
    """The work that was in flight in a large page when pages of it were last freed: the computation, and the
    copies into pages that were freed then or earlier."""

    computed: Event
    fillings: frozenset[Filling]


class DeviceRegion:
    """``present`` large pages of ``large_bytes`` bytes in one allocation of ``device``. Thread-safe.

    With ``most``, the memory is mapped in pieces, so that ``large_pages`` can grow to that number. If the
    device cannot map pieces, the number stays ``present``. Raise :class:`DeviceMemoryError` if there is not
    enough memory.
    """

    def __init__(
        self,
        device: Device,
        large_bytes: int,
        present: int,
        *,
        most: int | None = None,
        compute: Stream | None = None,
    ) -> None:
        """``compute`` is the stream for computation on the pages (None: a new stream)."""
        if most is not None and not device.granule_bytes:
            _log.warning("%s cannot map memory piece by piece: its page pool keeps its size", device.name)
            most = None
        self.runtime = device
        self.device = device.name
        count = max(present, most or 0)
        self.nbytes = count * large_bytes
        self._streams: list[Stream] = []
        self._mapped = None if most is None else MappedMemory(device, self.nbytes, self._streams)
        if self._mapped is None:
            self.address = _allocate(device, self.nbytes)
            fixed = f"the page pool of {device.name} cannot be resized: it was opened with a fixed size"
            self.large_pages = LargePages(large_bytes, count, fixed=fixed)
        else:
            self.address = self._mapped.address
            self.large_pages = LargePages(large_bytes, count, present=0, backing=self._mapped)
            if self.large_pages.resize(present) < present:
                self._mapped.close()
                raise DeviceMemoryError(f"{device.name} has less than {present * large_bytes} bytes free")
        memory = self.address if self._mapped is None else self._mapped
        # The finalizer must not run at interpreter exit, because the driver may be unloaded before.
        weakref.finalize(self, _give_back, device, self._streams, memory).atexit = False
        self.reach = Reach(device)
        self.compute = self.stream() if compute is None else compute
        self._lock = threading.Lock()
        self._left: dict[int, _Left] = {}  # guarded by the lock; by large page

    def stream(self) -> Stream:
        """Return a new stream for work on the region. The stream is released together with the region."""
        stream = self.runtime.stream()
        self._streams.append(stream)
        return stream

    def rows(self, count: int, nbytes: int, stride: int) -> Any:
        """Return the region as uint8 ``[count, nbytes]``, with rows ``stride`` bytes apart. The region exists
        as long as one of these arrays exists. (Torch uses the region's stream as long as it has tensors that
        were used on it.)"""
        array = self.runtime.view(self.address, (count, nbytes), stride=None if stride == nbytes else stride)
        weakref.finalize(array, _keep, self).atexit = False
        return array

    def share(self) -> bytes:
        """Return the handle with which another process on this machine opens the region."""
        return self.runtime.share(self.address)

    def covers(self, low: int, high: int) -> bool:
        """Return whether the addresses ``low … high`` are in the region."""
        return self.address <= low and high < self.address + self.nbytes

    # -- work in flight in large pages whose pages are freed -----------------------------------------

    def leave(self, large_pages: Iterable[int], fillings: Mapping[int, Sequence[Filling]]) -> None:
        """Record that pages in ``large_pages`` are about to be freed. ``fillings`` are the copies into these
        pages that may be in flight, by large page."""
        computed = self.runtime.record(self.compute)
        with self._lock:
            for large_page in large_pages:
                before = self._left.get(large_page)
                under_way = {filling for filling in before.fillings if not filling.done} if before else set()
                self._left[large_page] = _Left(
                    computed, frozenset(under_way.union(fillings.get(large_page, ())))
                )

    def computed_in(self, large_pages: Iterable[int]) -> set[Event]:
        """Return events for the computation in flight on freed pages in ``large_pages``."""
        with self._lock:
            left = {
                large_page: self._left[large_page] for large_page in large_pages if large_page in self._left
            }
            under_way = {each.computed for each in left.values()}
            under_way = {event for event in under_way if not self.runtime.reached(event)}
            for large_page, each in left.items():
                if each.computed not in under_way and all(filling.done for filling in each.fillings):
                    del self._left[large_page]
        return under_way

    def fillings_in(self, large_pages: Iterable[int]) -> set[Filling]:
        """Return the copies in flight into freed pages in ``large_pages``."""
        with self._lock:
            found = {
                each
                for large_page in large_pages
                if (left := self._left.get(large_page))
                for each in left.fillings
            }
        return {filling for filling in found if not filling.done}

    # -- memory ------------------------------------------------------------------------------------------

    def settle(self, *, wait: bool = False) -> None:
        """Release the memory of removed large pages, except those on which work is running. With ``wait``,
        wait for this work, and release all."""
        if self._mapped is not None and self._mapped.leaving:
            self._mapped.settle(wait=wait)


def _keep(region: DeviceRegion) -> None:
    """Do nothing. (A finalizer keeps its arguments alive until it is called.)"""


def _allocate(device: Device, nbytes: int) -> int:
    if nbytes > device.memory().free:
        raise DeviceMemoryError(f"{device.name} has less than {nbytes} bytes free")
    return device.allocate(nbytes)


def _give_back(device: Device, streams: Sequence[Stream], memory: int | MappedMemory) -> None:
    if isinstance(memory, MappedMemory):
        memory.close()
    else:
        device.free(memory)  # waits for the work on the streams
    for stream in streams:
        device.release(stream)
