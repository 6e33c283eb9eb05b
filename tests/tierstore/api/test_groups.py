"""A hit is right for its last token, whatever the layers keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tierstore import Identity, KVSpec, LayerGroup, LayerKind, Prompt

CHUNK = 8
DIGEST = 16  # bytes: one float32 vector of 4
STATE_DIGESTS = 8
ATTENTION = LayerGroup(LayerKind.FULL_ATTENTION, (0,), kv_heads=1, head_dim=4)
WINDOW = LayerGroup(LayerKind.SLIDING_WINDOW, (1,), kv_heads=1, head_dim=4, window=12)
LATENT = LayerGroup(LayerKind.MLA_LATENT, (2,), head_dim=4)
STATE = LayerGroup(LayerKind.RECURRENT_STATE, (3,), state_bytes=STATE_DIGESTS * DIGEST)
BLOB = LayerGroup(LayerKind.OPAQUE, (4,), state_bytes=STATE_DIGESTS * DIGEST)
CHUNKED = LayerGroup(LayerKind.CHUNKED_ATTENTION, (5,), kv_heads=1, head_dim=4, window=16)

_numbers = itertools.count()
tokens_of = st.lists(st.integers(0, 1), max_size=28)


def spec_of(*groups):
    return KVSpec(groups, "float32", CHUNK)


def is_state(group):
    return group.kind in (LayerKind.RECURRENT_STATE, LayerKind.OPAQUE)


def after(tokens, end):
    """What a model keeps of the first ``end`` tokens: a vector of the last one, or a state."""
    return xxhash.xxh3_128_digest(np.asarray(tokens[:end], np.uint32).tobytes())


def page_of(group, tokens, chunk):
    """The page of a chunk, which may be the partial one at the end."""
    start, end = chunk * CHUNK, min((chunk + 1) * CHUNK, len(tokens))
    if is_state(group):
        return after(tokens, end) * STATE_DIGESTS
    rows = b"".join(after(tokens, at + 1) for at in range(start, end)).ljust(CHUNK * DIGEST, b"\0")
    return rows * group.planes


def assert_right(group, tokens, chunk, page, end):
    """That the page is what a model needs to go on behind the first ``end`` tokens."""
    last = min((chunk + 1) * CHUNK, end)
    if is_state(group):
        assert page == after(tokens, last) * STATE_DIGESTS
        return
    expected = b"".join(after(tokens, each + 1) for each in range(chunk * CHUNK, last))
    for plane in range(group.planes):
        assert page[plane * CHUNK * DIGEST :].startswith(expected), (chunk, group.kind)


def save(store, prompt, group, pages):
    """Save all chunks of a group."""
    if not store.pools:
        store.save(prompt, pages, group=group).wait(30)
        return
    owned = store.allocate_hbm(len(pages), group=group)
    for number, page in zip(owned, pages, strict=True):
        store.pools[group].array[number] = np.frombuffer(page, np.uint8)
    store.save_hbm(prompt, owned, group=group).wait(30)
    store.release_hbm(owned, group=group)


def load(store, hit):
    """The tokens that came, and by group the bytes of each chunk's page."""
    if store.pools:
        loaded = store.load(hit).wait(30)
        found = []
        for group, part in enumerate(loaded.groups):
            array = store.pools[group].array
            found.append({chunk: bytes(array[page]) for chunk, page in enumerate(part.pages, part.first)})
            store.release_hbm(part.pages, group=group)
        return loaded.tokens, found
    chunks = [hit.chunks(group.number) for group in store.groups]
    into = [
        [bytearray(group.page_bytes) for _ in each] for group, each in zip(store.groups, chunks, strict=True)
    ]
    loaded = store.load(hit, into if len(into) > 1 else into[0]).wait(30)
    return loaded.tokens, [
        dict(zip(each, map(bytes, pages), strict=True)) for each, pages in zip(chunks, into, strict=True)
    ]


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(ATTENTION),
        spec_of(ATTENTION, LATENT),
        spec_of(ATTENTION, WINDOW, LATENT),
        spec_of(WINDOW),
        spec_of(STATE),
        spec_of(WINDOW, ATTENTION, STATE, CHUNKED),
        spec_of(BLOB),
    ],
    ids=["attention", "all tokens", "window", "window alone", "state alone", "all kinds", "opaque"],
)
@pytest.mark.parametrize("hbm", [False, True], ids=["buffers", "hbm"])
def test_every_hit_is_right_for_its_last_token(open_store, spec, hbm):
    store = open_store(spec, hbm_pages=64 if hbm else 0)
    found = []

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        saved=st.lists(tokens_of, max_size=4),
        common=st.integers(0, 28),
        tail=tokens_of,
        limit=st.none() | st.integers(0, 28),
    )
    @example(saved=[[0, 1] * 10], common=20, tail=[1], limit=None)
    def check(saved, common, tail, limit):
        asked = [*(saved[0] if saved else [])[:common], *tail]
        identity = Identity.of(spec, model=f"example {next(_numbers)}")
        for tokens in saved:
            prompt = Prompt(identity, tokens, chunk_tokens=CHUNK)
            for number, group in enumerate(spec.groups):
                pages = [page_of(group, tokens, chunk) for chunk in range(-(-len(tokens) // CHUNK))]
                save(store, prompt, number, pages)
        hit = store.lookup(Prompt(identity, asked, chunk_tokens=CHUNK), max_tokens=limit)
        assert hit.tokens <= min(len(asked), len(asked) if limit is None else limit)
        for tokens in saved:  # the whole chunks that all groups were saved to are found
            if asked[: len(tokens)] == tokens and (limit is None or limit >= len(tokens)):
                assert hit.tokens >= len(tokens) // CHUNK * CHUNK
        tokens, pages = load(store, hit)
        assert tokens == hit.tokens
        found.append(tokens)
        for number, group in enumerate(spec.groups):
            needed = store.groups[number].chunks(tokens)
            assert set(needed) == set(pages[number])
            for chunk in needed:
                assert_right(group, asked, chunk, pages[number][chunk], tokens)

    check()
    assert any(found)
