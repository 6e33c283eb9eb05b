"""The free space of a directory: slots in the extent space, and room in the index. The free space is not
stored: each opening computes it from the pages' facts."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.index_db import IndexUsage
from tierstore.tiers.disk.records import INLINE, PIECE_BYTES, SEALED_BYTES, PageRecord, Removal
from tierstore.tiers.slabs import Slab, SlabAllocator, best_run, slot_bytes
from tierstore.units import GIB, KIB, MIB, format_size

# -- shares of the capacity --------------------------------------------------------------------------
#
# A directory's capacity is divided between the index, the extents, and a fixed allowance for other files.
# LMDB's map and the extent space get fixed sizes at open, so the files can never exceed the capacity, and
# nothing needs to be measured while the store runs.


_ALLOWANCE = 40 * KIB  # two directories, the lock file, LMDB's lock file
_BLOCK_MAP_FRACTION = 256  # 1/n for the file system's block map of the extent files: 1/330 at worst on ext4
_LEAST_INDEX = 256 * KIB
_RECORD_SHARE = 704  # per page: a 64-token record, facts and link in B-tree leaves; 540 to 600 were measured
_LEAST_RECORDS_FRACTION = 64  # at least 1/n of the capacity for records: other models may have smaller pages
_SLACK_FRACTION = 512  # 1/n of the capacity for inline payloads, if most pages are not inline
_MOST_SLACK = 64 * MIB
_INLINE_FRACTION = 31 / 32  # share of the capacity for the index, if the usual pages are inline
_KEPT_STEPS = 16  # shares change in steps of 1/n of the capacity
_LEAST_FILE = 1 * GIB
_MOST_FILES = 256
_UNITS = 1024  # an extent space has 1024 to 2048 units: small enough for slabs that waste little
_LEAST_UNITS = 16
_MOST_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class SpaceLayout:
    """A division of the capacity: ``index_bytes`` + ``extent_bytes`` + the file system's overhead ≤
    ``capacity_bytes``."""

    capacity_bytes: int
    index_bytes: int  # LMDB's map size, which its file never exceeds
    payload_bytes: int  # the part of index_bytes for inline payloads
    extent_bytes: int

    def keeping(self, *, index_bytes: int, extent_bytes: int) -> SpaceLayout:
        """Return a division of the same capacity that has room for an index and extents of these sizes, up to
        half of the capacity each. So pages of another size, saved earlier, are not evicted without need."""
        room = self.capacity_bytes - _ALLOWANCE
        half = _round_down(room // 2)
        # Change in steps: the needed sizes vary a little from run to run, and each new division moves pages.
        step = _round_down(room // _KEPT_STEPS)
        if self.index_bytes < min(index_bytes, half):
            index = min(-(-index_bytes // step) * step, half)
        elif self.extent_bytes < min(extent_bytes, half):
            extents = min(-(-extent_bytes // step) * step, half)
            index = _round_down(room - extents - extents // _BLOCK_MAP_FRACTION)
        else:
            return self
        extents = _extents_beside(index, room)
        return SpaceLayout(self.capacity_bytes, index, min(self.payload_bytes, index), extents)


def split(capacity_bytes: int, *, page_bytes: int, inline_bytes: int, sealed: bool = False) -> SpaceLayout:
    """Divide the capacity of a store that mostly writes pages of ``page_bytes``. ``sealed`` says whether the
    store is encrypted, which makes its records larger. Raise :class:`UsageError` if not even one page of this
    size fits."""
    if page_bytes < 1 or inline_bytes < 0:
        raise UsageError(
            f"page_bytes must be at least 1 and inline_bytes at least 0, got {page_bytes} and {inline_bytes}"
        )
    room = capacity_bytes - _ALLOWANCE
    if page_bytes <= inline_bytes:
        index = payload = int(room * _INLINE_FRACTION)
        least = _LEAST_INDEX + 2 * page_bytes
    else:
        pages = room // slot_bytes(page_bytes)
        records = pages * (_RECORD_SHARE + SEALED_BYTES * sealed)
        least = room // _LEAST_RECORDS_FRACTION
        trees = max(records + tree_headroom(records), least + min(least, _MOST_TREE_HEADROOM))
        payload = min(room // _SLACK_FRACTION, _MOST_SLACK)
        index = min(trees + payload, room // 2)
        least = _LEAST_INDEX
    index = _round_down(max(index, least))
    extents = _extents_beside(index, room)
    if index > room or (page_bytes > inline_bytes and extents < slot_bytes(page_bytes)):
        needed = _ALLOWANCE + least + 2 * slot_bytes(page_bytes)
        raise UsageError(
            f"a disk capacity of {format_size(capacity_bytes)} cannot hold a page of "
            f"{format_size(page_bytes)}: give at least {format_size(needed)}"
        )
    return SpaceLayout(capacity_bytes, index, payload, extents)


def unit_bytes(extent_bytes: int, before: int | None) -> int:
    """Return the slab unit for an extent space. The unit used ``before`` is kept if possible, because with
    another unit, slots would have other positions."""
    if before and _LEAST_UNITS <= extent_bytes // before <= _MOST_UNITS:
        return before
    wanted = extent_bytes // _UNITS
    return min(max(1 << (wanted.bit_length() - 1) if wanted else 0, ALIGNMENT), 4 * MIB)


def file_bytes(extent_bytes: int) -> int:
    """Return the size of one extent file: 1 GiB, or more if there would be too many files."""
    size = _LEAST_FILE
    while extent_bytes > size * _MOST_FILES:
        size *= 2
    return size


def _extents_beside(index_bytes: int, room: int) -> int:
    extents = (room - index_bytes) * _BLOCK_MAP_FRACTION // (_BLOCK_MAP_FRACTION + 1)
    return max(_round_down(extents), 0)


def _round_down(nbytes: int) -> int:
    return nbytes // ALIGNMENT * ALIGNMENT


# -- emptying slabs ------------------------------------------------------------------------------------
#
# If a size class has no free slots, other slabs are emptied to make room for a new slab of the class.
# :func:`choose` chooses the slabs to empty, and does no I/O.
#
# A *window* is a run of adjacent units that could hold the new slab. All pages in the window must move to
# free slots of their own classes, or to new slabs on free units. Then the window's slabs are empty and their
# units are free. The emptiest windows cost least. A window may contain only a part of a larger slab; then
# this slab must be emptied as a whole.


_MOST_TRIED = 24  # the search ends after this many windows whose pages have nowhere to move


@dataclass(frozen=True, slots=True)
class Window:
    """Units ``start … start + units``. ``slabs`` are all slabs that have units in the window."""

    start: int
    units: int
    slabs: tuple[Slab, ...]


def choose(
    space: SlabAllocator,
    nbytes: int,
    count: int,
    *,
    wanted: Mapping[int, int],
    fixed: Collection[Slab],
    most_moved: float,
    joining: bool = False,
) -> list[Window]:
    """Return up to ``count`` windows for slabs of pages of ``nbytes``: the cheapest windows whose pages have
    free slots to move to.

    ``wanted`` are the numbers of free slots, by slot bytes, that are needed for other purposes. ``fixed`` are
    slabs with pages that cannot move. At most ``most_moved`` bytes move for each byte gained. The gain is the
    emptied slabs. With ``joining`` (there are enough free units, but they are not adjacent), the gain is the
    number of new slabs that fit only after the moves.
    """
    units, _ = space.shape(nbytes)
    if not units:
        return []
    elsewhere = _Elsewhere(space, wanted)
    candidates = _Candidates(space, units, fixed, joining=joining)
    # Size classes whose pages are not moved. Moving pages of the wanted class would gain nothing.
    hopeless = {slot_bytes(nbytes)}
    chosen: list[Window] = []
    tried = 0
    again = True
    while again:
        again = False
        for price, start in candidates.cheapest(hopeless):
            if len(chosen) == count or tried == _MOST_TRIED or price > most_moved:
                break
            window = Window(start, units, candidates.slabs_in(start))
            if elsewhere.has_emptied(window):
                continue
            stuck = elsewhere.take_pages_of(window)
            if stuck is None:
                chosen.append(window)
                continue
            tried += 1
            if elsewhere.is_hopeless(stuck):
                hopeless.add(stuck)
                again = True  # repeat without the windows that have pages of this class, which may be most
                break
    return chosen


class _Candidates:
    """All windows of a space, and their prices. A price is the number of bytes that move for each byte
    gained."""

    def __init__(self, space: SlabAllocator, units: int, fixed: Collection[Slab], *, joining: bool) -> None:
        self._slabs = slabs = space.slabs()
        columns = [(slab.start, slab.units, slab.slot_bytes, slab.slots, len(slab.free)) for slab in slabs]
        first, length, self._size, slots, free = np.array(columns, np.int64).reshape(-1, 5).T
        self._fixed = np.fromiter((slab in fixed for slab in slabs), np.bool_, len(slabs))
        used = (slots - free) * self._size
        end = first + length
        # A window with any other start has the same slabs as a window with one of these starts.
        starts = np.unique(np.concatenate([[0], first, end, first - units]))
        self._starts = starts = starts[(starts >= 0) & (starts + units <= space.units)]
        self._low = np.searchsorted(end, starts, side="right")
        self._high = np.searchsorted(first, starts + units)
        dissolved = self._within(length)
        if joining:  # the free units after the moves, minus the units that the moved pages need elsewhere
            run = np.append(first, space.units)[self._high] - np.insert(end, 0, 0)[self._low]
            gained = (run // units - dissolved // units) * units
        else:  # the units of emptied slabs outside of the window are gained, too
            gained = np.maximum(dissolved, units)
        self._good = (dissolved > 0) & (gained > 0)
        self._price = self._within(used) / (np.maximum(gained, 1) * space.unit_bytes)

    def cheapest(self, hopeless: Collection[int]) -> Iterator[tuple[float, int]]:
        """Return (price, first unit) of the windows without slabs that are fixed or of a ``hopeless`` class,
        in order of prices."""
        stuck = np.isin(self._size, list(hopeless)) | self._fixed
        rows = np.flatnonzero(self._good & (self._within(stuck.astype(np.int64)) == 0))
        rows = rows[np.argsort(self._price[rows], kind="stable")]
        return zip(self._price[rows].tolist(), self._starts[rows].tolist(), strict=True)

    def slabs_in(self, start: int) -> tuple[Slab, ...]:
        row = int(np.searchsorted(self._starts, start))
        return tuple(self._slabs[self._low[row] : self._high[row]])

    def _within(self, each: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each window the sum of ``each``, which has one value for each slab."""
        total = np.concatenate([[0], np.cumsum(each)])
        return total[self._high] - total[self._low]  # type: ignore[no-any-return]


class _Elsewhere:
    """The free slots and units to which the pages of chosen windows can move."""

    def __init__(self, space: SlabAllocator, wanted: Mapping[int, int]) -> None:
        self._space = space
        self._free = space.free_slots()
        self._free.subtract(wanted)
        self._taken = space.taken_units()
        self._emptied: set[Slab] = set()

    def has_emptied(self, window: Window) -> bool:
        """Return whether a slab of this window is also in a window that was already chosen."""
        return not self._emptied.isdisjoint(window.slabs)

    def is_hopeless(self, size: int) -> bool:
        """Return whether there is no room for the pages of even one more slab with slots of ``size``."""
        units, slots = self._space.shape(size)
        return self._free[size] < slots and best_run(self._taken, units) is None

    def take_pages_of(self, window: Window) -> int | None:
        """Allocate slots for all pages of a window. If there are too few, allocate none and return the slot
        bytes of the pages that have no slot."""
        stop = window.start + window.units
        free, taken = Counter(self._free), bytearray(self._taken)
        taken[window.start : stop] = b"\1" * window.units
        needed = Counter[int]()  # the window's own free slots are lost, so count all of its slots
        for slab in window.slabs:
            needed[slab.slot_bytes] += slab.slots
        for size, slots in needed.items():
            free[size] -= slots
            while free[size] < 0:
                if not self._add_slab(size, free, taken):
                    return size
        self._free, self._taken = free, taken
        self._emptied.update(window.slabs)
        return None

    def _add_slab(self, size: int, free: Counter[int], taken: bytearray) -> bool:
        units, slots = self._space.shape(size)
        start = best_run(taken, units)
        if start is None:
            return False
        taken[start : start + units] = b"\1" * units
        free[size] += slots
        return True


_RECORD_BYTES = 768  # reserved in the index for each page until its commit shows the real size
_PIECE_COST = 4096 + 64
# LMDB writes changed tree pages to new places, and reuses the old pages in the second transaction after that.
# So twice the size of the tree, or twice the part that a small change rewrites, must stay free. Otherwise a
# full index could not even delete pages.
_HEADROOM_FRACTION = 32  # 1/n of the index stays free, so that large removals fit into one transaction
_LEAST_HEADROOM = 32 * KIB
_MOST_TREE_HEADROOM = 2 * MIB


class Shortage(enum.Enum):
    """The reason why there is no room for a page."""

    NONE = "none"  # there is room
    SLOTS = "slots"
    INDEX = "index"


class Space:
    """The free space of one directory. Thread-safe. Does no I/O.

    A place is *reserved* from :meth:`reserve` until :meth:`settle` or :meth:`unreserve`. After
    :meth:`settle`, the page *holds* the place until a later :meth:`settle` for the page's removal. After
    :meth:`settle_moved`, the page also holds its old place, until :meth:`vacate`.
    """

    def __init__(self, layout: SpaceLayout, *, unit_bytes: int, inline_bytes: int, index: IndexUsage) -> None:
        self._inline_bytes = inline_bytes
        self._index_bytes = layout.index_bytes
        self._payload_bytes = layout.payload_bytes
        self._lock = threading.Lock()
        # Guarded by the lock.
        fits = layout.extent_bytes >= slot_bytes(1)
        self._slots = SlabAllocator(layout.extent_bytes, unit_bytes=unit_bytes) if fits else None
        self._index = index
        self._index_reserved = 0
        self._payload_reserved = 0  # the part of _index_reserved for payloads
        self._reserved: dict[int, int] = {}  # slots: place → slot bytes
        self._vacant: dict[int, int] = {}  # slots whose pages have moved: place → bytes

    def __repr__(self) -> str:
        return f"Space({self._slots}, index {self.index_used_bytes}/{self._index_bytes} bytes)"

    @property
    def index_used_bytes(self) -> int:
        """Bytes of the index in use or reserved."""
        return self._index.used_bytes + self._index_reserved

    @property
    def slots_used_bytes(self) -> int:
        """Bytes of extent slots in use or reserved."""
        return self._slots.used_bytes if self._slots else 0

    def claim(self, places: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Hold the places that are found in the index at open. Return for each place whether it is
        possible."""
        with self._lock:
            slots = self._slots
            return [
                place == INLINE or (slots is not None and slots.claim(place, nbytes))
                for place, nbytes in zip(places, sizes, strict=True)
            ]

    def unclaim(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """Free places that :meth:`claim` held."""
        with self._lock:
            for place, nbytes in zip(places, sizes, strict=True):
                self._free(place, nbytes)

    def reserve(self, nbytes: int) -> int | None:
        """Reserve a place for ``nbytes``. Return None if there is no room."""
        return next(iter(self.reserve_many(nbytes, 1)), None)

    def reserve_many(self, nbytes: int, count: int) -> list[int]:
        """Reserve up to ``count`` places for ``nbytes`` each. Return fewer if there is no more room."""
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
        """Reserve a place in the extents, never in the index."""
        with self._lock:
            place = self._slots.allocate(nbytes) if self._slots is not None else None
            if place is not None:
                self._count_reserved(place, nbytes, +1)
            return place

    def unreserve(self, place: int, nbytes: int) -> None:
        """Free a reserved place."""
        with self._lock:
            self._count_reserved(place, nbytes, -1)
            self._free(place, nbytes)

    def settle(self, added: Iterable[PageRecord], removed: Iterable[Removal], *, index: IndexUsage) -> None:
        """Record that a transaction is durable: the added pages hold their places, and the places of the
        removed pages are free."""
        with self._lock:
            for record in added:
                self._count_reserved(record.place, record.room, -1)
            for removal in removed:
                self._free(removal.place, removal.nbytes)
            self._index = index

    def settle_moved(self, moved: Iterable[tuple[PageRecord, int]], *, index: IndexUsage) -> None:
        """Record that the new records of moved pages are durable. Each record comes with the page's old
        place."""
        with self._lock:
            for record, before in moved:
                self._count_reserved(record.place, record.room, -1)
                self._vacant[before] = record.room
            self._index = index

    def vacate(self, place: int) -> None:
        """Free the old place of a moved page, after all reads of it have ended."""
        with self._lock:
            self._free(place, self._vacant.pop(place))

    def limit(self, end: int) -> None:
        """Allocate no slots behind byte ``end`` of the extent space, because the volume is full. Pages behind
        it stay until they are evicted."""
        with self._lock:
            if self._slots is not None and end < self._slots.units * self._slots.unit_bytes:
                self._slots.limit(end // self._slots.unit_bytes)

    # -- making room ---------------------------------------------------------------------------------

    def shortage(self, nbytes: int) -> Shortage:
        """Return why :meth:`reserve` would find no place; NONE if it would find one."""
        with self._lock:
            if nbytes <= self._inline_bytes and self._payload_fits(nbytes):
                return Shortage.NONE
            if self._slots is None or self._index_room() < _RECORD_BYTES:
                return Shortage.INDEX
            return Shortage.NONE if self._slots.has_room(nbytes) else Shortage.SLOTS

    def slab_slots(self, nbytes: int) -> int:
        """Return the number of slots in one slab for pages of ``nbytes``."""
        return self._slots.shape(nbytes)[1] if self._slots is not None else 0

    def slab_bytes(self, nbytes: int) -> int:
        """Return the bytes of a slab for pages of ``nbytes``."""
        return self._slots.shape(nbytes)[0] * self._slots.unit_bytes if self._slots is not None else 0

    def free_slots(self) -> Counter[int]:
        """Return slot bytes → number of free slots in existing slabs of this class."""
        with self._lock:
            return self._slots.free_slots() if self._slots is not None else Counter()

    def free_bytes(self) -> int:
        """Return the number of bytes of the extent space that no page uses."""
        with self._lock:
            return self._slots.capacity_bytes - self._slots.used_bytes if self._slots is not None else 0

    def hold(
        self, nbytes: int, count: int, *, wanted: Mapping[int, int], most_moved: float, joining: bool
    ) -> list[Window]:
        """Choose up to ``count`` windows (see :func:`choose`). Until :meth:`unhold`, no slots are allocated
        in these windows."""
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
        """Undo :meth:`hold`. Emptied units can become slabs of any class."""
        with self._lock:
            for window in windows:
                assert self._slots is not None
                self._slots.unhold(window.start, window.units)

    def bytes_of(self, window: Window) -> list[range]:
        """Return the byte ranges of a window's slabs in the extent space."""
        assert self._slots is not None
        unit = self._slots.unit_bytes
        return [range(slab.start * unit, (slab.start + slab.units) * unit) for slab in window.slabs]

    # -- checking ------------------------------------------------------------------------------------

    def check(self, held: Iterable[tuple[int, int]]) -> None:
        """Assert that the used slots are exactly those of the durable pages ``held`` (place, bytes), of
        reserved places, and of old places of moved pages."""
        slots = {place: slot_bytes(nbytes) for place, nbytes in held if place != INLINE}
        with self._lock:
            if self._slots is not None:
                self._slots.check()
            assert self._index_reserved >= 0, f"{self._index_reserved} bytes of the index are reserved"
            accounted = sum(slots.values()) + sum(self._reserved.values())
            accounted += sum(map(slot_bytes, self._vacant.values()))
            assert accounted == self.slots_used_bytes, f"{accounted} bytes are accounted for in {self._slots}"

    def _index_room(self) -> int:
        return index_room(self._index_bytes, self._index) - self._index_reserved

    def _payload_fits(self, nbytes: int) -> bool:
        payload = self._index.used_bytes - self._index.tree_bytes + self._payload_reserved
        cost = index_cost(nbytes, INLINE)
        return payload + cost <= self._payload_bytes and cost <= self._index_room()

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
    """Return how much may be added to an index of ``index_bytes``: the sum of :func:`index_cost` of the new
    pages."""
    headroom = max(index_bytes // _HEADROOM_FRACTION, tree_headroom(usage.tree_bytes) + _LEAST_HEADROOM)
    return index_bytes - headroom - usage.used_bytes


def needed_index_bytes(usage: IndexUsage) -> int:
    """Return the least size of an index with these contents: with this size, :func:`index_room` is 0."""
    least = usage.used_bytes + tree_headroom(usage.tree_bytes) + _LEAST_HEADROOM
    return max(usage.used_bytes * _HEADROOM_FRACTION // (_HEADROOM_FRACTION - 1), least)


def tree_headroom(tree_bytes: int) -> int:
    """Return the number of bytes that must stay free beside trees of ``tree_bytes``, so that a transaction
    can rewrite the parts that it changes."""
    return min(2 * tree_bytes, _MOST_TREE_HEADROOM)


def index_cost(nbytes: int, place: int) -> int:
    """Return the most bytes that a page can take in the index: for its record, and for an inline payload."""
    if place != INLINE:
        return _RECORD_BYTES
    return _RECORD_BYTES + -(-nbytes // PIECE_BYTES) * _PIECE_COST
