"""System calls that fail: nothing is lost, nothing wrong is served, and the tier goes on with the disk."""

from __future__ import annotations

import errno
import threading

import pytest

from tierstore.memory import Memory
from tierstore.testing.clock import ManualClock
from tierstore.tiers.disk import FileIO, PageRead
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.units import KIB, MIB


class FlakyIO(FileIO):
    """Fails the calls named in ``failing``, with the given error numbers."""

    def __init__(self):
        self.failing = {}
        self.short = False

    def _maybe_fail(self, call):
        if call in self.failing:
            raise OSError(self.failing[call], "injected")

    def preadv(self, fd, buffers, offset):
        self._maybe_fail("preadv")
        if self.short:
            return super().preadv(fd, [buffers[0][: max(buffers[0].nbytes // 2, 1)]], offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self._maybe_fail("pwritev")
        if self.short:
            return super().pwritev(
                fd, [buffers[0][: max(buffers[0].nbytes // 2 // 4096 * 4096, 4096)]], offset
            )
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd, offset, nbytes):
        self._maybe_fail("allocate")
        super().allocate(fd, offset, nbytes)

    def sync(self, fd):
        self._maybe_fail("sync")
        super().sync(fd)


@pytest.fixture
def flaky():
    return FlakyIO()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "allocate", "sync"])
def test_a_write_that_fails_is_an_os_error_and_leaves_nothing_behind(open_shelf, flaky, call, code):
    shelf = open_shelf(io=flaky, capacity_bytes=4 * MIB)  # below what calibration needs: no file yet
    if call != "allocate":
        shelf.save([64 * KIB] * 4)
    used = shelf.tier.stats().used_bytes
    flaky.failing = {call: code}
    with pytest.raises(OSError, match="injected") as raised:
        shelf.save([64 * KIB, 100_000, 4 * KIB])
    assert raised.value.errno == code
    assert shelf.tier.stats().used_bytes == used
    shelf.verify()
    flaky.failing = {}
    shelf.save([64 * KIB, 100_000, 4 * KIB])
    shelf.verify()
    shelf.reopen()
    shelf.verify()


def test_reads_that_fail_are_misses(open_shelf, flaky):
    shelf = open_shelf(io=flaky)
    inline, *records = shelf.save([4 * KIB, 64 * KIB, 300_000, 9 * MIB])
    flaky.failing = {"preadv": errno.EIO}
    assert shelf.read(records) == [None] * 3
    assert shelf.read([inline]) != [None]
    stats = shelf.tier.stats()
    assert (stats.failed_pages, stats.bad_pages) == (3, 0)
    flaky.failing = {}
    shelf.verify()


def test_a_read_says_whether_the_page_is_damaged_or_the_disk_failed(open_shelf):
    class Mixed(FlakyIO):
        bad, wrong = -1, -1

        def preadv(self, fd, buffers, offset):
            end = offset + sum(buffer.nbytes for buffer in buffers)
            if offset <= self.bad < end:
                raise OSError(errno.EIO, "injected")
            got = super().preadv(fd, buffers, offset)
            if offset <= self.wrong < end:
                at = self.wrong - offset
                buffer = next(b for b in buffers if (at := at - b.nbytes) < 0)
                buffer[at] ^= 1
            return got

    io = Mixed()
    shelf = open_shelf(io=io)
    records = shelf.save([64 * KIB] * 6)
    io.bad, io.wrong = records[1].place + 5000, records[4].place + 5000
    memory = Memory(6 * 64 * KIB, shared=False)
    read = shelf.tier.read([(r, memory.view(n * 64 * KIB, 64 * KIB)) for n, r in enumerate(records)])
    good = PageRead.GOOD
    assert read.outcomes == [good, PageRead.FAILED, good, good, PageRead.DAMAGED, good]
    assert read.error is not None
    assert read.error.errno == errno.EIO
    io.bad = io.wrong = -1
    shelf.verify()


def test_a_disk_that_gives_nothing_where_the_file_has_more_has_failed(open_shelf):
    class Mute(FlakyIO):
        mute = False

        def preadv(self, fd, buffers, offset):
            return 0 if self.mute else super().preadv(fd, buffers, offset)

    io = Mute()
    shelf = open_shelf(io=io)
    records = shelf.save([64 * KIB] * 2)
    io.mute = True
    assert shelf.read(records) == [None, None]
    assert shelf.tier.stats().failed_pages == 2
    io.mute = False
    shelf.verify()


@pytest.mark.parametrize("call", ["pwritev", "allocate", "sync", "preadv"])
def test_a_probe_finds_what_is_wrong_and_leaves_nothing_behind(open_shelf, flaky, call):
    shelf = open_shelf(io=flaky, capacity_bytes=4 * MIB)
    if call != "allocate":
        shelf.save([64 * KIB] * 2)
    used = shelf.tier.stats().extent_used_bytes
    shelf.tier.probe(shelf.tick)
    if call == "allocate":  # the first probe has made the file: start again without one
        shelf = open_shelf(shelf.path.parent / "fresh", io=flaky, capacity_bytes=4 * MIB)
        used = shelf.tier.stats().extent_used_bytes
    flaky.failing = {call: errno.EIO}
    with pytest.raises(OSError, match="injected"):
        shelf.tier.probe(shelf.tick)
    flaky.failing = {}
    shelf.tier.probe(shelf.tick)
    assert shelf.tier.stats().extent_used_bytes == used
    shelf.verify()
    shelf.tier.check()


def test_a_probe_needs_no_room_on_a_disk_that_is_full_of_pages(open_shelf):
    shelf = open_shelf(capacity_bytes=4 * MIB)
    while shelf.save([64 * KIB] * 4):
        pass
    while shelf.save([4097]):
        pass
    shelf.tier.probe(shelf.tick)
    shelf.verify()


def test_what_takes_long_can_be_seen_by_whoever_looks(open_shelf):
    class Slow(FlakyIO):
        def __init__(self):
            super().__init__()
            self.entered, self.go_on = threading.Event(), threading.Event()
            self.go_on.set()

        def preadv(self, fd, buffers, offset):
            self.entered.set()
            self.go_on.wait(30)
            return super().preadv(fd, buffers, offset)

    io, clock = Slow(), ManualClock()
    shelf = open_shelf(io=io, clock=clock)
    records = shelf.save([64 * KIB])
    assert shelf.tier.in_flight.longest_s() == 0
    io.entered.clear()
    io.go_on.clear()
    reading = threading.Thread(target=shelf.read, args=(records,))
    reading.start()
    assert io.entered.wait(30)
    clock.advance(7)
    assert shelf.tier.in_flight.longest_s() == 7
    io.go_on.set()
    reading.join(30)
    assert shelf.tier.in_flight.longest_s() == 0


def test_a_look_at_the_index_is_given_up_in_time(open_shelf):
    shelf = open_shelf()
    answering = threading.Event()
    assert shelf.tier.within(30, lambda: 7) == 7
    with pytest.raises(OSError, match="injected"):
        shelf.tier.within(30, lambda: _fail())
    for _ in range(6):  # more than there are threads
        with pytest.raises(TimeoutError):
            shelf.tier.within(0.01, lambda: answering.wait(30))
    answering.set()
    assert shelf.tier.within(30, lambda: 8) == 8


def _fail():
    raise OSError(errno.EIO, "injected")


def test_one_bad_block_costs_one_page(open_shelf):
    class BadBlock(FlakyIO):
        bad = -1

        def preadv(self, fd, buffers, offset):
            if offset <= self.bad < offset + sum(buffer.nbytes for buffer in buffers):
                raise OSError(errno.EIO, "injected")
            return super().preadv(fd, buffers, offset)

    io = BadBlock()
    shelf = open_shelf(io=io)
    records = shelf.save([64 * KIB] * 10)
    io.bad = records[4].place + 4096
    data = shelf.read(records)
    assert [index for index, each in enumerate(data) if each is None] == [4]


def test_transfers_that_fall_short_are_continued(open_shelf, flaky):
    shelf = open_shelf(io=flaky)
    flaky.short = True
    shelf.save([64 * KIB, 300_000, 9 * MIB])
    shelf.verify()
    flaky.short = False
    shelf.verify()


def test_pages_written_before_a_failed_sync_are_not_acknowledged_by_the_next_one(open_shelf, flaky):
    shelf = open_shelf(io=flaky)
    place = shelf.tier.reserve(64 * KIB)
    record = shelf.record(64 * KIB, place)
    view = shelf._views([64 * KIB])[0]
    shelf.tier.write([(record, view)])
    flaky.failing = {"sync": errno.EIO}
    with pytest.raises(OSError, match="injected"):
        shelf.tier.commit([], [], {})
    flaky.failing = {}
    with pytest.raises(OSError, match="failed after this page was written"):
        shelf.tier.commit([(record, view)], [], {})
    shelf.tier.write([(record, view)])
    shelf.tier.commit([(record, view)], [], {})
    shelf.saved[record.serial] = (record, bytes(view))
    shelf.verify()


def test_what_a_large_removal_freed_in_the_index_can_be_used_at_once(open_shelf, monkeypatch):
    made_room = []
    make_room = IndexDB._make_room
    monkeypatch.setattr(IndexDB, "_make_room", lambda *args: made_room.append(make_room(*args)))
    shelf = open_shelf(capacity_bytes=2 * MIB, page_bytes=16 * KIB)
    while shelf.save([16 * KIB] * 8):
        pass
    for _ in range(3):
        shelf.remove([record for record, _ in list(shelf.saved.values())[:40]])
        assert len(shelf.save([16 * KIB] * 32)) == 32
    assert made_room
    shelf.verify()


def test_an_index_that_is_full_against_all_expectation_is_an_os_error(open_shelf):
    shelf = open_shelf(capacity_bytes=2 * MIB, page_bytes=16 * KIB)
    shelf.tier.space._index_bytes = 1 << 40

    def save_until_it_fails():
        while True:
            shelf.save([16 * KIB] * 8)

    with pytest.raises(OSError, match="the index is full") as raised:
        save_until_it_fails()
    assert raised.value.errno == errno.ENOSPC
    shelf.verify()
    kept = len(shelf.saved)
    assert len(shelf.reopen()) == kept
    shelf.verify()


def test_a_disk_that_is_full_at_the_start_does_not_keep_the_store_from_opening(open_shelf, flaky):
    flaky.failing = {"allocate": errno.ENOSPC}
    shelf = open_shelf(io=flaky)
    shelf.save([4 * KIB])
    with pytest.raises(OSError, match="injected"):
        shelf.save([64 * KIB])
    shelf.verify()
