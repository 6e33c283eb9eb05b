"""Pools of several page sizes in one memory: no byte belongs to two, none is lost, little is wasted."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierstore.errors import UsageError
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.store.buffers import HbmPages
from tierstore.tiers.group_pools import open_group_pools
from tierstore.tiers.large_pages import LargePages
from tierstore.tiers.two_level import books_of, check, cut

CHUNK = 8


def specs(*vectors: int) -> tuple[KVSpec, ...]:
    """Layouts of pages of so many KiB: as many layers as numbers."""
    groups, layer = [], 0
    for window, layers in enumerate(vectors):
        members = tuple(range(layer, layer + layers))
        groups.append(LayerGroup(LayerKind.SLIDING_WINDOW, members, 1, 16, window=window + 1))
        layer += layers
    return KVSpec(tuple(groups), "float32", CHUNK).split()


@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=5))
@settings(max_examples=300, deadline=None)
def test_a_large_page_holds_a_page_of_every_group_and_small_ones_divide_it(sizes):
    pages = cut(sizes)
    for size, per_large in zip(sizes, pages.per_large, strict=True):
        assert per_large >= 1
        stride, rest = divmod(pages.large_bytes, per_large)
        assert rest == 0
        assert stride >= size
        assert stride % 64 == 0


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([4096, 20480], 0.0),  # Gemma 3: a full layer to five with windows
        ([65536, 65536], 0.0),
        ([1 << 20, 1_234_944, 73_728], 0.16),  # attention, states of odd sizes, a latent
    ],
)
def test_little_is_lost_to_sizes_that_do_not_fit(sizes, most):
    pages = cut(sizes)
    for size, per_large in zip(sizes, pages.per_large, strict=True):
        assert 1 - per_large * size / pages.large_bytes <= most


def test_a_memory_without_room_is_refused():
    with pytest.raises(UsageError, match="too small for a page"):
        open_group_pools(specs(1, 5), 1024)


def test_pages_of_one_group_become_room_for_another():
    first, second = open_group_pools(specs(1, 4), 16 * 4096)
    assert (first.num_pages, second.num_pages) == (64, 16)
    pages = first.allocate(64)
    assert pages is not None
    assert second.allocate(1) is None
    first.free(pages[:4])
    assert (first.free_pages, second.free_pages) == (4, 1)
    assert second.allocate(1) == [0]
    assert first.allocate(1) is None


def test_the_smallest_large_page_that_wastes_little_is_taken():
    assert cut([52 << 20, 10 << 20]).per_large == (1, 5)  # not their common multiple: 5 and 26
    assert cut([29 << 20, 5 << 20]).per_large == (3, 17)


def test_pages_of_one_sequence_are_kept_together():
    pool, _ = open_group_pools(specs(1, 4), 16 * 4096)
    one = pool.allocate(6)
    assert one == [0, 1, 2, 3, 4, 5]
    other = pool.allocate(4)
    assert other == [8, 9, 10, 11]  # a large page of its own
    assert pool.allocate(1, near=other) == [6]  # its own is full: the next best
    pool.free([9])
    assert pool.allocate(2, near=one) == [7, 9]
    pool.free([10])
    assert pool.allocate(3, near=[8]) == [10, 12, 13]
    assert pool.allocate(2) == [14, 15]


def test_what_fits_best_is_taken_from():
    first, _ = open_group_pools(specs(1, 4), 16 * 4096)
    one, other = first.allocate(4), first.allocate(4)
    assert one is not None
    assert other is not None
    first.free(one[:3])
    first.free(other[:1])
    assert first.allocate(1) == [other[0]]
    first.free(one[3:])
    assert first.large_pages.free == 15


def test_pages_that_lie_apart_are_saved_as_they_are():
    """Where large pages are no multiple of a group's small ones, these do not follow one another."""
    _, pool = open_group_pools(specs(51, 10), 1 << 20)
    assert pool.stride > pool.spec.page_bytes
    pages = pool.allocate(5)
    assert pages is not None
    for page in pages:
        pool.array[page] = page + 1
    target = np.zeros((5, pool.spec.page_bytes), np.uint8)
    source = HbmPages(pool, pages)
    checksums = source.copy([(at, target[at].ctypes.data) for at in range(5)], pool.spec.page_bytes)
    assert [set(row.tolist()) for row in target] == [{page + 1} for page in pages]
    assert checksums == [xxhash.xxh3_64_intdigest(row) for row in target]


class OneMemory(RuleBasedStateMachine):
    """Random allocations of three groups against a map of who wrote which bytes."""

    @initialize(sizes=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6)))
    def open(self, sizes):
        self.pools = open_group_pools(specs(*sizes), 120 * 1024)
        self.held: dict[tuple[int, int], int] = {}
        self.stamp = 0

    @rule(group=st.integers(0, 2), count=st.integers(1, 9))
    def take(self, group, count):
        pool = self.pools[group]
        free = pool.free_pages
        pages = pool.allocate(count)
        assert (pages is not None) == (count <= free)
        for page in pages or ():
            assert (group, page) not in self.held
            self.stamp = self.stamp % 250 + 1
            self.held[group, page] = self.stamp
            pool.array[page] = self.stamp

    @rule(data=st.data())
    def give(self, data):
        if self.held:
            group, page = data.draw(st.sampled_from(sorted(self.held)))
            self.pools[group].free([page])
            del self.held[group, page]

    @invariant()
    def nothing_overlaps(self):
        if not hasattr(self, "pools"):
            return
        groups = [pool.books for pool in self.pools]
        check(groups)
        for (group, page), stamp in self.held.items():
            assert (self.pools[group].array[page] == stamp).all()

    def teardown(self):
        for group, page in getattr(self, "held", ()):
            self.pools[group].free([page])
        if hasattr(self, "pools"):
            large = self.pools[0].large_pages
            assert large.free == large.count


TestOneMemory = OneMemory.TestCase
TestOneMemory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_copies_go_to_the_pages_that_are_shown():
    pools = open_group_pools(specs(3, 5), 1 << 16)
    for pool in pools:
        pages = pool.allocate(3)
        assert pages is not None
        source = np.arange(pool.spec.page_bytes, dtype=np.uint8)
        pool.write_pages([(pages[1], source.ctypes.data)])
        assert (pool.array[pages[1]] == source).all()
        pool.copy_pages([(pages[2], pages[1])])
        assert (pool.array[pages[2]] == source).all()
        back = np.zeros_like(source)
        pool.read_pages([(pages[2], back.ctypes.data)])
        assert (back == source).all()


def test_pages_that_others_have_given_back_meanwhile_empty_nothing():
    """Idle pages are listed, and then asked about: a save that ends between lets some of them leave."""
    sizes = [1024, 3072]
    small, _ = books_of(sizes, cut(sizes), LargePages(3072, 4))
    idle = small.allocate(4)
    assert small.emptied_by(idle) == 2
    small.free(idle[:3])
    small.free(idle[3:])
    assert not small.parts
    assert small.emptied_by(idle) <= 2
