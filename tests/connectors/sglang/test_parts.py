"""The parts of SGLang's connector that need no SGLang."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore import Identity, KVSpec
from tierstore.errors import UsageError
from tierstore.spec import LayerKind
from tierstore_connectors.common.shared_pages import BlockConverter, PagePart, PartSource
from tierstore_connectors.sglang.identity import pages_named
from tierstore_connectors.sglang.pools import HostPool, PagePlaces
from tierstore_connectors.sglang.queries import Queries, Query
from tierstore_connectors.sglang.sharing import PageTokens, SharedPages, pool_blocks, require_plain
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
    source = PagePlaces(host, indices_of(2), 1, problem, {5: 0})
    assert source.copy([(5, ctypes.addressof(page))], 4100) == [xxhash.xxh3_64_intdigest(pool.read(2))]
    assert page.raw == pool.read(2)
    PagePlaces(host, indices_of(0), 1, problem).write([(0, ctypes.addressof(page))])
    assert pool.read(0) == page.raw


def test_a_wrong_number_of_indices_is_no_address():
    host = HostPool("kv", Pool(3), [0, 1])
    problems = []
    target = PagePlaces(host, indices_of(0), 2, lambda *each: problems.append(each))
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
        source = PagePlaces(host, indices_of(*range(6)), 6, problem)
        prompt = pages_named(identity, keys, host.chunk_tokens)
        assert store.save_from(prompt, source, 6).wait(30) == 6 * host.chunk_tokens
        hit = store.lookup(prompt)
        asked = Query(store, identity, keys, hit)
        for memory in pool.memory:
            ctypes.memset(memory, 0, len(memory))
        for first in (2, 4, 0):  # in any order, as the hit stays held
            run = asked.held(first, 2)
            target = PagePlaces(
                host, indices_of(first, first + 1), 2, problem, {at: at - first for at in run}
            )
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


def page_names(tokens, page, before=b""):
    """SGLang's names of the pages of a prompt."""
    found = []
    for start in range(0, len(tokens) - page + 1, page):
        piece = np.array(tokens[start : start + page], "<u4").tobytes()
        before = hashlib.sha256(before + piece).digest()
        found.append(before.hex())
    return found


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.data())
def test_the_tokens_of_names_are_known_however_a_prompt_came(tokens, page, data):
    known = PageTokens(page)
    names = page_names(tokens, page)
    at = 0
    while at < len(names):  # in operations of any length, one behind the other
        count = data.draw(st.integers(1, len(names) - at))
        known.record(names[at - 1] if at else None, tokens[at * page : (at + count) * page])
        at += count
    for last in range(1, len(names) + 1):
        first = data.draw(st.integers(0, last - 1))
        whole = np.array(tokens[: last * page], "<u4").tobytes()
        assert known.tokens_to(names[first:last]) == whole
    if len(names) > 1:
        assert known.tokens_to(names[::-1]) is None, "pages that do not follow one another"


def test_names_of_salted_requests_and_of_other_forms_are_not_known():
    known, tokens = PageTokens(2), [1, 2, 3, 4]
    known.record(None, tokens)
    salted = page_names(tokens, 2, before=hashlib.sha256(b"salt").digest())
    assert known.tokens_to(salted) is None
    known.record(hashlib.sha256(b"salt").hexdigest(), tokens)  # SGLang never says where such a chain begins
    assert known.tokens_to(salted) is None
    assert known.tokens_to(["a"]) is None
    assert known.tokens_to(["no name"]) is None
    known.record(None, [5, 6, 7, 1 << 40, 9, 9])
    assert known.tokens_to(page_names([5, 6], 2)) is not None
    assert len(known) == 5


def test_the_pages_that_were_used_last_stay_known():
    known = PageTokens(1, most=3)
    known.record(None, [1, 2, 3])
    chain = page_names([1, 2, 3], 1)
    known.record(None, [9])
    assert known.tokens_to(chain) is None, "its first page left"
    known.record(None, [1, 2])
    assert known.tokens_to(chain[:2]) is not None
    known.record(None, [8])
    assert known.tokens_to(chain[:2]) is not None


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        ("layer_first", "plsthd"),
        ("page_first", "pstlhd"),
        ("page_first_direct", "pslthd"),
        ("page_head", "pshtld"),
    ],
)
def test_every_layout_of_a_host_pool_is_read_and_written(layout, order):
    """``order``: K and V, pages, tokens, layers, heads and numbers as the layout has them."""
    sizes = {"p": 2, "s": 3, "t": 4, "l": 2, "h": 3, "d": 8}
    whole = np.random.default_rng(0).random([sizes[each] for each in "pslhtd"], np.float32)
    memory = np.ascontiguousarray(whole.transpose(["pslhtd".index(each) for each in order]))
    if layout in ("layer_first", "page_first"):  # pages have no dimension of their own
        memory = memory.reshape([2, 2, 12, 3, 8] if layout == "layer_first" else [2, 12, 2, 3, 8])
    pool = SimpleNamespace(layout=layout, head_group_num=1, page_size=4, kv_buffer=Tensor(memory))
    spec = KVSpec.uniform(layers=2, kv_heads=3, head_dim=8, dtype="float32", chunk_tokens=4)
    every = PartSource(PagePart(0, 1, (0, 1)), range(3), range(3))
    converter = BlockConverter(spec.describe(), pool_blocks(pool, [0, 1]), every)
    page = np.zeros(spec.page_bytes, np.uint8)
    converter.gather([([2], page.ctypes.data)])
    assert page.tobytes() == whole[:, 2].transpose(1, 0, 2, 3, 4).tobytes()
    before = memory.copy()
    memory[...] = 0
    for number in range(3):
        converter.gather([([number], page.ctypes.data)])
        assert not page.any()
    page[:] = np.frombuffer(whole[:, 1].transpose(1, 0, 2, 3, 4).tobytes(), np.uint8)
    converter.scatter([([1], page.ctypes.data)])
    kept = np.flatnonzero(memory.ravel())
    assert len(kept) == page.size // 4
    assert np.array_equal(memory.ravel()[kept], before.ravel()[kept])
    pool.layout = "page_unified"
    with pytest.raises(UsageError, match="hicache-mem-layout must be one of"):
        pool_blocks(pool, [0, 1])


@pytest.mark.parametrize("window", [None, 8])
def test_a_prompt_is_saved_and_loaded_in_parts(window):
    """As the connector does it: a second operation continues the first one, and a load skips pages."""
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=8)
    if window is not None:
        spec = replace(spec, groups=(replace(spec.groups[0], kind=LayerKind.SLIDING_WINDOW, window=window),))
    model = Identity.of(spec, model="m")
    [identity] = model.groups
    memory = np.random.default_rng(0).random([2, 6, 1, 8, 1, 32], np.float32)
    before = memory.copy()
    pool = SimpleNamespace(
        layout="page_first_direct", head_group_num=1, page_size=8, page_num=6, kv_buffer=Tensor(memory)
    )
    every = PartSource(PagePart(0, 1, (0,)), range(1), range(1))
    converter = BlockConverter(identity.layout, pool_blocks(pool, [0]), every)
    known, tokens = PageTokens(8), list(range(50))
    pages = SharedPages("kv", pool, model, identity, window is not None, converter, known)
    names = page_names(tokens, 8)
    slots = np.arange(48)
    part = KVSpec.parse(identity.layout)
    with tierstore.open(None, part, identity=identity, host_bytes=1 << 20) as store:
        for first, count in ((0, 2), (2, 3), (5, 1)):
            known.record(names[first - 1] if first else None, tokens[8 * first : 8 * (first + count)])
            prompt, start = pages.prompt(identity, names[first : first + count], 0)
            source = PagePlaces(pages, slots[8 * first : 8 * (first + count)], count, problem)
            assert store.save_from(prompt, source, count, first=start).wait(30) == 8 * count
        memory[...] = 0
        prompt, start = pages.prompt(identity, names[1:], 0)
        asked = Query(store, identity, names[1:], store.lookup(prompt), start)
        run = asked.held(1, 3)  # pages 2, 3 and 4 of the prompt
        assert len(run) == 3
        places = {at: asked.positions[at] - 1 for at in run}
        target = PagePlaces(pages, slots[16:40], 3, problem, places)
        loaded = store.load_to(asked.hit, target, first=run.start, count=3, keep=True).wait(30)
        assert loaded.tokens == 8 * run.stop
        assert np.array_equal(memory[:, 2:5], before[:, 2:5])
        assert not memory[:, [0, 1, 5]].any()
        asked.hit.release()
        assert pages.prompt(identity, page_names(tokens[1:], 8), 0) is None
    with pytest.raises(ValueError, match="pages of the kv pool"):
        pages.runs(np.arange(48, 56), 1)


class Tensor:
    """The used part of a torch tensor, over numpy's."""

    def __init__(self, memory):
        self.memory, self.shape = memory, memory.shape

    def dim(self):
        return self.memory.ndim

    def element_size(self):
        return self.memory.itemsize

    def data_ptr(self):
        return self.memory.ctypes.data

    def stride(self):
        return [each // self.memory.itemsize for each in self.memory.strides]


def test_arguments_that_change_the_model_are_refused():
    plain = {"kv_cache_dtype": "auto", "quantization": None, "enable_lora": False, "pp_size": 1}
    keys = '{"hicache_storage_pass_prefix_keys": true}'
    require_plain({**plain, "hicache_storage_backend_extra_config": keys}, at_start=True)
    with pytest.raises(UsageError, match="share_engines: --enable-lora, --quantization may change KV"):
        require_plain({**plain, "enable_lora": True, "quantization": "fp8"}, at_start=True)
    with pytest.raises(UsageError, match="hicache_storage_pass_prefix_keys"):
        require_plain({**plain, "hicache_storage_backend_extra_config": "{}"}, at_start=True)
    with pytest.raises(UsageError, match="at SGLang's start"):
        require_plain(plain, at_start=False)
