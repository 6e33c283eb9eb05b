"""A device's pool that grows and shrinks: no memory goes from under what is still working on it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest

from tests.engine.device import ONE_OF_EACH, FakeDevice, missing
from tests.portions import chosen
from tests.tierstore.tiers.hbm_bugs import SOUND, Bug, Planted, caught
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.device_pool import DevicePool

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no driver to test with: {missing()}")

SPEC = KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, (0, 1, 2), 2, 16),), "float16", 16)
SIZE = SPEC.page_bytes  # three quarters of a granule: pages share them
PAGES = 12
_KEPT: list[Bench] = []


class Bench:
    """A pool of ``pages`` pages, all taken, which may become ``PAGES`` pages, on a device of a schedule."""

    def __init__(self, seed: int, *, pages: int = PAGES, planted: Planted = SOUND) -> None:
        _KEPT.clear()
        gc.collect()  # what an earlier pool has left is not this one's
        self.device = FakeDevice(seed)
        self.left = self.device.mapped, self.device.handles, self.device.reserved
        _KEPT[:] = [self]  # what a mistake left under way must not hit memory that is gone
        self.pool = planted.pool(SPEC, pages, self.device, most=PAGES, layered_bytes=0)
        self.host = Memory(PAGES * SIZE, shared=False)
        self.pool.register(self.host.address, self.host.nbytes)
        taken = self.pool.allocate(pages)
        assert taken == list(range(pages))

    def set_page(self, page: int, value: int) -> None:
        self.device.launch(self.pool.compute, lambda: self.pool.array[page].fill(value))

    def read_page(self, page: int, into: list[bytes]) -> None:
        """What computes reads it, when its turn comes."""
        self.device.launch(self.pool.compute, lambda: into.append(bytes(self.pool.array[page])))

    def finish(self) -> None:
        self.device.finish(self.pool.compute)

    def close(self) -> None:
        """All is given back, and nothing touched what was not there."""
        self.finish()
        self.gone()

    def gone(self) -> None:
        del self.pool
        gc.collect()
        assert self.device.strays == 0
        assert (self.device.mapped, self.device.handles, self.device.reserved) == self.left


def filled(value: int) -> bytes:
    return bytes([value]) * SIZE


def memory_goes_after_what_computes(bench: Bench) -> None:
    """Rule 7: the pages are given back while steps that read them wait for their turn."""
    seen: list[bytes] = []
    for page in (9, 10, 11):
        bench.set_page(page, page)
        bench.read_page(page, seen)
    bench.pool.free([9, 10, 11])
    bench.pool.resize(9 * SIZE)
    bench.finish()
    assert seen == [filled(page) for page in (9, 10, 11)]
    bench.pool.settle(wait=True)
    assert bench.device.mapped - bench.left[0] < 9 * SIZE + 8192
    bench.close()


def memory_goes_after_what_is_copied(bench: Bench) -> None:
    """A load that was given up still copies; memory that went would be a stray copy."""
    bench.pool.start_writing([(page, bench.host.address + page * SIZE) for page in range(8, 12)])
    bench.pool.start_copying([(7, 6)])
    bench.pool.free([7, 8, 9, 10, 11])
    bench.pool.resize(7 * SIZE)
    bench.pool.settle()
    bench.pool.settle(wait=True)
    bench.close()


def memory_that_is_wanted_again_stays(bench: Bench) -> None:
    """It was about to go, and is somebody else's now."""
    bench.set_page(11, 1)
    bench.pool.free([10, 11])
    bench.pool.resize(10 * SIZE)
    bench.pool.resize(12 * SIZE)
    assert bench.pool.allocate(2) == [10, 11]
    seen: list[bytes] = []
    bench.set_page(10, 77)
    bench.set_page(11, 88)
    bench.finish()
    bench.pool.settle(wait=True)
    bench.read_page(10, seen)
    bench.read_page(11, seen)
    bench.finish()
    assert seen == [filled(77), filled(88)]
    assert bench.device.mapped - bench.left[0] >= 12 * SIZE
    bench.close()


def what_stays_keeps_its_bytes(bench: Bench) -> None:
    """Pages of which a neighbour goes, half a granule away."""
    for page in range(PAGES):
        bench.set_page(page, page + 1)
    kept = [0, 3, 4, 8]
    bench.pool.free([page for page in range(PAGES) if page not in kept])
    bench.pool.resize(4 * SIZE)
    bench.pool.settle(wait=True)
    assert bench.pool.capacity == 4
    bench.pool.resize(PAGES * SIZE)
    seen: list[bytes] = []
    for page in kept:
        bench.read_page(page, seen)
    bench.finish()
    assert seen == [filled(page + 1) for page in kept]
    bench.close()


def a_pool_may_go_while_it_shrinks(bench: Bench) -> None:
    """And while it is copied into."""
    bench.set_page(11, 3)
    bench.pool.free([11])
    bench.pool.resize(11 * SIZE)
    bench.pool.start_writing([(10, bench.host.address)])
    bench.gone()


SCENES = {
    scene.__name__: scene
    for scene in (
        memory_goes_after_what_computes,
        memory_goes_after_what_is_copied,
        memory_that_is_wanted_again_stays,
        what_stays_keeps_its_bytes,
        a_pool_may_go_while_it_shrinks,
    )
}


_EACH = "for stream in self._streams)"
BUGS = (
    Bug("memory goes at once", "if all(wait or self._device.reached(event) for event in events)", "if True"),
    Bug("only the first stream is waited for", _EACH, "for stream in self._streams[:1])"),
    Bug("only the last stream is waited for", _EACH, "for stream in self._streams[-1:])"),
    Bug("waiting waits for nothing", "self._device.synchronize(event)\n", "pass\n"),
    Bug("what is wanted again goes all the same", "self._leaving.pop(granule, None)", "pass"),
    Bug("what has gone is thought to be there", "self._mapped.difference_update(over)", "pass"),
    Bug("what has memory is mapped again", "if granule not in self._mapped]", "]"),
    Bug("a pool that goes leaves its memory", "self._unmap(self._mapped)", "pass"),
    Bug("a pool that goes leaves its addresses", "self._device.unreserve(self.address, self.nbytes)", "pass"),
    Bug("a pool that goes waits for nobody", "self._device.synchronize(self._device.record(stream))", "pass"),
)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_order(scene: Callable[[Bench], None], seed: int) -> None:
    scene(Bench(seed))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # by a pool that goes
@pytest.mark.parametrize(
    "bug", chosen(BUGS, BUGS[0], BUGS[1], BUGS[5], BUGS[7], BUGS[8]), ids=lambda bug: bug.name
)
def test_planted_bugs_are_caught(bug: Bug) -> None:
    assert caught(bug, SCENES.values(), Bench)
    _KEPT.clear()


def test_a_pool_takes_what_there_is() -> None:
    bench = Bench(1, pages=4)
    bench.device = FakeDevice(1, total_bytes=3 * 8192)
    _KEPT[:] = [bench]
    size = bench.pool.resize(PAGES * SIZE)
    assert 4 * SIZE < size.nbytes == size.target_bytes < 9 * SIZE
    fresh = bench.pool.allocate(bench.pool.free_pages)
    assert fresh is not None
    bench.set_page(fresh[-1], 5)
    bench.close()


def test_a_device_that_cannot_map_keeps_the_size(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pool = DevicePool(SPEC, 4, FakeDevice(1, maps=False), most=8)
    assert [each.message for each in caplog.records] == [
        "cuda:0 cannot map memory piece by piece: its page pool keeps its size"
    ]
    with pytest.raises(UsageError, match="the page pool of cuda:0 cannot be resized"):
        pool.resize(4 * SIZE)
    assert (pool.num_pages, pool.capacity) == (4, 4)
