from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore.keys import Identity, Prompt, encode_tokens
from tierstore.spec import KVSpec

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=8, dtype="float32", chunk_tokens=4)
IDENTITY = Identity.of(SPEC, model="m")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def prompt(tokens, identity=IDENTITY):
    return Prompt(identity, tokens, chunk_tokens=4)


@given(token_lists, token_lists)
def test_a_prompt_grown_in_steps_has_the_keys_of_one_made_at_once(head, tail):
    grown = prompt(head)
    grown.extend(tail)
    whole = prompt(head + tail)
    assert grown.keys == whole.keys
    assert grown.tail == whole.tail
    assert len(grown) == len(head) + len(tail)
    assert grown.tokens.tolist() == head + tail
    assert b"".join(grown.chunks()) + grown.tail == encode_tokens(head + tail)


@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.data())
def test_keys_are_equal_exactly_for_equal_prefixes(tokens, data):
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = list(tokens)
    other[at] += 1
    a, b = prompt(tokens).keys, prompt(other).keys
    same = at // 4
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b[same:])


@pytest.mark.parametrize(
    "field", ["model", "layout", "revision", "adapter", "codec", "rope", "shard", "tenant"]
)
def test_every_field_of_the_identity_changes_every_key(field):
    fields = {"model": "m", "layout": SPEC.describe(), field: "something else"}
    other = Identity(**fields)
    assert other.digest != IDENTITY.digest
    assert not set(prompt(range(16)).keys) & set(prompt(range(16), other).keys)


def test_a_partial_chunk_has_a_key_of_its_own():
    keys = {prompt(range(4 + n)).tail_key() for n in range(4)}
    assert len(keys) == 4


def test_lists_arrays_and_dtypes_make_the_same_keys():
    tokens = [1, 2, 3, 70_000, 5, 6, 7, 8]
    for dtype in (np.int64, np.uint32, np.int32):
        assert prompt(np.array(tokens, dtype)).keys == prompt(tokens).keys


@pytest.mark.parametrize("tokens", [[-1], [2**32], [0.5], [[1, 2]], ["a"]])
def test_what_is_no_token_is_refused(tokens):
    with pytest.raises(UsageError, match="token"):
        prompt(tokens)


def test_a_copy_of_named_pages_has_named_pages():
    windows = Identity.of(KVSpec.opaque(4096, chunk_tokens=8), model="m")
    prompt = Prompt.named_pages(windows, [bytes(32), b"1" * 32], chunk_tokens=8, pages_before=3)
    twin = prompt.copy()
    assert (twin.named, twin.pages_before, twin.keys) == (True, 3, prompt.keys)


@pytest.mark.parametrize("tokens", [[True, False], [1.5], ["a"], [-1], [1 << 32], [[1]]])
def test_a_list_of_what_is_no_token_is_refused(tokens):
    with pytest.raises(UsageError, match="token"):
        encode_tokens(tokens)
