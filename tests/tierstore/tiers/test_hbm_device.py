"""The pool of a device, under schedules that do everything asynchronous as badly as they may."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash

from tests.engine.device import ONE_OF_EACH, SCHEDULES, FakeDevice, missing
from tests.tierstore.tiers.hbm_bugs import BUGS, SOUND, Bug, Planted, caught
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.store.buffers import HbmPages
from tierstore.tiers import cuda
from tierstore.tiers.cuda import DeviceArray
from tierstore.tiers.device import DeviceError, SourceOrder
from tierstore.tiers.device_pool import DevicePool, merge_neighbours, pages_that_fit

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no driver to test with: {missing()}")

LAYERS = 3
SPEC = KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, tuple(range(LAYERS)), 2, 16),), "float16", 16)
PAGES = 6
_KEPT: list[Bench] = []


class Bench:
    """A pool on a device with the schedule ``seed``, and host pages that each have bytes of their own."""

    def __init__(
        self, seed: int, *, planted: Planted = SOUND, batches: bool = True, layered_bytes: int = 0
    ) -> None:
        self.device = FakeDevice(seed, batches=batches)
        _KEPT[:] = [self]  # a copy that a mistake left under way must not hit memory that is gone
        self.pool = planted.pool(SPEC, PAGES, self.device, layered_bytes=layered_bytes)
        self.host = Memory(PAGES * SPEC.page_bytes, shared=False)
        self.pool.register(self.host.address, self.host.nbytes)
        self.content = [bytes([page + 1]) * SPEC.page_bytes for page in range(PAGES)]
        for page, content in enumerate(self.content):
            self.slot(page)[:] = content

    def address(self, slot: int) -> int:
        return self.host.address + slot * SPEC.page_bytes

    def slot(self, slot: int) -> memoryview:
        return self.host.view(slot * SPEC.page_bytes, SPEC.page_bytes)

    def compute(self, work: Callable[[], None]) -> None:
        """As the engine does: nothing happens before the schedule says so."""
        self.device.launch(self.pool.compute, work)

    def set_page(self, page: int, value: int) -> None:
        self.compute(lambda: self.pool.array[page].fill(value))

    def finish(self) -> None:
        self.device.finish(self.pool.compute)

    def layer(self, page: int, layer: int) -> bytes:
        span = SPEC.layer(layer)
        return bytes(self.pool.array[page, span.start : span.stop])


def save_follows_compute(bench: Bench) -> None:
    """Rules 1 and 2: what the engine computed is what is saved, and it is there when the call returns."""
    bench.set_page(0, 77)
    after = bench.pool.computed()
    bench.set_page(1, 88)  # later work need not be waited for, and does no harm
    bench.pool.read_pages([(0, bench.address(3))], after=after)
    assert bytes(bench.slot(3)) == bytes([77]) * SPEC.page_bytes
    bench.pool.read_pages([(1, bench.address(4))])
    assert bytes(bench.slot(4)) == bytes([88]) * SPEC.page_bytes


def compute_follows_load(bench: Bench) -> None:
    """Rule 3: each layer is there when it is computed with."""
    filling = bench.pool.start_writing([(page, bench.address(page)) for page in range(3)])
    seen: list[bytes] = []
    arrivals = bench.pool.arrivals(range(3))

    def forward() -> None:
        for layer in range(LAYERS):
            arrivals.wait(layer)
            seen.extend(bench.layer(page, layer) for page in range(3))

    bench.compute(forward)
    bench.finish()
    expected = [bench.content[page][: len(seen[0])] for _ in range(LAYERS) for page in range(3)]
    assert seen == expected
    filling.wait()
    assert [bytes(bench.pool.array[page]) for page in range(3)] == bench.content[:3]


def save_follows_load(bench: Bench) -> None:
    """Rule 4, down: a page that has just been loaded can be read by another."""
    bench.pool.start_writing([(0, bench.address(0))])
    bench.pool.read_pages([(0, bench.address(5))])
    assert bytes(bench.slot(5)) == bench.content[0]


def copy_follows_load(bench: Bench) -> None:
    """Rule 4, across: and copied for one who is going to write on."""
    bench.pool.start_writing([(0, bench.address(0))])
    bench.pool.start_copying([(1, 0)]).wait()
    assert bytes(bench.pool.array[1]) == bench.content[0]


def copy_follows_compute(bench: Bench) -> None:
    """Rule 1, across."""
    bench.set_page(0, 55)
    bench.pool.copy_pages([(1, 0)])
    assert bytes(bench.pool.array[1]) == bytes([55]) * SPEC.page_bytes


def load_follows_former_owner(bench: Bench) -> None:
    """Rule 5: a page that was given back while its owner still computes is not loaded into before."""
    pages = bench.pool.allocate(PAGES)
    assert pages is not None
    seen: list[bytes] = []
    bench.set_page(0, 33)
    bench.compute(lambda: seen.append(bytes(bench.pool.array[0])))
    bench.pool.free([0])
    assert bench.pool.allocate(1) == [0]
    bench.pool.start_writing([(0, bench.address(0))])
    arrivals = bench.pool.arrivals([0])
    bench.compute(lambda: arrivals.wait(LAYERS - 1))
    bench.finish()
    assert seen == [bytes([33]) * SPEC.page_bytes]
    assert bytes(bench.pool.array[0]) == bench.content[0]


def load_follows_former_copy(bench: Bench) -> None:
    """A page that was given back while being copied into is loaded into after that."""
    bench.pool.allocate(PAGES)
    copying = bench.pool.start_copying([(0, 1)])
    bench.pool.free([0])
    bench.pool.allocate(1)
    bench.pool.start_writing([(0, bench.address(0))])
    arrivals = bench.pool.arrivals([0])
    bench.compute(lambda: arrivals.wait(LAYERS - 1))
    bench.finish()
    copying.wait()
    assert bytes(bench.pool.array[0]) == bench.content[0]


def compute_follows_abandoned_load(bench: Bench) -> None:
    """Rule 6: the next owner's work is not overwritten by a load that was given up."""
    bench.pool.allocate(PAGES)
    filling = bench.pool.start_writing([(0, bench.address(0))])
    bench.pool.free([0])  # while a copy is under way
    assert bench.pool.allocate(1) == [0]
    bench.set_page(0, 22)
    bench.finish()
    filling.wait()
    assert bytes(bench.pool.array[0]) == bytes([22]) * SPEC.page_bytes


def source_stays_until_the_end(bench: Bench) -> None:
    """What a load is copied from may be overwritten when ``wait`` has returned."""
    filling = bench.pool.start_writing([(page, bench.address(page)) for page in range(2)])
    filling.wait()
    for page in range(2):
        bench.slot(page)[:] = b"\xee" * SPEC.page_bytes
    bench.finish()
    assert [bytes(bench.pool.array[page]) for page in range(2)] == bench.content[:2]


def streams_live_as_long_as_pages(bench: Bench) -> None:
    """A pool is dropped while something is under way on its streams and somebody computes with its pages."""
    old, bench.pool = bench.pool, type(bench.pool)(SPEC, PAGES, bench.device, layered_bytes=0)
    views, compute, streams = [old.array], old.compute, bench.device.streams
    read: list[bytes] = []
    filling = old.start_writing([(0, bench.address(0))])
    old.arrivals([0]).wait(LAYERS - 1)
    del old
    gc.collect()
    bench.device.launch(compute, lambda: read.append(bytes(views[0][0])))
    filling.wait()
    bench.device.finish(compute)
    assert read == [bench.content[0]]
    assert bench.device.streams == streams
    bench.device.launch(compute, lambda: read.append(b"last"))
    views.clear()
    assert bench.device.streams == streams - 5
    assert read[1:] == [b"last"]


SCENES = {
    scene.__name__: scene
    for scene in (
        save_follows_compute,
        compute_follows_load,
        save_follows_load,
        copy_follows_load,
        copy_follows_compute,
        load_follows_former_owner,
        load_follows_former_copy,
        compute_follows_abandoned_load,
        source_stays_until_the_end,
        streams_live_as_long_as_pages,
    )
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_order(scene: Callable[[Bench], None], seed: int) -> None:
    bench = Bench(seed)
    scene(bench)
    bench.finish()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_caught(bug: Bug) -> None:
    """Each mistake alone, by the scenes above under the same schedules."""
    assert caught(bug, SCENES.values(), Bench)


@pytest.mark.parametrize("batches", [True, False])
def test_many_copies_in_one_call_where_the_driver_has_it(batches: bool) -> None:
    bench = Bench(2, batches=batches)
    compute_follows_load(bench)
    device = bench.device
    if batches:
        assert (device.batches, device.copies, device.refused_batches) == (LAYERS, 0, 0)
    else:
        assert (device.batches, device.copies, device.refused_batches) == (0, 3 * LAYERS, LAYERS)


def test_whole_pages_that_continue_one_another_are_one_copy() -> None:
    bench = Bench(1)
    bench.pool._layered_bytes = 1 << 30
    bench.pool.write_pages([(page, bench.address(page)) for page in range(PAGES)])
    assert [bytes(bench.pool.array[page]) for page in range(PAGES)] == bench.content
    assert (bench.device.batches, bench.device.copies) == (1, 0)


def test_pageable_memory_takes_plain_copies() -> None:
    bench = Bench(2)
    elsewhere = Memory(SPEC.page_bytes, shared=False)
    bench.set_page(0, 3)
    bench.pool.read_pages([(0, elsewhere.address)])
    assert bytes(elsewhere.view(0, SPEC.page_bytes)) == bytes([3]) * SPEC.page_bytes
    assert (bench.device.batches, bench.device.copies) == (0, 1)
    bench.pool.unregister(bench.host.address)
    assert bench.device.registered == 0


def test_a_daemons_client_saves_what_was_computed() -> None:
    for seed in SCHEDULES[:4]:
        bench = Bench(seed)
        bench.set_page(2, 9)
        source = HbmPages(bench.pool, [2])
        target = np.zeros(SPEC.page_bytes, np.uint8)
        checksums = source.copy([(0, target.ctypes.data)], SPEC.page_bytes)
        assert target.tobytes() == bytes([9]) * SPEC.page_bytes
        assert checksums == [xxhash.xxh3_64_intdigest(target)]


def test_merging_neighbours() -> None:
    to = np.array([100, 110, 120, 140, 150], np.uint64)
    sources = np.array([0, 10, 30, 40, 50], np.uint64)
    merged = merge_neighbours(to, sources, 10)
    assert [part.tolist() for part in merged] == [[100, 120, 140], [0, 30, 40], [20, 10, 20]]


def test_a_pool_that_does_not_fit_says_what_would() -> None:
    device = FakeDevice(total_bytes=3 * SPEC.page_bytes + 100)
    message = (
        re.escape(f"(4 pages of {SPEC.page_bytes // 1024} KiB, 64 tokens) does not fit cuda:0")
        + ".*room for 2 pages"
    )
    with pytest.raises(UsageError, match=message):
        DevicePool(SPEC, 4, device)
    assert pages_that_fit(SPEC, device, 1.0) == 3
    pool = DevicePool(SPEC, 3, device)
    assert device.memory().free == 100
    assert len(pool.share()) == 64
    del pool  # and with its last view its memory
    assert device.memory().free == 3 * SPEC.page_bytes + 100


def test_copies_beyond_what_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.tiers.cuda._MOST_COPIES", 2)
    bench = Bench(0)
    stream = bench.device.stream()
    to = np.array([bench.address(page) for page in (5, 4, 3)], np.uint64)
    sources = np.array([bench.address(page) for page in (0, 1, 2)], np.uint64)
    sizes = np.full(3, SPEC.page_bytes, np.uint64)
    bench.device.copy_many(stream, to, sources, sizes, SourceOrder.STREAM)
    bench.device.finish(stream)
    assert [bytes(bench.slot(page)) for page in (5, 4, 3)] == bench.content[:3]
    assert bench.device.batches == 2


def test_the_old_form_of_the_batch_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a driver of CUDA 12.8."""
    monkeypatch.delitem(cuda._BATCHES, "cuMemcpyBatchAsync_v2")
    device = FakeDevice(1)
    target, source = (ctypes.c_ubyte * 32)(), (ctypes.c_ubyte * 32)(*range(32))
    halves = np.array([0, 16], np.uint64)
    stream = device.stream()
    to, of = (halves + np.uint64(ctypes.addressof(memory)) for memory in (target, source))
    device.copy_many(stream, to, of, np.full(2, 16, np.uint64), SourceOrder.ANY)
    device.finish(stream)
    assert bytes(target) == bytes(source)
    assert (device.batches, device.refused_batches) == (1, 0)


def test_a_stream_that_was_given_back_is_not_used() -> None:
    """The test of the scene above: the driver here knows such a stream, as a real one need not."""
    bench = Bench(1)
    device, page = bench.device, bench.pool.address
    stream, event = device.stream(), bench.pool.computed()
    device.release(stream)
    one = np.array([page], np.uint64)
    for use in (
        lambda: device.record(stream),
        lambda: device.wait(stream, event),
        lambda: device.copy(stream, page, page, 1),
        lambda: device.launch(stream, lambda: None),
        lambda: device.release(stream),
    ):
        with pytest.raises(DeviceError, match="failed with CUDA_ERROR_INVALID_HANDLE"):
            use()
    device.copy_many(bench.pool.compute, one, one, np.ones(1, np.uint64), SourceOrder.STREAM)
    assert device.refused_batches == 0
    with pytest.raises(DeviceError):  # it is refused as a batch, and then as a copy
        device.copy_many(stream, one, one, np.ones(1, np.uint64), SourceOrder.STREAM)
    assert device.refused_batches == 1


def test_what_the_driver_refuses_has_its_name() -> None:
    with pytest.raises(DeviceError, match="cuda:0: cuMemFree_v2 failed with CUDA_ERROR_UNKNOWN"):
        FakeDevice().free(4096)


def test_who_computes_does_not_wait_while_copies_are_queued() -> None:
    """A large hit is tens of thousands of copies: queueing them takes as long as steps of decoding."""
    bench = Bench(0)
    pool, queueing, go_on = bench.pool, threading.Event(), threading.Event()
    original = bench.device.copy_many

    def slow(*arguments: Any) -> None:
        queueing.set()
        assert go_on.wait(30)
        original(*arguments)

    bench.device.copy_many = slow  # type: ignore[method-assign]
    taken = pool.allocate(4)
    assert taken is not None
    load = [(page, bench.address(page)) for page in taken[:2]]
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(pool.start_writing, load)
        assert queueing.wait(30)

        def step() -> list[int] | None:
            assert not pool.arrivals(taken[2:]).pending
            pool.free(taken[3:])
            return pool.allocate(1)

        stepping = threads.submit(step)
        try:
            assert stepping.result(10) == taken[3:]
        finally:
            go_on.set()
        loading.result(30).wait()
    assert [bytes(pool.array[page]) for page in taken[:2]] == bench.content[:2]


def test_a_thread_that_works_on_another_device_keeps_its_context() -> None:
    """torch makes a device's context current when it computes there, and expects to find it again."""
    bench = Bench(0)
    driver, other = bench.device._driver, ctypes.c_void_p(4096)
    driver.cuCtxPushCurrent_v2(other)
    save_follows_compute(bench)
    bench.finish()
    found = ctypes.c_void_p()
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(found)) == 0
    assert found.value == other.value
    assert driver.cuCtxPopCurrent_v2(ctypes.byref(found)) != 0  # and that was all there was


def test_changing_the_context_keeps_the_gil() -> None:
    """It is done around every call, while hundreds of copies are queued; the calls themselves release it."""
    device, go, order = FakeDevice(), threading.Lock(), []
    event = device.record(device.stream())
    interval = sys.getswitchinterval()

    def other() -> None:
        with go:
            order.append("other")

    def raced(calls: Callable[[], object]) -> bool:
        """Whether another thread ran while ``calls`` were made, although nobody took the GIL from us."""
        order.clear()
        go.acquire()
        thread = threading.Thread(target=other)
        sys.setswitchinterval(1000)
        try:
            thread.start()  # returns when it has the GIL back: the other thread waits for the lock then
            go.release()
            for _ in range(20_000):
                calls()
            return bool(order)
        finally:
            sys.setswitchinterval(interval)
            thread.join()

    def change() -> None:
        device._quick.cuCtxPushCurrent_v2(device._context)
        device._quick.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    assert not raced(change)
    assert raced(lambda: device.reached(event))


def test_the_array_as_other_libraries_take_it() -> None:
    described = DeviceArray(4096, (2, 8)).__cuda_array_interface__
    assert described["data"] == (4096, False)
    assert described["shape"] == (2, 8)


def test_a_small_load_does_not_wait_behind_a_large_one() -> None:
    """On the lazy device, where only what is waited for happens, and all before it on its stream."""
    bench = Bench(0, layered_bytes=2 * SPEC.page_bytes)
    pool = bench.pool
    large = pool.start_writing([(page, bench.address(page)) for page in range(3)])
    small = pool.start_writing([(4, bench.address(4))])
    small.wait()
    assert bytes(pool.array[4]) == bench.content[4]
    assert not large.done
    large.wait()
    assert [bytes(pool.array[page]) for page in range(3)] == bench.content[:3]


@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_small_and_large_loads_into_the_same_pages(seed: int) -> None:
    """One after the other, by streams that know nothing of each other: the last one's bytes are there."""
    bench = Bench(seed, layered_bytes=2 * SPEC.page_bytes)
    pool = bench.pool
    for shift in range(2):
        pages = pool.allocate(4)
        assert pages is not None
        pool.start_writing([(page, bench.address(place)) for place, page in enumerate(pages)])
        pool.free(pages)
        again = pool.allocate(4)
        assert again is not None
        for place, page in enumerate(again):
            pool.start_writing([(page, bench.address(place + shift))])
        pool.read_pages([(page, bench.address(5)) for page in again[-1:]])
        assert bytes(bench.slot(5)) == bench.content[3 + shift]
        pool.free(again)
