"""The order of leaving: as a whole, by size class, and how bad the worst of a class are beside all others."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tierstore.policy import LRU
from tierstore.tiers.disk import INLINE, PageRecord, PageTable, PageUse
from tierstore.units import KIB, MIB

POLICY = LRU()


def record(serial, nbytes, place=None, parent=0):
    return PageRecord(
        serial, parent, bytes(16), bytes(32), b"", nbytes, serial * MIB if place is None else place
    )


def ledger_of(pages):
    """A page_table of (bytes, tick) pages with serials 1, 2, …"""
    page_table = PageTable()
    records = [record(serial, nbytes) for serial, (nbytes, _) in enumerate(pages, 1)]
    page_table.add(records, {serial: PageUse(tick, 0.0, 0) for serial, (_, tick) in enumerate(pages, 1)})
    return page_table


def test_each_class_has_its_own_order():
    page_table = ledger_of([(64 * KIB, 4), (1 * MIB, 1), (64 * KIB, 2), (1 * MIB, 3), (60_000, 1)])
    assert page_table.next_to_leave(POLICY, 9, size_class=64 * KIB) == [3, 1]
    assert page_table.next_to_leave(POLICY, 9, size_class=1 * MIB) == [2, 4]
    assert page_table.next_to_leave(POLICY, 9, size_class=8 * KIB) == []
    assert set(page_table.next_to_leave(POLICY, 9)) == {1, 2, 3, 4, 5}


def test_inline_pages_are_a_class_of_their_own():
    page_table = PageTable()
    page_table.add([record(1, 4 * KIB, INLINE), record(2, 4 * KIB)], {})
    assert page_table.next_to_leave(POLICY, 9, size_class=4 * KIB) == [2]
    assert page_table.next_to_leave(POLICY, 9, size_class=0) == [1]


def test_no_more_leave_than_it_takes():
    page_table = ledger_of([(1 * MIB, tick) for tick in range(9)])
    assert page_table.next_to_leave(POLICY, 9, nbytes=2 * MIB + 1) == [1, 2, 3]
    assert page_table.next_to_leave(POLICY, 9, nbytes=1) == [4]


def test_none_leave_that_are_better_than_asked_for():
    page_table = ledger_of([(1 * MIB, tick) for tick in range(9)])
    assert page_table.next_to_leave(POLICY, 9, until=2) == [1, 2, 3]
    assert page_table.next_to_leave(POLICY, 9, until=2) == []
    assert page_table.next_to_leave(POLICY, 9) == [4, 5, 6, 7, 8, 9]


def test_who_is_used_meanwhile_is_passed_over_in_every_order():
    page_table = ledger_of([(64 * KIB, 1), (64 * KIB, 2), (1 * MIB, 3)])
    assert page_table.next_to_leave(POLICY, 1, size_class=64 * KIB) == [1]
    page_table.touch({2: PageUse(9, 0.0, 1)})
    assert page_table.next_to_leave(POLICY, 9, size_class=64 * KIB) == []
    assert page_table.next_to_leave(POLICY, 9) == [1, 3, 2]


def test_a_class_begins_anew_whatever_was_asked_for():
    page_table = ledger_of([(1 * MIB, 5)])
    assert page_table.next_to_leave(POLICY, 9, size_class=64 * KIB, until=3) == []
    page_table.add([record(2, 64 * KIB)], {2: PageUse(2, 0.0, 0)})
    assert page_table.next_to_leave(POLICY, 9, size_class=64 * KIB, until=3) == [2]
    assert page_table.next_to_leave(POLICY, 9, size_class=64 * KIB, until=3) == []
    page_table.add([record(3, 64 * KIB)], {3: PageUse(3, 0.0, 0)})
    assert 3 in page_table.next_to_leave(POLICY, 9, size_class=64 * KIB, until=3)


def test_what_is_near_the_worst_changes_as_pages_leave():
    old, young = (64 * KIB, 10), (64 * KIB, 1000)
    page_table = ledger_of([old] * 100 + [young] * 100)
    assert page_table.near_worst(POLICY) == 10
    for serial in range(1, 101):
        page_table.remove(serial)
    assert page_table.near_worst(POLICY) == 1000


@pytest.mark.parametrize("pages", [100, 100_000])  # all of them are looked at, or some
def test_the_near_worst_hold_a_thirty_second_of_all_bytes(pages):
    chance = random.Random(0)
    page_table = ledger_of([(chance.choice([64 * KIB, 1 * MIB]), tick) for tick in range(pages)])
    until = page_table.near_worst(POLICY)
    nbytes = sum(ledger_bytes(page_table, serial) for serial in range(1, int(until) + 2))
    assert nbytes == pytest.approx(page_table.payload_bytes() / 32, rel=0.5 if pages == 100 else 0.03)


def ledger_bytes(page_table, serial):
    row = int(np.searchsorted(page_table._columns["serial"][: len(page_table)], serial))
    return int(page_table._columns["nbytes"][row])


def test_pages_are_found_by_their_places_and_move():
    page_table = ledger_of([(64 * KIB, 1), (64 * KIB, 2), (1 * MIB, 3)])
    assert page_table.within(range(2 * MIB, 4 * MIB)) == [(2, 2 * MIB, 64 * KIB), (3, 3 * MIB, 1 * MIB)]
    assert page_table.move(2, 9 * MIB)
    assert page_table.place(2) == 9 * MIB
    assert page_table.within(range(2 * MIB, 4 * MIB)) == [(3, 3 * MIB, 1 * MIB)]
    page_table.remove(2)
    assert page_table.place(2) is None
    assert not page_table.move(2, 5 * MIB)
    assert page_table.within(range(9 * MIB, 10 * MIB)) == []
    page_table.check()


def test_the_commonest_class():
    assert PageTable().commonest_class() is None
    assert ledger_of([(64 * KIB, 1), (64 * KIB, 2), (1 * MIB, 3)]).commonest_class() == 64 * KIB
