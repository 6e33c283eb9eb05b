"""The hbm tier on a device with memory of its own, and the order of all work on its pages.

Work runs on the engine's *compute* stream and on four streams of the pool. Two of these copy *up* (from host
memory), one copies *down* (to host memory), and one copies *across* (within the pool). The device does not
order the work of different streams. Seven rules keep a page's bytes correct. For each rule, a stream or a
thread waits for an event:

1. A copy down begins after the computation of the page (``after`` in :meth:`read_pages`).
2. A copy down ends before its call returns, because the call waits for the copy's event.
3. Computation on a page waits for a copy into the page, layer by layer (:meth:`arrivals`).
4. A copy down or across waits for a running copy into its source (``_filling``).
5. A copy into a page begins after earlier computation on the page (``device_region.py``, called by
   :meth:`free`).
6. If a page is freed during a copy into it, later computation on the page waits for that copy
   (``device_region.py`` and :meth:`allocate`).
7. Memory is unmapped after all work that was on any stream when its last page was freed (``mapped.py``).

The pools of a model's layer groups share a region. Between these pools, rules 5 and 6 apply to large pages.
The caller must keep the *source* of a copy until ``PendingCopy.wait`` returns.

Large loads are copied layer by layer, layer 0 of all pages first, with an event after each layer. So the
model can compute layer 0 while later layers are being copied. Small loads, single layers, and loads from
unregistered memory (see ``pinned.py``) are copied as a whole. Small loads have a stream of their own; on a
common stream, they would wait for every earlier large load."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from tierstore import copying
from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore.tiers.device import (
    Addresses,
    Device,
    DeviceError,
    DeviceMemoryError,
    Event,
    SourceOrder,
    Stream,
)
from tierstore.tiers.device_region import DeviceRegion, Filling
from tierstore.tiers.hbm import COMPLETED, CopyFence, PagePool, PendingCopy, check_pages
from tierstore.tiers.large_pages import Books, WholePages
from tierstore.tiers.pinned import Pin
from tierstore.units import format_size

_log = logging.getLogger(__name__)

LAYERED_BYTES = 16 << 20
"""Loads of this size or more are copied layer by layer. Smaller loads take less than a millisecond."""

FRACTION = 0.9  # share of the device's free memory for a pool without a configured size


class Gather(Protocol):
    """A kernel that copies small fragments faster than the copy engines do."""

    @property
    def below_bytes(self) -> int:
        """The kernel is used for fragments smaller than this size, which is measured at start (0: never)."""

    def copy(self, stream: Stream, to: Addresses, sources: Addresses, nbytes: int) -> None:
        """Queue a copy of ``nbytes`` for each pair of addresses on ``stream``. Host memory must be
        registered."""


class _DeviceArrivals:
    """A fence for copies into the pages that a batch computes with."""

    pending = True

    def __init__(
        self, device: Device, compute: Stream, fillings: Sequence[Filling], places: Mapping[int, int]
    ) -> None:
        """``places`` maps the model's layer numbers to those of the pool."""
        self._device = device
        self._compute = compute
        self._fillings = fillings
        self._places = places

    def wait(self, layer: int) -> None:
        if (place := self._places.get(layer)) is not None:
            for filling in self._fillings:
                self._device.wait(self._compute, filling.event(place))

    def arrived(self, layer: int) -> bool:
        place = self._places.get(layer)
        return place is None or all(filling.reached(place) for filling in self._fillings)


class _Upload:
    """A stream for copies up. ``queueing`` is held while the copies and events of one load are put on the
    stream, so that those of another load cannot come between them."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.queueing = threading.Lock()


class DevicePool(PagePool):
    """A pool in the memory of a device. ``compute`` is the stream for computation on pages of all pools of
    the region."""

    overlaps = True

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        device: Device,
        *,
        most: int | None = None,
        layered_bytes: int = LAYERED_BYTES,
    ) -> None:
        """Open a pool of ``num_pages`` pages in one allocation. With ``most``, the memory is mapped in
        pieces, so that :meth:`resize` can grow the pool to ``most`` pages. If the device cannot map pieces,
        the pool keeps ``num_pages``. Raise :class:`UsageError` if there is not enough memory."""
        check_pages(spec, num_pages)
        try:
            region = DeviceRegion(device, spec.page_bytes, num_pages, most=most)
        except DeviceMemoryError as error:
            raise _no_room(spec, num_pages, device) from error
        self._open(spec, region, WholePages(region.large_pages), layered_bytes)

    @classmethod
    def within(  # type: ignore[override]  # the memory is the device's
        cls, spec: KVSpec, region: DeviceRegion, books: Books, *, layered_bytes: int = LAYERED_BYTES
    ) -> DevicePool:
        """Return the pool of one layer group in a region that other pools share."""
        pool = cls.__new__(cls)
        pool._open(spec, region, books, layered_bytes)
        return pool

    def _open(self, spec: KVSpec, region: DeviceRegion, books: Books, layered_bytes: int) -> None:
        self._place(spec, region, books)
        self.runtime = region.runtime
        self.compute: Stream = region.compute
        self.gather: Gather | None = None
        """The engine's kernel for small copies; None if it has none. The engine sets this attribute."""
        self._region = region
        self._layered_bytes = layered_bytes
        layers = sorted(layer for group in spec.groups for layer in group.layers)
        self._layers = [spec.layer(layer) for layer in layers]
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._large, self._small = _Upload(region.stream()), _Upload(region.stream())
        self._down, self._across = region.stream(), region.stream()
        # Held only briefly, because every step of computation acquires it. Guards ``_filling``.
        self._lock = threading.Lock()
        self._filling: dict[int, Filling] = {}  # page → the last copy into it, until that copy has ended
        self._distrusted = ""  # the reason given to invalidate(); empty before that call

    def share(self) -> bytes:
        """Return the handle with which another process on this machine opens the pool's memory."""
        return self._region.share()

    # -- pages -----------------------------------------------------------------------------------------

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        pages = super().allocate(count, near=near)
        for filling in self._region.fillings_in(self._large_of(pages or ())):
            self.runtime.wait(self.compute, filling.last)  # rule 6
        return pages

    def free(self, pages: Sequence[int]) -> None:
        if pages:
            under_way: dict[int, list[Filling]] = {}  # by large page
            with self._lock:
                for page in pages if self._filling else ():
                    if (filling := self._filling.get(page)) is not None:
                        under_way.setdefault(page // self.books.per_large, []).append(filling)
            self._region.leave(self._large_of(pages), under_way)  # rules 5 and 6
        super().free(pages)
        self.settle()

    def settle(self, *, wait: bool = False) -> None:
        self._region.settle(wait=wait)

    def _large_of(self, pages: Iterable[int]) -> set[int]:
        return {page // self.books.per_large for page in pages}

    # -- copies ----------------------------------------------------------------------------------------

    def read_pages(self, copies: Iterable[tuple[int, int]], *, after: Event | None = None) -> None:
        pairs = list(copies)
        if not pairs:
            return
        device, stream = self.runtime, self._down
        pages = [page for page, _ in pairs]
        device.wait(stream, after if after is not None else self.computed())  # rule 1
        for filling in self._under_way(pages):
            device.wait(stream, filling.last)  # rule 4
        self._copy(stream, [address for _, address in pairs], self._addresses(pages), SourceOrder.STREAM)
        device.synchronize(device.record(stream))  # rule 2

    def read_and_hash(
        self, copies: Sequence[tuple[int, int]], *, after: Event | None = None
    ) -> Sequence[int | None]:
        self.read_pages(copies, after=after)
        return copying.hash_all([address for _, address in copies], self.spec.page_bytes)

    def write_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        self.start_writing(list(copies)).wait()

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        self.start_copying(list(copies)).wait()

    def start_writing(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        if not copies:
            return COMPLETED
        pages = [page for page, _ in copies]
        sources = [address for _, address in copies]
        small = len(pages) * self.spec.page_bytes < self._layered_bytes
        upload = self._small if small else self._large
        with upload.queueing:
            self._await_former(upload.stream, pages)
            events = list(self._write(upload.stream, pages, sources, whole=small))
            return self._fill(pages, events)

    def start_copying(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        if not copies:
            return COMPLETED
        to, sources = [page for page, _ in copies], [page for _, page in copies]
        computed, under_way = self.computed(), self._under_way(sources)
        self.runtime.wait(self._across, computed)  # rule 1
        for filling in under_way:
            self.runtime.wait(self._across, filling.last)  # rule 4
        self._await_former(self._across, to)
        self._copy(self._across, self._addresses(to), self._addresses(sources), SourceOrder.STREAM)
        return self._fill(to, [self.runtime.record(self._across)])

    def computed(self) -> Event:
        return self.runtime.record(self.compute)

    def arrivals(self, pages: Iterable[int]) -> CopyFence:
        if self._distrusted:
            raise DeviceError(self._distrusted)
        fillings = self._under_way(pages)  # rule 3
        if not fillings:
            return COMPLETED
        return _DeviceArrivals(self.runtime, self.compute, fillings, self._places)

    def invalidate(self, why: str) -> None:
        _log.error("%s: %s", self, why)
        self._distrusted = f"{self.device}: {why}"

    # -- memory ----------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        self._region.reach.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._region.reach.unregister(address)

    def reach(self, pin: Pin) -> None:
        self._region.reach.share(pin)

    def reaches(self, address: int) -> bool:
        return self._region.reach.covers(address, address)

    # -- inside ----------------------------------------------------------------------------------------

    def _under_way(self, pages: Iterable[int]) -> list[Filling]:
        """Return the running copies into ``pages``, each once."""
        with self._lock:
            if not self._filling:
                return []
            found = {filling: None for page in pages if (filling := self._filling.get(page)) is not None}
            done = {filling for filling in found if filling.done}
            if done:
                self._filling = {page: each for page, each in self._filling.items() if each not in done}
        return [filling for filling in found if filling not in done]

    def _fill(self, pages: Sequence[int], events: Sequence[Event]) -> Filling:
        """Record that ``pages`` are being filled. No other thread can use these pages before this, because
        the caller has not added them to the index yet."""
        filling = Filling(self.runtime, events)
        with self._lock:
            self._filling.update((page, filling) for page in pages)
        return filling

    def _await_former(self, stream: Stream, pages: Sequence[int]) -> None:
        """Order later work on ``stream`` after the computation of earlier owners of ``pages``, and after
        running copies into them."""
        large_pages = self._large_of(pages)
        for event in self._region.computed_in(large_pages):
            self.runtime.wait(stream, event)  # rule 5
        with self._lock:
            fillings = {self._filling[page] for page in pages if page in self._filling}
        for filling in fillings | self._region.fillings_in(large_pages):
            self.runtime.wait(stream, filling.last)

    def _write(
        self, up: Stream, pages: Sequence[int], sources: Sequence[int], *, whole: bool
    ) -> Iterator[Event]:
        """Put the copies on stream ``up``. Yield an event after each layer, or one event after all layers."""
        to, of = self._addresses(pages), np.array(sources, np.uint64)
        if len(self._layers) < 2 or whole or not self._in_reach(of):
            self._copy(up, to, of, SourceOrder.ANY)
            yield self.runtime.record(up)
            return
        for layer in self._layers:
            start = np.uint64(layer.start)
            self._copy(up, to + start, of + start, SourceOrder.ANY, layer.stop - layer.start)
            yield self.runtime.record(up)

    def _copy(
        self,
        stream: Stream,
        to: Addresses | Sequence[int],
        sources: Addresses | Sequence[int],
        order: SourceOrder,
        nbytes: int | None = None,
    ) -> None:
        """Put copies of ``nbytes`` each (None: of a page) on ``stream``, by the fastest possible method."""
        nbytes = nbytes or self.spec.page_bytes
        targets, origins = np.asarray(to, np.uint64), np.asarray(sources, np.uint64)
        if not (self._in_reach(targets) and self._in_reach(origins)):
            # Unregistered memory can only be copied one range at a time.
            self.runtime.copy_each(stream, targets, origins, np.full(len(targets), nbytes, np.uint64))
            return
        gather = self.gather
        if gather is not None and nbytes < gather.below_bytes:
            gather.copy(stream, targets, origins, nbytes)
            return
        targets, origins, sizes = merge_neighbours(targets, origins, nbytes)
        self.runtime.copy_many(stream, targets, origins, sizes, order)

    def _in_reach(self, addresses: Addresses) -> bool:
        """Return whether the copy engines can access all of these addresses: they are all in the region, or
        all in registered host memory."""
        low, high = int(addresses.min()), int(addresses.max())
        return self._region.covers(low, high) or self._region.reach.covers(low, high)

    def _addresses(self, pages: Sequence[int]) -> Addresses:
        start, stride = np.uint64(self._start), np.uint64(self.stride)
        addresses: Addresses = np.array(pages, np.uint64) * stride + start
        return addresses


def merge_neighbours(
    to: Addresses, sources: Addresses, nbytes: int
) -> tuple[Addresses, Addresses, Addresses]:
    """Merge copies of ``nbytes`` each whose sources and whose destinations are both adjacent. Return
    destinations, sources and sizes."""
    step = np.uint64(nbytes)
    first = np.ones(len(to), bool)
    first[1:] = (to[1:] != to[:-1] + step) | (sources[1:] != sources[:-1] + step)
    starts = np.flatnonzero(first)
    counts = np.diff(np.append(starts, len(to))).astype(np.uint64)
    return to[starts], sources[starts], counts * step


def pages_that_fit(spec: KVSpec, device: Device, fraction: float = FRACTION) -> int:
    """Return how many pages fit into ``fraction`` of the device's free memory."""
    return int(device.memory().free * fraction) // spec.page_bytes


def _no_room(spec: KVSpec, num_pages: int, device: Device) -> UsageError:
    memory, fit = device.memory(), pages_that_fit(spec, device)
    return UsageError(
        f"a page pool of {format_size(num_pages * spec.page_bytes)} ({num_pages} pages of "
        f"{format_size(spec.page_bytes)}, {num_pages * spec.chunk_tokens} tokens) does not fit "
        f"{device.name}: {format_size(memory.free)} of its {format_size(memory.total)} are free, "
        f"room for {fit} pages ({fit * spec.chunk_tokens} tokens)"
    )
