"""Pages on several devices, for processes that each compute some of the heads, or some of the pages.

A page still has one number, is allocated, loaded, saved and evicted as a whole, and has all heads in host
memory and on disk. On a device, the page has only the heads of this device
(:meth:`KVSpec.of_heads <tierstore.spec.KVSpec.of_heads>`). A copy to the devices divides the page into these
shares, and a copy to the host joins them. If several devices have the same head, a copy to the host reads it
from the first of these devices. The pages can be in *parts* (:mod:`tierstore.tiers.large_pages`), each on
separate devices. On its devices, a part's pages are numbered from 0. ::

    host     [ layer 0: K h0 h1 V h0 h1 | layer 1: K h0 h1 V h0 h1 ]
    cuda:0   [ K h0 V h0 | K h0 V h0 ]         cuda:1   [ K h1 V h1 | K h1 V h1 ]

One process allocates the memory on all devices and does all copies. A process that computes opens the memory
of its device by a handle (:meth:`DeviceShare.attach`). Copies have ended when their calls return. No page may
be copied while a step runs: the first process waits for each step on all devices.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from tierstore import copying
from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore.tiers.device import (
    Addresses,
    Device,
    DeviceMemoryError,
    Event,
    SourceOrder,
    Stream,
)
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.large_pages import Books, LargePages
from tierstore.tiers.pinned import Pin, Reach
from tierstore.tiers.two_level import SmallPages, books_of, checked_cut, large_bytes_for
from tierstore.units import format_size

Pairs = Iterable[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ShareLayout:
    """The memory on one device: ``count`` large pages of ``large_bytes`` bytes. ``specs`` has the layout of
    each layer group's pages on the device. A large page has room for ``per_large`` pages of each group."""

    specs: tuple[KVSpec, ...]
    per_large: tuple[int, ...]
    large_bytes: int
    count: int

    @classmethod
    def of(cls, specs: Sequence[KVSpec], heads: range, per_large: Sequence[int], count: int) -> ShareLayout:
        """Return the layout for these ``heads`` of pages of ``specs``."""
        own = tuple(spec.of_heads(heads) for spec in specs)
        large_bytes = large_bytes_for([spec.page_bytes for spec in own], per_large)
        return cls(own, tuple(per_large), large_bytes, count)

    @property
    def nbytes(self) -> int:
        return self.large_bytes * self.count


class DeviceShare:
    """One device's share of the heads of all pages of a part, at ``address`` in its memory."""

    def __init__(self, runtime: Device, address: int, layout: ShareLayout) -> None:
        self.runtime = runtime
        self.layout = layout
        self.device = runtime.name
        self.address = address
        self.large_pages = LargePages(layout.large_bytes, layout.count)

    @classmethod
    def allocate(cls, runtime: Device, layout: ShareLayout) -> DeviceShare:
        """Allocate the memory. Raise :class:`UsageError` if the device has too little free memory."""
        free = runtime.memory().free
        try:
            if layout.nbytes > free:
                raise DeviceMemoryError(f"{runtime.name} has less than {layout.nbytes} bytes free")
            share = cls(runtime, runtime.allocate(layout.nbytes), layout)
        except DeviceMemoryError as error:
            raise UsageError(
                f"{runtime.name} has no room for its share of the pages, {format_size(layout.nbytes)}: "
                f"{format_size(free)} are free"
            ) from error
        # Not at interpreter exit, because the driver may be unloaded before.
        weakref.finalize(share, runtime.free, share.address).atexit = False
        return share

    @classmethod
    def attach(cls, runtime: Device, handle: bytes, layout: ShareLayout) -> DeviceShare:
        """Open the memory that another process has allocated. The memory stays open until this process
        ends."""
        return cls(runtime, runtime.open(handle), layout)

    def handle(self) -> bytes:
        """Return the handle with which another process on this machine opens the memory."""
        return self.runtime.share(self.address)

    def rows(self, count: int, nbytes: int, stride: int) -> Any:
        return self.runtime.view(self.address, (count, nbytes), stride=None if stride == nbytes else stride)

    def pools(self) -> list[PagePool]:
        """Return a pool for each layer group, for computation only. Pages are allocated by
        :class:`DividedPool`."""
        parts = zip(self.layout.specs, self.layout.per_large, strict=True)
        return [
            PagePool.within(spec, self, SmallPages(self.large_pages, per_large, spec.page_bytes))
            for spec, per_large in parts
        ]


class DividedRegion:
    """The memory of the pools of a model, on several devices. ``shares`` has the shares of the first part,
    then those of the second part, and so on."""

    def __init__(self, shares: Sequence[DeviceShare], large_bytes: int, present: int, parts: int) -> None:
        """``large_bytes`` is the size of a large page with all heads. Only ``present`` large pages are
        used."""
        self.shares = tuple(shares)
        self.streams = [share.runtime.stream() for share in shares]
        self.device = ",".join(share.device for share in shares)
        self.address = 0
        fixed = "a page pool on several devices cannot be resized"
        count = shares[0].layout.count * parts
        self.large_pages = LargePages(large_bytes, count, present=present, fixed=fixed, parts=parts)
        self.reach = Reach(shares[0].runtime)  # memory registered with one device is accessible to all
        weakref.finalize(self, _release, [share.runtime for share in shares], self.streams).atexit = False

    @property
    def shares_per_part(self) -> int:
        return len(self.shares) // self.large_pages.parts

    def share(self, part: int, number: int) -> DeviceShare:
        """Return share ``number`` of a part."""
        return self.shares[part * self.shares_per_part + number]

    def rows(self, count: int, nbytes: int, stride: int) -> Any:
        """Return None, because an array cannot be on several devices."""
        return None


def _release(devices: Sequence[Device], streams: Sequence[Stream]) -> None:
    for device, stream in zip(devices, streams, strict=True):
        device.release(stream)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of a page: their offsets in a page with all heads, their offsets in a share's page, and their
    sizes."""

    whole: Addresses
    own: Addresses
    sizes: Addresses


class DividedPool(PagePool):
    """The pages of one layer group, divided over the shares of a region; see the module's docstring. Methods
    that copy are thread-safe. The copies have ended when they return."""

    def __init__(
        self, spec: KVSpec, region: DividedRegion, books: Books, group: int, heads: Sequence[range]
    ) -> None:
        """``heads`` has the heads of each share."""
        self._place(spec, region, books)
        self._region = region
        self._part_pages = region.large_pages.part_size * books.per_large
        self._bytes = [share.layout.specs[group].page_bytes for share in region.shares]
        self._strides = [share.layout.large_bytes // books.per_large for share in region.shares]
        self._up, self._down = [], []
        known: set[tuple[int, int]] = set()
        for number, own in enumerate(heads):
            pieces, part = spec.pieces_of(own), self._part_of(number)
            self._up.append(_pieces(pieces))
            self._down.append(_pieces([each for each in pieces if (part, each[0].start) not in known]))
            known.update((part, whole.start) for whole, _ in pieces)

    def page_address(self, page: int) -> int:
        raise AssertionError("a page on several devices has no address")

    def write_pages(self, copies: Pairs) -> None:
        self._copy(list(copies), self._up, up=True)

    def read_pages(self, copies: Pairs, *, after: Event | None = None) -> None:
        self._copy(list(copies), self._down, up=False)

    def read_and_hash(
        self, copies: Sequence[tuple[int, int]], *, after: Event | None = None
    ) -> Sequence[int | None]:
        self.read_pages(copies)
        return copying.hash_all([address for _, address in copies], self.spec.page_bytes)

    def copy_pages(self, copies: Pairs) -> None:
        pairs = np.array(list(copies), np.uint64).reshape(-1, 2)
        events, step = [], self._region.shares_per_part
        for number, source in product(range(len(self._region.shares)), repeat=2):
            here, there = self._part_of(number), self._part_of(source)
            chosen = pairs[(pairs // np.uint64(self._part_pages) == (here, there)).all(axis=1)]
            if len(chosen) and number % step == source % step:  # the same heads
                sizes = np.full(len(chosen), self._bytes[number], np.uint64)
                to, sources = self._addresses(number, chosen[:, 0]), self._addresses(source, chosen[:, 1])
                # The driver accepts batches only within a device, or from and to pinned host memory.
                events.append(self._queue(number, to, sources, sizes, batch=number == source))
        self._wait(events)

    def register(self, address: int, nbytes: int) -> None:
        self._region.reach.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._region.reach.unregister(address)

    def reach(self, pin: Pin) -> None:
        self._region.reach.share(pin)

    def _copy(self, copies: Sequence[tuple[int, int]], pieces: Sequence[_Pieces], *, up: bool) -> None:
        if not copies:
            return
        pages, hosts = np.array(copies, np.uint64).T
        low, high = int(hosts.min()), int(hosts.max()) + self.spec.page_bytes - 1
        pinned = self._region.reach.covers(low, high)
        events, parts = [], pages // np.uint64(self._part_pages)
        for number, each in enumerate(pieces):
            own = parts == self._part_of(number)
            if len(each.sizes) and own.any():
                here = (self._addresses(number, pages[own])[:, None] + each.own).reshape(-1)
                there = (hosts[own, None] + each.whole).reshape(-1)
                sizes = np.tile(each.sizes, int(own.sum()))
                to, sources = (here, there) if up else (there, here)
                events.append(self._queue(number, to, sources, sizes, batch=pinned))
        self._wait(events)

    def _queue(
        self, number: int, to: Addresses, sources: Addresses, sizes: Addresses, *, batch: bool
    ) -> tuple[Device, Event]:
        """Start copies from or to a share, in a ``batch`` or one by one. A batch is possible only with pinned
        host memory."""
        runtime, stream = self._region.shares[number].runtime, self._region.streams[number]
        if batch:
            runtime.copy_many(stream, to, sources, sizes, SourceOrder.STREAM)
        else:
            runtime.copy_each(stream, to, sources, sizes)
        return runtime, runtime.record(stream)

    def _wait(self, events: Sequence[tuple[Device, Event]]) -> None:
        for runtime, event in events:
            runtime.synchronize(event)

    def _part_of(self, number: int) -> int:
        return number // self._region.shares_per_part

    def _addresses(self, number: int, pages: Addresses) -> Addresses:
        """Return the addresses of pages, which are in the share's part, in the share's memory."""
        start, stride = np.uint64(self._region.shares[number].address), np.uint64(self._strides[number])
        first = np.uint64(self._part_of(number) * self._part_pages)
        addresses: Addresses = (pages - first) * stride + start
        return addresses


def _pieces(pieces: Sequence[tuple[Any, int]]) -> _Pieces:
    whole, own, sizes = (
        np.array(numbers, np.uint64)
        for numbers in (
            [each.start for each, _ in pieces],
            [start for _, start in pieces],
            [each.nbytes for each, _ in pieces],
        )
    )
    return _Pieces(whole, own, sizes)


def open_divided_pools(
    specs: Sequence[KVSpec], nbytes: int, shares: Mapping[Device, range], *, parts: int = 1
) -> tuple[DividedPool, ...]:
    """Open pools for these layouts (of one layer group each). ``nbytes`` is the size of their memory, with
    all heads. ``shares`` has the heads of each device: first of the devices of the first of ``parts``, then
    of the second part, and so on. Raise :class:`UsageError` if a device has too little memory."""
    page_bytes = [spec.page_bytes for spec in specs]
    pages = checked_cut(page_bytes, nbytes)
    present = nbytes // pages.large_bytes
    heads = list(shares.values())
    region = DividedRegion(
        [
            DeviceShare.allocate(device, ShareLayout.of(specs, own, pages.per_large, -(-present // parts)))
            for device, own in shares.items()
        ],
        pages.large_bytes,
        present,
        parts,
    )
    books = books_of(page_bytes, pages, region.large_pages)
    return tuple(
        DividedPool(spec, region, each, group, heads)
        for group, (spec, each) in enumerate(zip(specs, books, strict=True))
    )
