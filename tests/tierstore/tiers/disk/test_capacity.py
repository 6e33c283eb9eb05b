"""The cap holds on everything under the directory: while churning, across lives, and when it shrinks."""

from __future__ import annotations

import errno
import os
import random
import time

import pytest

from tierstore import KVSpec
from tierstore.testing.opening import open_store
from tierstore.tiers.disk import FileIO
from tierstore.tiers.disk.space import Shortage
from tierstore.units import KIB, MIB


def sizes(path):
    """(allocated, apparent) bytes of everything under ``path``, itself included."""
    allocated = apparent = 0
    for root, _, names in os.walk(path):
        for each in (root, *(os.path.join(root, name) for name in names)):
            stat = os.lstat(each)
            allocated += stat.st_blocks * 512
            apparent += stat.st_size
    return allocated, apparent


def churn(shelf, page_sizes, steps, seed=0):
    """Save until full, remove some, and so on. The cap is looked at after each step."""
    chance = random.Random(seed)
    for _ in range(steps):
        wanted = [chance.choice(page_sizes) for _ in range(16)]
        saved = len(shelf.save(wanted))
        if saved < len(wanted):
            serials = list(shelf.saved)
            oldest = len(serials) // (8 if saved else 2)
            doomed = serials[:oldest] + chance.sample(serials, k=min(len(serials), 8))
            shelf.remove([shelf.saved[serial][0] for serial in set(doomed)])
        assert max(sizes(shelf.path)) <= shelf.options["capacity_bytes"]
    shelf.save([page_sizes[-1]])


@pytest.mark.parametrize(
    ("page_bytes", "page_sizes", "inline_bytes"),
    [
        (64 * KIB, [64 * KIB], 16 * KIB),
        (4 * KIB, [4 * KIB], 0),
        (16 * KIB, [16 * KIB], 16 * KIB),
        (100_000, [2000, 9000, 16 * KIB, 40_000, 100_000, 256 * KIB], 16 * KIB),
    ],
)
def test_the_cap_holds_while_churning(open_shelf, page_bytes, page_sizes, inline_bytes):
    shelf = open_shelf(capacity_bytes=3 * MIB, page_bytes=page_bytes, inline_bytes=inline_bytes)
    churn(shelf, page_sizes, steps=60)
    shelf.verify()
    shelf.reopen()
    shelf.verify()


@pytest.mark.parametrize(("page_bytes", "share"), [(16 * KIB, 0.8), (64 * KIB, 0.85), (1 * MIB, 0.9)])
def test_most_of_the_cap_can_be_used(open_shelf, page_bytes, share):
    shelf = open_shelf(capacity_bytes=32 * MIB, page_bytes=page_bytes)
    while len(shelf.save([page_bytes] * 8)) == 8:
        pass
    assert len(shelf.saved) * page_bytes >= share * 32 * MIB


def test_the_cap_holds_life_after_life(open_shelf):
    shelf = open_shelf(capacity_bytes=3 * MIB)
    for seed in range(5):
        churn(shelf, [10_000, 64 * KIB, 100_000], steps=10, seed=seed)
        kept = set(shelf.saved)
        shelf.reopen()
        assert set(shelf.saved) == kept
        shelf.verify()


@pytest.mark.parametrize(
    ("page_bytes", "page_sizes"),
    [(64 * KIB, [64 * KIB]), (16 * KIB, [16 * KIB]), (64 * KIB, [1000, 16 * KIB, 64 * KIB, 256 * KIB])],
)
def test_a_smaller_cap_at_the_next_start_holds_at_once(open_shelf, page_bytes, page_sizes):
    shelf = open_shelf(capacity_bytes=8 * MIB, page_bytes=page_bytes)
    churn(shelf, page_sizes, steps=12)
    before = len(shelf.saved)
    for capacity in (6 * MIB, 3 * MIB, 1 * MIB):
        shelf.reopen(capacity_bytes=capacity)
        assert max(sizes(shelf.path)) <= capacity
        assert shelf.saved
        shelf.verify()
        shelf.tier.check()
    assert len(shelf.saved) < before
    churn(shelf, page_sizes, steps=10)
    shelf.reopen(capacity_bytes=8 * MIB)
    churn(shelf, page_sizes, steps=12)
    assert sum(record.nbytes for record, _ in shelf.saved.values()) > 1 * MIB
    shelf.verify()


def test_a_smaller_cap_keeps_the_most_recently_used_pages(open_shelf):
    shelf = open_shelf(capacity_bytes=64 * MIB, page_bytes=4 * KIB, inline_bytes=0)
    while shelf.save([4 * KIB] * 64):
        pass
    shelf.reopen(capacity_bytes=8 * MIB, page_bytes=64 * KIB)  # a smaller share of it for the index
    assert len(shelf.saved) > 50
    assert max(shelf.saved) - min(shelf.saved) < len(shelf.saved) + 64
    shelf.verify()


def test_pages_leave_when_a_full_index_is_made_smaller(open_shelf, caplog):
    """An index that is nearly all of a directory gives up blocks before another finds room beside it."""
    shelf = open_shelf(capacity_bytes=8 * MIB, page_bytes=16 * KIB)
    while shelf.save([16 * KIB] * 8):
        pass
    saved = sorted(shelf.saved)
    shelf.reopen(capacity_bytes=4 * MIB)
    assert max(sizes(shelf.path)) <= 4 * MIB
    assert "without room were evicted" in caplog.text
    assert len(shelf.saved) > 150
    assert len(shelf.saved.keys() & saved[-150:]) > 140  # but for some in extents, which are smaller, too
    shelf.verify()
    assert shelf.save([16 * KIB] * 8)


def test_other_page_sizes_in_the_next_life_work(open_shelf):
    shelf = open_shelf(capacity_bytes=4 * MIB, page_bytes=64 * KIB)
    for page_bytes in (16 * KIB, 200_000, 8 * KIB, 1 * MIB):
        churn(shelf, [page_bytes], steps=6)
        shelf.reopen(page_bytes=page_bytes)
        churn(shelf, [page_bytes], steps=20)
        assert any(record.nbytes == page_bytes for record, _ in shelf.saved.values())
        shelf.verify()


def test_a_rebuild_that_was_interrupted_changes_nothing(open_shelf):
    shelf = open_shelf(capacity_bytes=4 * MIB)
    shelf.save([64 * KIB] * 4)
    shelf.tier.close()
    (shelf.path / "index.lmdb.new").write_bytes(b"half")
    (shelf.path / "index.lmdb.new-lock").write_bytes(b"half")
    shelf.tier = type(shelf.tier).open(shelf.path, **shelf.options)
    shelf.verify()
    assert not list(shelf.path.glob("*.new*"))


class SmallVolume(FileIO):
    """The files of a volume of ``nbytes``."""

    def __init__(self, path, nbytes):
        self._path, self._nbytes = path, nbytes

    def available(self, fd):
        return max(self._nbytes - sizes(self._path)[0], 0)

    def allocate(self, fd, offset, nbytes):
        if nbytes > self.available(fd):
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(fd, offset, nbytes)


def test_a_volume_that_is_a_little_smaller_than_the_cap_holds_what_fits(open_shelf, path):
    """A volume is never quite as large as it is called."""
    shelf = open_shelf(capacity_bytes=32 * MIB, page_bytes=64 * KIB, io=SmallVolume(path, 30 * MIB))
    assert len(shelf.save([64 * KIB] * 16)) == 16
    full = False
    while shelf.tier.space.shortage(64 * KIB) is Shortage.NONE:
        try:
            shelf.save([64 * KIB] * 16)
        except OSError as error:
            assert not full, "the space that is left is known after the first failure"
            full = error.errno == errno.ENOSPC
    assert full
    assert sum(record.nbytes for record, _ in shelf.saved.values()) > 26 * MIB
    shelf.remove([record for record, _ in list(shelf.saved.values())[:200]])
    assert len(shelf.save([64 * KIB] * 16)) == 16  # pages that leave make room for new ones
    assert len(shelf.save([100_000] * 16)) > 0
    shelf.verify()
    shelf.tier.check()
    shelf.reopen()
    shelf.verify()


def test_a_store_on_a_small_volume_goes_on_with_the_newest_pages(tmp_path):
    spec = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")
    io = SmallVolume(tmp_path / "kv", 12 * MIB)
    with open_store(tmp_path / "kv", spec, host_bytes=4 * MIB, disk_bytes=16 * MIB, io=io) as store:
        tokens: list[int] = []
        deadline = time.monotonic() + 120
        number = 0
        while number < 60 or store.lookup(tokens).by_tier.get("disk", 0) < 512:
            assert time.monotonic() < deadline, store.stats().health_line
            tokens = list(range(10_000 * number, 10_000 * number + 512))
            store.save(tokens, [bytes([number % 256]) * spec.page_bytes] * 8).wait(60)
            store.flush(10)
            store.evict("host")
            number += 1
        assert store.stats().tiers["disk"].used_bytes > 6 * MIB
