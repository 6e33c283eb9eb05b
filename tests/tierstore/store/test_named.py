"""Pages without a chain: any list of them, in one request and under one lease, in every kind of store."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import random
import shutil
import socket
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tests.tierstore.cli.test_operations import run
from tierstore import Identity, KVSpec, Prompt, UsageError
from tierstore.keys import PageKey
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.hbm import PagePool

CHUNK, PAGE_BYTES = 8, 4096
SPEC = KVSpec.opaque(PAGE_BYTES, chunk_tokens=CHUNK)
HOST_PAGES = 256
_names = itertools.count()


def name(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


@pytest.fixture(scope="module")
def daemon():
    directory = tempfile.mkdtemp(prefix="ts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        tcp = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    daemon = DaemonProcess(
        directory, f"--reserve-bytes={1 << 20}", listen=(tcp,), host_bytes=HOST_PAGES * PAGE_BYTES, disk=True
    )
    daemon.tcp = tcp
    daemon.start()
    yield daemon
    daemon.kill()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(params=["embedded", "ipc", "tcp"])
def store(request, tmp_path):
    identity = Identity.of(SPEC, model=f"named {next(_names)}")
    if request.param == "embedded":
        opened = tierstore.open(
            tmp_path / "disk",
            SPEC,
            identity=identity,
            host_bytes=HOST_PAGES * PAGE_BYTES,
            disk_bytes=64 << 20,
        )
    else:
        daemon = request.getfixturevalue("daemon")
        url = daemon.tcp if request.param == "tcp" else daemon.url
        opened = tierstore.connect(url, SPEC, identity=identity, lookup_s=10.0)
        assert opened.wait_connected(30)
    with opened:
        yield opened


def named(store, numbers, before=0):
    names = [name(number) for number in numbers]
    keys = [PageKey(each[:16]) for each in names]
    return Prompt.with_names(store.identity, b"".join(names), keys, chunk_tokens=CHUNK, pages_before=before)


def save(store, numbers):
    return store.save(named(store, numbers), [content(number) for number in numbers]).wait(30) // CHUNK


def load(store, numbers):
    """What there is of these pages: number -> bytes."""
    hit = store.lookup(named(store, numbers))
    buffers = [bytearray(PAGE_BYTES) for _ in range(hit.num_pages)]
    pages = store.load(hit, buffers).wait(30).tokens // CHUNK
    assert pages == hit.num_pages == len(hit.positions)
    return {numbers[at]: bytes(page) for at, page in zip(hit.positions, buffers, strict=True)}


def test_each_page_is_found_by_itself(store):
    assert save(store, [1, 2, 3, 5, 8]) == 5
    assert load(store, [8, 4, 2, 9, 1]) == {8: content(8), 2: content(2), 1: content(1)}
    hit = store.lookup(named(store, [8, 4, 2]))
    assert (hit.tokens, list(hit.positions)) == (2 * CHUNK, [0, 2])
    hit.release()
    assert load(store, [4, 6]) == {}


def test_what_is_there_is_not_written_again(store):
    assert save(store, [1, 2]) == 2
    before = store.stats().tiers["host"].pages
    assert save(store, [2, 3, 1]) == 3
    assert store.stats().tiers["host"].pages == before + 1
    assert store.stats().counters["already_stored_pages"] == 2


def test_a_pin_holds_those_that_are_there(store):
    save(store, range(4))
    assert store.flush(30)
    store.evict("host")
    asked = named(store, [0, 9, 2])
    assert store.pin(asked) == 2 * CHUNK
    for tier in ("host", "disk"):
        store.evict(tier)
    assert load(store, range(4)) == {0: content(0), 2: content(2)}
    assert store.unpin(asked) == 2 * CHUNK
    assert store.unpin(asked) == 0

    def evicted() -> bool:
        for tier in ("host", "disk"):
            store.evict(tier)
        return load(store, range(4)) == {}

    wait_until(evicted)  # the daemon may still hold them for the load before


def test_the_tokens_decide(store):
    save(store, [1])
    other = Prompt.with_names(store.identity, bytes(32), [PageKey(name(1)[:16])], chunk_tokens=CHUNK)
    with store.lookup(other) as hit:
        assert hit.tokens == 0


def test_they_come_back_from_disk_some_from_there_some_from_memory(store):
    numbers = list(range(60))
    assert save(store, numbers) == 60
    assert store.flush(30)
    store.evict("host")
    assert load(store, numbers[10:30:3]) == {number: content(number) for number in numbers[10:30:3]}
    hit = store.lookup(named(store, numbers))
    assert set(hit.by_tier) == {"host", "disk"}
    assert hit.prefetch(deadline_s=30).wait(30) == 60 * CHUNK
    hit.release()
    assert load(store, numbers) == {number: content(number) for number in numbers}


def test_a_lease_holds_each_of_them(store):
    save(store, range(20))
    hit = store.lookup(named(store, range(0, 20, 2)))
    store.flush(30)
    store.evict("host")
    store.evict("disk")
    buffers = [bytearray(PAGE_BYTES) for _ in range(10)]
    assert store.load(hit, buffers).wait(30).tokens == 10 * CHUNK
    assert [bytes(each) for each in buffers] == [content(number) for number in range(0, 20, 2)]


def test_many_windows(store):
    """More than a reservation may hold at once, in an arena that has room for them."""
    assert store.flush(30)  # pages that wait for the disk could not leave
    numbers = list(range(1000, 1200))
    assert save(store, numbers) == 200
    assert load(store, numbers) == {number: content(number) for number in numbers}


def test_of_a_prompt_that_came_in_batches_the_end_leaves_first(tmp_path):
    identity = Identity.of(SPEC, model="batches")
    with tierstore.open(None, SPEC, identity=identity, host_bytes=512 * PAGE_BYTES) as store:
        save(store, range(2000, 2200))  # so that it is not the store's first minute
        for number in range(30):
            store.lookup(named(store, [2000 + number])).release()
        for start in range(0, 384, 128):
            prompt = named(store, range(start, start + 128), before=start)
            assert store.save(prompt, [content(n) for n in range(start, start + 128)]).wait(30) == 128 * CHUNK
        save(store, range(1000, 1200))
        with store.lookup(named(store, range(384))) as hit:
            assert 0 < len(hit.positions) < 384
            assert list(hit.positions) == list(range(len(hit.positions)))


def test_they_outlive_the_process_that_saved_them(tmp_path):
    identity = Identity.of(SPEC, model="lives")
    for life in range(2):
        with tierstore.open(
            tmp_path, SPEC, identity=identity, host_bytes=1 << 20, disk_bytes=64 << 20
        ) as store:
            if not life:
                assert save(store, range(40)) == 40
                assert store.flush(30)
            store.check()
            assert load(store, range(39, 0, -7)) == {number: content(number) for number in range(39, 0, -7)}


def test_a_list_that_makes_no_sense_is_refused():
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")
    with pytest.raises(UsageError, match="found whole"):
        Prompt.with_names(Identity.of(spec, model="m"), b"", [], chunk_tokens=64)
    keys = [PageKey(b"1" * 16), PageKey(b"2" * 16)]
    with pytest.raises(UsageError, match="2 named pages"):
        Prompt.with_names(Identity.of(SPEC, model="m"), bytes(4), keys, chunk_tokens=CHUNK)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["save", "look", "evict", "flush"]),
            st.lists(st.integers(0, 40), min_size=1, max_size=25, unique=True),
        ),
        max_size=12,
    )
)
def test_any_order_of_things_agrees_with_a_dictionary(tmp_path_factory, steps):
    identity = Identity.of(SPEC, model=f"model {next(_names)}")
    path = tmp_path_factory.mktemp("named")
    with tierstore.open(path, SPEC, identity=identity, host_bytes=1 << 20, disk_bytes=64 << 20) as store:
        saved: set[int] = set()
        for what, numbers in steps:
            if what == "save":
                assert save(store, numbers) == len(numbers)
                saved.update(numbers)
            elif what == "look":
                assert load(store, numbers) == {n: content(n) for n in numbers if n in saved}
            elif what == "flush":
                assert store.flush(30)
            elif store.flush(30):
                store.evict("host", len(numbers))
            store.check()


class Taken:
    """A load's target that keeps what comes: position -> bytes."""

    def __init__(self):
        self.pages = {}

    def write(self, pages):
        for at, address in pages:
            self.pages[at] = ctypes.string_at(address, PAGE_BYTES)


def test_a_hit_is_loaded_in_parts(store):
    save(store, range(8))
    hit = store.lookup(named(store, [0, 1, 99, 2, 3, 4]))
    for first, count in ((3, 2), (0, 2)):
        taken = Taken()
        load = store.load_to(hit, taken, first=first, count=count, keep=True)
        assert load.wait(30).tokens == (first + count) * CHUNK
        assert taken.pages == {first + at: content(first + at) for at in range(count)}
    rest = Taken()
    assert store.load_to(hit, rest, first=4).wait(30).tokens == 5 * CHUNK  # which releases it
    assert rest.pages == {4: content(4)}


def test_a_hit_of_which_some_have_left_loads_nothing_wrong(tmp_path):
    identity = Identity.of(SPEC, model="left")
    with tierstore.open(None, SPEC, identity=identity, host_bytes=HOST_PAGES * PAGE_BYTES) as store:
        save(store, [1, 2, 3])
        hit = store.lookup(named(store, [1, 2, 3]))
        hit.release()  # it loads all the same, what is still there
        assert store.evict("host") == 3
        save(store, [2, 3])
        taken = Taken()
        assert store.load_to(hit, taken).wait(30).tokens == 0
        assert taken.pages == {}
        hit.release()


def test_the_end_of_a_hit_is_brought_from_disk(store):
    save(store, range(6))
    store.flush(30)
    store.evict("host")
    hit = store.lookup(named(store, range(6)))
    assert hit.by_tier == {"disk": 6 * CHUNK}
    assert hit.prefetch(first=4).wait(30) == 6 * CHUNK
    hit.release()
    assert store.lookup(named(store, range(6))).by_tier == {"disk": 4 * CHUNK, "host": 2 * CHUNK}


def test_ls_counts_no_prompts_of_pages_that_are_named_by_a_hash(tmp_path):
    spec = KVSpec.opaque(PAGE_BYTES, chunk_tokens=CHUNK, hashed=True)
    identity = Identity.of(spec, model="hashed")
    with tierstore.open(tmp_path, spec, identity=identity, host_bytes=1 << 20, disk_bytes=64 << 20) as store:
        assert save(store, [1, 2, 3]) == 3
        assert store.flush(30)
    code, out, _ = run("ls", str(tmp_path))
    [line] = [line for line in out.splitlines() if line.startswith("hashed")]
    assert code == 0
    assert line.split()[1:5] == ["–", identity.digest.hex()[:8], "3", "–"]


POOL_PAGES = 24


class InPool:
    """A store whose pages are an engine's: saved from its pool, loaded into it."""

    def __init__(self, path=None):
        pool = PagePool(SPEC, POOL_PAGES)
        self.store = tierstore.open(
            path,
            SPEC,
            identity=Identity.of(SPEC, model=f"pool {next(_names)}"),
            pools=pool,
            host_bytes=HOST_PAGES * PAGE_BYTES,
            disk_bytes=64 << 20,
        )
        self.array = pool.array

    def save(self, numbers):
        pages = self.store.allocate_hbm(len(numbers))
        assert pages is not None
        for page, number in zip(pages, numbers, strict=True):
            self.array[page] = list(content(number))
        stored = self.store.save_hbm(named(self.store, numbers), pages).wait(30) // CHUNK
        self.store.release_hbm(pages)
        return stored

    def load(self, numbers):
        hit = self.store.lookup(named(self.store, numbers))
        there = [numbers[at] for at in hit.positions]
        loaded = self.store.load(hit).wait(30)
        assert len(loaded.pages) == len(there)
        found = {n: self.array[page].tobytes() for n, page in zip(there, loaded.pages, strict=True)}
        self.store.release_hbm(loaded.pages)
        return found


def test_pages_of_a_pool_come_from_hbm_and_from_below():
    engine = InPool()
    with engine.store as store:
        assert engine.save([1, 2, 3, 4, 5, 6]) == 6
        assert engine.load([9, 6, 1, 3]) == {n: content(n) for n in (6, 1, 3)}
        store.evict("hbm", 4)
        hit = store.lookup(named(store, [1, 2, 3, 4, 5, 6, 7]))
        assert hit.by_tier == {"hbm": 2 * CHUNK, "host": 4 * CHUNK}
        assert sorted(hit.positions) == [0, 1, 2, 3, 4, 5]
        hit.release()
        assert engine.load([1, 2, 3, 4, 5, 6, 7]) == {n: content(n) for n in range(1, 7)}
        with store.lookup(named(store, [2, 7, 5])) as hit:
            assert hit.by_tier == {"hbm": 2 * CHUNK}
        assert store.available_hbm() == POOL_PAGES
        store.check()


def test_pages_that_left_hbm_after_the_lookup_shorten_the_load():
    engine = InPool()
    with engine.store as store:
        engine.save([1, 2, 3])
        store.evict("hbm", 2)
        hit = store.lookup(named(store, [1, 2, 3]))
        assert hit.by_tier == {"hbm": CHUNK, "host": 2 * CHUNK}
        hit.release()
        store.evict("hbm")
        assert store.load(hit).wait(30).pages == ()
        assert store.available_hbm() == POOL_PAGES
        store.check()


def test_two_loads_of_the_same_pages_share_them():
    engine = InPool()
    with engine.store as store:
        engine.save(list(range(8)))
        store.evict("hbm")
        first = store.lookup(named(store, list(range(8))))
        second = store.lookup(named(store, [6, 2, 4]))
        some = store.load(second).wait(30)
        all_of_them = store.load(first).wait(30)
        assert len(all_of_them.pages) == 8
        assert set(some.pages) <= set(all_of_them.pages)
        store.release_hbm([*some.pages, *all_of_them.pages])
        assert store.available_hbm() == POOL_PAGES
        store.check()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["save", "look", "hbm", "host", "flush"]),
            st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True),
        ),
        max_size=14,
    )
)
def test_with_a_pool_any_order_of_things_agrees_with_a_dictionary(tmp_path_factory, steps):
    engine = InPool(tmp_path_factory.mktemp("pool"))
    with engine.store as store:
        saved: set[int] = set()
        for what, numbers in steps:
            if what == "save":
                assert engine.save(numbers) == len(numbers)
                saved.update(numbers)
            elif what == "look":
                assert engine.load(numbers) == {n: content(n) for n in numbers if n in saved}
            elif what == "hbm":
                store.evict("hbm", len(numbers))
            elif store.flush(30) and what == "host":
                store.evict("host", len(numbers))
            assert store.available_hbm() == POOL_PAGES
            store.check()
