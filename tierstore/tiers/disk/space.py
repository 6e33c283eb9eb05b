"""What is free: slots in the extent space, and room in the index. Rebuilt from the pages' facts at open."""

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
from tierstore.tiers.disk.records import INLINE, PIECE_BYTES, PageRecord, Removal
from tierstore.tiers.slabs import Slab, SlabAllocator, best_run, slot_bytes
from tierstore.units import GIB, KIB, MIB, format_size

# -- sharing out the cap -------------------------------------------------------------------------------
#
# How a directory's byte capacity is shared out between the index, the extents and everything else in it.
#
# The cap is hard: LMDB's map and the extent space are sized once, at open, so that together with a fixed
# allowance for the rest they cannot exceed it, whatever is written later. Nothing is measured while running.


_ALLOWANCE = 40 * KIB  # two directories, the lock file, LMDB's lock file
_BLOCK_MAP_FRACTION = 256  # the file system's own map of the extent files: 1/330 at its very worst on ext4
_LEAST_INDEX = 256 * KIB
_RECORD_SHARE = 704  # per page: a 64-token record, facts and link in B-tree leaves; 540 to 600 were measured
_LEAST_RECORDS_FRACTION = 64  # of the cap: other models may have smaller pages
_SLACK_FRACTION = 512  # of the cap, for inline payloads beside larger pages
_MOST_SLACK = 64 * MIB
_INLINE_FRACTION = 31 / 32  # of the cap, when pages are small enough to live in the index
_KEPT_STEPS = 16  # of the cap
_LEAST_FILE = 1 * GIB
_MOST_FILES = 256
_UNITS = 1024  # and up to twice as many: fine enough for slabs that waste little
_LEAST_UNITS = 16
_MOST_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class SpaceLayout:
    """``index_bytes`` + ``extent_bytes`` + what the file system needs for them ≤ ``capacity_bytes``."""

    capacity_bytes: int
    index_bytes: int  # LMDB's map size: its file never grows beyond
    payload_bytes: int  # of these, what inline payloads may take: the rest is for the records
    extent_bytes: int

    def keeping(self, *, index_bytes: int, extent_bytes: int) -> SpaceLayout:
        """The same cap, shared out so that an index and extents which need so much keep it, up to half of the
        cap. Pages of another size than this life's would have to leave otherwise, though there is room."""
        room = self.capacity_bytes - _ALLOWANCE
        half = _round_down(room // 2)
        # In steps: what is needed changes a little from life to life, and each other share moves pages.
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


def split(capacity_bytes: int, *, page_bytes: int, inline_bytes: int) -> SpaceLayout:
    """Share out a cap for a life that mostly writes pages of ``page_bytes``.

    Raises :class:`UsageError` when not even one such page would fit.
    """
    if page_bytes < 1 or inline_bytes < 0:
        raise UsageError(
            f"page_bytes must be positive and inline_bytes not negative: {page_bytes}, {inline_bytes}"
        )
    room = capacity_bytes - _ALLOWANCE
    if page_bytes <= inline_bytes:
        index = payload = int(room * _INLINE_FRACTION)
        least = _LEAST_INDEX + 2 * page_bytes
    else:
        pages = room // slot_bytes(page_bytes)
        records = pages * _RECORD_SHARE
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
    """The slab unit for an extent space. The one used ``before`` is kept while it is bearable, since slots
    only keep their positions under the same unit."""
    if before and _LEAST_UNITS <= extent_bytes // before <= _MOST_UNITS:
        return before
    wanted = extent_bytes // _UNITS
    return min(max(1 << (wanted.bit_length() - 1) if wanted else 0, ALIGNMENT), 4 * MIB)


def file_bytes(extent_bytes: int) -> int:
    """The size of one extent file: 1 GiB, more where that would make too many files."""
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
# Which slabs to empty, so that a class of pages which has no room gets some. Pure: no files, no threads.
#
# A *window* is a run of units where a slab of the class could be. The pages in it, of whatever class, have to
# move elsewhere, to free slots of their own classes or to new slabs on free units; then the slabs dissolve
# and the window is free. The cheapest windows are the emptiest. A window may cut a larger slab, which then
# has to be emptied as a whole.


_MOST_TRIED = 24  # windows whose pages have nowhere to go, before it is given up


@dataclass(frozen=True, slots=True)
class Window:
    """Units ``start … start + units``. ``slabs`` are those in it and across its borders."""

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
    """Up to ``count`` windows for slabs of pages of ``nbytes``, the cheapest ones whose pages have somewhere
    to go.

    ``wanted`` are the free slots, by slot bytes, that somebody is about to take. ``fixed`` are slabs with
    pages that cannot move. At most ``most_moved`` bytes move for each byte that is gained: by dissolving
    slabs, or, where free units enough are there and only have to be joined (``joining``), by the slabs that
    fit in afterwards and did not before.
    """
    units, _ = space.shape(nbytes)
    if not units:
        return []
    elsewhere = _Elsewhere(space, wanted)
    candidates = _Candidates(space, units, fixed, joining=joining)
    hopeless = {slot_bytes(nbytes)}  # classes: moving one out of its own way gains nothing
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
                again = True  # without those that this class is in, which may be most
                break
    return chosen


class _Candidates:
    """All windows of a space as it is, and their prices: the bytes that move for each byte gained."""

    def __init__(self, space: SlabAllocator, units: int, fixed: Collection[Slab], *, joining: bool) -> None:
        self._slabs = slabs = space.slabs()
        columns = [(slab.start, slab.units, slab.slot_bytes, slab.slots, len(slab.free)) for slab in slabs]
        first, length, self._size, slots, free = np.array(columns, np.int64).reshape(-1, 5).T
        self._fixed = np.fromiter((slab in fixed for slab in slabs), np.bool_, len(slabs))
        used = (slots - free) * self._size
        end = first + length
        # Windows that begin anywhere else are like one of these.
        starts = np.unique(np.concatenate([[0], first, end, first - units]))
        self._starts = starts = starts[(starts >= 0) & (starts + units <= space.units)]
        self._low = np.searchsorted(end, starts, side="right")
        self._high = np.searchsorted(first, starts + units)
        dissolved = self._within(length)
        if joining:  # the free run that comes about, against the one that the window's pages take elsewhere
            run = np.append(first, space.units)[self._high] - np.insert(end, 0, 0)[self._low]
            gained = (run // units - dissolved // units) * units
        else:  # what lies beyond the window's borders is gained, too
            gained = np.maximum(dissolved, units)
        self._good = (dissolved > 0) & (gained > 0)
        self._price = self._within(used) / (np.maximum(gained, 1) * space.unit_bytes)

    def cheapest(self, hopeless: Collection[int]) -> Iterator[tuple[float, int]]:
        """(price, first unit), the cheapest first, of those without a slab that is fixed or ``hopeless``."""
        stuck = np.isin(self._size, list(hopeless)) | self._fixed
        rows = np.flatnonzero(self._good & (self._within(stuck.astype(np.int64)) == 0))
        rows = rows[np.argsort(self._price[rows], kind="stable")]
        return zip(self._price[rows].tolist(), self._starts[rows].tolist(), strict=True)

    def slabs_in(self, start: int) -> tuple[Slab, ...]:
        row = int(np.searchsorted(self._starts, start))
        return tuple(self._slabs[self._low[row] : self._high[row]])

    def _within(self, each: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sum over the slabs of each window."""
        total = np.concatenate([[0], np.cumsum(each)])
        return total[self._high] - total[self._low]  # type: ignore[no-any-return]


def _cost(window: Window) -> Counter[int]:
    """Slots by slot bytes: those that the window's pages go to, and its own free ones."""
    cost = Counter[int]()
    for slab in window.slabs:
        cost[slab.slot_bytes] += slab.slots
    return cost


class _Elsewhere:
    """Where pages can go while windows are being chosen: free slots, and free units for new slabs."""

    def __init__(self, space: SlabAllocator, wanted: Mapping[int, int]) -> None:
        self._space = space
        self._free = space.free_slots()
        self._free.subtract(wanted)
        self._taken = space.taken_units()
        self._emptied: set[Slab] = set()

    def has_emptied(self, window: Window) -> bool:
        """Whether a slab of this window goes with another window already."""
        return not self._emptied.isdisjoint(window.slabs)

    def is_hopeless(self, size: int) -> bool:
        """Whether there is no place for even one more slab's pages."""
        units, slots = self._space.shape(size)
        return self._free[size] < slots and best_run(self._taken, units) is None

    def take_pages_of(self, window: Window) -> int | None:
        """Find places for all pages of a window and take them. If that cannot be done nothing is taken, and
        the slot bytes of pages that have no place are returned."""
        stop = window.start + window.units
        free, taken = Counter(self._free), bytearray(self._taken)
        taken[window.start : stop] = b"\1" * window.units
        for size, slots in _cost(window).items():
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
                self._count_reserved(record.place, record.room, -1)
            for removal in removed:
                self._free(removal.place, removal.nbytes)
            self._index = index

    def settle_moved(self, moved: Iterable[tuple[PageRecord, int]], *, index: IndexUsage) -> None:
        """A transaction is durable that gave pages these new places; each had the other one before."""
        with self._lock:
            for record, before in moved:
                self._count_reserved(record.place, record.room, -1)
                self._vacant[before] = record.room
            self._index = index

    def vacate(self, place: int) -> None:
        """Nobody reads any more from the place that a page was moved away from."""
        with self._lock:
            self._free(place, self._vacant.pop(place))

    def limit(self, end: int) -> None:
        """The extent space ends at byte ``end`` for this life: its volume has no room for more. New pages go
        before it, and pages behind it stay until they leave."""
        with self._lock:
            if self._slots is not None and end < self._slots.units * self._slots.unit_bytes:
                self._slots.limit(end // self._slots.unit_bytes)

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


def needed_index_bytes(usage: IndexUsage) -> int:
    """How large an index has to be for what is in it: there :func:`index_room` is 0."""
    least = usage.used_bytes + tree_headroom(usage.tree_bytes) + _LEAST_HEADROOM
    return max(usage.used_bytes * _HEADROOM_FRACTION // (_HEADROOM_FRACTION - 1), least)


def tree_headroom(tree_bytes: int) -> int:
    """What must stay free beside ``tree_bytes`` of trees, for a transaction to rewrite what it changes."""
    return min(2 * tree_bytes, _MOST_TREE_HEADROOM)


def index_cost(nbytes: int, place: int) -> int:
    """What a page takes of the index, at most: its record, and its payload if that is inline."""
    if place != INLINE:
        return _RECORD_BYTES
    return _RECORD_BYTES + -(-nbytes // PIECE_BYTES) * _PIECE_COST
