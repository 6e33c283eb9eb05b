from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from tierstore.tiers.disk.records import INLINE, PageRecord, decode, encode, stored_place

RAW = st.builds(
    PageRecord,
    serial=st.integers(1, 2**63),
    parent=st.integers(0, 2**63),
    key=st.binary(min_size=16, max_size=16),
    identity=st.binary(min_size=32, max_size=32),
    tokens=st.binary(max_size=600),
    nbytes=st.integers(1, 2**48),
    place=st.one_of(st.just(INLINE), st.integers(0, 2**62)),
    checksum=st.integers(0, 2**64 - 1),
    codec=st.just(0),
    created_s=st.floats(0, 1e12),
)


def kept_by(record, codec, encoded_bytes):
    twin = copy.copy(record)
    twin.codec, twin.encoded_bytes = codec, encoded_bytes
    return twin


@st.composite
def records(draw):
    """Some of them kept by a codec."""
    record = draw(RAW)
    if draw(st.booleans()):
        codec, kept = draw(st.integers(1, 255)), draw(st.integers(1, record.nbytes))
        return kept_by(record, codec, kept)
    return record


RECORDS = records()


@given(record=RECORDS)
def test_a_record_comes_back_as_it_was(record):
    assert decode(record.serial, encode(record)) == record
    assert stored_place(encode(record)) == record.place


@given(record=RECORDS)
def test_more_encoded_bytes_than_a_page_has_are_no_record(record):
    for kept in (0, record.nbytes + 1):
        assert decode(record.serial, encode(kept_by(record, 1, kept))) is None


@given(record=RECORDS, data=st.data())
def test_a_damaged_record_is_no_record(record, data):
    stored = bytearray(encode(record))
    bit = data.draw(st.integers(0, len(stored) * 8 - 1))
    stored[bit // 8] ^= 1 << bit % 8
    assert decode(record.serial, bytes(stored)) is None


@given(record=RECORDS, length=st.integers(0, 600))
def test_a_record_cut_short_is_no_record(record, length):
    stored = encode(record)
    assert decode(record.serial, stored[: min(length, len(stored) - 1)]) is None


@given(record=RECORDS)
def test_a_record_under_another_serial_is_no_record(record):
    assert decode(record.serial + 1, encode(record)) is None
