"""Reads that are handed to the kernel all at once: every byte where it should be, and nothing in flight when
the call is over."""

from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from tierstore.memory import Memory
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO, FlipBit, Short
from tierstore.tiers.disk import PageRead
from tierstore.tiers.disk.io import QueuedIO, QueuedRead, ReadQueue
from tierstore.tiers.disk.payloads import ReadMode
from tierstore.units import KIB, MIB

BLOCK = 4 * KIB
BLOCKS = 200


@pytest.fixture
def file(tmp_path):
    """(descriptor for O_DIRECT, content) of a file of numbered blocks."""
    content = b"".join(number.to_bytes(8, "big") * (BLOCK // 8) for number in range(BLOCKS))
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT)
    yield fd, content
    os.close(fd)


@pytest.fixture
def queue():
    queue = ReadQueue(16)
    yield queue
    queue.close()
    queue.close()


def scattered(fd, seed=0):
    """Reads of one to four blocks all over the file, and what each must bring."""
    chance = random.Random(seed)
    memory = Memory(BLOCKS * 4 * BLOCK, shared=False)
    reads, wanted = [], []
    for number in range(BLOCKS):
        blocks, start = chance.randint(1, 4), chance.randrange(BLOCKS - 4)
        reads.append(QueuedRead(fd, memory.view(number * 4 * BLOCK, blocks * BLOCK), start * BLOCK))
        wanted.append((start * BLOCK, (start + blocks) * BLOCK))
    return reads, wanted


def test_a_queue_that_nobody_has_any_more_is_given_back():
    """The machine has so many and no more (fs.aio-max-nr)."""
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if most > 1 << 20:
        pytest.skip(f"this machine has {most} of them")
    for _ in range(most // 1024 + 8):
        ReadQueue(1024)


def test_each_read_brings_its_own_bytes_and_is_told_once(queue, file):
    fd, content = file
    reads, wanted = scattered(fd)
    results = {}

    def landed(number, result):
        assert number not in results
        results[number] = result
        start, stop = wanted[number]
        assert bytes(reads[number].view) == content[start:stop]

    queue.read(reads, landed)
    assert results == {number: read.view.nbytes for number, read in enumerate(reads)}


def test_the_end_of_the_file_cuts_a_read_short(queue, file):
    fd, _ = file
    view = Memory(4 * BLOCK, shared=False).view(0, 4 * BLOCK)
    results = []
    queue.read(
        [QueuedRead(fd, view, (BLOCKS - 1) * BLOCK), QueuedRead(fd, view[:BLOCK], BLOCKS * BLOCK)],
        lambda number, result: results.append((number, result)),
    )
    assert sorted(results) == [(0, BLOCK), (1, 0)]


def test_what_the_kernel_does_not_take_is_an_error_and_nothing_is_left_in_flight(queue, file):
    fd, _ = file
    reads, _ = scattered(fd)
    reads[50] = QueuedRead(1 << 20, *reads[50][1:])
    landed = []
    with pytest.raises(OSError, match="Bad file descriptor") as raised:
        queue.read(reads, lambda number, result: landed.append(number))
    assert raised.value.errno == errno.EBADF
    assert set(landed) <= set(range(50))
    again, wanted = scattered(fd, seed=1)
    results = []
    queue.read(again, lambda number, result: results.append(number))
    assert sorted(results) == list(range(len(wanted))), "events of the call before were still to come"


def test_whoever_is_told_may_raise(queue, file):
    fd, _ = file

    def landed(number, result):
        raise KeyError(number)

    with pytest.raises(KeyError):
        queue.read(scattered(fd)[0], landed)
    results = []
    queue.read(scattered(fd, seed=2)[0], lambda number, result: results.append(number))
    assert sorted(results) == list(range(BLOCKS))


def every_second(open_shelf, **options):
    """A shelf that reads with a queue, and its pages that are no neighbours."""
    shelf = open_shelf(**options)
    shelf.save([64 * KIB, 128 * KIB] * 40)
    if not shelf.tier.stats().direct_io:
        pytest.skip("this file system has no O_DIRECT")
    shelf.tier._payloads.read_mode = ReadMode(direct=True, streams=4, queued=True)
    return shelf, [record for record, _ in list(shelf.saved.values())[::2]]


def test_pages_that_lie_apart_are_read_at_once(open_shelf):
    class Counting(QueuedIO):
        asked = 0

        def read_many(self, reads, landed):
            self.asked += len(reads)
            super().read_many(reads, landed)

    io = Counting()
    shelf, records = every_second(open_shelf, io=io)
    before = io.asked
    assert shelf.read(records) == [shelf.saved[record.serial][1] for record in records]
    assert io.asked - before >= len(records) // 2
    shelf.verify()


def test_several_threads_may_read_at_once(open_shelf):
    shelf, records = every_second(open_shelf)
    good = []

    def read(seed):
        mine = random.Random(seed).sample(records, 30)
        memory = Memory(30 * 64 * KIB, shared=False)
        views = [memory.view(number * 64 * KIB, 64 * KIB) for number in range(30)]
        for _ in range(10):
            assert shelf.tier.read(list(zip(mine, views, strict=True))).all_good
        good.append(seed)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(good) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("effect", "times", "outcome"),
    [
        (Fail(errno.EIO), 1, PageRead.GOOD),  # a second try finds what is there
        (Fail(errno.EIO), None, PageRead.FAILED),
        (Short(), 1, PageRead.GOOD),
        (FlipBit(1), None, PageRead.DAMAGED),
    ],
)
def test_a_read_of_many_that_goes_wrong_is_one_page_s_misfortune(open_shelf, effect, times, outcome):
    io = FaultyIO()
    shelf, records = every_second(open_shelf, io=io)
    unlucky = records[7]
    io.set(
        Fault(lambda call: call.kind == "preadv" and call.offset == unlucky.place, effect, times=times),
    )
    memory = Memory(len(records) * 64 * KIB, shared=False)
    wanted = [(each, memory.view(at * 64 * KIB, 64 * KIB)) for at, each in enumerate(records)]
    outcomes = shelf.tier.read(wanted).outcomes
    assert outcomes[7] is outcome
    assert set(outcomes[:7]) | set(outcomes[8:]) == {PageRead.GOOD}
    io.clear()


def test_where_there_is_no_queue_to_be_had_threads_read(open_shelf):
    class Without(QueuedIO):
        def read_many(self, reads, landed):
            raise OSError(errno.ENOSYS, "Function not implemented")

    shelf, records = every_second(open_shelf, io=Without())
    assert shelf.read(records) == [shelf.saved[record.serial][1] for record in records]


def test_calibration_says_whether_a_queue_is_worth_it(open_shelf):
    class Sleepy(QueuedIO):
        """A kernel that does them one after the other."""

        def read_many(self, reads, landed):
            for read in reads:
                for _ in range(8):
                    super().read_many([read], lambda number, result: None)
            super().read_many(reads, landed)

    shelf = open_shelf(io=Sleepy(), capacity_bytes=64 * MIB)
    assert shelf.tier._payloads.read_mode.queued is False
