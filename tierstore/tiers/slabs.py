"""Two-level space management, for the host arena and the disk's extents alike. Pure: no memory, no files.

Space is cut into equal *units*. A *slab* is an aligned run of units given to one size class and carved into
equal *slots*; a page takes one slot. When its last slot is freed, a slab dissolves into units that any other
class may take. So pages of different models share one space, and no history of sizes can fragment it for
good: at any moment at most one partly empty slab per class is not to blame on pages that are still in use.

Slab positions are a function of the slot's offset and size alone. That is what lets the disk tier rebuild its
free space from nothing but its page records.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT
from tierstore.units import round_up

_MAX_UNIT = 4 << 20
_UNITS_WANTED = 256
_MAX_SLOTS_TRIED = 64
_MAX_SLAB_FRACTION = 16  # no slab takes more of the space than this share, unless a single slot does
_TOLERATED_WASTE = 1 / 64


@dataclass(slots=True)
class _Slab:
    start: int  # first unit
    units: int
    slot_bytes: int
    slots: int
    free: dict[int, None]  # slot numbers, as an ordered set: the last one in is the next one out


class SlabAllocator:
    """Hands out aligned slots within ``capacity_bytes``. Not thread-safe: its owner locks."""

    def __init__(self, capacity_bytes: int, *, unit_bytes: int | None = None) -> None:
        if unit_bytes is None:
            unit_bytes = min(max(round_up(capacity_bytes // _UNITS_WANTED, ALIGNMENT), ALIGNMENT), _MAX_UNIT)
        if capacity_bytes < unit_bytes:
            unit_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        if unit_bytes < ALIGNMENT:
            raise UsageError(
                f"{capacity_bytes} bytes are too few to keep pages in: give at least {ALIGNMENT}"
            )
        self.capacity_bytes = capacity_bytes
        self.unit_bytes = unit_bytes
        self.used_bytes = 0  # in slots
        self._owner: list[_Slab | None] = [None] * (capacity_bytes // unit_bytes)
        self._first_free = 0  # a lower bound of the first unit without a slab
        self._open: dict[int, dict[int, _Slab]] = {}  # slot_bytes -> slabs with a free slot, by first unit
        self._shapes: dict[int, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"SlabAllocator({self.used_bytes}/{self.capacity_bytes} bytes used)"

    def slots_for(self, nbytes: int) -> int:
        """How many pages of ``nbytes`` an empty space holds."""
        units, slots = self._shape(slot_bytes(nbytes))
        return len(self._owner) // units * slots if units else 0

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a free slot for ``nbytes``, or None when there is none."""
        size = slot_bytes(nbytes)
        slab = next(iter(self._open.get(size, {}).values()), None) or self._new_slab(size)
        if slab is None:
            return None
        slot, _ = slab.free.popitem()
        if not slab.free:
            del self._open[size][slab.start]
        self.used_bytes += size
        return slab.start * self.unit_bytes + slot * size

    def free(self, offset: int, nbytes: int) -> None:
        """Return the slot that :meth:`allocate` or :meth:`claim` gave for ``nbytes``."""
        size = slot_bytes(nbytes)
        slab = self._owner[offset // self.unit_bytes]
        assert slab is not None, f"no slot at {offset}"
        assert slab.slot_bytes == size, f"the slot at {offset} has {slab.slot_bytes} bytes, not {size}"
        slot = (offset - slab.start * self.unit_bytes) // size
        assert slot not in slab.free, f"slot at {offset} freed twice"
        slab.free[slot] = None
        self.used_bytes -= size
        self._open.setdefault(size, {})[slab.start] = slab
        if len(slab.free) == slab.slots:
            del self._open[size][slab.start]
            self._owner[slab.start : slab.start + slab.units] = [None] * slab.units
            self._first_free = min(self._first_free, slab.start)

    def claim(self, offset: int, nbytes: int) -> bool:
        """Mark a slot known from elsewhere as used (a record read at start). False when ``offset`` is no
        slot of that size, lies outside, or is taken: the record is then not to be believed."""
        size = slot_bytes(nbytes)
        units, slots = self._shape(size)
        if not units or offset < 0:
            return False
        start = offset // (units * self.unit_bytes) * units
        slot, odd = divmod(offset - start * self.unit_bytes, size)
        if odd or slot >= slots or start + units > len(self._owner):
            return False
        slab = self._owner[start]
        if slab is None:
            if any(self._owner[start : start + units]):
                return False
            slab = self._place_slab(start, size, units, slots)
        if slab.slot_bytes != size or slab.start != start or slot not in slab.free:
            return False
        del slab.free[slot]
        if not slab.free:
            del self._open[size][start]
        self.used_bytes += size
        return True

    def check(self) -> None:
        """Assert that slabs, open lists and the byte count agree."""
        slabs = {slab.start: slab for slab in self._owner if slab is not None}
        used = 0
        for slab in slabs.values():
            assert all(self._owner[slab.start + i] is slab for i in range(slab.units)), f"torn slab {slab}"
            assert len(slab.free) < slab.slots, f"empty slab not dissolved: {slab}"
            assert (slab.start in self._open.get(slab.slot_bytes, {})) == bool(slab.free), f"lost slab {slab}"
            used += (slab.slots - len(slab.free)) * slab.slot_bytes
        assert used == self.used_bytes, f"{used} bytes are in slots, {self.used_bytes} counted"

    # -- slabs ---------------------------------------------------------------------------------------

    def _shape(self, size: int) -> tuple[int, int]:
        """(units, slots) of a slab of this class: the smallest that wastes little, (0, 0) if none fits."""
        shape = self._shapes.get(size)
        if shape is None:
            shape = self._shapes[size] = self._best_shape(size)
        return shape

    def _best_shape(self, size: int) -> tuple[int, int]:
        # What is lost is the rest of each slab and the units left over beside whole slabs: so count pages.
        best = (0, 0)
        most = 0
        for wanted in range(1, _MAX_SLOTS_TRIED + 1):
            units = -(-wanted * size // self.unit_bytes)
            if units > len(self._owner) or (best[0] and units > len(self._owner) // _MAX_SLAB_FRACTION):
                break
            slots = units * self.unit_bytes // size
            total = len(self._owner) // units * slots
            if total > most * (1 + _TOLERATED_WASTE):
                best, most = (units, slots), total
        return best

    def _new_slab(self, size: int) -> _Slab | None:
        units, slots = self._shape(size)
        if not units:
            return None
        # Everything before _first_free is taken, so filling a space looks at each unit about once.
        while self._first_free < len(self._owner) and self._owner[self._first_free] is not None:
            self._first_free += 1
        for start in range(round_up(self._first_free, units), len(self._owner) - units + 1, units):
            if not any(self._owner[start : start + units]):
                return self._place_slab(start, size, units, slots)
        return None

    def _place_slab(self, start: int, size: int, units: int, slots: int) -> _Slab:
        slab = _Slab(start, units, size, slots, dict.fromkeys(range(slots - 1, -1, -1)))
        self._owner[start : start + units] = [slab] * units
        self._open.setdefault(size, {})[start] = slab
        return slab


def slot_bytes(nbytes: int) -> int:
    """The size class of ``nbytes``: rounded up to what O_DIRECT needs."""
    return round_up(max(nbytes, 1), ALIGNMENT)
