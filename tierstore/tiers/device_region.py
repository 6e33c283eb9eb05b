"""The memory of a device that pools of pages lie in, and what is under way in it.

A model's layer groups have a pool each and one region: its large pages go from one pool to another
as the work does. A pool knows what happens to its own pages while it has them; what was under way when they
were given back is known here, by large page, so that whoever has the large page next waits for it, whichever
pool that is. All of them compute on the region's one stream.

That is coarser than pages where a large page has several: who copies into one of them waits for what computed
with its neighbours, too, when those were given back last. It is a step at most.
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
    """A copy into pages: one event per layer of theirs, or one for all."""

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
    """What was under way in a large page when pages of it were given back last: what computed, and copies
    into those that were given back, then and before."""

    computed: Event
    fillings: frozenset[Filling]


class DeviceRegion:
    """``present`` large pages of ``large_bytes`` bytes in one allocation of ``device``; with ``most`` in
    memory that is mapped piece by piece, so that ``large_pages`` may be resized to as many. A device that
    cannot has ``present`` for good. Thread-safe.

    Raises :class:`DeviceMemoryError` when there is no room for it.
    """

    def __init__(self, device: Device, large_bytes: int, present: int, *, most: int | None = None) -> None:
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
            fixed = f"the page pool of {device.name} was opened with a size that it keeps"
            self.large_pages = LargePages(large_bytes, count, fixed=fixed)
        else:
            self.address = self._mapped.address
            self.large_pages = LargePages(large_bytes, count, present=0, backing=self._mapped)
            if self.large_pages.resize(present) < present:
                self._mapped.close()
                raise DeviceMemoryError(f"{device.name} has no {present * large_bytes} bytes left")
        memory = self.address if self._mapped is None else self._mapped
        # At the interpreter's end the driver may be gone first: no need to ask it.
        weakref.finalize(self, _give_back, device, self._streams, memory).atexit = False
        self.reach = Reach(device)
        self.compute = self.stream()
        self._lock = threading.Lock()
        self._left: dict[int, _Left] = {}  # guarded by it; by large page

    def stream(self) -> Stream:
        """A stream to work on the region with. It is given back with the region."""
        stream = self.runtime.stream()
        self._streams.append(stream)
        return stream

    def rows(self, count: int, nbytes: int, stride: int) -> Any:
        """The region as uint8 ``[count, nbytes]``, rows ``stride`` bytes apart. It is there as long as the
        last of these is: who computes with pages does so on the region's stream, and torch comes back to that
        stream as long as it has tensors that were used there."""
        array = self.runtime.view(self.address, (count, nbytes), stride=None if stride == nbytes else stride)
        weakref.finalize(array, _keep, self).atexit = False
        return array

    def share(self) -> bytes:
        """The handle by which another process on this machine opens the region."""
        return self.runtime.share(self.address)

    def covers(self, low: int, high: int) -> bool:
        """Whether the addresses ``low … high`` are the region's."""
        return self.address <= low and high < self.address + self.nbytes

    # -- what is under way in large pages whose pages are given back -----------------------------------------

    def leave(self, large_pages: Iterable[int], fillings: Mapping[int, Sequence[Filling]]) -> None:
        """Pages in ``large_pages`` are about to be given back, while those copies into them may be under
        way."""
        computed = self.runtime.record(self.compute)
        with self._lock:
            for large_page in large_pages:
                before = self._left.get(large_page)
                under_way = {filling for filling in before.fillings if not filling.done} if before else set()
                self._left[large_page] = _Left(
                    computed, frozenset(under_way.union(fillings.get(large_page, ())))
                )

    def computed_in(self, large_pages: Iterable[int]) -> set[Event]:
        """What computed with pages in ``large_pages`` that have been given back, as far as it is under
        way."""
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
        """The copies into pages in ``large_pages`` that were given back meanwhile, as far as they are under
        way."""
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
        """Give back the memory of large pages that there are no more, as far as nothing works on it; ``wait``
        until that is so."""
        if self._mapped is not None and self._mapped.leaving:
            self._mapped.settle(wait=wait)


def _keep(region: DeviceRegion) -> None:
    """Does nothing: a finalizer keeps its arguments until it is called."""


def _allocate(device: Device, nbytes: int) -> int:
    if nbytes > device.memory().free:
        raise DeviceMemoryError(f"{device.name} has no {nbytes} bytes left")
    return device.allocate(nbytes)


def _give_back(device: Device, streams: Sequence[Stream], memory: int | MappedMemory) -> None:
    if isinstance(memory, MappedMemory):
        memory.close()
    else:
        device.free(memory)  # waits for what is on the streams
    for stream in streams:
        device.release(stream)
