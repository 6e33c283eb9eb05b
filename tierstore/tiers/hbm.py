"""The hbm tier: a pool of pages on the device that computes, read in place by the attention kernels.

On a machine without a GPU the device is ``cpu``: the pool is ordinary memory and "HBM" is only its place in
the hierarchy. One page is ``KVSpec.page_bytes`` contiguous bytes, so a page moves in one copy. The pool of a
GPU is :class:`tierstore.tiers.device_pool.DevicePool`; :func:`tierstore.open_pool` makes the one that a
device needs, :func:`tierstore.open_pools` those of a model with several layer groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tierstore import copying
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec
from tierstore.tiers.device import Event
from tierstore.tiers.large_pages import Books, HostBacking, LargePages, PoolSize, WholePages
from tierstore.tiers.pinned import Pin
from tierstore.units import format_size


class PendingCopy(Protocol):
    """Pages that are on their way into the pool. Whoever computes may have them at once: the pool sees to the
    order (:meth:`PagePool.arrivals`). What they are copied *from* must stay until :meth:`wait` returns."""

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived."""

    def wait(self) -> None:
        """Block until they have."""


class CopyFence(Protocol):
    """The pages of one batch that are on their way."""

    def wait(self, layer: int) -> None:
        """What computes from now on happens after layer ``layer`` (the model's own index) of them is there.
        Does not block."""

    def arrived(self, layer: int) -> bool:
        """Whether layer ``layer`` of them is there, so that nothing waits for it. Does not block."""

    @property
    def pending(self) -> bool:
        """Whether there were any to wait for when this was made."""


class _Here:
    """Both of the above for a pool whose copies are done when the call returns."""

    done = True
    pending = False

    def wait(self, layer: int = 0) -> None:
        """Nothing is on its way."""

    def arrived(self, layer: int) -> bool:
        return True


COMPLETED = _Here()


class _Both:
    """Pages of several pools."""

    pending = True

    def __init__(self, fences: Sequence[CopyFence]) -> None:
        self._fences = fences

    def wait(self, layer: int) -> None:
        for fence in self._fences:
            fence.wait(layer)

    def arrived(self, layer: int) -> bool:
        return all(fence.arrived(layer) for fence in self._fences)


def arrivals_of(pools: Sequence[PagePool], tables: Sequence[Iterable[int]]) -> CopyFence:
    """What has to be waited for before computing with these pages of each pool: see
    :meth:`PagePool.arrivals`. Raises what that raises."""
    fences = [pool.arrivals(pages) for pool, pages in zip(pools, tables, strict=True)]
    pending = [fence for fence in fences if fence.pending]
    return _Both(pending) if len(pending) > 1 else next(iter(pending), COMPLETED)


class HostRegion:
    """``present`` large pages of ``large_bytes`` bytes, which may become ``most``, in one mapping of ordinary
    memory: what the pools of a model lie in."""

    device = "cpu"

    def __init__(self, large_bytes: int, present: int, *, most: int | None = None) -> None:
        count = max(present, most or 0)
        self._memory = Memory(count * large_bytes, shared=False, reserve=count > present)
        self._memory.populate(nbytes=present * large_bytes)
        self.address = self._memory.address
        self.large_pages = LargePages(large_bytes, count, present=present, backing=HostBacking(self._memory))

    def rows(self, count: int, nbytes: int, stride: int) -> Any:
        """The memory as uint8 ``[count, nbytes]``, rows ``stride`` bytes apart."""
        rows = np.frombuffer(self._memory.view(0, count * stride), np.uint8)
        return rows.reshape(count, stride)[:, :nbytes]


class Region(Protocol):
    """Memory that pools lie in: a :class:`HostRegion`, or a device's."""

    @property
    def device(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def large_pages(self) -> LargePages: ...

    def rows(self, count: int, nbytes: int, stride: int) -> Any: ...


class PagePool:
    """Pages of ``spec`` in one allocation, and who has none of them. Not thread-safe: its owner locks. (The
    methods that copy bytes are, and release the GIL.)

    ``array`` is the memory as uint8 ``[num_pages, page_bytes]``, rows ``stride`` bytes apart; an engine views
    it in its own dtype. ``num_pages`` is how many there may be, ``capacity`` how many there are
    (:mod:`tierstore.tiers.large_pages`): where the pools of other layer groups lie in the same memory, if
    this one had all of it. ``overlaps`` says whether copies go on beside what computes."""

    overlaps = False
    array: Any
    """A numpy array on a CPU; elsewhere whatever the libraries of the device take."""

    def __init__(self, spec: KVSpec, num_pages: int, *, most: int | None = None) -> None:
        """``num_pages`` pages, which :meth:`resize` may make ``most`` (None: as many)."""
        check_pages(spec, num_pages)
        region = HostRegion(spec.page_bytes, num_pages, most=most)
        self._place(spec, region, WholePages(region.large_pages))

    @classmethod
    def within(cls, spec: KVSpec, region: HostRegion, books: Books) -> PagePool:
        """The pool of one layer group in a memory that others share."""
        pool = cls.__new__(cls)
        pool._place(spec, region, books)
        return pool

    def _place(self, spec: KVSpec, region: Region, books: Books) -> None:
        self.spec = spec
        self.device = region.device
        self.books = books
        self.large_pages = region.large_pages
        self.num_pages = region.large_pages.count * books.per_large
        self.stride = region.large_pages.large_bytes // books.per_large
        self._start = region.address
        self.array = region.rows(self.num_pages, spec.page_bytes, self.stride)

    def __repr__(self) -> str:
        size = format_size(self.large_pages.nbytes)
        return f"{type(self).__name__}({self.device}, {self.free_pages}/{self.capacity} pages free, {size})"

    @property
    def address(self) -> int:
        """Where page 0 begins, in the device's memory."""
        return self._start

    @property
    def capacity(self) -> int:
        """Pages that there are."""
        return self.large_pages.present * self.books.per_large

    @property
    def target(self) -> int:
        """Pages that there will be, once those that are too many have been given back."""
        return self.large_pages.target * self.books.per_large

    @property
    def excess(self) -> int:
        """Pages that are too many: none of them is given out again."""
        return self.large_pages.excess * self.books.per_large

    def resize(self, nbytes: int) -> PoolSize:
        """Have ``nbytes`` of memory from now on, rounded down to whole (large) pages. More is had at once, as
        far as there is more; less as soon as pages are free, and those that are free go at once. No page in
        use moves. Raises :class:`UsageError` for a size that cannot be,
        or a device that cannot change it."""
        size = self.large_pages.large_bytes
        if not size <= nbytes <= self.large_pages.count * size:
            raise UsageError(
                f"a pool of {format_size(nbytes)} cannot be: this one may have {format_size(size)} to "
                f"{format_size(self.large_pages.count * size)}"
            )
        self.large_pages.resize(nbytes // size)
        return self.large_pages.size

    def settle(self, *, wait: bool = False) -> None:
        """Give back the memory of pages that there are no more, as far as nothing works on it; ``wait`` until
        that is so."""

    @property
    def free_pages(self) -> int:
        """Pages that it could have now."""
        return self.books.free_pages

    @property
    def used_pages(self) -> int:
        """Pages that are allocated."""
        return self.books.used_pages

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` pages, lowest first where possible, or None if fewer are free. ``near`` are pages that
        will be given back at about the same time: a pool that it matters to keeps these together."""
        return self.books.allocate(count, near=near)

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. What has been put to work on them already may still be under way."""
        self.books.free(pages)

    # -- copies, done when the call returns ------------------------------------------------------------

    def read_pages(self, copies: Iterable[tuple[int, int]], *, after: Event | None = None) -> None:
        """Copy pages to host memory: (page, address) pairs, as what was put to work before ``after`` (of
        :meth:`computed`; None: before now) left them."""
        copying.copy_all(
            ((address, self.page_address(page)) for page, address in copies), self.spec.page_bytes
        )

    def write_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy host memory into pages: (page, address) pairs."""
        copying.copy_all(
            ((self.page_address(page), address) for page, address in copies), self.spec.page_bytes
        )

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy within the pool: (destination page, source page) pairs."""
        addresses = ((self.page_address(to), self.page_address(of)) for to, of in copies)
        copying.copy_all(addresses, self.spec.page_bytes)

    # -- beside what computes --------------------------------------------------------------------------

    def start_writing(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        """:meth:`write_pages`, which may go on beside what computes."""
        self.write_pages(copies)
        return COMPLETED

    def start_copying(self, copies: Sequence[tuple[int, int]]) -> PendingCopy:
        """:meth:`copy_pages`, which may go on beside what computes."""
        self.copy_pages(copies)
        return COMPLETED

    def computed(self) -> Event | None:
        """The point after all that has been put to work on pages so far; None where that is done."""
        return None

    def arrivals(self, pages: Iterable[int]) -> CopyFence:
        """What has to be waited for before computing with these pages. Raises
        :class:`~tierstore.tiers.device.DeviceError` when pages cannot be trusted any more."""
        return COMPLETED

    def invalidate(self, why: str) -> None:
        """Pages that somebody computes with have wrong bytes, perhaps: nobody is to go on."""
        raise AssertionError("copies are done when the call returns")

    # -- memory ----------------------------------------------------------------------------------------

    def register(self, address: int, nbytes: int) -> None:
        """Prepare host memory that pages will be copied from and to: it must stay until it is given back."""

    def unregister(self, address: int) -> None:
        """Host memory that begins at ``address`` is about to go."""

    def reach(self, pin: Pin) -> None:
        """Pages will be copied from and to host memory that other pools use too: ``pin`` prepares it for a
        device, once for all of them, and gives it back when it goes."""

    def reaches(self, address: int) -> bool:
        """Whether host memory at ``address`` is prepared by now: large loads from it come layer by layer,
        beside what computes."""
        return False

    def page_address(self, page: int) -> int:
        """Where a page begins, in the device's memory."""
        return self._start + page * self.stride


def check_pages(spec: KVSpec, num_pages: int) -> None:
    """Raises :class:`UsageError` for a pool without a page."""
    if num_pages < 1:
        raise UsageError(f"a page pool needs at least one page of {spec.page_bytes} bytes, not {num_pages}")
