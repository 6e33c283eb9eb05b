"""Which slabs to empty, so that a class of pages which has no room gets some. Pure: no files, no threads.

A *window* is a run of units where a slab of the class could be. The pages in it, of whatever class, have to
move elsewhere, to free slots of their own classes or to new slabs on free units; then the slabs dissolve and
the window is free. The cheapest windows are the emptiest. A window may cut a larger slab, which then has to
be emptied as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore.tiers.slabs import Slab, SlabAllocator, best_run, slot_bytes

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
