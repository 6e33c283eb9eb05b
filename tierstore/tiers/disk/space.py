"""What is free: slots in the extent space, and room in the index. Rebuilt from the records at open."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierstore.tiers.disk.catalog import PIECE_BYTES
from tierstore.tiers.disk.layout import Layout
from tierstore.tiers.disk.records import INLINE, PageRecord
from tierstore.tiers.slabs import SlabAllocator, slot_bytes
from tierstore.units import KIB

_RECORD_BYTES = 1 * KIB  # reserved in the index for each page until its commit shows what it really took
_PIECE_COST = 4096 + 64
_HEADROOM_FRACTION = 16  # of the index: LMDB writes changed tree pages to new places before it frees the old
_LEAST_HEADROOM = 64 * KIB


class Space:
    """The free space of one directory. Thread-safe, and never waits for a disk.

    A place is *reserved* from :meth:`reserve` until :meth:`settle` or :meth:`unreserve`, then *held* until a
    later :meth:`settle` says that its removal is durable.
    """

    def __init__(self, layout: Layout, *, unit_bytes: int, inline_bytes: int, index_used_bytes: int) -> None:
        self._inline_bytes = inline_bytes
        headroom = max(layout.index_bytes // _HEADROOM_FRACTION, _LEAST_HEADROOM)
        self._index_limit = layout.index_bytes - headroom
        self._lock = threading.Lock()
        # Guarded by the lock.
        fits = layout.extent_bytes >= slot_bytes(1)
        self._slots = SlabAllocator(layout.extent_bytes, unit_bytes=unit_bytes) if fits else None
        self._index_used = index_used_bytes
        self._index_reserved = 0
        self._reserved_slots = 0

    def __repr__(self) -> str:
        return f"Space({self._slots}, index {self.index_used_bytes}/{self._index_limit} bytes)"

    @property
    def index_used_bytes(self) -> int:
        """Bytes of the index in use or promised."""
        return self._index_used + self._index_reserved

    @property
    def slots_used_bytes(self) -> int:
        """Bytes of extent slots in use or promised."""
        return self._slots.used_bytes if self._slots else 0

    def claim(self, record: PageRecord) -> bool:
        """Hold the place of a record found at open. False when the place cannot be what the record says."""
        if record.place == INLINE:
            return True
        with self._lock:
            return self._slots is not None and self._slots.claim(record.place, record.nbytes)

    def reserve(self, nbytes: int) -> int | None:
        """A place for ``nbytes``, or None."""
        with self._lock:
            if nbytes <= self._inline_bytes and self._index_fits(_index_cost(nbytes, INLINE)):
                self._index_reserved += _index_cost(nbytes, INLINE)
                return INLINE
            if self._slots is None or not self._index_fits(_index_cost(nbytes, 0)):
                return None
            place = self._slots.allocate(nbytes)
            if place is not None:
                self._index_reserved += _index_cost(nbytes, place)
                self._reserved_slots += slot_bytes(nbytes)
            return place

    def unreserve(self, place: int, nbytes: int) -> None:
        """Give a reserved place back."""
        with self._lock:
            self._index_reserved -= _index_cost(nbytes, place)
            if place != INLINE:
                self._reserved_slots -= slot_bytes(nbytes)
                self._free(place, nbytes)

    def settle(
        self, added: Iterable[PageRecord], removed: Iterable[PageRecord], *, index_used_bytes: int
    ) -> None:
        """A transaction is durable: what it added is held, what it removed is free."""
        with self._lock:
            for record in added:
                self._index_reserved -= _index_cost(record.nbytes, record.place)
                if record.place != INLINE:
                    self._reserved_slots -= slot_bytes(record.nbytes)
            for record in removed:
                if record.place != INLINE:
                    self._free(record.place, record.nbytes)
            self._index_used = index_used_bytes

    def check(self, held: Sequence[PageRecord]) -> None:
        """Assert that what is used is what the durable records hold plus what is reserved."""
        slots = {record.place: slot_bytes(record.nbytes) for record in held if record.place != INLINE}
        with self._lock:
            if self._slots is not None:
                self._slots.check()
            assert self._index_reserved >= 0, f"{self._index_reserved} bytes of the index are reserved"
            accounted = sum(slots.values()) + self._reserved_slots
            assert accounted == self.slots_used_bytes, f"{accounted} bytes are accounted for in {self._slots}"

    def _index_fits(self, nbytes: int) -> bool:
        return self._index_used + self._index_reserved + nbytes <= self._index_limit

    def _free(self, place: int, nbytes: int) -> None:
        assert self._slots is not None
        self._slots.free(place, nbytes)


def _index_cost(nbytes: int, place: int) -> int:
    if place != INLINE:
        return _RECORD_BYTES
    return _RECORD_BYTES + -(-nbytes // PIECE_BYTES) * _PIECE_COST
