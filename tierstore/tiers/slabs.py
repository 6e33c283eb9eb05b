"""Two-level space management, for the host arena and the disk's extents alike. Pure: no memory, no files.

Space is cut into equal *units*. A *slab* is a run of units given to one size class and carved into
equal *slots*; a page takes one slot. When its last slot is freed, a slab dissolves into units that any other
class may take. So pages of different models share one space. What a history of sizes may leave behind are
partly empty slabs; where pages can be moved (on disk), a run of units is *held*, emptied and given to another
class (tiers/disk/space.py says which).

A slab may begin at any unit: were it aligned to its own size, as a buddy is, slabs of 5, 8 and 28 units would
leave gaps between them that nobody can use. Where it begins still follows from any one of its slots, since no
two slots of a slab are at the same distance from the unit before them. That is what lets the disk tier
rebuild its free space from nothing but its page records.
"""

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
_MAX_SLAB_FRACTION = 64  # no slab takes more of the space than this share, unless a single slot does
_TOLERATED_WASTE = 1 / 64


@dataclass(slots=True, eq=False)
class Slab:
    """Units ``start … start + units``, carved into ``slots`` of ``slot_bytes``."""

    start: int
    units: int
    slot_bytes: int
    slots: int
    free: dict[int, None]  # slot numbers, as an ordered set: the last one in is the next one out
    held: bool = False  # to be emptied: no slot of it is handed out

    @property
    def used_slots(self) -> int:
        return self.slots - len(self.free)

    @property
    def used_bytes(self) -> int:
        return self.used_slots * self.slot_bytes


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
        self._owner: list[Slab | None] = [None] * (capacity_bytes // unit_bytes)
        self._limit = len(self._owner)  # units from here on are given to no slab any more
        self._taken = bytearray(len(self._owner))  # for each unit whether no slab may be put there
        self._open: dict[int, dict[int, Slab]] = {}  # slot_bytes -> slabs with a free slot, by first unit
        self._shapes: dict[int, tuple[int, int]] = {}
        self._numbers: dict[
            int, dict[int, int]
        ] = {}  # slot_bytes -> bytes beyond a unit -> number of the slot

    def __repr__(self) -> str:
        return f"SlabAllocator({self.used_bytes}/{self.capacity_bytes} bytes used)"

    def slots_for(self, nbytes: int) -> int:
        """How many pages of ``nbytes`` an empty space holds."""
        units, slots = self._shape(slot_bytes(nbytes))
        return len(self._owner) // units * slots if units else 0

    @property
    def units(self) -> int:
        return len(self._owner)

    def shape(self, nbytes: int) -> tuple[int, int]:
        """(units, slots) of a slab for pages of ``nbytes``; (0, 0) where not one of them fits."""
        return self._shape(slot_bytes(nbytes))

    def slab_of(self, unit: int) -> Slab | None:
        """The slab that has this unit."""
        return self._owner[unit]

    def slabs(self) -> list[Slab]:
        """All slabs, in order of their places."""
        return [slab for slab in dict.fromkeys(self._owner) if slab is not None]

    def taken_units(self) -> bytearray:
        """For each unit 1 if no slab may be put there, else 0: a copy."""
        return bytearray(self._taken)

    def free_slots(self) -> Counter[int]:
        """Slot bytes → slots that can be had without a new slab."""
        return Counter(
            {
                size: sum(len(slab.free) for slab in slabs.values())
                for size, slabs in self._open.items()
                if slabs
            }
        )

    def has_room(self, nbytes: int) -> bool:
        """Whether :meth:`allocate` would find a slot."""
        size = slot_bytes(nbytes)
        return bool(self._open.get(size)) or self._free_run(*self._shape(size)) is not None

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a free slot for ``nbytes``, or None when there is none."""
        return next(iter(self.allocate_many(nbytes, 1)), None)

    def allocate_many(self, nbytes: int, count: int) -> list[int]:
        """The offsets of up to ``count`` free slots for ``nbytes``: fewer when there are no more."""
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
        """Return the slot that :meth:`allocate` or :meth:`claim` gave for ``nbytes``."""
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
        """Hand out nothing of units ``start … start + units``, nor of the slabs that reach into them, so that
        they empty."""
        self._taken[start : start + units] = b"\1" * units
        for slab in self._slabs_in(start, units):
            slab.held = True
            self._open.get(slab.slot_bytes, {}).pop(slab.start, None)

    def unhold(self, start: int, units: int) -> None:
        """Undo :meth:`hold`: what has not become empty is a slab like any other again."""
        for slab in self._slabs_in(start, units):
            if slab.start + slab.units > self._limit:
                continue
            slab.held = False
            if slab.free:
                self._open.setdefault(slab.slot_bytes, {})[slab.start] = slab
        # Slabs that reached beyond the borders may be gone from there, too.
        first = next((at for at in range(start, 0, -1) if self._owner[at - 1] is not None), 0)
        last = next(
            (at for at in range(start + units, self.units) if self._owner[at] is not None), self.units
        )
        for unit in range(first, last):
            self._taken[unit] = unit >= self._limit or self._owner[unit] is not None

    def limit(self, units: int) -> None:
        """Put no new slab, and no new page, behind the first ``units``. Pages that are there stay."""
        self._limit = min(units, self._limit)
        self.capacity_bytes = self._limit * self.unit_bytes
        self.hold(self._limit, self.units - self._limit)

    def _slabs_in(self, start: int, units: int) -> Iterator[Slab]:
        return (slab for slab in dict.fromkeys(self._owner[start : start + units]) if slab is not None)

    def claim(self, offset: int, nbytes: int) -> bool:
        """Mark a slot known from elsewhere as used (a record read at start). False when ``offset`` is no
        slot of that size, lies outside, or is taken: the record is then not to be believed."""
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
        """Assert that slabs, open lists and the byte count agree."""
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

    def _new_slab(self, size: int) -> Slab | None:
        units, slots = self._shape(size)
        start = self._free_run(units, slots)
        return None if start is None else self._place_slab(start, size, units, slots)

    def _free_run(self, units: int, slots: int) -> int | None:
        """The first unit of a free place for a slab."""
        return best_run(self._taken, units) if slots else None

    def _number(self, size: int, beyond: int) -> int | None:
        """Which slot of its slab begins ``beyond`` bytes after the last unit's border."""
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
    """Where to put ``units`` among those that are 0 in ``taken``: in the run of which least is left over when
    it is full of their like, and in the smallest of those, so that what is left can be used."""
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
    """The size class of ``nbytes``: rounded up to what O_DIRECT needs."""
    return round_up(max(nbytes, 1), ALIGNMENT)
