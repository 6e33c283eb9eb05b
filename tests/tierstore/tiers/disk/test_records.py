from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore.tiers.disk.records import INLINE, PageRecord, decode, encode, stored_place

RECORDS = st.builds(
    PageRecord,
    serial=st.integers(1, 2**63),
    parent=st.integers(0, 2**63),
    key=st.binary(min_size=16, max_size=16),
    identity=st.binary(min_size=32, max_size=32),
    tokens=st.binary(max_size=600),
    nbytes=st.integers(1, 2**48),
    place=st.one_of(st.just(INLINE), st.integers(0, 2**62)),
    checksum=st.integers(0, 2**64 - 1),
    codec=st.integers(0, 255),
    created_s=st.floats(0, 1e12),
)


@given(record=RECORDS)
def test_a_record_comes_back_as_it_was(record):
    assert decode(record.serial, encode(record)) == record
    assert stored_place(encode(record)) == record.place


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
