"""The hbm tier: a pool of pages on the compute device, which the attention kernels read in place.

On a machine without a GPU, the device is ``cpu``: the pool is ordinary memory, and "HBM" is only its place in
the hierarchy. A page is ``KVSpec.page_bytes`` contiguous bytes, so it moves in one copy. The pool of a GPU is
:class:`tierstore.tiers.device_pool.DevicePool`. :func:`tierstore.open_pool` opens the pool that a device
needs, and :func:`tierstore.open_pools` opens those of a model with several layer groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tierstore import copying
from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT, Memory
from tierstore.spec import KVSpec
from tierstore.tiers.device import Event
from tierstore.tiers.large_pages import Books, HostBacking, LargePages, PoolSize, WholePages
from tierstore.tiers.pinned import Pin
from tierstore.units import format_size, round_up


class PendingCopy(Protocol):
    """A copy into pages of the pool that may still be running. Computation may use the pages at once, because
    the pool keeps the order (:meth:`PagePool.arrivals`). The *source* of the copy must stay until
    :meth:`wait` returns."""

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived."""

    def wait(self) -> None:
        """Block until all bytes have arrived."""


class CopyFence(Protocol):
    """The copies in flight into the pages of one batch."""

    def wait(self, layer: int) -> None:
        """Order later computation after the arrival of layer ``layer`` (the model's own index). Does not
        block."""

    def arrived(self, layer: int) -> bool:
        """Return whether layer ``layer`` has arrived, so that nothing has to wait for it. Does not block."""

    @property
    def pending(self) -> bool:
        """Whether any copy was in flight when this was made."""


class _Here:
    """A ``PendingCopy`` and ``CopyFence`` for pools whose copies are done when the call returns."""

    done = True
    pending = False

    def wait(self, layer: int = 0) -> None:
        """Return at once: no copy is in flight."""

    def arrived(self, layer: int) -> bool:
        return True


COMPLETED = _Here()


class _Both:
    """The fence over pages of several pools."""

    pending = True

    def __init__(self, fences: Sequence[CopyFence]) -> None:
        self._fences = fences

    def wait(self, layer: int) -> None:
        for fence in self._fences:
            fence.wait(layer)

    def arrived(self, layer: int) -> bool:
        return all(fence.arrived(layer) for fence in self._fences)


def arrivals_of(pools: Sequence[PagePool], tables: Sequence[Iterable[int]]) -> CopyFence:
    """Return the fence to wait for before computing with these pages of each pool. See
    :meth:`PagePool.arrivals`; raises the same errors."""
    fences = [pool.arrivals(pages) for pool, pages in zip(pools, tables, strict=True)]
    pending = [fence for fence in fences if fence.pending]
    return _Both(pending) if len(pending) > 1 else next(iter(pending), COMPLETED)


class HostRegion:
    """Memory of this process for the pools of a model: ``present`` large pages of ``large_bytes`` bytes,
    which may grow to ``most``, in one mapping. If it is not ``touched``, a page takes memory when it is
    written. If it has ``shared_parts``, other processes can map it, or one of its parts (:meth:`attach`)."""

    device = "cpu"

    def __init__(
        self,
        large_bytes: int,
        present: int,
        *,
        most: int | None = None,
        touched: bool = True,
        shared_parts: int = 0,
    ) -> None:
        parts = max(shared_parts, 1)
        count = round_up(max(present, most or 0), parts)
        reserve = count > present or not touched
        memory = Memory(count * large_bytes, shared=shared_parts > 0, reserve=reserve, huge_pages=touched)
        self._take(
            memory,
            LargePages(large_bytes, count, present=present, backing=HostBacking(memory), parts=parts),
        )
        if touched:
            for first, pages in self.large_pages.present_parts():
                memory.populate(first=first * large_bytes, nbytes=pages * large_bytes)
        else:
            memory.allow_huge_pages(large_bytes)

    @classmethod
    def attach(cls, fd: int, large_bytes: int, count: int, *, first: int = 0) -> HostRegion:
        """Map ``count`` large pages of the shared memory of another process's region, from ``first`` on.
        Takes over ``fd``. Which pages are free is known to the other process only. Raise
        :class:`UsageError` if the memory cannot be mapped."""
        start = first * large_bytes
        skipped = start % ALIGNMENT  # a file is mapped in whole system pages
        memory = Memory.attach(fd, skipped + count * large_bytes, offset=start - skipped)
        region = cls.__new__(cls)
        region._take(memory, LargePages(large_bytes, count), skipped)
        return region

    def _take(self, memory: Memory, large_pages: LargePages, skipped: int = 0) -> None:
        self.memory = memory
        self._skipped = skipped
        self.address = memory.address + skipped
        self.large_pages = large_pages

    def rows(self, count: int, nbytes: int, stride: int) -> Any:
        """Return the memory as uint8 ``[count, nbytes]``, with rows ``stride`` bytes apart."""
        rows = np.frombuffer(self.memory.view(self._skipped, count * stride), np.uint8)
        return rows.reshape(count, stride)[:, :nbytes]


class Region(Protocol):
    """Memory for pools: a :class:`HostRegion`, or memory of a device."""

    @property
    def device(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def large_pages(self) -> LargePages: ...

    def rows(self, count: int, nbytes: int, stride: int) -> Any: ...


class PagePool:
    """Pages of ``spec`` in one allocation, and which of them are free. Not thread-safe: its owner locks. (The
    methods that copy bytes are thread-safe, and release the GIL.)

    ``array`` is the memory as uint8 ``[num_pages, page_bytes]``, rows ``stride`` bytes apart; an engine views
    it in its own dtype. ``num_pages`` is the largest possible number of pages. ``capacity`` is the present
    number (:mod:`tierstore.tiers.large_pages`); if pools of other layer groups share the memory, the number
    if this pool had all of it. ``overlaps`` says whether copies run beside the computation.
    """

    overlaps = False
    own_memory = False
    """Whether it never shares its memory with the pools of other layer groups."""
    array: Any
    """A numpy array on a CPU. On other devices, an object that the device's libraries accept."""

    def __init__(
        self, spec: KVSpec, num_pages: int, *, most: int | None = None, shared_parts: int = 0
    ) -> None:
        """Open a pool of ``num_pages`` pages, which :meth:`resize` can grow to ``most`` (None:
        ``num_pages``). With ``shared_parts``, other processes can map the memory (:meth:`HostRegion.attach`),
        and pages are taken from all parts in turn."""
        check_pages(spec, num_pages)
        region = HostRegion(spec.page_bytes, num_pages, most=most, shared_parts=shared_parts)
        self._place(spec, region, WholePages(region.large_pages))

    @classmethod
    def within(cls, spec: KVSpec, region: Region, books: Books) -> PagePool:
        """Return the pool of one layer group in memory that other pools share."""
        pool = cls.__new__(cls)
        pool._place(spec, region, books)
        return pool

    def _place(self, spec: KVSpec, region: Region, books: Books) -> None:
        self.spec = spec
        self.device = region.device
        self.books = books
        self.large_pages = region.large_pages
        self.region = region
        self.num_pages = region.large_pages.count * books.per_large
        self.stride = region.large_pages.large_bytes // books.per_large
        self._start = region.address
        self.array = region.rows(self.num_pages, spec.page_bytes, self.stride)

    def __repr__(self) -> str:
        size = format_size(self.large_pages.nbytes)
        return f"{type(self).__name__}({self.device}, {self.free_pages}/{self.capacity} pages free, {size})"

    @property
    def address(self) -> int:
        """Address of page 0, in the device's memory."""
        return self._start

    @property
    def capacity(self) -> int:
        """Present number of pages."""
        return self.large_pages.present * self.books.per_large

    @property
    def target(self) -> int:
        """Number of pages after the excess ones have been freed."""
        return self.large_pages.target * self.books.per_large

    @property
    def excess(self) -> int:
        """Pages above the target. They are not allocated again."""
        return self.large_pages.excess * self.books.per_large

    def resize(self, nbytes: int) -> PoolSize:
        """Resize the memory to ``nbytes``, rounded down to whole (large) pages. Return the new size.

        Memory is added at once, as far as the device has any. It is removed as soon as pages are free; free
        pages go at once. No page in use moves. Raise :class:`UsageError` for a size outside the limits, or if
        the device cannot change it.
        """
        size = self.large_pages.large_bytes
        if not size <= nbytes <= self.large_pages.count * size:
            raise UsageError(
                f"the pool's size must be {format_size(size)} to "
                f"{format_size(self.large_pages.count * size)}, got {format_size(nbytes)}"
            )
        self.large_pages.resize(nbytes // size)
        return self.large_pages.size

    def settle(self, *, wait: bool = False) -> None:
        """Release the memory of removed pages, as far as no work on it is running. With ``wait``, wait for
        that work."""

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self.books.free_pages

    @property
    def used_pages(self) -> int:
        """Pages that are allocated."""
        return self.books.used_pages

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """Allocate ``count`` pages, lowest first where possible. Return None if fewer are free. ``near`` are
        pages that will be freed at about the same time: a pool of two levels keeps these together."""
        return self.books.allocate(count, near=near)

    def free(self, pages: Sequence[int]) -> None:
        """Free pages. Work that was started on them may still be running."""
        self.books.free(pages)

    def close(self) -> None:
        """Release what the pool has besides memory. It must not be used any more."""

    # -- copies that are done when the call returns --------------------------------------------------

    def read_pages(self, copies: Iterable[tuple[int, int]], *, after: Event | None = None) -> None:
        """Copy pages to host memory: (page, address) pairs. The bytes are those at ``after`` (from
        :meth:`computed`; None: now), when all work started before it is done."""
        copying.copy_all(
            ((address, self.page_address(page)) for page, address in copies), self.spec.page_bytes
        )

    def read_and_hash(
        self, copies: Sequence[tuple[int, int]], *, after: Event | None = None
    ) -> Sequence[int | None]:
        """Copy as :meth:`read_pages` does. Return the XXH3-64 of each page as it was copied; None for a page
        that could not be read."""
        addresses = ((address, self.page_address(page)) for page, address in copies)
        return copying.copy_and_hash(addresses, self.spec.page_bytes)

    def write_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy from host memory into pages: (page, address) pairs."""
        copying.copy_all(
            ((self.page_address(page), address) for page, address in copies), self.spec.page_bytes
        )

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy within the pool: (destination page, source page) pairs."""
        addresses = ((self.page_address(to), self.page_address(of)) for to, of in copies)
        copying.copy_all(addresses, self.spec.page_bytes)

    # -- copies beside the computation ---------------------------------------------------------------

    def start_writing(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        """Start :meth:`write_pages`, which may run beside the computation."""
        self.write_pages(copies)
        return COMPLETED

    def start_copying(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        """Start :meth:`copy_pages`, which may run beside the computation."""
        self.copy_pages(copies)
        return COMPLETED

    def computed(self) -> Event | None:
        """Return an event after all work started on pages so far; None if all of it is done."""
        return None

    def arrivals(self, pages: Iterable[int]) -> CopyFence:
        """Return the fence to wait for before computing with these pages. Raise
        :class:`~tierstore.tiers.device.DeviceError` if :meth:`invalidate` was called."""
        return COMPLETED

    def invalidate(self, why: str) -> None:
        """Refuse all further computation, because pages in use may have wrong bytes."""
        raise AssertionError("this pool's copies are done when the call returns")

    # -- memory ----------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        """Prepare host memory for copies from and to pages. It must stay until it is unregistered."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register` for host memory at ``address``, before the memory is freed."""

    def reach(self, pin: Pin) -> None:
        """Prepare host memory that other pools use too. ``pin`` registers it with a device, once for all
        pools, and unregisters it before it is freed."""

    def reaches(self, address: int) -> bool:
        """Return whether host memory at ``address`` is registered by now. Large loads from it arrive layer by
        layer, beside the computation."""
        return False

    def page_address(self, page: int) -> int:
        """Return the address of a page in the device's memory."""
        return self._start + page * self.stride


def check_pages(spec: KVSpec, num_pages: int) -> None:
    """Raise :class:`UsageError` for a pool without pages."""
    if num_pages < 1:
        raise UsageError(f"a page pool needs at least 1 page of {spec.page_bytes} bytes, got {num_pages}")
