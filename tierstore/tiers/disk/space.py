"""What is free: slots in the extent space, and room in the index. Rebuilt from the pages' facts at open."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tierstore.tiers.disk.catalog import IndexUsage
from tierstore.tiers.disk.layout import Layout
from tierstore.tiers.disk.records import INLINE, PageRecord, Removal
from tierstore.tiers.disk.trees import PIECE_BYTES
from tierstore.tiers.disk.windows import Window, choose
from tierstore.tiers.slabs import SlabAllocator, slot_bytes
from tierstore.units import KIB, MIB

_RECORD_BYTES = 768  # reserved in the index for each page until its commit shows what it really took
_PIECE_COST = 4096 + 64
# LMDB writes changed tree pages to new places, and reuses the old ones in the second transaction after that.
# So twice the tree must stay free for the index never to get stuck, or twice what a small change touches.
_HEADROOM_FRACTION = (
    32  # more is wanted where much is freed at once, so that transactions need not wait for it
)
_LEAST_HEADROOM = 32 * KIB
_MOST_TREE_HEADROOM = 2 * MIB


class Shortage(enum.Enum):
    """Why a page finds no room."""

    NONE = "none"  # it does
    SLOTS = "slots"
    INDEX = "index"


class Space:
    """The free space of one directory. Thread-safe, and never waits for a disk.

    A place is *reserved* from :meth:`reserve` until :meth:`settle` or :meth:`unreserve`, then *held* until a
    later :meth:`settle` says that its removal is durable. A page that :meth:`settle_moved` to a new place
    holds the old one too, until :meth:`vacate`.
    """

    def __init__(self, layout: Layout, *, unit_bytes: int, inline_bytes: int, index: IndexUsage) -> None:
        self._inline_bytes = inline_bytes
        self._index_bytes = layout.index_bytes
        self._payload_bytes = layout.payload_bytes
        self._lock = threading.Lock()
        # Guarded by the lock.
        fits = layout.extent_bytes >= slot_bytes(1)
        self._slots = SlabAllocator(layout.extent_bytes, unit_bytes=unit_bytes) if fits else None
        self._index = index
        self._index_reserved = 0
        self._payload_reserved = 0  # of which for payloads
        self._reserved: dict[int, int] = {}  # slots: place -> slot bytes
        self._vacant: dict[int, int] = {}  # slots whose pages have moved: place -> bytes

    def __repr__(self) -> str:
        return f"Space({self._slots}, index {self.index_used_bytes}/{self._index_bytes} bytes)"

    @property
    def index_used_bytes(self) -> int:
        """Bytes of the index in use or promised."""
        return self._index.used_bytes + self._index_reserved

    @property
    def slots_used_bytes(self) -> int:
        """Bytes of extent slots in use or promised."""
        return self._slots.used_bytes if self._slots else 0

    def claim(self, places: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Hold places found at open. False for each that cannot be what its record says."""
        with self._lock:
            slots = self._slots
            return [
                place == INLINE or (slots is not None and slots.claim(place, nbytes))
                for place, nbytes in zip(places, sizes, strict=True)
            ]

    def unclaim(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Free places that were claimed for pages that are lost all the same."""
        with self._lock:
            for place, nbytes in zip(places, sizes, strict=True):
                self._free(place, nbytes)

    def reserve(self, nbytes: int) -> int | None:
        """A place for ``nbytes``, or None."""
        return next(iter(self.reserve_many(nbytes, 1)), None)

    def reserve_many(self, nbytes: int, count: int) -> list[int]:
        """Up to ``count`` places for ``nbytes`` each: fewer when there are no more."""
        places: list[int] = []
        with self._lock:
            while nbytes <= self._inline_bytes and len(places) < count and self._payload_fits(nbytes):
                self._count_reserved(INLINE, nbytes, +1)
                places.append(INLINE)
            if self._slots is not None:
                records = max(self._index_room() // _RECORD_BYTES, 0)
                slots = self._slots.allocate_many(nbytes, min(count - len(places), records))
                self._index_reserved += len(slots) * _RECORD_BYTES
                self._reserved.update(dict.fromkeys(slots, slot_bytes(nbytes)))
                places += slots
        return places

    def reserve_outside(self, nbytes: int) -> int | None:
        """Like :meth:`reserve`, but never in the index."""
        with self._lock:
            place = self._slots.allocate(nbytes) if self._slots is not None else None
            if place is not None:
                self._count_reserved(place, nbytes, +1)
            return place

    def unreserve(self, place: int, nbytes: int) -> None:
        """Give a reserved place back."""
        with self._lock:
            self._count_reserved(place, nbytes, -1)
            self._free(place, nbytes)

    def settle(self, added: Iterable[PageRecord], removed: Iterable[Removal], *, index: IndexUsage) -> None:
        """A transaction is durable: what it added is held, what it removed is free."""
        with self._lock:
            for record in added:
                self._count_reserved(record.place, record.nbytes, -1)
            for removal in removed:
                self._free(removal.place, removal.nbytes)
            self._index = index

    def settle_moved(self, moved: Iterable[tuple[PageRecord, int]], *, index: IndexUsage) -> None:
        """A transaction is durable that gave pages these new places; each had the other one before."""
        with self._lock:
            for record, before in moved:
                self._count_reserved(record.place, record.nbytes, -1)
                self._vacant[before] = record.nbytes
            self._index = index

    def vacate(self, place: int) -> None:
        """Nobody reads any more from the place that a page was moved away from."""
        with self._lock:
            self._free(place, self._vacant.pop(place))

    # -- making room ---------------------------------------------------------------------------------

    def shortage(self, nbytes: int) -> Shortage:
        """Whether :meth:`reserve` would find a place, and what is missing if not."""
        with self._lock:
            if nbytes <= self._inline_bytes and self._payload_fits(nbytes):
                return Shortage.NONE
            if self._slots is None or not self._index_fits(_RECORD_BYTES):
                return Shortage.INDEX
            return Shortage.NONE if self._slots.has_room(nbytes) else Shortage.SLOTS

    def slab_slots(self, nbytes: int) -> int:
        """How many pages of ``nbytes`` are in one slab."""
        return self._slots.shape(nbytes)[1] if self._slots is not None else 0

    def slab_bytes(self, nbytes: int) -> int:
        """What a slab for pages of ``nbytes`` takes of the extent space."""
        return self._slots.shape(nbytes)[0] * self._slots.unit_bytes if self._slots is not None else 0

    def free_slots(self) -> Counter[int]:
        """Slot bytes → slots that are free and cannot be used by pages of another class."""
        with self._lock:
            return self._slots.free_slots() if self._slots is not None else Counter()

    def free_bytes(self) -> int:
        """Bytes of the extent space that no page has."""
        with self._lock:
            return self._slots.capacity_bytes - self._slots.used_bytes if self._slots is not None else 0

    def hold(
        self, nbytes: int, count: int, *, wanted: Mapping[int, int], most_moved: float, joining: bool
    ) -> list[Window]:
        """Choose up to ``count`` windows (see there) and hand out nothing of them until :meth:`unhold`."""
        with self._lock:
            slots = self._slots
            if slots is None:
                return []
            fixed = {slots.slab_of(place // slots.unit_bytes) for place in (*self._reserved, *self._vacant)}
            windows = choose(
                slots,
                nbytes,
                count,
                wanted=wanted,
                fixed={slab for slab in fixed if slab is not None},
                most_moved=most_moved,
                joining=joining,
            )
            for window in windows:
                slots.hold(window.start, window.units)
            return windows

    def unhold(self, windows: Iterable[Window]) -> None:
        """Undo :meth:`hold`. What has been emptied is there for every class."""
        with self._lock:
            for window in windows:
                assert self._slots is not None
                self._slots.unhold(window.start, window.units)

    def bytes_of(self, window: Window) -> list[range]:
        """Where in the extent space a window's slabs are."""
        assert self._slots is not None
        unit = self._slots.unit_bytes
        return [range(slab.start * unit, (slab.start + slab.units) * unit) for slab in window.slabs]

    # -- checking ------------------------------------------------------------------------------------

    def check(self, held: Iterable[tuple[int, int]]) -> None:
        """Assert that what is used is what durable pages (place, bytes) hold plus what is reserved."""
        slots = {place: slot_bytes(nbytes) for place, nbytes in held if place != INLINE}
        with self._lock:
            if self._slots is not None:
                self._slots.check()
            assert self._index_reserved >= 0, f"{self._index_reserved} bytes of the index are reserved"
            accounted = sum(slots.values()) + sum(self._reserved.values())
            accounted += sum(map(slot_bytes, self._vacant.values()))
            assert accounted == self.slots_used_bytes, f"{accounted} bytes are accounted for in {self._slots}"

    def _index_fits(self, nbytes: int) -> bool:
        return nbytes <= self._index_room()

    def _index_room(self) -> int:
        return index_room(self._index_bytes, self._index) - self._index_reserved

    def _payload_fits(self, nbytes: int) -> bool:
        payload = self._index.used_bytes - self._index.tree_bytes + self._payload_reserved
        cost = index_cost(nbytes, INLINE)
        return payload + cost <= self._payload_bytes and self._index_fits(cost)

    def _count_reserved(self, place: int, nbytes: int, sign: int) -> None:
        self._index_reserved += sign * index_cost(nbytes, place)
        if place == INLINE:
            self._payload_reserved += sign * index_cost(nbytes, place)
        elif sign > 0:
            self._reserved[place] = slot_bytes(nbytes)
        else:
            del self._reserved[place]

    def _free(self, place: int, nbytes: int) -> None:
        if place != INLINE:
            assert self._slots is not None
            self._slots.free(place, nbytes)


def index_room(index_bytes: int, usage: IndexUsage) -> int:
    """How much may be added to an index of ``index_bytes``, in terms of :func:`index_cost`."""
    headroom = max(index_bytes // _HEADROOM_FRACTION, tree_headroom(usage.tree_bytes) + _LEAST_HEADROOM)
    return index_bytes - headroom - usage.used_bytes


def tree_headroom(tree_bytes: int) -> int:
    """What must stay free beside ``tree_bytes`` of trees, for a transaction to rewrite what it changes."""
    return min(2 * tree_bytes, _MOST_TREE_HEADROOM)


def index_cost(nbytes: int, place: int) -> int:
    """What a page takes of the index, at most: its record, and its payload if that is inline."""
    if place != INLINE:
        return _RECORD_BYTES
    return _RECORD_BYTES + -(-nbytes // PIECE_BYTES) * _PIECE_COST
