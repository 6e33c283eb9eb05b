"""Several pools in one region of a device: large pages that go from one layer group to another while the
device still works on them, under schedules that do everything asynchronous as badly as they may."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.device import ONE_OF_EACH, FakeDevice, missing
from tests.portions import chosen
from tests.tierstore.tiers.hbm_bugs import SOUND, Bug, Planted, caught
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.group_pools import open_group_pools
from tierstore.tiers.hbm import PendingCopy
from tierstore.tiers.two_level import SmallPages, books_of, check, cut

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no driver to test with: {missing()}")

SPEC = KVSpec(
    (
        LayerGroup(LayerKind.SLIDING_WINDOW, (0, 2), 2, 16, window=32),
        LayerGroup(LayerKind.FULL_ATTENTION, (1, 3, 4, 5, 6, 7), 2, 16),
    ),
    "float16",
    16,
)
SMALL, LARGE = SPEC.split()  # three small pages to a large one
FRAMES, MOST = 4, 8
_KEPT: list[Bench] = []


class Bench:
    """A pool of small pages and one of large ones in a region of ``FRAMES`` large pages, which may become
    ``MOST``, and host pages that each have bytes of their own."""

    def __init__(self, seed: int, *, planted: Planted = SOUND) -> None:
        _KEPT.clear()
        gc.collect()  # what an earlier region has left is not this one's
        self.device = FakeDevice(seed)
        self.left = self._left()
        _KEPT[:] = [self]  # what a mistake left under way must not hit memory that is gone
        sizes = [SMALL.page_bytes, LARGE.page_bytes]
        pages = cut(sizes)
        assert pages.per_large == (3, 1)
        region = planted.region(self.device, pages.large_bytes, FRAMES, most=MOST)
        books = books_of(sizes, pages, region.large_pages)
        self.small, self.large = (
            planted.pool.within(spec, region, each, layered_bytes=0)
            for spec, each in zip((SMALL, LARGE), books, strict=True)
        )
        self.host = Memory(8 * LARGE.page_bytes, shared=False)
        self.small.register(self.host.address, self.host.nbytes)
        for slot in range(8):
            self.host.view(slot * LARGE.page_bytes, LARGE.page_bytes)[:] = self.content(slot, self.large)

    def _left(self) -> tuple[int, ...]:
        device = self.device
        return device.mapped, device.handles, device.reserved, device.streams

    def address(self, slot: int) -> int:
        return self.host.address + slot * LARGE.page_bytes

    def content(self, slot: int, pool) -> bytes:
        return bytes([slot + 1]) * pool.spec.page_bytes

    def compute(self, work: Callable[[], object]) -> None:
        """Nothing happens before the schedule says so."""
        self.device.launch(self.small.compute, work)

    def put(self, pool, page: int, value: int) -> None:
        array = pool.array
        self.compute(lambda: array[page].fill(value))

    def read(self, pool, page: int, into: list[bytes]) -> None:
        array = pool.array
        self.compute(lambda: into.append(bytes(array[page])))

    def load(self, pool, page: int, slot: int) -> None:
        """And have what computes wait for all of it."""
        pool.start_writing([(page, self.address(slot))])
        arrivals = pool.arrivals([page])
        for layer in range(8):
            arrivals.wait(layer)

    def taken_by_the_other(self, loading: PendingCopy) -> None:
        """Large page 0 goes to the pool of large ones, and what that computes there stays, although
        ``loading``, into a small page of it, was given up while it was under way."""
        assert self.large.allocate(1) == [0]
        self.put(self.large, 0, 99)
        self.finish()
        loading.wait()
        assert bytes(self.large.array[0]) == bytes([99]) * LARGE.page_bytes
        self.close()

    def finish(self) -> None:
        self.device.finish(self.small.compute)

    def close(self) -> None:
        """All is given back, and nothing touched what was not there."""
        self.finish()
        check([pool.books for pool in (self.small, self.large) if isinstance(pool.books, SmallPages)])
        del self.small, self.large
        gc.collect()
        assert self.device.strays == 0
        assert self._left() == self.left


def a_load_follows_what_another_group_computed(bench: Bench) -> None:
    """Rule 5: its large page was the other one's, whose step still reads it."""
    seen: list[bytes] = []
    assert bench.small.allocate(3) == [0, 1, 2]
    for page in range(3):
        bench.put(bench.small, page, 70 + page)
    for page in range(3):
        bench.read(bench.small, page, seen)
    bench.small.free([0, 1, 2])
    assert bench.large.allocate(1) == [0]
    bench.load(bench.large, 0, 4)
    bench.finish()
    assert seen == [bytes([70 + page]) * SMALL.page_bytes for page in range(3)]
    assert bytes(bench.large.array[0]) == bench.content(4, bench.large)
    bench.close()


def computing_follows_a_load_that_another_group_gave_up(bench: Bench) -> None:
    """Rule 6: into a page that is a third of this one."""
    assert bench.small.allocate(3) == [0, 1, 2]
    loading = bench.small.start_writing([(1, bench.address(1))])
    bench.small.free([0, 1, 2])
    bench.taken_by_the_other(loading)


def a_load_follows_one_that_another_group_gave_up(bench: Bench) -> None:
    """By streams that know nothing of each other; a copy within the pool likewise."""
    assert bench.large.allocate(2) == [0, 1]
    bench.large.start_writing([(0, bench.address(1))])
    copying = bench.large.start_copying([(1, 0)])
    bench.large.free([1])
    assert bench.small.allocate(3) == [3, 4, 5]
    for page in range(3):
        bench.load(bench.small, 3 + page, 4 + page)
    bench.finish()
    copying.wait()
    for page in range(3):
        assert bytes(bench.small.array[3 + page]) == bench.content(4 + page, bench.small)
    bench.close()


def what_was_given_back_before_is_remembered(bench: Bench) -> None:
    """The large page goes with its last small one; the load that was given up was into its first."""
    assert bench.small.allocate(3) == [0, 1, 2]
    loading = bench.small.start_writing([(0, bench.address(1))])
    bench.small.free([0])
    bench.put(bench.small, 2, 5)
    bench.small.free([1])
    bench.small.free([2])
    bench.taken_by_the_other(loading)


def a_neighbour_is_loaded_meanwhile(bench: Bench) -> None:
    """What is known of a large page is not over with the first that asks."""
    assert bench.small.allocate(6) == [0, 1, 2, 3, 4, 5]
    loading = bench.small.start_copying([(0, 3)])
    bench.small.free([0])
    bench.finish()  # but not the copy
    bench.load(bench.small, 1, 2)
    bench.small.free([1, 2])
    bench.taken_by_the_other(loading)


def two_that_ask_both_wait(bench: Bench) -> None:
    """Two loads by streams of their own, one after the other, into what one step still reads."""
    bench.small._layered_bytes = 2 * SMALL.page_bytes
    seen: list[bytes] = []
    assert bench.large.allocate(1) == [0]
    bench.put(bench.large, 0, 44)
    bench.finish()
    bench.read(bench.large, 0, seen)
    bench.large.free([0])
    assert bench.small.allocate(3) == [0, 1, 2]
    bench.small.start_writing([(0, bench.address(0))])
    bench.small.start_writing([(page, bench.address(page)) for page in (1, 2)]).wait()
    bench.finish()
    assert seen == [bytes([44]) * LARGE.page_bytes]
    bench.small.read_pages([(page, bench.address(7 - page)) for page in range(3)])
    bench.close()


def memory_goes_after_what_any_pool_put_to_work(bench: Bench) -> None:
    """Rule 7: half of the region goes while both pools' streams work on it."""
    seen: list[bytes] = []
    small, large = bench.small.allocate(6), bench.large.allocate(2)
    assert (small, large) == ([0, 1, 2, 3, 4, 5], [2, 3])
    bench.small.start_writing([(page, bench.address(page)) for page in range(3, 6)])
    bench.large.start_writing([(2, bench.address(6))])
    bench.large.start_copying([(3, 2)])
    bench.put(bench.small, 0, 7)
    bench.read(bench.small, 0, seen)
    bench.large.free([2, 3])
    bench.small.free([3, 4, 5])
    size = bench.small.resize(FRAMES * bench.small.large_pages.large_bytes // 2)
    assert size.nbytes == 2 * bench.small.large_pages.large_bytes
    bench.finish()
    assert seen == [bytes([7]) * SMALL.page_bytes]
    bench.large.settle(wait=True)
    assert bench.device.mapped - bench.left[0] < 3 * bench.small.large_pages.large_bytes
    bench.large.resize(MOST * bench.small.large_pages.large_bytes)
    assert bench.large.free_pages == MOST - 1
    bench.load(bench.large, 7, 3)
    bench.read(bench.large, 7, seen)
    bench.finish()
    assert seen[1] == bench.content(3, bench.large)
    bench.close()


def the_region_stays_as_long_as_one_pools_pages(bench: Bench) -> None:
    """Somebody computes with the second pool's pages when both pools have gone."""
    arrays, compute = [bench.large.array], bench.large.compute
    bench.small.start_writing([(0, bench.address(0))])
    del bench.small, bench.large
    gc.collect()
    seen: list[bytes] = []
    bench.device.launch(compute, lambda: arrays[0][1].fill(3))
    bench.device.launch(compute, lambda: seen.append(bytes(arrays[0][1])))
    bench.device.finish(compute)
    assert seen == [bytes([3]) * LARGE.page_bytes]
    arrays.clear()
    gc.collect()
    assert bench.device.strays == 0
    assert bench._left() == bench.left


SCENES = {
    scene.__name__: scene
    for scene in (
        a_load_follows_what_another_group_computed,
        computing_follows_a_load_that_another_group_gave_up,
        a_load_follows_one_that_another_group_gave_up,
        what_was_given_back_before_is_remembered,
        a_neighbour_is_loaded_meanwhile,
        two_that_ask_both_wait,
        memory_goes_after_what_any_pool_put_to_work,
        the_region_stays_as_long_as_one_pools_pages,
    )
}
BUGS = (
    Bug("copies into what was given back are forgotten", ".union(fillings.get(large_page, ()))", ""),
    Bug("those of before are forgotten",
        "{filling for filling in before.fillings if not filling.done} if before else set()", "set()"),
    Bug("what was given back is known by page",
        "{page // self.books.per_large for page in pages}", "{*pages}"),
    Bug("copies into it are known by page", "under_way.setdefault(page // self.books.per_large, [])",
        "under_way.setdefault(page, [])"),
    Bug("it is known until somebody asks", "if each.computed not in under_way and all(", "if all("),
    Bug("it is known until what computed is over", " and all(filling.done for filling in each.fillings)", ""),
    Bug("nobody waits for what computed", "        for event in self._region.computed_in(large_pages):",
        "        for event in ():"),
    Bug("a load does not wait for another pool's", "fillings | self._region.fillings_in(large_pages)",
    "fillings"), Bug("only the first pool's streams are waited for", "self._streams.append(stream)",
        "self._streams += [stream][: len(self._streams) < 5]"),
    Bug("the region goes with its pools", "weakref.finalize(array, _keep, self).atexit = False", "pass"),
    Bug("pages are where they would be without others",
        "np.uint64(self._start), np.uint64(self.stride)",
        "np.uint64(self._start), np.uint64(self.spec.page_bytes + 64)"),
)  # fmt: skip


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_order(scene: Callable[[Bench], None], seed: int) -> None:
    scene(Bench(seed))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # by a region that goes
@pytest.mark.parametrize("bug", chosen(BUGS, BUGS[0], BUGS[3], BUGS[6], BUGS[8]), ids=lambda bug: bug.name)
def test_planted_bugs_are_caught(bug: Bug) -> None:
    assert caught(bug, SCENES.values(), Bench)
    _KEPT.clear()


def test_pages_that_lie_apart_on_a_device() -> None:
    """Sizes that do not fit into one another: rows have a stride, and copies go where the array says."""
    layers = tuple(range(10))
    groups = (
        LayerGroup(LayerKind.FULL_ATTENTION, tuple(range(10, 61)), 1, 16),
        LayerGroup(LayerKind.SLIDING_WINDOW, layers, 1, 16, window=32),
    )
    device = FakeDevice(3)
    pools = open_group_pools(KVSpec(groups, "float16", 16).split(), 1 << 20, device=device, layered_bytes=0)
    pool = pools[1]
    assert pool.stride > pool.spec.page_bytes
    host = Memory(8 * pool.spec.page_bytes, shared=False)
    pool.register(host.address, host.nbytes)
    source, target = (
        np.frombuffer(host.view(at * 4 * pool.spec.page_bytes, 4 * pool.spec.page_bytes), np.uint8)
        for at in range(2)
    )
    source[:] = np.arange(len(source)) % 251
    pages = pool.allocate(8)
    assert pages is not None
    for at, page in enumerate(pages[:4]):
        pool.write_pages([(page, host.address + at * pool.spec.page_bytes)])
    pool.copy_pages(zip(pages[4:], pages[:4], strict=True))
    pool.read_pages(
        [(page, host.address + (4 + at) * pool.spec.page_bytes) for at, page in enumerate(pages[4:])]
    )
    assert (target == source).all()
    assert (pool.array[pages[:4]].ravel() == source).all()


def test_groups_that_do_not_fit_a_device() -> None:
    device = FakeDevice(1, total_bytes=1 << 20)
    with pytest.raises(UsageError, match=r"a page pool of 4 MiB does not fit cuda:0: .* are free"):
        open_group_pools(SPEC.split(), 4 << 20, device=device)
    with pytest.raises(UsageError, match=r"does not fit cuda:0"):
        open_group_pools(SPEC.split(), 4 << 20, most_bytes=8 << 20, device=device)
    assert device.memory().free == 1 << 20
