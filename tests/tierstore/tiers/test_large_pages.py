"""A pool's memory comes and goes: never from under a page that there is, and all that is given back goes."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tierstore.errors import UsageError
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.device import DeviceError
from tierstore.tiers.group_pools import attach_group_pools, open_group_pools
from tierstore.tiers.hbm import HostRegion, PagePool
from tierstore.tiers.large_pages import LargePages
from tierstore.tiers.two_level import check


class Granules:
    """A backing that knows which granules have memory, and has ``left`` more."""

    def __init__(self, granule_bytes: int, left: int) -> None:
        self.granule_bytes = granule_bytes
        self.left = left
        self.there: set[int] = set()

    def back(self, granules: range) -> bool:
        new = set(granules) - self.there
        if len(new) > self.left:
            return False
        self.left -= len(new)
        self.there |= new
        return True

    def release(self, granules: range) -> None:
        assert self.there.issuperset(granules), "what has no memory is given back"
        self.left += len(granules)
        self.there.difference_update(granules)


class Elastic(RuleBasedStateMachine):
    """Large pages and granules of any sizes, against what each large page needs."""

    @initialize(
        sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
        count=st.integers(1, 12),
        left=st.integers(9, 120),
        parts=st.integers(1, 3),
    )
    def open(self, sizes, count, left, parts):
        large_page, granule = sizes
        self.backing = Granules(granule, left)
        count *= parts
        self.large_pages = LargePages(large_page, count, present=0, backing=self.backing, parts=parts)
        self.large_pages.resize(1)
        self.held: set[int] = set()

    @rule(wanted=st.integers(1, 12))
    def resize(self, wanted):
        before = self.large_pages.present
        if wanted > self.large_pages.count:
            with pytest.raises(UsageError, match="the pool must have 1 to"):
                self.large_pages.resize(wanted)
            return
        assert self.large_pages.resize(wanted) == self.large_pages.present
        if wanted < before:
            assert self.large_pages.present == max(wanted, len(self.held | {0}))
        else:
            assert before <= self.large_pages.present <= wanted
            assert self.large_pages.target == self.large_pages.present

    @rule(count=st.integers(1, 4))
    def take(self, count):
        free = self.large_pages.free_large
        taken = self.large_pages.take(count)
        assert (taken is None) == (count > len(free))
        assert free.issuperset(taken or ())
        for page in taken or ():  # the part with the most free ones had its turn
            part, left = (
                page // self.large_pages.part_size,
                Counter(each // self.large_pages.part_size for each in free),
            )
            assert left[part] == max(left.values())
            free -= {page}
        self.held.update(taken or ())

    @rule(data=st.data())
    def give(self, data):
        if self.held:
            large_pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
            self.held.difference_update(large_pages)
            self.large_pages.give(large_pages)

    def there(self) -> set[int]:
        return self.held | self.large_pages.free_large

    @invariant()
    def each_frame_has_its_memory_and_nothing_else_has(self):
        if not hasattr(self, "large_pages"):
            return
        self.large_pages.check()
        there, size, granule = self.there(), self.large_pages.large_bytes, self.backing.granule_bytes
        assert len(there) == self.large_pages.present
        needed = {
            byte // granule
            for large_page in there
            for byte in range(large_page * size, (large_page + 1) * size)
        }
        assert needed == self.backing.there
        sizes = [count for _, count in self.large_pages.present_parts()]
        assert sum(sizes) == self.large_pages.present
        assert self.large_pages.used == tuple(
            sum(held // self.large_pages.part_size == part for held in self.held)
            for part in range(len(sizes))
        )


TestElastic = Elastic.TestCase
TestElastic.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def resident_bytes(address: int, nbytes: int) -> int:
    """Of these addresses, by what the kernel says of the process's mappings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        if "-" in span and not span.endswith(":"):
            start, stop = (int(part, 16) for part in span.split("-"))
            inside = start < address + nbytes and address < stop
        elif inside and span == "Rss:":
            total += int(rest.split()[0]) << 10
    return total


def spec(layers: int) -> KVSpec:
    """16 KiB for each layer."""
    return KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, tuple(range(layers)), 4, 32),), "float32", 16)


def test_memory_that_is_given_back_is_the_systems_again() -> None:
    pool = PagePool(spec(4), 512, most=640)  # 32 MiB, and addresses for 40
    address, nbytes = pool.address, 640 * (64 << 10)
    assert resident_bytes(address, nbytes) == 32 << 20
    pages = pool.allocate(512)
    assert pages is not None
    for page in pages:
        pool.array[page] = page % 251
    assert pool.resize(16 << 20).nbytes == 32 << 20, "all is in use"
    pool.free(pages[:256:2])
    pool.free(pages[256::2])
    pool.free(pages[257:384:2])
    assert (pool.capacity, pool.target, pool.free_pages) == (256, 256, 64)
    kept = [*pages[1:256:2], *pages[385::2]]
    assert resident_bytes(address, nbytes) == 16 << 20
    assert pool.resize(nbytes).nbytes == nbytes
    assert resident_bytes(address, nbytes) == nbytes
    assert all((pool.array[page] == page % 251).all() for page in kept)
    fresh = pool.allocate(640 - len(kept))
    assert fresh is not None
    assert not set(fresh) & set(kept)
    with pytest.raises(UsageError, match=r"must be 64 KiB to 40 MiB"):
        pool.resize(nbytes + (64 << 10))
    assert mmap.PAGESIZE == 4096


def test_groups_share_what_there_is() -> None:
    both = KVSpec(
        (
            LayerGroup(LayerKind.FULL_ATTENTION, (0,), 4, 32),
            LayerGroup(LayerKind.SLIDING_WINDOW, (1, 2, 3, 4), 4, 32, window=32),
        ),
        "float32",
        16,
    )
    first, second = pools = open_group_pools(both.split(), 1 << 20, most_bytes=2 << 20)
    assert (first.capacity, second.capacity, first.num_pages, second.num_pages) == (64, 16, 128, 32)
    one, other = first.allocate(30), second.allocate(8)
    assert one is not None
    assert other is not None
    for page in one:
        first.array[page] = 7
    assert first.resize(512 << 10).nbytes == 1 << 20  # 16 large pages, all in use
    assert (first.free_pages, second.free_pages, second.excess) == (2, 0, 8)
    second.free(other)
    assert (first.capacity, second.capacity, second.free_pages) == (32, 8, 0)
    assert second.allocate(1) is None
    assert second.resize(2 << 20).nbytes == 2 << 20
    taken = second.allocate(24)
    assert taken is not None
    second.array[taken] = np.uint8(9)
    assert all((first.array[page] == 7).all() for page in one)
    check([pool.books for pool in pools])


def test_frames_that_came_before_a_device_failed_are_there():
    class Failing(Granules):
        def back(self, granules):
            if self.left <= 2:
                raise DeviceError("the driver refused")
            return super().back(granules)

    large_pages = LargePages(4, 8, present=0, backing=Failing(4, 6))
    with pytest.raises(DeviceError, match="refused"):
        large_pages.resize(8)
    large_pages.check()
    assert (large_pages.present, large_pages.target, large_pages.free, large_pages.excess) == (4, 4, 4, 0)
    assert large_pages.take(4) == [0, 1, 2, 3]
    large_pages.give([3, 2, 1, 0])
    assert large_pages.resize(2) == 2
    large_pages.check()


def test_a_process_maps_one_part() -> None:
    """Parts need not begin at whole system pages."""
    spec = KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 24),), "float32", 5)
    pool = PagePool(spec, 10, shared_parts=3)  # of 4 pages, of which 2 are absent
    pages = pool.allocate(10)
    assert pages is not None
    assert pool.large_pages.used == (4, 3, 3)
    for page in pages:
        pool.array[page] = page + 1
    assert isinstance(pool.region, HostRegion)
    assert pool.region.memory.fd is not None
    for part in range(3):
        fd = os.dup(pool.region.memory.fd)
        [own] = attach_group_pools([spec], fd, spec.page_bytes, 4, first=4 * part)
        held = [page - 4 * part for page in pages if page // 4 == part]
        assert [set(own.array[page].tolist()) for page in held] == [{page + 4 * part + 1} for page in held]
        own.array[held[0]] = 99
        assert (pool.array[held[0] + 4 * part] == 99).all()
