from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.errors import UsageError
from tierstore.tiers.disk.space import choose
from tierstore.tiers.slabs import SlabAllocator, best_run, slot_bytes

SIZES = [1, 4096, 5000, 72 << 10, 128 << 10, 300_000]


class AllocatorAgainstIntervals(RuleBasedStateMachine):
    """Whatever is allocated, freed and moved in any order: slots are aligned, within bounds, and never
    overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SlabAllocator(3 << 20)
        self.taken: dict[int, int] = {}

    @rule(nbytes=st.sampled_from(SIZES))
    def allocate(self, nbytes):
        offset = self.space.allocate(nbytes)
        assert (offset is None) or self.take(offset, nbytes)

    def take(self, offset, nbytes):
        assert offset % 4096 == 0
        assert 0 <= offset <= self.space.capacity_bytes - slot_bytes(nbytes)
        for start, size in self.taken.items():
            assert offset + slot_bytes(nbytes) <= start or start + slot_bytes(size) <= offset
        self.taken[offset] = nbytes
        return True

    @rule(nbytes=st.sampled_from(SIZES), count=st.integers(1, 3), joining=st.booleans(), data=st.data())
    def move_out_of_the_way(self, nbytes, count, joining, data):
        """The pages of the chosen windows always find places elsewhere, and then there is room."""
        windows = choose(
            self.space,
            nbytes,
            count,
            wanted={},
            fixed=(),
            most_moved=data.draw(st.floats(0, 4)),
            joining=joining,
        )
        for window in windows:
            self.space.hold(window.start, window.units)
        unit = self.space.unit_bytes
        held = {
            offset
            for window in windows
            for slab in window.slabs
            for offset in self.taken
            if slab.start * unit <= offset < (slab.start + slab.units) * unit
        }
        stays = data.draw(st.sets(st.sampled_from(sorted(held)), max_size=2)) if held else set()
        for offset in sorted(held - stays):  # a page that is in use does not move
            size = self.taken[offset]
            place = self.space.allocate(size)
            assert place is not None
            self.take(place, size)
            self.space.free(offset, self.taken.pop(offset))
            self.space.check()
        for window in windows:
            self.space.unhold(window.start, window.units)
        assert self.space.has_room(nbytes) or not windows or stays

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data):
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.space.free(offset, self.taken.pop(offset))

    @rule()
    def rebuild_from_the_slots_alone(self):
        again = SlabAllocator(3 << 20)
        for offset, nbytes in self.taken.items():
            assert again.claim(offset, nbytes)
            assert not again.claim(offset, nbytes)
        again.check()
        assert again.used_bytes == self.space.used_bytes
        self.space = again

    @invariant()
    def books_balance(self):
        self.space.check()
        assert self.space.used_bytes == sum(map(slot_bytes, self.taken.values()))


TestAllocator = AllocatorAgainstIntervals.TestCase
TestAllocator.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)


@given(pages=st.integers(1, 200), nbytes=st.sampled_from(SIZES))
def test_one_class_fills_nearly_everything(pages, nbytes):
    space = SlabAllocator(pages * slot_bytes(nbytes))
    offsets = [space.allocate(nbytes) for _ in range(pages)]
    held = [offset for offset in offsets if offset is not None]
    assert len(held) == space.slots_for(nbytes) >= pages * 0.66 - 1
    for offset in held:
        space.free(offset, nbytes)
    assert space.used_bytes == 0


@pytest.mark.parametrize("nbytes", [200_000, (5 << 20) + 12, 72 << 10])
def test_one_class_leaves_room_for_another(nbytes):
    space = SlabAllocator(64 << 20)
    assert space.allocate(nbytes) is not None
    assert space.allocate(1 << 20) is not None
    assert space.slots_for(nbytes) * slot_bytes(nbytes) > 0.9 * space.capacity_bytes


def test_another_class_gets_the_space_back():
    space = SlabAllocator(8 << 20)
    small = [space.allocate(4096) for _ in range(2048)]
    assert None not in small
    assert space.allocate(1 << 20) is None
    for offset in small:
        assert offset is not None
        space.free(offset, 4096)
    assert space.allocate(1 << 20) is not None


def test_what_moves_goes_where_it_is_of_no_use_to_others():
    space = SlabAllocator(64 << 20, unit_bytes=1 << 20)
    small = [space.allocate(1 << 20) for _ in range(64)]
    for offset in small[10::8]:
        assert offset is not None
        space.free(offset, 1 << 20)
    assert space.allocate(4 << 20) is None
    (window,) = choose(space, 4 << 20, 1, wanted={}, fixed=(), most_moved=1.0)
    assert sum(slab.used_bytes for slab in window.slabs) == 3 << 20  # it has one of the gaps
    assert not choose(space, 4 << 20, 1, wanted={1 << 20: 0}, fixed=set(space.slabs()), most_moved=1.0)
    assert not choose(space, 4 << 20, 1, wanted={}, fixed=(), most_moved=0.5)


def test_gaps_are_joined():
    space = SlabAllocator(16 << 20, unit_bytes=1 << 20)
    taken = [space.allocate(3 << 20) for _ in range(5)]  # and a gap of one unit at the end
    assert None not in taken
    assert taken[1] is not None
    space.free(taken[1], 3 << 20)
    assert not space.has_room(4 << 20)
    (window,) = choose(space, 4 << 20, 1, wanted={}, fixed=(), most_moved=1.0, joining=True)
    assert window.start + window.units == 16


def test_the_run_with_the_least_left_over_is_the_best():
    taken = bytearray(b"\0\0\0\1\0\0\0\0\1\0\0\0\0\0")
    assert [best_run(taken, units) for units in (1, 2, 3, 4, 5, 6)] == [0, 4, 0, 4, 9, None]


def test_a_slot_says_where_its_slab_begins():
    space = SlabAllocator(64 << 20, unit_bytes=64 << 10)
    assert space.allocate(4096) == 0
    offsets = [space.allocate(160 << 10) for _ in range(10)]  # slabs of 5 units, from unit 1 on
    again = SlabAllocator(64 << 20, unit_bytes=64 << 10)
    for offset in reversed(offsets):
        assert offset is not None
        assert again.claim(offset, 160 << 10)
    again.check()
    assert [slab.start for slab in again.slabs()] == [1, 6, 11, 16, 21]


@pytest.mark.parametrize(("offset", "nbytes"), [(-4096, 4096), (100, 4096), (3 << 20, 4096), (4096, 300_000)])
def test_claim_refuses_what_is_no_slot(offset, nbytes):
    assert not SlabAllocator(3 << 20).claim(offset, nbytes)


def test_too_little_space_is_said_at_once():
    with pytest.raises(UsageError, match="the capacity must be at least"):
        SlabAllocator(100)
