"""Names and headers: nothing that differs has the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cluster.objects import HEADER_BYTES, PageObject, named_proofs, page_objects, proofs

KEY = st.binary(min_size=16, max_size=16)
CHUNK = st.tuples(KEY, st.binary(min_size=8, max_size=8))
OBJECT = PageObject(bytes(32), 4096, 16, 3, bytes(range(32)))


@given(st.lists(CHUNK, max_size=6), st.lists(CHUNK, max_size=6))
def test_a_proof_stands_for_all_that_comes_before_it(one, other):
    first, second = proofs(bytes(32), one), proofs(bytes(32), other)
    for at in range(min(len(one), len(other))):
        assert (first[at] == second[at]) == (one[: at + 1] == other[: at + 1])


@given(st.lists(CHUNK, max_size=4), st.lists(CHUNK, max_size=4), st.binary(max_size=32))
def test_a_named_page_s_proof_stands_for_itself(one, other, secret):
    """Whatever is beside it; and no page of a chain has the same, not even a first one."""
    first = named_proofs(bytes(32), one, secret=secret)
    second = named_proofs(bytes(32), other, secret=secret)
    for at, chunk in enumerate(one):
        for place, another in enumerate(other):
            assert (first[at] == second[place]) == (chunk == another)
    assert not {*first, *second} & {*proofs(bytes(32), one, secret=secret), *proofs(bytes(32), other)}
    assert not {*first} & {*named_proofs(b"\1" * 32, one, secret=secret)}


@given(st.lists(CHUNK, min_size=1, max_size=3), st.binary(max_size=32), st.binary(max_size=32))
@pytest.mark.parametrize("named", [False, True])
def test_a_secret_makes_other_names(named, chunks, one, other):
    keys, tokens = zip(*chunks, strict=True)
    names = [
        [each.name for each in page_objects(bytes(32), 4096, 2, keys, tokens, secret=secret, named=named)]
        for secret in (one, other)
    ]
    assert (names[0] == names[1]) == (one == other)
    assert all(name.startswith("ts1:") and len(name) == 44 for name in names[0])


def test_a_named_page_has_no_place():
    """Whoever puts it there may know it, or not."""
    chunks = [(b"k" * 16, b"abcdefgh"), (b"l" * 16, b"ijklmnop")]
    keys, tokens = zip(*chunks, strict=True)
    both = page_objects(bytes(32), 4096, 2, keys, tokens, named=True)
    alone = page_objects(bytes(32), 4096, 2, keys[1:], tokens[1:], named=True)
    assert both[1] == alone[0]
    assert {each.depth for each in both} == {0}


@pytest.mark.parametrize("secret", [b"", b"s" * 16, b"s" * 64])
@pytest.mark.parametrize(
    "change",
    [
        {"identity": b"\1" * 32},
        {"page_bytes": 8192},
        {"chunk_tokens": 32},
        {"depth": 4},
        {"proof": b"\1" * 32},
    ],
)
def test_a_header_says_all_of_it(secret, change):
    header = OBJECT.header(7, secret=secret)
    assert len(header) == HEADER_BYTES
    assert replace(OBJECT, **change).header(7, secret=secret) != header
    assert OBJECT.header(8, secret=secret) != header
    assert OBJECT.header(7, secret=secret + b"t" if secret[:1] and len(secret) < 64 else b"t" * 16) != header


def test_a_header_cannot_be_made_without_the_secret():
    assert OBJECT.header(7, secret=b"s" * 16)[-32:] != OBJECT.header(7)[-32:]
