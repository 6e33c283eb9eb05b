"""A hit is right for its last token, whatever the layers keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.tierstore.api.conftest import load_bytes
from tierstore import Identity, KVSpec, LayerGroup, LayerKind, Prompt

CHUNK = 4
DIGEST = 16  # bytes: one float32 vector of 4
STATE_DIGESTS = 8
ATTENTION = LayerGroup(LayerKind.FULL_ATTENTION, (0,), kv_heads=1, head_dim=4)
WINDOW = LayerGroup(LayerKind.SLIDING_WINDOW, (1,), kv_heads=1, head_dim=4, window=8)
LATENT = LayerGroup(LayerKind.MLA_LATENT, (2,), head_dim=4)
STATE = LayerGroup(LayerKind.RECURRENT_STATE, (3,), state_bytes=STATE_DIGESTS * DIGEST)
BLOB = LayerGroup(LayerKind.OPAQUE, (4,), state_bytes=STATE_DIGESTS * DIGEST)

_numbers = itertools.count()
tokens_of = st.lists(st.integers(0, 1), max_size=14)


def spec_of(*groups):
    return KVSpec(groups, "float32", CHUNK)


def is_state(group):
    return group.kind in (LayerKind.RECURRENT_STATE, LayerKind.OPAQUE)


def after(tokens, end):
    """What a model keeps of the first ``end`` tokens: a vector of the last one, or a state."""
    return xxhash.xxh3_128_digest(np.asarray(tokens[:end], np.uint32).tobytes())


def page_of(spec, tokens, chunk):
    """The page of a chunk, which may be the partial one at the end."""
    start, end = chunk * CHUNK, min((chunk + 1) * CHUNK, len(tokens))
    rows = b"".join(after(tokens, at + 1) for at in range(start, end)).ljust(CHUNK * DIGEST, b"\0")
    state = after(tokens, end) * STATE_DIGESTS
    return b"".join(state if is_state(group) else rows * group.planes for group in spec.groups)


def assert_right(spec, tokens, pages, end):
    """That these pages are what a model needs to go on behind the first ``end`` tokens."""
    for chunk, page in enumerate(pages):
        last = min((chunk + 1) * CHUNK, end)
        at = 0
        for group in spec.groups:
            if is_state(group):
                state = after(tokens, last) * STATE_DIGESTS
                assert page[at : at + len(state)] == state, (chunk, group.kind)
                at += len(state)
                continue
            for _ in range(group.planes):
                expected = b"".join(after(tokens, each + 1) for each in range(chunk * CHUNK, last))
                assert page[at:].startswith(expected), (chunk, group.kind)
                at += CHUNK * DIGEST


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(ATTENTION),
        spec_of(ATTENTION, WINDOW, LATENT),
        spec_of(STATE),
        spec_of(ATTENTION, STATE),
        spec_of(BLOB),
    ],
    ids=["attention", "by token", "state", "attention and state", "opaque"],
)
@pytest.mark.parametrize("hbm", [False, True], ids=["buffers", "hbm"])
def test_every_hit_is_right_for_its_last_token(open_store, spec, hbm):
    store = open_store(spec, hbm_pages=64 if hbm else 0)
    found = []

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        saved=st.lists(tokens_of, max_size=4),
        common=st.integers(0, 14),
        tail=tokens_of,
        limit=st.none() | st.integers(0, 14),
    )
    @example(saved=[[0, 1] * 5], common=10, tail=[1], limit=None)
    def check(saved, common, tail, limit):
        asked = [*(saved[0] if saved else [])[:common], *tail]
        identity = Identity.of(spec, model=f"example {next(_numbers)}")
        for tokens in saved:
            prompt = Prompt(identity, tokens, chunk_tokens=CHUNK)
            pages = [page_of(spec, tokens, chunk) for chunk in range(-(-len(tokens) // CHUNK))]
            if hbm:
                owned = store.allocate_hbm(len(pages))
                for number, page in zip(owned, pages, strict=True):
                    store.pool.array[number] = np.frombuffer(page, np.uint8)
                store.save_hbm(prompt, owned).wait(30)
                store.release_hbm(owned)
            else:
                store.save(prompt, pages).wait(30)
        hit = store.lookup(Prompt(identity, asked, chunk_tokens=CHUNK), max_tokens=limit)
        assert hit.tokens <= min(len(asked), len(asked) if limit is None else limit)
        if hbm:
            loaded = store.load(hit).wait(30)
            pages = [bytes(store.pool.array[number]) for number in loaded.pages]
            store.release_hbm(loaded.pages)
            tokens = loaded.tokens
        else:
            tokens, pages = load_bytes(store, hit)
        assert tokens == hit.tokens
        found.append(tokens)
        assert_right(spec, asked, pages, tokens)

    check()
    assert any(found)


def test_a_state_is_found_at_the_end_of_its_chunk_and_nowhere_else(open_store):
    spec = spec_of(ATTENTION, STATE)
    store = open_store(spec)
    tokens = list(range(10))
    pages = [page_of(spec, tokens, chunk) for chunk in range(3)]
    assert store.save(tokens, pages).wait(30) == 8  # that of the last two tokens could not be found
    assert store.lookup([*tokens[:7], 99]).tokens == 4  # parts inside the second chunk
    assert store.lookup(tokens, max_tokens=7).tokens == 4
    assert store.lookup(tokens).tokens == 8
