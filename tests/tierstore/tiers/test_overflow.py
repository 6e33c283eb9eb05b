"""A pool with pages beyond its memory against a plain dict of pages: on a CPU, on a device with host memory
and with a file below, and with a disk that fails."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.device import ONE_OF_EACH, FakeDevice, missing
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO, FlipBit, Stall
from tierstore.tiers import overflow
from tierstore.tiers.beyond import BEYOND, NONE, BeyondPool, LostPagesError, OverflowFailedError
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.overflow import Overflow, OverflowPool

PAGES, RESIDENT = 12, 4
SPECS = {
    "whole blocks": KVSpec.uniform(layers=3, kv_heads=2, head_dim=64, dtype="bfloat16", chunk_tokens=16),
    "odd sizes": KVSpec.uniform(
        layers=2, kv_heads=1, head_dim=24, dtype="int8", chunk_tokens=10, scaled=True
    ),
}


def pool_of(directory: Path, spec: KVSpec, io: FaultyIO | None = None) -> OverflowPool:
    return OverflowPool(spec, PAGES, resident_pages=RESIDENT, directory=directory, io=io)


class OverflowModel(RuleBasedStateMachine):
    """Every operation in any order: pages have the bytes that were written to them."""

    directory: Path

    def open(self) -> BeyondPool:
        return pool_of(self.directory, self.spec)

    def put(self, page: int, data: bytes) -> None:
        """What the engine computes."""
        self.pool.array[page] = np.frombuffer(data, np.uint8)

    def beyond(self) -> OverflowPool:
        """The pool with the pages that have no memory."""
        assert isinstance(self.pool, OverflowPool)
        return self.pool

    @initialize(spec=st.sampled_from(sorted(SPECS)))
    def begin(self, spec: str) -> None:
        self.spec = SPECS[spec]
        self.pool = self.open()
        self.held: dict[int, bytes | None] = {}  # None: nothing was written yet
        self.buffer = Memory(PAGES * self.spec.page_bytes, shared=False)
        self.random = np.random.default_rng(7)

    def some(self) -> bytes:
        return self.random.bytes(self.spec.page_bytes)

    def written(self) -> list[int]:
        return [page for page, data in self.held.items() if data is not None]

    @rule(count=st.integers(1, PAGES))
    def allocate(self, count: int) -> None:
        pages = self.pool.allocate(count)
        assert (pages is None) == (count > PAGES - len(self.held))
        self.held.update(dict.fromkeys(pages or ()))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        self.pool.free(pages)
        for page in pages:
            del self.held[page]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """The engine's step: it writes to some pages and reads all others that are used."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, max_size=RESIDENT))
        used = [*pages, *self.written()]
        self.pool.prepare(pages, used)
        for page in pages:
            self.held[page] = new = self.some()
            self.put(page, new)
        pool = self.beyond()
        away = np.array([page for page in self.written() if pool.is_beyond(np.array([page]))[0]], np.int64)
        with pool.streaming([away[::2], away[1::2]]) as stream:
            for layer in range(self.spec.num_layers):
                part = self.spec.layer(layer)
                for batch in (away[::2], away[1::2]):
                    address = stream.take()
                    rows = pool.staging_array(address).reshape(-1, pool.file.stride)
                    for row, page in zip(rows, batch.tolist(), strict=False):
                        assert row[: part.nbytes].tobytes() == self.held[page][part.start : part.stop]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """What a load writes from another thread."""
        pages = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        copies = []
        for number, page in enumerate(pages):
            self.held[page] = new = self.some()
            self.buffer.view(number * len(new), len(new))[:] = new
            copies.append((page, self.buffer.address + number * len(new)))
        self.pool.write_pages(copies)

    @precondition(lambda self: self.written())
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        nbytes = self.spec.page_bytes
        pages = data.draw(st.lists(st.sampled_from(sorted(self.written())), unique=True))
        copies = [(page, self.buffer.address + number * nbytes) for number, page in enumerate(pages)]
        sums = self.pool.read_and_hash(copies)
        assert None not in sums
        for number, page in enumerate(pages):
            assert self.buffer.view(number * nbytes, nbytes).tobytes() == self.held[page]

    @precondition(lambda self: self.written() and len(self.held) > 1)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        of = data.draw(st.sampled_from(sorted(self.written())))
        to = data.draw(st.sampled_from(sorted(set(self.held) - {of})))
        self.pool.copy_pages([(to, of)])
        self.held[to] = self.held[of]

    @invariant()
    def memory_is_bounded(self) -> None:
        assert int(self.pool._backed.sum()) <= RESIDENT
        here = [page for page in range(PAGES) if self.pool.is_resident(page)]
        assert all(self.pool._backed[page] for page in here)
        for page in here:
            assert self.here(page) == self.held[page]

    def here(self, page: int) -> bytes:
        """A page in memory."""
        return bytes(self.pool.array[page])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


class DeviceOverflowModel(OverflowModel):
    """The same on a device, where computation happens when the schedule says so."""

    seed = 0

    def open(self) -> BeyondPool:
        self.device = FakeDevice(self.seed)
        made = DeviceOverflowPool.open(self.spec, RESIDENT, self.size(), self.device)
        assert made.num_pages == PAGES
        return made

    def size(self) -> Overflow:
        """As much as lets the pool have ``PAGES`` pages."""
        page = -(-self.spec.page_bytes // 4096) * 4096
        layers = -(-self.spec.layer(0).nbytes // 4096) * 4096 * self.spec.num_layers
        if self.directory.name == "host":
            return Overflow(None, 0, host_bytes=(PAGES - RESIDENT + 2) * page)
        return Overflow(self.directory, PAGES * layers, host_bytes=3 * page)

    def put(self, page: int, data: bytes) -> None:
        assert isinstance(self.pool, DeviceOverflowPool)
        hbm, [slot] = self.pool.hbm, self.pool.slots(np.array([page]))
        self.device.launch(hbm.compute, lambda: hbm.array.__setitem__(slot, np.frombuffer(data, np.uint8)))

    def beyond(self) -> OverflowPool:
        assert isinstance(self.pool, DeviceOverflowPool)
        return self.pool.below

    def here(self, page: int) -> bytes:
        assert isinstance(self.pool, DeviceOverflowPool)
        self.device.finish(self.pool.hbm.compute)
        return bytes(self.pool.array[self.pool.slots(np.array([page]))[0]])

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        assert isinstance(self.pool, DeviceOverflowPool)
        below = self.pool.below
        held = np.flatnonzero(below._content != NONE)
        assert (self.pool._content[held] == BEYOND).all()
        assert len(held) == int((self.pool._content == BEYOND).sum())
        assert int(below._backed.sum()) <= below.resident_pages
        assert self.pool.hbm.used_pages == int(self.pool._backed.sum())


def run_any_order(model: type[OverflowModel], directory: Path, *, examples: int = 30) -> None:
    model.directory = directory
    model.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    model.TestCase().runTest()


def test_any_order(tmp_path: Path) -> None:
    run_any_order(OverflowModel, tmp_path)
    assert not list(tmp_path.iterdir())  # the files have no names


@pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")
@pytest.mark.parametrize("below", ["host", "file"])
@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_any_order_on_a_device(tmp_path: Path, below: str, seed: int) -> None:
    DeviceOverflowModel.seed = seed
    run_any_order(DeviceOverflowModel, tmp_path / below, examples=10)


@pytest.fixture
def io() -> FaultyIO:
    return FaultyIO()


@pytest.fixture
def pool(tmp_path: Path, io: FaultyIO) -> OverflowPool:
    """A pool whose pages 0 to 5 were written one after the other; the first two are in the file."""
    made = pool_of(tmp_path, SPECS["whole blocks"], io)
    made.allocate(6)
    for page in range(6):
        made.prepare([page], range(page))
        made.array[page] = page
    assert [made.is_resident(page) for page in range(6)] == [False] * 2 + [True] * 4
    yield made
    io.clear()
    made.close()


def test_a_page_that_comes_back_changed_is_lost(pool: OverflowPool, io: FaultyIO) -> None:
    io.set(Fault(lambda call: call.kind == "preadv", FlipBit(77), times=None))
    with pytest.raises(LostPagesError) as raised:
        pool.prepare([0], range(6))
    assert raised.value.pages == {0}
    with pytest.raises(LostPagesError):  # also without a new read
        pool.prepare([], [0])
    pool.prepare([], [2, 3, 4, 5])
    memory = Memory(pool.spec.page_bytes, shared=False)
    assert pool.read_and_hash([(1, memory.address)]) == [None]
    pool.free([0])
    [again] = pool.allocate(1)
    assert again == 0
    io.clear()
    pool.prepare([0], range(2, 6))
    assert pool.stats.lost_pages == 1


def test_a_read_that_fails_once_is_tried_again(pool: OverflowPool, io: FaultyIO) -> None:
    io.set(Fault(lambda call: call.kind == "preadv", Fail(errno.EIO), times=1))
    with pool.streaming([np.array([0, 1])]) as stream:
        rows = pool.staging_array(stream.take()).reshape(-1, pool.file.stride)
        assert set(rows[0, : pool.file.slice_bytes]) == {0}
        assert set(rows[1, : pool.file.slice_bytes]) == {1}


def test_a_stream_waits_for_its_reads_though_the_file_takes_no_more_pages(
    pool: OverflowPool, io: FaultyIO
) -> None:
    """A late read would overwrite what the next stream reads into the same buffer."""
    stall = Stall()
    io.set(
        Fault(lambda call: call.kind == "preadv", stall, times=1),
        Fault(lambda call: call.kind == "pwritev", Fail(errno.ENOSPC)),
    )
    opened = ExitStack()
    opened.enter_context(pool.streaming([np.array([0, 1])]))
    stall.entered.wait()
    more = pool.allocate(1)
    assert more is not None
    with pytest.raises(OverflowFailedError):
        pool.prepare(more, [2, 3, 4, 5])
    closing = threading.Thread(target=opened.close)
    closing.start()
    closing.join(0.2)
    waits = closing.is_alive()
    stall.release()
    closing.join()
    assert waits


def test_a_stream_whose_reads_do_not_end_is_the_last(pool: OverflowPool, io: FaultyIO) -> None:
    stall = Stall()
    pool.answer_s = 0.1
    io.set(Fault(lambda call: call.kind == "preadv", stall, times=1))
    with pool.streaming([np.array([0, 1])]):
        stall.entered.wait()
    stall.release()
    assert pool.failed
    with pytest.raises(LostPagesError):
        pool.prepare([], [0])


def test_a_file_that_takes_no_pages(
    pool: OverflowPool, io: FaultyIO, caplog: pytest.LogCaptureFixture
) -> None:
    io.set(Fault(lambda call: call.kind == "pwritev", Fail(errno.EIO)))
    [new] = pool.allocate(1)
    with pytest.raises(OverflowFailedError, match="takes no more pages"):
        pool.prepare([new], range(6))
    assert [pool.is_resident(page) for page in range(2, 6)] == [True] * 4  # nothing was given up
    assert pool.target == RESIDENT
    assert "takes no more pages" in caplog.text
    pool.prepare([new], [])  # for others, idle pages make room
    assert pool.is_resident(new)
    with pytest.raises(LostPagesError):
        pool.prepare([], range(6))
    memory = Memory(pool.spec.page_bytes, shared=False)
    [other] = pool.allocate(1)
    pool.write_pages([(other, memory.address)])  # no room, and it cannot be written
    with pytest.raises(LostPagesError):
        pool.prepare([], [other])


def test_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT or a queue of reads works too."""

    class PlainIO(FaultyIO):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return super().open(path, flags)

        def read_many(self, reads, landed):  # type: ignore[no-untyped-def]
            raise OSError(errno.ENOSYS, "no queue")

    pool = pool_of(tmp_path, SPECS["odd sizes"], PlainIO())
    pages = pool.allocate(6)
    for page in pages:
        pool.prepare([page], pages)
        pool.array[page] = page
    pool.prepare([0], pages)
    assert set(pool.array[0]) == {0}
    pool.close()


def test_which_models_have_an_overflow_file(tmp_path: Path) -> None:
    window = LayerGroup(LayerKind.SLIDING_WINDOW, (0,), 1, 64, window=128)
    with pytest.raises(UsageError, match="sliding_window"):
        Overflow(tmp_path, 1 << 30).pages(KVSpec((window,), "float16"), 1)
    spec = SPECS["odd sizes"]
    size = Overflow(tmp_path, 20 * 2 * 4096)
    assert size.pages(spec, 19) == 20  # a layer of a page takes a whole block
    pool = OverflowPool(spec, size.pages(spec, 3), resident_pages=3, directory=tmp_path)
    assert pool.file.nbytes <= size.nbytes
    pool.close()
    with pytest.raises(UsageError, match="holds 20 pages, and the memory 20: give it more than 160 KiB"):
        size.pages(spec, 20)


def test_runs() -> None:
    assert overflow.runs(np.array([], np.int64)) == []
    assert overflow.runs(np.array([5])) == [(0, 1)]
    assert overflow.runs(np.array([0, 1, 3, 2])) == [(0, 2), (2, 1), (3, 1)]


def test_only_resident_pages_take_memory(tmp_path: Path) -> None:
    """Pages of whole huge pages may be huge, and those that leave give theirs back."""
    page = 2 << 20
    spec = KVSpec((LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, page // 64 // 4),), "float16", 64)
    assert spec.page_bytes == page
    pool = OverflowPool(spec, 8, resident_pages=3, directory=tmp_path)
    try:
        pages = pool.allocate(8)
        assert pages is not None
        for number in pages:
            pool.prepare([number], ())
            pool.array[number] = number + 1
        assert taken(pool.address, 8 * page) == 3 * page
        for number in (0, 5, 7):
            pool.prepare([number], ())
            assert (pool.array[number] == number + 1).all()
        assert taken(pool.address, 8 * page) == 3 * page
    finally:
        pool.close()


def taken(address: int, nbytes: int) -> int:
    """The bytes of memory behind a range of addresses, whose mappings may have been split."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and ":" not in name:
            start, stop = (int(each, 16) for each in name.split("-"))
            inside = address <= start and stop <= address + nbytes
        elif name == "Rss:" and inside:
            total += int(rest.split()[0]) << 10
    return total
