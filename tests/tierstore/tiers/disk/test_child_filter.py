"""What is said not to be on disk is not there; and of what is not there most is said so."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.keys import TOKEN_BYTES
from tierstore.tiers.disk import child_filter as child_filter_module
from tierstore.tiers.disk.child_filter import BloomFilter, ChildFilter
from tierstore.tiers.disk.records import PageRecord, link_of
from tierstore.units import KIB

SMALL = 4 * KIB

serials = st.integers(1, 1 << 62)
chunks = st.binary(max_size=80).map(lambda data: data[: len(data) // TOKEN_BYTES * TOKEN_BYTES])


def page(parent, key, tokens, serial=1 << 61):
    return PageRecord(serial, parent, key, bytes(32), tokens, 0, 0)


@given(st.lists(st.tuples(serials, st.binary(min_size=16, max_size=16), chunks), min_size=1, max_size=50))
def test_all_that_was_put_in_may_be_there(pages):
    known = BloomFilter(len(pages))
    known.add([link_of(page(*each)) for each in pages])
    for parent, key, tokens in pages:
        assert known.may_have(parent, key)
        assert known.may_begin(parent, tokens)


@pytest.mark.parametrize("count", [1000, 30_000])
def test_most_of_what_was_not_put_in_is_not_there(count):
    chance = random.Random(count)
    pages = [(chance.randrange(1 << 40), chance.randbytes(16), chance.randbytes(256)) for _ in range(count)]
    known = BloomFilter(count)
    known.add([link_of(page(*each)) for each in pages])
    parents = [parent for parent, _, _ in pages]
    for taken_for_there in (
        sum(known.may_have(chance.choice(parents), chance.randbytes(16)) for _ in range(5000)),
        sum(known.may_begin(chance.choice(parents), chance.randbytes(256)) for _ in range(5000)),
        sum(known.may_have(parent + 1, key) for parent, key, _ in pages[:5000]) * 5000 // min(count, 5000),
        sum(known.may_begin(parent + 1, text) for parent, _, text in pages[:5000]) * 5000 // min(count, 5000),
    ):
        assert taken_for_there < 5000 * 0.04


def leads(tier, record, tokens=None):
    """Whether the record may be there, for those who want whole pages and for those who do not."""
    found = tier.may_lead(record.parent, record.identity, record.key, record.tokens, whole=True)
    similar = tier.may_lead(record.parent, record.identity, None, tokens or record.tokens, whole=False)
    return found, similar


def test_pages_are_there_once_they_are_durable_and_in_the_next_life(open_shelf):
    shelf = open_shelf()
    shelf.tier.child_filter.wait()
    records = shelf.save([SMALL] * 20, chained=True)
    for _ in range(2):
        shelf.tier.child_filter.wait()
        assert {leads(shelf.tier, record) for record in records} == {(True, True)}
        others = [shelf.record(SMALL, 0, records[0].serial) for _ in range(200)]
        assert sum(any(leads(shelf.tier, record)) for record in others) < 20
        shelf.reopen()


def test_a_tail_is_found_by_its_beginning_and_by_what_it_begins_with(open_shelf):
    shelf = open_shelf()
    shelf.tier.child_filter.wait()
    (first,) = shelf.save([SMALL])
    place = shelf.tier.reserve(SMALL)
    short = shelf.record(SMALL, place, first.serial)
    short.tokens = bytes(range(1, 9))  # two tokens
    shelf.tier.write([(short, memoryview(bytes(SMALL)))])
    shelf.tier.commit([(short, memoryview(bytes(SMALL)))], [], {})
    shelf.saved[short.serial] = (short, bytes(SMALL))

    def similar(tokens):
        return shelf.tier.may_lead(first.serial, first.identity, None, tokens, whole=False)

    assert similar(short.tokens)
    assert similar(short.tokens + bytes(64))
    assert not similar(short.tokens[:4] + bytes(range(60)))
    assert not similar(b"")  # the prompt ends here
    assert not shelf.tier.may_lead(first.serial, first.identity, None, short.tokens, whole=True)


def test_a_filter_that_is_full_is_made_anew_without_what_has_left(open_shelf, monkeypatch):
    monkeypatch.setattr(child_filter_module, "_LEAST_PAGES", 64)
    monkeypatch.setattr(child_filter_module, "_STEP", 16)
    shelf = open_shelf()
    shelf.tier.child_filter.wait()
    first = shelf.tier.child_filter._filter
    gone = shelf.save([SMALL] * 50)
    shelf.remove(gone)
    kept = shelf.save([SMALL] * 20)
    shelf.tier.child_filter.wait()
    now = shelf.tier.child_filter._filter
    assert now is not first
    assert now.added <= 20 + len(kept)  # some may have been read and added
    assert all(leads(shelf.tier, record) == (True, True) for record in kept)
    assert sum(any(leads(shelf.tier, record)) for record in gone) < 20


def test_what_is_added_while_the_index_is_read_is_there(open_shelf, monkeypatch):
    """One page is committed between any two steps."""
    monkeypatch.setattr(child_filter_module, "_STEP", 4)
    shelf = open_shelf()
    shelf.save([SMALL] * 30)
    read, go_on = threading.Semaphore(0), threading.Semaphore(0)
    index_db = shelf.tier._index_db

    class Slow:
        """The index, one step at a time."""

        def __len__(self):
            return len(index_db)

        def links(self, start, count):
            found = index_db.links(start, count)
            read.release()
            assert go_on.acquire(timeout=30)
            return found

    shelf.tier.child_filter.close()
    slow = shelf.tier.child_filter = ChildFilter(Slow(), shelf.tier.in_flight)
    while slow._filter is None:
        if read.acquire(timeout=0.01):
            assert slow.may_lead(1, bytes(16), ())  # nothing is known yet
            shelf.save([SMALL])
            go_on.release()
    for record, _ in shelf.saved.values():
        assert leads(shelf.tier, record) == (True, True)


def test_an_index_that_cannot_be_read_spares_nothing(open_shelf, caplog):
    shelf = open_shelf()

    class Unreadable:
        def __len__(self):
            raise OSError(5, "Input/output error")

    broken = ChildFilter(Unreadable(), shelf.tier.in_flight)
    broken.wait()
    broken.add([page(1, bytes(16), bytes(256))])
    assert broken.may_lead(1, bytes(16), ())
    assert "could not be read" in caplog.text
