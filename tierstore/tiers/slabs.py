"""Two-level allocation of space, for the host arena and the disk's extents. The allocator computes with
offsets only.

Space is divided into equal *units*. A *slab* is a run of units for one size class, divided into equal
*slots*; a page takes one slot. When the last used slot of a slab is freed, the slab becomes free units for
any class. So pages of different models share one space. After pages of many sizes came and went, slabs may be
partly empty. On disk, where pages can be moved, a run of units is then *held* (nothing is allocated there),
emptied, and used for another class (tiers/disk/space.py chooses the run).

A slab may begin at any unit. If slabs were aligned to their own sizes, like buddy blocks, slabs of 5, 8 and
28 units would leave unusable gaps. The start of a slab still follows from the offset of any of its slots,
because no two slots of a slab have the same distance from the unit border before them. So the disk tier can
rebuild its free space from its page records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT
from tierstore.units import round_up

_MAX_UNIT = 4 << 20
_UNITS_WANTED = 256
_MAX_SLOTS_TRIED = 64
_MAX_SLAB_FRACTION = 64  # a slab has at most 1/n of the space, unless a single slot is larger
_TOLERATED_WASTE = 1 / 64


@dataclass(slots=True, eq=False)
class Slab:
    """Units ``start … start + units``, divided into ``slots`` of ``slot_bytes``."""

    start: int
    units: int
    slot_bytes: int
    slots: int
    free: dict[int, None]  # free slot numbers, as an ordered set: the last one added is allocated first
    held: bool = False  # True while the slab is being emptied: its slots are not allocated

    @property
    def used_slots(self) -> int:
        return self.slots - len(self.free)

    @property
    def used_bytes(self) -> int:
        return self.used_slots * self.slot_bytes


class SlabAllocator:
    """Allocates aligned slots within ``capacity_bytes``. Not thread-safe: the caller must lock."""

    def __init__(self, capacity_bytes: int, *, unit_bytes: int | None = None) -> None:
        if unit_bytes is None:
            unit_bytes = min(max(round_up(capacity_bytes // _UNITS_WANTED, ALIGNMENT), ALIGNMENT), _MAX_UNIT)
        if capacity_bytes < unit_bytes:
            unit_bytes = capacity_bytes // ALIGNMENT * ALIGNMENT
        if unit_bytes < ALIGNMENT:
            raise UsageError(
                f"the capacity must be at least {ALIGNMENT} bytes to hold a page, got {capacity_bytes}"
            )
        self.capacity_bytes = capacity_bytes
        self.unit_bytes = unit_bytes
        self.used_bytes = 0  # bytes of used slots
        self._owner: list[Slab | None] = [None] * (capacity_bytes // unit_bytes)  # the slab of each unit
        self._limit = len(self._owner)  # no slab is placed at or after this unit
        self._taken = bytearray(len(self._owner))  # for each unit: 1 if no slab may be placed there
        self._open: dict[int, dict[int, Slab]] = {}  # slot_bytes → slabs with a free slot, by first unit
        self._shapes: dict[int, tuple[int, int]] = {}
        self._numbers: dict[int, dict[int, int]] = {}  # slot_bytes → bytes after a unit border → slot number

    def __repr__(self) -> str:
        return f"SlabAllocator({self.used_bytes}/{self.capacity_bytes} bytes used)"

    def slots_for(self, nbytes: int) -> int:
        """Return the number of pages of ``nbytes`` that fit into the empty space."""
        units, slots = self._shape(slot_bytes(nbytes))
        return len(self._owner) // units * slots if units else 0

    @property
    def units(self) -> int:
        return len(self._owner)

    def shape(self, nbytes: int) -> tuple[int, int]:
        """Return (units, slots) of a slab for pages of ``nbytes``; (0, 0) if not even one page fits."""
        return self._shape(slot_bytes(nbytes))

    def slab_of(self, unit: int) -> Slab | None:
        """Return the slab that contains this unit, if any."""
        return self._owner[unit]

    def slabs(self) -> list[Slab]:
        """Return all slabs, in order of their positions."""
        return [slab for slab in dict.fromkeys(self._owner) if slab is not None]

    def taken_units(self) -> bytearray:
        """Return a byte for each unit: 1 if no slab may be placed there, else 0."""
        return bytearray(self._taken)

    def free_slots(self) -> Counter[int]:
        """Return the number of free slots in existing slabs that are not held, by slot bytes."""
        opened = {size: slabs.values() for size, slabs in self._open.items() if slabs}
        return Counter({size: sum(len(slab.free) for slab in slabs) for size, slabs in opened.items()})

    def has_room(self, nbytes: int) -> bool:
        """Return whether :meth:`allocate` would find a slot."""
        size = slot_bytes(nbytes)
        return bool(self._open.get(size)) or self._free_run(*self._shape(size)) is not None

    def allocate(self, nbytes: int) -> int | None:
        """Allocate a slot for ``nbytes``, and return its offset; None if there is no room."""
        return next(iter(self.allocate_many(nbytes, 1)), None)

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """Allocate up to ``count`` slots for ``nbytes``, and return their offsets; fewer if there is no more
        room."""
        size = slot_bytes(nbytes)
        offsets: list[int] = []
        while len(offsets) < count:
            slab = next(iter(self._open.get(size, {}).values()), None) or self._new_slab(size)
            if slab is None:
                break
            first = slab.start * self.unit_bytes
            for _ in range(min(count - len(offsets), len(slab.free))):
                offsets.append(first + slab.free.popitem()[0] * size)
            if not slab.free:
                del self._open[size][slab.start]
        self.used_bytes += size * len(offsets)
        return offsets

    def free(self, offset: int, nbytes: int) -> None:
        """Free a slot that :meth:`allocate` or :meth:`claim` returned for ``nbytes``."""
        size = slot_bytes(nbytes)
        slab = self._owner[offset // self.unit_bytes]
        assert slab is not None, f"no slot at {offset}"
        assert slab.slot_bytes == size, f"the slot at {offset} has {slab.slot_bytes} bytes, not {size}"
        slot = (offset - slab.start * self.unit_bytes) // size
        assert slot not in slab.free, f"slot at {offset} freed twice"
        slab.free[slot] = None
        self.used_bytes -= size
        if not slab.held:
            self._open.setdefault(size, {})[slab.start] = slab
        if len(slab.free) == slab.slots:
            self._open.get(size, {}).pop(slab.start, None)
            self._owner[slab.start : slab.start + slab.units] = [None] * slab.units
            usable = max(min(slab.units, self._limit - slab.start), 0)
            if not slab.held or usable < slab.units:
                self._taken[slab.start : slab.start + usable] = bytes(usable)

    def hold(self, start: int, units: int) -> None:
        """Allocate nothing in units ``start … start + units`` and in slabs that overlap them, so that these
        slabs can be emptied."""
        self._taken[start : start + units] = b"\1" * units
        for slab in self._slabs_in(start, units):
            slab.held = True
            self._open.get(slab.slot_bytes, {}).pop(slab.start, None)

    def unhold(self, start: int, units: int) -> None:
        """Undo :meth:`hold`: allocate again in slabs that have not been emptied, and in free units."""
        for slab in self._slabs_in(start, units):
            if slab.start + slab.units > self._limit:
                continue
            slab.held = False
            if slab.free:
                self._open.setdefault(slab.slot_bytes, {})[slab.start] = slab
        # Slabs that overlapped the borders of the range may have left free units outside of the range.
        first = next((at for at in range(start, 0, -1) if self._owner[at - 1] is not None), 0)
        last = next(
            (at for at in range(start + units, self.units) if self._owner[at] is not None), self.units
        )
        for unit in range(first, last):
            self._taken[unit] = unit >= self._limit or self._owner[unit] is not None

    def limit(self, units: int) -> None:
        """Allocate nothing after the first ``units`` units. Existing pages stay."""
        self._limit = min(units, self._limit)
        self.capacity_bytes = self._limit * self.unit_bytes
        self.hold(self._limit, self.units - self._limit)

    def _slabs_in(self, start: int, units: int) -> Iterator[Slab]:
        return (slab for slab in dict.fromkeys(self._owner[start : start + units]) if slab is not None)

    def claim(self, offset: int, nbytes: int) -> bool:
        """Mark the slot at ``offset`` as used, for a page whose record was read at open. Return False if
        there can be no slot of this size, or the slot is used: then the record is invalid."""
        size = slot_bytes(nbytes)
        units, slots = self._shape(size)
        slot = self._number(size, offset % self.unit_bytes)
        if not units or slot is None or offset < slot * size:
            return False
        start = (offset - slot * size) // self.unit_bytes
        if start + units > len(self._owner):
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
        """Assert that slabs, lists of free slots and the byte count agree."""
        slabs = {slab.start: slab for slab in self._owner if slab is not None}
        used = 0
        for slab in slabs.values():
            assert all(self._owner[slab.start + i] is slab for i in range(slab.units)), f"torn slab {slab}"
            assert len(slab.free) < slab.slots, f"empty slab not dissolved: {slab}"
            offered = slab.start in self._open.get(slab.slot_bytes, {})
            assert offered == (bool(slab.free) and not slab.held), f"lost slab {slab}"
            used += slab.used_bytes
            assert all(self._taken[slab.start : slab.start + slab.units]), f"units of {slab} are offered"
        assert used == self.used_bytes, f"{used} bytes are in slots, {self.used_bytes} counted"

    # -- slabs ---------------------------------------------------------------------------------------

    def _shape(self, size: int) -> tuple[int, int]:
        """Return (units, slots) of a slab of this class: the smallest slab that wastes little space; (0, 0)
        if no slab fits."""
        shape = self._shapes.get(size)
        if shape is None:
            shape = self._shapes[size] = self._best_shape(size)
        return shape

    def _best_shape(self, size: int) -> tuple[int, int]:
        # Space is wasted at the end of each slab, and in units that are too few for another slab. So compare
        # the numbers of pages that fit into the whole space.
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

    def _new_slab(self, size: int) -> Slab | None:
        units, slots = self._shape(size)
        start = self._free_run(units, slots)
        return None if start is None else self._place_slab(start, size, units, slots)

    def _free_run(self, units: int, slots: int) -> int | None:
        return best_run(self._taken, units) if slots else None

    def _number(self, size: int, beyond: int) -> int | None:
        """Return the number of the slot that begins ``beyond`` bytes after a unit border."""
        numbers = self._numbers.get(size)
        if numbers is None:
            _, slots = self._shape(size)
            numbers = {slot * size % self.unit_bytes: slot for slot in range(slots)}
            assert len(numbers) == slots, f"slots of {size} bytes cannot be told apart"
            self._numbers[size] = numbers
        return numbers.get(beyond)

    def _place_slab(self, start: int, size: int, units: int, slots: int) -> Slab:
        slab = Slab(start, units, size, slots, dict.fromkeys(range(slots - 1, -1, -1)))
        self._owner[start : start + units] = [slab] * units
        self._taken[start : start + units] = b"\1" * units
        self._open.setdefault(size, {})[start] = slab
        return slab


def best_run(taken: bytearray, units: int) -> int | None:
    """Return the first of ``units`` adjacent units that are 0 in ``taken``; None if there are none. Choose
    the free run with the fewest units left over after it is filled with slabs of this size, and among equals
    the shortest."""
    best: tuple[int, int, int] | None = None
    start = taken.find(0)
    while start >= 0:
        stop = taken.find(1, start)
        length = (stop if stop >= 0 else len(taken)) - start
        if length >= units:
            fit = (length % units, length, start)
            best = fit if best is None else min(best, fit)
        start = taken.find(0, start + length)
    return best[2] if best is not None else None


def slot_bytes(nbytes: int) -> int:
    """Return the size class of ``nbytes``: rounded up to the alignment of O_DIRECT."""
    return round_up(max(nbytes, 1), ALIGNMENT)
