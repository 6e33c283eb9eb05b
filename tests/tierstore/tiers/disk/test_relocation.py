"""Pages that move on disk: a crash finds each in one of its two places, with the right bytes."""

from __future__ import annotations

import errno
import shutil

import pytest
from msgspec.structs import replace

from tests.tierstore.tiers.disk.shelf import Shelf
from tests.tierstore.tiers.disk.test_faults import FlakyIO
from tierstore.memory import Memory
from tierstore.units import KIB, MIB, round_up

SIZES = [64 * KIB, 100_000, 300_000, 64 * KIB]


class Moving:
    """The steps of moving pages, one by one."""

    def __init__(self, shelf, records):
        self.shelf = shelf
        self.before = records
        memory = Memory(sum(round_up(record.nbytes, 4096) for record in records), shared=False)
        self.copies = []
        start = 0
        for record in records:
            place = shelf.tier.space.reserve_outside(record.nbytes)
            assert place is not None
            self.copies.append((replace(record, place=place), memory.view(start, record.nbytes)))
            start += round_up(record.nbytes, 4096)

    def write(self):
        views = [view for _, view in self.copies]
        assert self.shelf.tier.read(list(zip(self.before, views, strict=True))).all_good
        self.shelf.tier.write(self.copies)

    def commit(self):
        moved = [(new, old.place) for (new, _), old in zip(self.copies, self.before, strict=True)]
        self.shelf.tier.relocate(moved)

    def settle(self):
        for (new, _), old in zip(self.copies, self.before, strict=True):
            assert self.shelf.tier.page_table.move(new.serial, new.place)
            self.shelf.tier.space.vacate(old.place)
            self.shelf.saved[new.serial] = (new, self.shelf.saved[new.serial][1])

    def give_up(self):
        for new, _ in self.copies:
            self.shelf.tier.unreserve(new.place, new.nbytes)


@pytest.fixture
def after_a_crash(tmp_path):
    """What a process finds that opens the directory as it is now."""
    shelves = []

    def after_a_crash(shelf):
        where = tmp_path / f"crashed-{len(shelves)}"
        shutil.copytree(shelf.path, where)
        found = Shelf(where, **{**shelf.options, "io": None})
        records = found.records()
        found.saved = {record.serial: (record, shelf.saved[record.serial][1]) for record in records}
        shelves.append(found)
        return found

    yield after_a_crash
    for shelf in shelves:
        shelf.close()


def places(shelf):
    return {record.serial: record.place for record in shelf.records()}


def test_a_crash_at_any_step_finds_every_page(open_shelf, after_a_crash):
    shelf = open_shelf(capacity_bytes=8 * MIB)
    records = shelf.save(SIZES, chained=True)
    old = places(shelf)
    moving = Moving(shelf, records)
    new = {copy.serial: copy.place for copy, _ in moving.copies}
    assert not set(new.values()) & set(old.values())

    moving.write()
    found = after_a_crash(shelf)
    assert places(found) == old
    found.verify()

    moving.commit()
    found = after_a_crash(shelf)  # the old places are not given up yet: nobody misses them
    assert places(found) == new
    found.verify()

    moving.settle()
    found = after_a_crash(shelf)
    assert places(found) == new
    found.verify()

    shelf.save(SIZES)  # into what has become free
    found = after_a_crash(shelf)
    found.verify()
    shelf.verify()
    shelf.reopen()
    assert {serial: place for serial, place in places(shelf).items() if serial in new} == new
    shelf.verify()


def test_what_is_known_of_a_page_moves_with_it(open_shelf):
    shelf = open_shelf(capacity_bytes=8 * MIB)
    records = shelf.save(SIZES, chained=True)
    before = [(shelf.use(record.serial), record.checksum, record.tokens) for record in records]
    moving = Moving(shelf, records)
    moving.write()
    moving.commit()
    moving.settle()
    after = shelf.reopen()
    assert [(shelf.use(record.serial), record.checksum, record.tokens) for record in after] == before
    assert [record.parent for record in after] == [record.parent for record in records]


@pytest.mark.parametrize("call", ["pwritev", "sync"])
def test_a_disk_that_fails_leaves_pages_where_they_are(open_shelf, call):
    flaky = FlakyIO()
    shelf = open_shelf(capacity_bytes=4 * MIB, io=flaky)
    records = shelf.save(SIZES)
    old = places(shelf)
    used = shelf.tier.stats().used_bytes
    moving = Moving(shelf, records)
    if call == "sync":
        moving.write()
    flaky.failing = {call: errno.EIO}
    with pytest.raises(OSError, match="injected"):
        moving.commit() if call == "sync" else moving.write()
    flaky.failing = {}
    if call == "sync":  # written before a sync that failed: not to be believed any more
        with pytest.raises(OSError, match="failed after"):
            moving.commit()
    moving.give_up()
    assert shelf.tier.stats().used_bytes == used
    assert places(shelf) == old
    shelf.verify()
    shelf.tier.check()
    shelf.reopen()
    shelf.verify()


def test_the_old_place_is_not_given_away_while_somebody_reads_there(open_shelf):
    shelf = open_shelf(capacity_bytes=1 * MIB)
    (record,) = shelf.save([300_000])
    moving = Moving(shelf, [record])
    moving.write()
    moving.commit()
    while shelf.save([64 * KIB]):
        pass
    assert shelf.read([record]) == [shelf.saved[record.serial][1]]
    moving.settle()
    assert shelf.save([64 * KIB])
    shelf.verify()
