"""A connected store does what an embedded one does."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

import tierstore
from tests.daemons import SPEC, TOKENS, daemon_stats, load_bytes, pages_of
from tierstore.errors import StoreClosedError, UsageError
from tierstore.mover import Priority
from tierstore.testing.clock import wait_until
from tierstore.tiers.hbm import PagePool


@pytest.fixture
def store(shared_daemon, connect):
    return connect(shared_daemon.url)


def save(store, tokens, **kwargs):
    return store.save(tokens, pages_of(tokens), **kwargs).wait(10)


def compute(store, tokens):
    """Play the engine: pages of the pool, filled."""
    contents = pages_of(tokens)
    pages = store.allocate_hbm(len(contents))
    assert pages is not None
    for page, content in zip(pages, contents, strict=True):
        store.pool.array[page] = np.frombuffer(content, np.uint8)
    return pages


@pytest.mark.parametrize("direction", ["load", "save"])
def test_buffers_that_the_caller_lets_go_of_live_until_the_transfer_has_ended(store, direction):
    save(store, TOKENS)
    hit = store.lookup(TOKENS)
    arrays = [np.zeros(SPEC.page_bytes, np.uint8) for _ in range(hit.num_pages)]
    alive = [weakref.ref(array) for array in arrays]
    go_on = threading.Event()
    for _ in range(2):  # as many as the store has threads that copy
        store._mover.submit(Priority.LOAD, go_on.wait)
    buffers = [memoryview(array) for array in arrays]
    transfer = store.load(hit, buffers) if direction == "load" else store.save([7, *TOKENS[1:]], buffers)
    del arrays, buffers
    gc.collect()
    kept = all(array() is not None for array in alive)
    go_on.set()
    transfer.wait(10)
    assert kept
    hit.release()


def batches_of(pages, monkeypatch):
    monkeypatch.setattr("tierstore.store.save._FIRST_BATCH_BYTES", pages * SPEC.page_bytes)
    monkeypatch.setattr("tierstore.store.save._BATCH_BYTES", pages * SPEC.page_bytes)


def test_a_long_prompt_goes_in_batches(store, monkeypatch):
    batches_of(4, monkeypatch)
    monkeypatch.setattr("tierstore.client.reading._BATCH_PAGES", 3)
    monkeypatch.setattr("tierstore.store.load._COPY_BYTES", 2 * SPEC.page_bytes)
    tokens = list(range(16 * 30 + 5))
    transfer = store.save(tokens, pages_of(tokens))
    assert transfer.wait(10) == len(tokens)
    assert transfer.progress.pages_done == 31
    assert load_bytes(store, store.lookup(tokens)) == (len(tokens), pages_of(tokens))


@pytest.mark.parametrize("looked_up", [True, False], ids=["looked up", "only saved"])
@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("pieces", [1, 10])
def test_a_long_prompt_is_sent_once(store, monkeypatch, pieces, grows, looked_up):
    """Whether it is saved at one stroke, or step by step as an engine computes it; by who has asked for it
    before, or (a worker of vLLM's) by somebody else."""
    batches_of(2, monkeypatch)
    tokens = list(range(16 * 200))
    pages = pages_of(tokens)
    if looked_up:
        assert store.lookup(tokens).tokens == 0
    before = daemon_stats(store)["server"]["received_bytes"]
    step = len(pages) // pieces
    for first in range(0, len(pages), step):
        known = tokens[: (first + step) * SPEC.chunk_tokens] if grows else tokens
        stored = store.save(known, pages[first : first + step], first=first).wait(10)
        assert stored == step * SPEC.chunk_tokens
    sent = daemon_stats(store)["server"]["received_bytes"] - before
    assert sent < 3 * len(pages) * (16 * 4 + 16), "tokens and keys, and a little for each batch"
    assert load_bytes(store, store.lookup(tokens)) == (len(tokens), pages)


def test_a_save_goes_on_behind_pages_that_have_left(make_daemon, connect):
    store = connect(make_daemon(disk=False).url)
    pages = pages_of(TOKENS)
    assert store.lookup(TOKENS).tokens == 0
    assert store.save(TOKENS, pages[:2]).wait(10) == 32
    assert store.evict("host") == 2
    assert store.save(TOKENS, pages[2:], first=2).wait(10) == 0, "it could never be found"
    assert store.save(TOKENS, pages).wait(10) == 70
    assert store.evict("host", 2) == 2
    assert store.save(TOKENS, pages[2:], first=2).wait(10) == 38
    assert load_bytes(store, store.lookup(TOKENS)) == (70, pages)


def test_a_short_batch_does_not_overtake_a_long_one(make_daemon, connect):
    """The daemon decides long ones in steps, and short ones at once."""
    store = connect(make_daemon(host_bytes=64 << 20).url)
    tokens = list(range(16 * 560))  # batches of 512 and 48 pages
    assert store.save(tokens, pages_of(tokens)).wait(30) == len(tokens)
    assert store.lookup(tokens).tokens == len(tokens)


def test_a_hit_can_be_loaded_after_its_release(store):
    save(store, TOKENS)
    hit = store.lookup(TOKENS)
    hit.release()
    hit.release()
    assert load_bytes(store, hit) == (70, pages_of(TOKENS))
    assert load_bytes(store, hit) == (70, pages_of(TOKENS))


def test_pages_in_hbm_are_shared_and_the_tail_is_copied(shared_daemon, connect):
    store = connect(shared_daemon.url, hbm_pages=12)
    pages = compute(store, TOKENS)
    assert store.save_hbm(store.prompt(TOKENS), pages).wait(10) == 70
    hit = store.lookup([*TOKENS, 1, 2])
    assert hit.by_tier == {"hbm": 70}
    loaded = store.load(hit).wait(10)
    assert loaded.pages[:4] == tuple(pages[:4])
    assert loaded.pages[4] != pages[4]
    store.pool.array[loaded.pages[4]] = 0  # its own: nobody else may notice
    store.release_hbm(loaded.pages)
    store.release_hbm(pages)
    assert store.available_hbm() == 12
    assert load_bytes(store, store.lookup(TOKENS)) == (70, pages_of(TOKENS))
    assert store.evict("hbm") == 5
    hit = store.lookup(TOKENS)
    assert hit.by_tier == {"host": 70}
    loaded = store.load(hit).wait(10)
    got = [store.pool.array[page].tobytes() for page in loaded.pages]
    assert got == pages_of(TOKENS)
    with store.lookup(TOKENS, max_tokens=64) as hit:
        assert hit.by_tier == {"hbm": 64}
    store.release_hbm(loaded.pages)
    assert store.available_hbm() == 12


def test_hbm_first_and_the_rest_by_the_daemon(shared_daemon, connect):
    store = connect(shared_daemon.url, hbm_pages=8)
    save(store, TOKENS)
    first = store.load(store.lookup(TOKENS, max_tokens=32)).wait(10)
    hit = store.lookup(TOKENS)
    assert hit.by_tier == {"hbm": 32, "host": 38}
    loaded = store.load(hit).wait(10)
    assert loaded.pages[:2] == first.pages
    assert loaded.moved_bytes == 3 * SPEC.page_bytes
    assert [store.pool.array[page].tobytes() for page in loaded.pages] == pages_of(TOKENS)
    buffers = load_bytes(store, store.lookup(TOKENS))
    assert buffers == (70, pages_of(TOKENS))
    store.release_hbm([*first.pages, *loaded.pages])
    assert store.available_hbm() == 8


def test_a_pool_that_is_full_cuts_the_load(shared_daemon, connect):
    store = connect(shared_daemon.url, hbm_pages=4)
    save(store, TOKENS)
    kept = store.allocate_hbm(2)
    loaded = store.load(store.lookup(TOKENS)).wait(10)
    assert loaded.tokens == 32
    store.release_hbm([*kept, *loaded.pages])
    assert store.available_hbm() == 4


def test_two_loads_of_one_prompt_share_its_pages(shared_daemon, connect):
    store = connect(shared_daemon.url, hbm_pages=40)
    save(store, TOKENS)
    for _ in range(10):
        transfers = [store.load(store.lookup(TOKENS)) for _ in range(4)]
        loaded = [transfer.wait(10) for transfer in transfers]
        assert {each.tokens for each in loaded} == {70}
        assert len({each.pages[:4] for each in loaded}) == 1
        for each in loaded:
            store.release_hbm(each.pages)
        assert store.available_hbm() == 40
        store.evict("hbm")


def test_a_second_client_hits_what_the_first_saved(shared_daemon, connect):
    first, second = connect(shared_daemon.url), connect(shared_daemon.url)
    save(first, TOKENS)
    assert load_bytes(second, second.lookup(TOKENS)) == (70, pages_of(TOKENS))
    assert save(second, TOKENS) == 70
    assert second.stats().counters["saved_pages"] == 0
    assert second.stats().counters["already_stored_pages"] == 5


def test_asyncio(store):
    async def main():
        assert await store.save(TOKENS, pages_of(TOKENS)) == 70
        hits = await asyncio.gather(*(store.lookup_async(TOKENS) for _ in range(20)))
        buffers = [bytearray(SPEC.page_bytes) for _ in range(5)]
        loaded = await store.load(hits[0], buffers, deadline_s=10)
        for hit in hits:
            hit.release()
        return loaded.tokens, buffers

    tokens, buffers = asyncio.run(main())
    assert (tokens, [bytes(buffer) for buffer in buffers]) == (70, pages_of(TOKENS))


def test_what_a_client_held_is_back_when_it_has_gone(shared_daemon, connect):
    store, other = connect(shared_daemon.url), connect(shared_daemon.url)
    save(store, TOKENS)
    hits = [store.lookup(TOKENS) for _ in range(10)]
    assert all(hit.tokens for hit in hits)
    before = other.stats().tiers["host"].leased_pages
    assert before > 0
    store.close()
    wait_until(lambda: other.stats().tiers["host"].leased_pages == 0)


def test_mistakes(store, shared_daemon):
    with pytest.raises(UsageError, match="no address"):
        tierstore.connect("http://localhost", SPEC)
    with pytest.raises(UsageError, match="another KV spec"):
        tierstore.connect(shared_daemon.url, SPEC, pools=PagePool(type(SPEC)(SPEC.groups, "float16"), 2))
    with pytest.raises(UsageError, match="must lie within"):
        store.save(TOKENS, pages_of(TOKENS), first=1)
    with pytest.raises(UsageError, match="no page pool"):
        store.load(store.lookup(TOKENS))
    with pytest.raises(UsageError, match="unknown tier"):
        store.evict("tape")
    with pytest.raises(UsageError, match="both"):
        tierstore.connect("tcp://localhost:1", SPEC, keys="x.secret")
    store.close()
    for verb in (store.lookup, store.pin):
        with pytest.raises(StoreClosedError):
            verb(TOKENS)
