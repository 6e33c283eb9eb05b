"""Bad arguments are refused in one line, before anything changes; whatever raises, the store goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.tierstore.api.conftest import SPEC, load_bytes, pages_of
from tierstore import Hint, Identity, KVSpec, Prompt, UsageError

TOKENS = list(range(2000, 2070))  # 4 full chunks and 6 tokens
OTHERS = list(range(3000, 3070))
PAGE = bytes(SPEC.page_bytes)
STRIDED = np.zeros((2, SPEC.page_bytes), np.uint8)[:, ::2]

BAD_SAVES = {
    "hint of text": {"hint": "likely"},
    "session with a surrogate": {"session": "\ud800"},
    "session of bytes": {"session": b"name"},
    "session of a number": {"session": 7},
    "empty session": {"session": ""},
    "fractional first": {"first": 0.5},
    "first of text": {"first": "0"},
    "first before the prompt": {"first": -1},
    "first beyond the prompt": {"first": 10**30},
    "ragged tokens": {"prompt": [[1, 2], [3]]},
    "nested tokens": {"prompt": [[1, 2], [3, 4]]},
    "tokens of None": {"prompt": None},
    "tokens of text": {"prompt": "hello"},
    "fractional tokens": {"prompt": [1.5]},
    "token beyond 32 bits": {"prompt": [2**32]},
    "token beyond 64 bits": {"prompt": [2**70]},
    "no pages": {"pages": None},
    "pages of None": {"pages": [None] * 5},
    "pages in one buffer": {"pages": PAGE},
    "pages that are not contiguous": {"pages": [STRIDED] * 5},
    "pages of text": {"pages": ["page"] * 5},
}


def assert_works(store):
    """That it saves, finds and flushes, and nothing is under way in it for good."""
    pages = pages_of(OTHERS)
    assert store.save(OTHERS, pages).wait(30) == len(OTHERS)
    assert load_bytes(store, store.lookup(OTHERS)) == (len(OTHERS), pages)
    assert store.flush(30)
    store.check()


@pytest.mark.parametrize("bad", BAD_SAVES.values(), ids=BAD_SAVES)
def test_a_save_with_bad_arguments_is_refused_and_changes_nothing(store, bad):
    with pytest.raises(UsageError) as refused:
        store.save(**{"prompt": TOKENS, "pages": pages_of(TOKENS), **bad})
    assert "\n" not in str(refused.value)
    assert store.stats().pending_saves == 0
    assert_works(store)
    assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
    assert store.lookup(TOKENS).tokens == len(TOKENS)


@pytest.mark.parametrize(
    "hint", [Hint(ttl_s=2**80), Hint(ttl_s=2**62, reuse="likely", priority=-100)], ids=["2**80", "2**62"]
)
def test_a_long_time_to_live_is_as_good_as_any(store, hint):
    assert store.save(TOKENS, pages_of(TOKENS), hint=hint, session="s" * 256).wait(30) == len(TOKENS)
    assert_works(store)


@pytest.mark.parametrize("ttl_s", [10**400, math.inf, math.nan, -1, "60", True], ids=str)
def test_a_hint_is_checked_where_it_is_made(ttl_s):
    with pytest.raises(UsageError, match="ttl_s"):
        Hint(ttl_s=ttl_s)


@pytest.mark.parametrize("hbm", [False, True], ids=["buffers", "hbm"])
def test_what_a_save_that_raises_has_begun_is_undone(open_store, hbm):
    """As by a bug of ours: nobody can make such a hint."""
    store = open_store(hbm_pages=16 if hbm else 0)
    broken = Hint()
    object.__setattr__(broken, "reuse", object())
    if hbm:
        owned = store.allocate_hbm(5)
        with pytest.raises((KeyError, TypeError)):
            store.save_hbm(store.prompt(TOKENS), owned, hint=broken)
        store.release_hbm(owned)
        assert store.available_hbm() == 16
    else:
        with pytest.raises((KeyError, TypeError)):
            store.save(TOKENS, pages_of(TOKENS), hint=broken)
    assert_works(store)
    assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
    assert store.evict("hbm") >= 0
    assert load_bytes(store, store.lookup(TOKENS)) == (len(TOKENS), pages_of(TOKENS))


def test_counts_and_limits_are_whole_numbers(store):
    assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
    for pages in (1.5, "2", -1):
        with pytest.raises(UsageError, match="pages"):
            store.evict("host", pages)
    with pytest.raises(UsageError, match="max_tokens"):
        store.lookup(TOKENS, max_tokens=3.5)
    for limit, tokens in ((-5, 0), (np.int64(20), 20), (10**30, len(TOKENS))):
        with store.lookup(TOKENS, max_tokens=limit) as hit:
            assert hit.tokens == tokens
    assert store.save(TOKENS, pages_of(TOKENS)[1:], first=np.int64(1)).wait(30) == len(TOKENS) - 16
    for session in (None, "\ud800", 3):
        with pytest.raises(UsageError, match="session"):
            store.finish(session)
    assert store.flush(30)
    assert store.evict("host", 10**23) > 0


@pytest.mark.parametrize("forever", [1e10, 2**80, 10**400, math.inf], ids=["1e10", "2**80", "10**400", "inf"])
def test_a_wait_may_be_as_long_as_anybody_likes(store, forever):
    assert store.save(TOKENS, pages_of(TOKENS)).wait(forever) == len(TOKENS)
    assert store.flush(forever)
    assert store.evict("host") > 0
    hit = store.lookup(TOKENS)
    assert hit.prefetch(deadline_s=forever).wait(forever) == len(TOKENS)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(5)]
    assert store.load(hit, buffers, deadline_s=forever).wait(forever).tokens == len(TOKENS)


@pytest.mark.parametrize("seconds", ["1", math.nan, [1]], ids=["text", "nan", "list"])
def test_a_wait_is_a_number_of_seconds(store, seconds):
    transfer = store.save(TOKENS, pages_of(TOKENS))
    hit = store.lookup(TOKENS)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    for wait in (
        lambda: transfer.wait(seconds),
        lambda: store.flush(seconds),
        lambda: hit.prefetch(deadline_s=seconds),
        lambda: store.load(hit, buffers, deadline_s=seconds),
    ):
        with pytest.raises(UsageError, match="seconds"):
            wait()
    assert transfer.wait(30) == len(TOKENS)


@pytest.mark.parametrize(
    "into", [[None], ["page"], [PAGE], [STRIDED], 5], ids=["none", "text", "bytes", "strided", "int"]
)
def test_buffers_to_load_into_are_checked(store, into):
    assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
    hit = store.lookup(TOKENS, max_tokens=16)
    with pytest.raises(UsageError):
        store.load(hit, into)
    assert load_bytes(store, hit) == (16, pages_of(TOKENS)[:1])


def test_without_a_pool_there_are_no_hbm_verbs(store):
    for verb in (
        lambda: store.save_hbm(store.prompt(TOKENS), [0]),
        lambda: store.allocate_hbm(1),
        lambda: store.release_hbm([0]),
        store.available_hbm,
    ):
        with pytest.raises(UsageError, match="no page pool"):
            verb()


def test_hbm_pages_are_those_of_the_pool(open_store):
    store = open_store(hbm_pages=8)
    owned = store.allocate_hbm(5)
    for bad in ([*owned[:4], 8], [*owned[:4], -1], [*owned[:4], 1.5], None, "01234"):
        with pytest.raises(UsageError, match="hbm_pages"):
            store.save_hbm(store.prompt(TOKENS), bad)
        with pytest.raises(UsageError, match="hbm_pages"):
            store.release_hbm(bad)
    for bad in (-1, 1.5, None):
        with pytest.raises(UsageError, match="count"):
            store.allocate_hbm(bad)
    assert store.save_hbm(TOKENS, np.array(owned)).wait(30) == len(TOKENS)  # bare tokens do, as everywhere
    store.release_hbm(owned)
    assert store.available_hbm() == 8


def test_identities_prompts_and_specs_are_checked_where_they_are_made():
    for field in ({"model": "\ud800"}, {"model": None}, {"model": "m", "tenant": "a\udfff"}, {"model": b"m"}):
        with pytest.raises(UsageError, match="identity"):
            Identity.of(SPEC, **field)
    identity = Identity.of(SPEC, model="m")
    for chunk_tokens in (0, -1, 1.5, None):
        with pytest.raises(UsageError, match="chunk_tokens"):
            Prompt(identity, TOKENS, chunk_tokens=chunk_tokens)
        with pytest.raises(UsageError, match="chunk_tokens"):
            KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16", chunk_tokens=chunk_tokens)
