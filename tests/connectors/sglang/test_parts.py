"""The parts of SGLang's connector that need no SGLang."""

from __future__ import annotations

import ctypes
import threading

import pytest
import xxhash

import tierstore
from tierstore import Identity, KVSpec
from tierstore_connectors.sglang.identity import pages_named
from tierstore_connectors.sglang.pools import HostPool, PageRuns
from tierstore_connectors.sglang.queries import Queries, Query
from tierstore_connectors.sglang.weights import WeightsWatch, epoch_of

IDENTITY = Identity.of(KVSpec.opaque(4096, chunk_tokens=8, hashed=True), model="m")


class FakeHit:
    def __init__(self, positions):
        self.positions = positions
        self.released = 0

    def release(self):
        self.released += 1


def query(keys, positions):
    return Query(None, IDENTITY, list(keys), FakeHit(positions))


def test_pages_of_a_call_are_found_in_an_earlier_query():
    queries = Queries()
    first = query("abcdef", [0, 1, 2, 4, 5])
    queries.add(first)
    queries.add(query("xy", [0, 1]))
    found, at = queries.find(IDENTITY, ["c", "d", "e"])
    assert (found, at) == (first, 2)
    assert first.held(2, 3) == range(2, 4)  # page 3 is not held
    assert first.held(3, 1) == range(3, 3)
    assert first.held(4, 9) == range(3, 5)
    assert first.held(0, 2) == range(2)
    assert queries.find(IDENTITY, ["d", "x"]) is None
    other = Identity.of(KVSpec.opaque(4096, chunk_tokens=8), model="m")
    assert queries.find(other, ["a"]) is None


def test_the_oldest_query_gives_its_lease_back():
    queries = Queries(most=2)
    three = [query(keys, [0]) for keys in "abc"]
    for each in three:
        queries.add(each)
    assert [each.hit.released for each in three] == [1, 0, 0]
    queries.drop(three[1])
    assert (len(queries), three[1].hit.released) == (1, 1)
    queries.clear()
    assert (len(queries), three[2].hit.released) == (0, 1)


def in_thread(call):
    """What a new thread gets."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_threads_of_before_an_update_save_nothing_any_more():
    version = ["1"]
    watch = WeightsWatch(lambda: version[0], str)
    go, done, answers = threading.Event(), threading.Event(), []

    def older():
        watch.look()
        go.wait(30)
        watch.look()
        answers.append(watch.may_save())
        done.set()

    thread = threading.Thread(target=older)
    thread.start()
    before = watch.look()
    assert watch.may_save()
    version[0] = "2"
    assert watch.look() != before
    go.set()
    assert done.wait(30)
    thread.join()
    assert answers == [False]
    assert not watch.may_save()
    assert in_thread(lambda: watch.look() and watch.may_save())  # SGLang's flush begins new threads


def test_a_new_epoch_is_another_identity_and_no_thread_loses_its_right():
    watch = WeightsWatch(lambda: "default", lambda number: f"epoch {number}")
    before = watch.look()
    watch.begin_epoch()
    assert watch.look() != before
    assert watch.may_save()


def test_epochs_of_engines_differ_and_ranks_that_share_agree():
    assert epoch_of(1, shared=False, seed=1) != epoch_of(1, shared=False, seed=1)
    assert epoch_of(1, shared=True, seed=1) == epoch_of(1, shared=True, seed=1)
    assert epoch_of(1, shared=True, seed=1) != epoch_of(2, shared=True, seed=1)
    assert epoch_of(1, shared=True, seed=1) != epoch_of(1, shared=True, seed=2)


class Pool:
    """Two runs of other sizes for each page, as K and V may have."""

    page_size = 2
    layout = "page_first"
    SIZES = (3000, 1100)

    def __init__(self, pages):
        self.memory = [ctypes.create_string_buffer(pages * size) for size in self.SIZES]

    def get_page_buffer_meta(self, indices):
        pages = [index // self.page_size for index in indices[:: self.page_size]]
        starts = [ctypes.addressof(each) for each in self.memory]
        parts = list(zip(starts, self.SIZES, strict=True))
        addresses = [start + page * size for page in pages for start, size in parts]
        return addresses, list(self.SIZES) * len(pages)

    def fill(self, page):
        for memory, size in zip(self.memory, self.SIZES, strict=True):
            ctypes.memset(ctypes.addressof(memory) + page * size, page + 1, size)

    def read(self, page):
        pairs = zip(self.memory, self.SIZES, strict=True)
        return b"".join(memory.raw[page * size : (page + 1) * size] for memory, size in pairs)


def indices_of(*pages):
    return [index for page in pages for index in (2 * page, 2 * page + 1)]


def problem(where, error):
    raise AssertionError(f"{where}: {error}")


def test_a_page_is_its_runs_one_after_the_other():
    pool = Pool(3)
    host = HostPool("kv", pool, [0, 1])
    assert (host.page_bytes, host.chunk_tokens) == (4100, 8)
    pool.fill(2)
    page = ctypes.create_string_buffer(4100)
    source = PageRuns(host, indices_of(2), 1, problem, {5: 0})
    assert source.copy([(5, ctypes.addressof(page))], 4100) == [xxhash.xxh3_64_intdigest(pool.read(2))]
    assert page.raw == pool.read(2)
    PageRuns(host, indices_of(0), 1, problem).write([(0, ctypes.addressof(page))])
    assert pool.read(0) == page.raw


def test_a_wrong_number_of_indices_is_no_address():
    host = HostPool("kv", Pool(3), [0, 1])
    problems = []
    target = PageRuns(host, indices_of(0), 2, lambda *each: problems.append(each))
    target.write([(0, 0)])
    assert target.failed
    assert target.copy([(0, 0)], 4100) == [None]
    assert len(problems) == 2


def test_a_part_of_what_was_asked_about_is_read_under_its_lease(tmp_path):
    """As the connector does it, over an embedded store."""
    pool = Pool(6)
    host = HostPool("kv", pool, [0, 1])
    spec = KVSpec.opaque(host.page_bytes, chunk_tokens=host.chunk_tokens, hashed=True)
    identity = Identity.of(spec, model="m")
    keys = [f"{at:064x}" for at in range(1, 7)]
    with tierstore.open(tmp_path, spec, identity=identity, host_bytes=1 << 20, disk_bytes=64 << 20) as store:
        for page in range(6):
            pool.fill(page)
        wanted = [pool.read(page) for page in range(6)]
        source = PageRuns(host, indices_of(*range(6)), 6, problem)
        prompt = pages_named(identity, keys, host.chunk_tokens)
        assert store.save_from(prompt, source, 6).wait(30) == 6 * host.chunk_tokens
        hit = store.lookup(prompt)
        asked = Query(store, identity, keys, hit)
        for memory in pool.memory:
            ctypes.memset(memory, 0, len(memory))
        for first in (2, 4, 0):  # in any order, as the hit stays held
            run = asked.held(first, 2)
            target = PageRuns(host, indices_of(first, first + 1), 2, problem, {at: at - first for at in run})
            loaded = store.load_to(hit, target, first=run.start, count=2, keep=True).wait(30)
            assert loaded.tokens == (first + 2) * host.chunk_tokens
            assert [pool.read(first), pool.read(first + 1)] == wanted[first : first + 2]
        with pytest.raises(tierstore.UsageError):
            store.load_to(hit, target, first=5, count=2)
        hit.release()
        assert store.stats().open_hits == 0


def test_pools_that_lie_otherwise_are_told_apart():
    one, two = Pool(1), Pool(1)
    two.layout = "layer_first"
    assert HostPool("kv", one, [0, 1]).layout != HostPool("kv", two, [0, 1]).layout
