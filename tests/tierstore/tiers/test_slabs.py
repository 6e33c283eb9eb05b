from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.errors import UsageError
from tierstore.tiers.slabs import SlabAllocator, slot_bytes

SIZES = [1, 4096, 5000, 72 << 10, 128 << 10, 300_000]


class AllocatorAgainstIntervals(RuleBasedStateMachine):
    """Whatever is allocated and freed in any order: slots are aligned, within bounds, and never overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.space = SlabAllocator(3 << 20)
        self.taken: dict[int, int] = {}

    @rule(nbytes=st.sampled_from(SIZES))
    def allocate(self, nbytes):
        offset = self.space.allocate(nbytes)
        if offset is None:
            return
        assert offset % 4096 == 0
        assert 0 <= offset <= self.space.capacity_bytes - slot_bytes(nbytes)
        for start, size in self.taken.items():
            assert offset + slot_bytes(nbytes) <= start or start + slot_bytes(size) <= offset
        self.taken[offset] = nbytes

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


@pytest.mark.parametrize(("offset", "nbytes"), [(-4096, 4096), (100, 4096), (3 << 20, 4096), (4096, 300_000)])
def test_claim_refuses_what_is_no_slot(offset, nbytes):
    assert not SlabAllocator(3 << 20).claim(offset, nbytes)


def test_too_little_space_is_said_at_once():
    with pytest.raises(UsageError, match="too few"):
        SlabAllocator(100)
