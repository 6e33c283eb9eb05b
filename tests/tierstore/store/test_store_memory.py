"""The store without a disk: saves, hits, loads, leases, eviction, and the page pool."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import xxhash

import tierstore
from tests.portions import portion
from tests.small_store import SPEC, leading_tokens, load_bytes, page_of, pages_of
from tierstore.errors import UsageError
from tierstore.index import Tier
from tierstore.keys import Prompt

TOKENS = list(range(100, 170))  # 4 full chunks and 6 tokens


@pytest.fixture
def store(open_store):
    return open_store(None)


def save(store, tokens, **kwargs):
    return store.save(tokens, pages_of(tokens), **kwargs).wait(10)


def test_a_second_save_keeps_one_copy(store):
    save(store, TOKENS)
    used = store.stats().tiers["host"].used_bytes
    assert save(store, TOKENS) == 70
    assert store.stats().tiers["host"].used_bytes == used
    assert store.stats().counters["already_stored_pages"] == 5


def test_capacity_holds_and_the_oldest_prompts_leave(open_store):
    store = open_store(None, pages=8)
    for n in range(10):
        save(store, list(range(1000 * n, 1000 * n + 64)))
        assert store.stats().tiers["host"].used_bytes <= 8 * SPEC.page_bytes
    assert [store.lookup(range(1000 * n, 1000 * n + 64)).tokens for n in range(10)] == [0] * 8 + [64] * 2
    assert store.stats().counters["evicted_pages"]["host"] == 32


def test_what_a_lease_holds_is_not_evicted_and_nobody_waits(open_store):
    store = open_store(None, pages=4)
    save(store, range(64))
    hit = store.lookup(range(64))
    assert save(store, range(1000, 1064)) == 0
    assert store.stats().counters["not_stored_pages"] == 4
    assert load_bytes(store, hit) == (64, pages_of(list(range(64))))
    assert save(store, range(1000, 1064)) == 64


def test_nothing_waits_for_pythons_collector(store):
    """Neither a load's buffers nor pages that have left."""
    save(store, range(64))  # whatever is made once
    load_bytes(store, store.lookup(range(64)))
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for n in range(1, 20):
            save(store, range(1000 * n, 1000 * n + 64))
            load_bytes(store, store.lookup(range(1000 * n, 1000 * n + 64)))
        store.evict("host")
        gc.collect()
        left = [found for found in gc.garbage if type(found).__module__.startswith("tierstore")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == []


def test_a_lease_ends_by_itself_and_the_load_brings_what_is_still_there(open_store):
    store = open_store(None, pages=4, lease_s=0.0)
    save(store, range(64))
    hit = store.lookup(range(64))
    save(store, range(1000, 1032))
    assert load_bytes(store, hit) == (32, pages_of(list(range(32))))
    assert store.stats().counters["expired_leases"] == 1


def damage_first(store, tokens):
    """Take the first of these pages out of the host tier, those below it stay."""
    state = store.backend.core.state
    with state.lock:
        root = state.root(store.identity, store.spec.page_bytes)
        first, *_ = state.index.tree.match(root, store.prompt(tokens), len(tokens)).pages
        state.index.set_damaged(first, Tier.HOST)
        state.residency.drop(first, Tier.HOST)


def test_filling_a_hole_may_evict_the_page_below_it(open_store):
    store = open_store(None, pages=2)
    save(store, range(32))
    damage_first(store, range(32))
    save(store, range(900, 916))
    assert save(store, range(16)) == 16
    store.check()
    assert load_bytes(store, store.lookup(range(32))) == (16, pages_of(list(range(16))))


def test_slots_taken_ahead_and_not_needed_are_given_back(open_store):
    store = open_store(None, pages=8)
    save(store, range(64))
    damage_first(store, range(64))
    assert save(store, range(64)) == 64  # of its four pages, only the first is filled again
    assert store.stats().tiers["host"].used_bytes == 4 * SPEC.page_bytes
    assert load_bytes(store, store.lookup(range(64))) == (64, pages_of(list(range(64))))


@pytest.mark.parametrize("lookups", portion(5_000, 20_000))
def test_eight_bit_keys_serve_no_wrong_page(open_store, lookups):
    """Hundreds of pages under 256 keys: only the tokens tell them apart."""
    store = open_store(None, pages=800)
    rng = np.random.default_rng(0)
    identity = store.identity

    def prompt(tokens):
        return Prompt(identity, tokens, chunk_tokens=16, digest=lambda data: xxhash.xxh3_64_digest(data)[:1])

    saved = [rng.integers(0, 50, 48).tolist() for _ in range(250)]
    for tokens in saved:
        store.save(prompt(tokens), pages_of(tokens)).wait(10)
    known = {tuple(tokens[:end]) for tokens in saved for end in range(1, 49)}
    wrong = 0
    for n in range(lookups):
        tokens = list(saved[n % 250])
        if n % 4:
            tokens[rng.integers(0, 48)] = int(rng.integers(0, 50))
        with store.lookup(prompt(tokens)) as hit:
            wrong += hit.tokens > 0 and tuple(tokens[: hit.tokens]) not in known
            whole = hit.tokens // 16 * 16 + 16
            wrong += whole <= 48 and tuple(tokens[:whole]) in known
            if n % 100 == 0 and hit.tokens:
                page = load_bytes(store, hit)[1][-1]
                count = (hit.tokens - 1) % 16 + 1
                wrong += leading_tokens(page, count) != leading_tokens(page_of(tokens[: hit.tokens]), count)
    assert wrong == 0
    assert store.stats().key_collisions > 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"host_bytes": 100}, "host_bytes is 100 B, less than one page"),
        ({"policy": "oracle"}, "unknown policy"),
        ({"host_bytes": 1 << 60}, "cannot map"),
    ],
)
def test_what_cannot_work_is_refused_at_open(kwargs, message):
    with pytest.raises(UsageError, match=message):
        tierstore.open(None, SPEC, **kwargs)


# -- with a page pool -----------------------------------------------------------------------------------


def compute(store, tokens, first=0):
    """Play the engine: allocate HBM pages, compute into them, publish them."""
    chunks = pages_of(tokens)[first:]
    pages = store.allocate_hbm(len(chunks))
    for page, data in zip(pages, chunks, strict=True):
        store.pool.array[page] = np.frombuffer(data, np.uint8)
    prompt = store.prompt(tokens)
    return pages, store.save_hbm(prompt, pages, first=first)


def hbm_bytes(store, pages):
    return [store.pool.array[page].tobytes() for page in pages]


def test_evicted_from_hbm_it_comes_back_from_host(open_store):
    store = open_store(None, hbm_pages=8)
    pages, saved = compute(store, TOKENS)
    saved.wait(10)
    store.release_hbm(pages)
    other, saved = compute(store, list(range(900, 1000)))  # needs 7 of the 8 pages
    saved.wait(10)
    store.release_hbm(other)
    hit = store.lookup(TOKENS)
    assert "host" in hit.by_tier
    loaded = store.load(hit).wait(10)
    assert loaded.tokens == 70
    assert hbm_bytes(store, loaded.pages) == pages_of(TOKENS)
    store.release_hbm(loaded.pages)
    assert store.available_hbm() == 8


def test_a_full_pool_gives_none_and_loads_come_short(open_store):
    store = open_store(None, hbm_pages=6)
    save(store, TOKENS)
    held = store.allocate_hbm(3)
    assert store.allocate_hbm(4) is None
    loaded = store.load(store.lookup(TOKENS)).wait(10)
    assert loaded.tokens == 48
    assert store.stats().counters["loads_cut_short"] == 1
    store.release_hbm([*held, *loaded.pages])
    assert store.available_hbm() == 6
