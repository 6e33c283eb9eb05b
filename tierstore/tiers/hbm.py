"""The hbm tier: a pool of pages on the compute device, which the attention kernels read in place.

On a machine without a GPU, the device is ``cpu``: the pool is ordinary memory, but is still called HBM. A
page is ``KVSpec.page_bytes`` contiguous bytes, so it moves in one copy. The pool of a GPU is
:class:`tierstore.tiers.device_pool.DevicePool`. :func:`tierstore.open_pool` opens a pool for a device, and
:func:`tierstore.open_pools` opens the pools of a model with several layer groups."""

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
    """A copy into pages of the pool that may still be running. Computation on the pages may be started at
    once, because :meth:`PagePool.arrivals` orders it after the copy. The *source* of the copy must stay until
    :meth:`wait` returns."""

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived."""

    def wait(self) -> None:
        """Block until all bytes have arrived."""


class CopyFence(Protocol):
    """The copies in flight into the pages of one batch."""

    def wait(self, layer: int) -> None:
        """Order later computation after the copies of layer ``layer`` (a layer number of the model). Does not
        block."""

    def arrived(self, layer: int) -> bool:
        """Return whether the copies of layer ``layer`` have ended. Does not block."""

    @property
    def pending(self) -> bool:
        """Whether any copy was in flight when this fence was created."""


class _Here:
    """A ``PendingCopy`` and ``CopyFence`` for copies that have already ended."""

    done = True
    pending = False

    def wait(self, layer: int = 0) -> None: ...

    def arrived(self, layer: int) -> bool:
        return True


COMPLETED = _Here()


class _Both:
    """A fence that combines the fences of several pools."""

    pending = True

    def __init__(self, fences: Sequence[CopyFence]) -> None:
        self._fences = fences

    def wait(self, layer: int) -> None:
        for fence in self._fences:
            fence.wait(layer)

    def arrived(self, layer: int) -> bool:
        return all(fence.arrived(layer) for fence in self._fences)


def arrivals_of(pools: Sequence[PagePool], tables: Sequence[Iterable[int]]) -> CopyFence:
    """Return the fence to wait for before computing with these pages of each pool. Raise the errors of
    :meth:`PagePool.arrivals`."""
    fences = [pool.arrivals(pages) for pool, pages in zip(pools, tables, strict=True)]
    pending = [fence for fence in fences if fence.pending]
    return _Both(pending) if len(pending) > 1 else next(iter(pending), COMPLETED)


class HostRegion:
    """Memory of this process for the pools of a model, in one mapping: ``present`` large pages of
    ``large_bytes`` bytes, which may grow to ``most``. If it is not ``touched``, the kernel provides the
    memory of a page when the page is first written. With ``shared_parts``, other processes can map the memory
    or one of its parts (:meth:`attach`)."""

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
        """Map ``count`` large pages of another process's region, from ``first`` on. ``fd`` is the region's
        shared memory, and is closed later. Only the other process knows which pages are free. Raise
        :class:`UsageError` if the memory cannot be mapped."""
        start = first * large_bytes
        skipped = start % ALIGNMENT  # mappings of a file begin at a multiple of the system's page size
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
    """The memory of one or more pools: a :class:`HostRegion`, or memory of a device."""

    @property
    def device(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def large_pages(self) -> LargePages: ...

    def rows(self, count: int, nbytes: int, stride: int) -> Any: ...


class PagePool:
    """Pages of ``spec`` in one allocation, and which of them are free. Not thread-safe: the caller must lock.
    (The methods that copy bytes are thread-safe, and release the GIL.)

    ``array`` is the memory as uint8 ``[num_pages, page_bytes]``, with rows ``stride`` bytes apart; an engine
    views it in its own dtype. ``num_pages`` is the largest possible number of pages. ``capacity`` is the
    current number of pages (:mod:`tierstore.tiers.large_pages`). If pools of other layer groups share the
    memory, it is the number that this pool would have with all of the memory. ``overlaps`` says whether
    copies run at the same time as computation.
    """

    overlaps = False
    own_memory = False
    """Whether the pool never shares its memory with the pools of other layer groups."""
    array: Any
    """A numpy array on a CPU. On other devices, an object that the device's libraries accept."""

    def __init__(
        self, spec: KVSpec, num_pages: int, *, most: int | None = None, shared_parts: int = 0
    ) -> None:
        """Open a pool of ``num_pages`` pages, which :meth:`resize` can grow to ``most`` (None:
        ``num_pages``). With ``shared_parts``, other processes can map the memory (:meth:`HostRegion.attach`),
        and pages are allocated from all parts in turn."""
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
        """Current number of pages."""
        return self.large_pages.present * self.books.per_large

    @property
    def target(self) -> int:
        """Number of pages after the :attr:`excess` has been freed."""
        return self.large_pages.target * self.books.per_large

    @property
    def excess(self) -> int:
        """Number of pages above :attr:`target`: this many pages will be released when they become free."""
        return self.large_pages.excess * self.books.per_large

    def resize(self, nbytes: int) -> PoolSize:
        """Resize the memory to ``nbytes``, rounded down to whole (large) pages. Return the new size.

        Memory is added at once, as far as the device has free memory. Free pages are released at once, and
        pages in use when they become free. No page in use moves. Raise :class:`UsageError` for a size outside
        the limits, or if the pool's size cannot change.
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
        """Release the memory of removed pages, except pages on which work is running. With ``wait``, wait for
        this work, and release all."""

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return self.books.free_pages

    @property
    def used_pages(self) -> int:
        """Pages that are allocated."""
        return self.books.used_pages

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """Allocate ``count`` pages, preferably those with the lowest numbers. Return None if fewer are free.
        ``near`` are pages that will be freed at about the same time. A pool that divides large pages places
        the new pages in the same large pages."""
        return self.books.allocate(count, near=near)

    def free(self, pages: Sequence[int]) -> None:
        """Free pages. Work that was started on these pages may still be running."""
        self.books.free(pages)

    def close(self) -> None:
        """Close the pool's threads and files, if it has any. The pool must not be used any more."""

    # -- copies that are done when the call returns --------------------------------------------------

    def read_pages(self, copies: Iterable[tuple[int, int]], *, after: Event | None = None) -> None:
        """Copy pages to host memory: (page, address) pairs. The copies wait for the computation before the
        event ``after`` (from :meth:`computed`; None: all computation so far)."""
        copying.copy_all(
            ((address, self.page_address(page)) for page, address in copies), self.spec.page_bytes
        )

    def read_and_hash(
        self, copies: Sequence[tuple[int, int]], *, after: Event | None = None
    ) -> Sequence[int | None]:
        """Copy pages as :meth:`read_pages` does. Return the XXH3-64 of the copied bytes of each page; None
        for a page that could not be read."""
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

    # -- copies at the same time as computation --------------------------------------------------------

    def start_writing(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        """Start the copies of :meth:`write_pages`, which may run at the same time as computation."""
        self.write_pages(copies)
        return COMPLETED

    def start_copying(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        """Start the copies of :meth:`copy_pages`, which may run at the same time as computation."""
        self.copy_pages(copies)
        return COMPLETED

    def computed(self) -> Event | None:
        """Return an event after all computation started on pages so far; None if all of it has ended."""
        return None

    def arrivals(self, pages: Iterable[int]) -> CopyFence:
        """Return the fence to wait for before computing with these pages. Raise
        :class:`~tierstore.tiers.device.DeviceError` if :meth:`invalidate` was called."""
        return COMPLETED

    def invalidate(self, why: str) -> None:
        """Make :meth:`arrivals` raise an error from now on, because pages in use may have wrong bytes."""
        raise AssertionError("this pool's copies are done when the call returns")

    # -- memory ----------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        """Prepare host memory for copies from and to pages. The memory must stay until it is unregistered."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register` for host memory at ``address``, before the memory is freed."""

    def reach(self, pin: Pin) -> None:
        """Prepare host memory that other pools use too. ``pin`` registers the memory with a device, once for
        all pools, and unregisters it before it is freed."""

    def reaches(self, address: int) -> bool:
        """Return whether host memory at ``address`` is registered now. Large loads from registered memory are
        copied layer by layer, at the same time as computation."""
        return False

    def page_address(self, page: int) -> int:
        """Return the address of a page in the device's memory."""
        return self._start + page * self.stride


def check_pages(spec: KVSpec, num_pages: int) -> None:
    """Raise :class:`UsageError` for a pool without pages."""
    if num_pages < 1:
        raise UsageError(f"a page pool needs at least 1 page of {spec.page_bytes} bytes, got {num_pages}")
