"""A pool on a GPU with more pages than fit into its memory: other pages are in host memory or in a file.

Pages on the device are in the *slots* of a :class:`~tierstore.tiers.device_pool.DevicePool`. All other pages
are in a CPU's pool (:class:`~tierstore.tiers.overflow.OverflowPool`), under the same numbers::

    page         0       1      2       3     4          of DeviceOverflowPool
    content      slot 2  beyond slot 0  none  beyond
    below        -       memory -       -     file       of the OverflowPool

A page's contents are in one of the two pools. The contents move to the CPU's pool when the device's memory is
full, and to the device when a step writes to the page or the device has room. Attention reads a page where it
is, or reads a copy of one of its layers (:mod:`tierstore_engine.attention.push_down`).

All copies have ended when a call returns. The device pool's rules order them after computation on the pages.
So computation that starts after the call needs no fence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tierstore.spec import KVSpec
from tierstore.tiers.beyond import BEYOND, LOST, MEMORY, NONE, BeyondPool, Numbers, OverflowStats, batches
from tierstore.tiers.device import Device, Event
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import CopyFence
from tierstore.tiers.large_pages import LargePages, WholePages
from tierstore.tiers.overflow import Overflow, OverflowPool
from tierstore.tiers.pinned import Pin

NO_SLOT = -1


class DeviceOverflowPool(BeyondPool):
    """One pool over the pages of ``hbm`` and ``below``. ``below`` has room for the contents of all pages that
    are not in ``hbm``, and for ``moved_pages`` more. ``array`` is the memory of the slots. ``num_pages`` is
    the number of pages, not of slots."""

    def __init__(self, hbm: DevicePool, below: OverflowPool, *, moved_pages: int) -> None:
        self.hbm, self.below = hbm, below
        self.spec, self.device = hbm.spec, hbm.device
        self.num_pages, self.resident_pages = below.num_pages, hbm.num_pages
        self.large_pages = LargePages(hbm.stride, self.num_pages)
        self.books = WholePages(self.large_pages)
        self.stride, self._start, self.array = hbm.stride, hbm.address, hbm.array
        self._slots = np.full(self.num_pages, NO_SLOT, np.int64)
        self._track(self.num_pages, at_once=moved_pages)

    @classmethod
    def open(cls, spec: KVSpec, slots: int, overflow: Overflow, device: Device) -> DeviceOverflowPool:
        """Open a pool with ``slots`` pages on ``device``, and all other pages in ``overflow``. Raise
        :class:`~tierstore.errors.UsageError` if there is too little memory or disk space."""
        pages, moved = overflow.pages(spec, slots), overflow.moved_pages(spec)
        below = OverflowPool(
            spec, pages, resident_pages=overflow.host_pages(spec), directory=overflow.directory
        )
        return cls(DevicePool(spec, slots, device), below, moved_pages=moved)

    @property
    def failed(self) -> str | None:
        return self.below.failed

    @property
    def target(self) -> int:
        if self.failed is None:
            return super().target
        return self.resident_pages + self.below.resident_pages - self._at_once

    @property
    def stats(self) -> OverflowStats:
        with self._lock:
            beyond, below = int((self._content == BEYOND).sum()), self.below.stats
            return replace(below, host_pages=beyond - below.pages, lost_pages=below.lost_pages + self._lost)

    def slots(self, pages: Numbers) -> Numbers:
        """Return the slot of each of these pages; :data:`NO_SLOT` for a page that is not on the device."""
        return np.where(self._content[pages] == MEMORY, self._slots[pages], NO_SLOT)

    def page_address(self, page: int) -> int:
        assert self.is_resident(page), "only a page on the device has an address there"
        return self.hbm.page_address(int(self._slots[page]))

    def _forget(self, pages: Numbers) -> None:
        super()._forget(pages)
        self.below.forget(pages)

    def _give_memory(self, pages: Numbers) -> None:
        slots = self.hbm.allocate(len(pages))
        assert slots is not None, "there is a slot for each page with memory"
        self._slots[pages] = slots

    def _take_memory(self, pages: Numbers) -> None:
        self.hbm.free(self._slots[pages].tolist())
        self._slots[pages] = NO_SLOT

    def _write_here(self, copies: Sequence[tuple[int, int]]) -> None:
        self.hbm.write_pages([(int(self._slots[page]), address) for page, address in copies])
        self.below.forget(np.array([page for page, _ in copies], np.int64))

    def _write_beyond(self, pages: Numbers, sources: Numbers | None = None) -> None:
        if sources is not None:
            self.below.write_pages(zip(pages.tolist(), sources.tolist(), strict=True))
            return
        for some in batches(pages, self._at_once):
            self.below.prepare(some, ())
            self.hbm.read_pages(
                (slot, self.below.page_address(page))
                for page, slot in zip(some.tolist(), self._slots[some].tolist(), strict=True)
            )

    def _bring(self, pages: Numbers) -> None:
        for some in batches(pages, self._at_once):
            self.below.prepare(some, ())  # reads pages from the file into host memory
            self.hbm.write_pages(
                (slot, self.below.page_address(page))
                for page, slot in zip(some.tolist(), self._slots[some].tolist(), strict=True)
            )
            self._content[some] = MEMORY
            self.below.forget(some)

    def _read(self, copies: Sequence[tuple[int, int]], after: Event | None) -> set[int]:
        content = self._content[[page for page, _ in copies]].tolist()
        here = [copy for copy, where in zip(copies, content, strict=True) if where == MEMORY]
        there = [copy for copy, where in zip(copies, content, strict=True) if where == BEYOND]
        lost = {page for (page, _), where in zip(copies, content, strict=True) if where in (LOST, NONE)}
        self.hbm.read_pages([(int(self._slots[page]), address) for page, address in here], after=after)
        return lost | self.below.read_as_far(there)

    def close(self) -> None:
        self.below.close()

    # -- methods of the device pool ------------------------------------------------------------------------

    def computed(self) -> Event:
        return self.hbm.computed()

    def arrivals(self, pages: Iterable[int]) -> CopyFence:
        return self.hbm.arrivals(())

    def invalidate(self, why: str) -> None:
        self.hbm.invalidate(why)

    def register(self, address: int, nbytes: int) -> None:
        self.hbm.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self.hbm.unregister(address)

    def reach(self, pin: Pin) -> None:
        self.hbm.reach(pin)

    def reaches(self, address: int) -> bool:
        return self.hbm.reaches(address)
