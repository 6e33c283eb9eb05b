"""The memory of pages that have left."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.core.departures import Cause, Departure, Departures
from tierstore.index import Tier

IDENTITY = bytes(range(32))
causes = st.sampled_from(list(Cause))
tiers = st.sampled_from([Tier.HOST, Tier.DISK, None])


def table(entries=1 << 14, now=lambda: 1000):
    return Departures(entries << 16, now)


def key(number):
    return number.to_bytes(16, "big")


def test_a_page_that_never_left_is_unknown():
    departures = table()
    departures.note(IDENTITY, key(1), Cause.EVICTED, Tier.HOST)
    assert departures.of(IDENTITY, key(2)) is None
    assert departures.of(bytes(32), key(1)) is None


@given(st.lists(st.tuples(st.integers(0, 40), causes, tiers), max_size=60))
def test_the_last_departure_of_a_page_counts(events):
    """Except that a page which could not be written keeps that cause when it leaves the host tier."""
    kept = {Cause.BUDGET, Cause.QUEUE, Cause.WORTH, Cause.READ_ONLY}
    departures, model, now = table(now=lambda: now), {}, 0
    for now, (number, cause, tier) in enumerate(events, 1):  # the table's clock reads it
        departures.note(IDENTITY, key(number), cause, tier)
        before = model.get(number)
        if cause is Cause.EVICTED and tier is Tier.HOST and before is not None and before.cause in kept:
            cause = before.cause
        model[number] = Departure(cause, tier, now)
    assert {number: departures.of(IDENTITY, key(number)) for number in model} == model


@pytest.mark.parametrize("entries", [1 << 14, 1 << 16])
def test_a_full_table_forgets_the_oldest(entries):
    departures = table(entries, now=lambda: now)
    draw = random.Random(7)
    keys = [draw.randbytes(16) for _ in range(2 * entries)]
    for now, each in enumerate(keys):  # noqa: B007  # the table's clock reads it
        departures.note(IDENTITY, each, Cause.EVICTED, Tier.DISK)
    known = [departures.of(IDENTITY, each) is not None for each in keys]
    assert sum(known[-entries // 4 :]) > 0.99 * (entries // 4)
    assert sum(known) <= entries
    assert departures.nbytes == 12 * entries


def test_the_table_is_bounded():
    assert Departures(10 << 40).nbytes == 48 << 20
    assert Departures(0).nbytes == 12 << 14


@given(
    st.dictionaries(st.integers(0, 1 << 64), st.tuples(causes, tiers, st.integers(1, 1 << 31)), max_size=30)
)
def test_a_dump_is_read_again_into_a_table_of_another_size(facts):
    before, after, now = table(), table(1 << 15), 0
    before._clock = lambda: now
    for number, (cause, tier, now) in facts.items():  # noqa: B007  # the table's clock reads it
        before.note(IDENTITY, key(number), cause, tier)
    after.load(before.dump())
    for number in facts:
        assert after.of(IDENTITY, key(number)) == before.of(IDENTITY, key(number))


@pytest.mark.parametrize("dump", [b"", b"x", bytes(12), bytes(range(256)), b"\xff" * 1200])
def test_a_damaged_dump_is_no_error(dump):
    departures = table()
    departures.load(dump)
    assert departures.of(IDENTITY, key(1)) is None


def test_more_room_by_what_has_left_since():
    departures, now = table(now=lambda: now), 10
    departures.note(IDENTITY, key(1), Cause.EVICTED, Tier.HOST, 1000)
    now = 20
    departures.note(IDENTITY, key(2), Cause.EVICTED, Tier.HOST, 500)
    now = 30
    departures.note(IDENTITY, key(3), Cause.EVICTED, Tier.HOST, 200)
    assert [departures.left_since(at_s) for at_s in (0, 10, 15, 20, 30, 31)] == [1700, 1700, 700, 700, 200, 0]
