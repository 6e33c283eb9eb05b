"""The disk model itself: what a crash may leave, on small examples worked out by hand."""

from __future__ import annotations

import lmdb
import pytest

from tests.campaigns.disk import SECTOR, Crash, Disk, changed_sectors, crashes, torn_commit, torn_write
from tests.campaigns.recording import (
    Committed,
    Created,
    DirectorySynced,
    Journal,
    Removed,
    Renamed,
    Resized,
    Synced,
    Written,
    recorded_index,
)

FILE = "extents/000000"
START = [Created(FILE), DirectorySynced("extents"), Resized(FILE, 4), Synced(FILE, 3)]


def test_what_was_synced_is_there_and_what_was_not_may_be():
    disk = Disk([*START, Written(FILE, 0, b"ab"), Written(FILE, 2, b"cd")])
    assert disk.pending == [4, 5]
    assert disk.image() == {FILE: b"abcd"}
    assert disk.image(()) == {FILE: b"\0\0\0\0"}
    assert disk.image({5}) == {FILE: b"\0\0cd"}
    disk.apply(Synced(FILE, 6))
    assert disk.pending == []
    assert disk.image(()) == {FILE: b"abcd"}


def test_a_sync_covers_only_what_was_written_before_it_began():
    disk = Disk([*START, Written(FILE, 0, b"ab"), Written(FILE, 2, b"cd"), Synced(FILE, 5)])
    assert disk.pending == [5]
    assert disk.image(()) == {FILE: b"ab\0\0"}


def test_a_sync_of_one_file_says_nothing_of_another():
    other = "extents/000001"
    disk = Disk([*START, Created(other), Written(other, 0, b"x"), Synced(FILE, 6)])
    assert disk.pending == [5]


def test_names_are_lost_until_their_directory_is_synced():
    disk = Disk([Created(FILE), Resized(FILE, 2), Synced(FILE, 2)])
    assert disk.names_pending
    assert disk.image((), names=False) == {}
    disk.apply(DirectorySynced(""))
    assert disk.image((), names=False) == {}
    disk.apply(DirectorySynced("extents"))
    assert disk.image((), names=False) == {FILE: b"\0\0"}
    disk.apply(Removed(FILE))
    assert disk.image((), names=True) == {}
    assert disk.image((), names=False) == {FILE: b"\0\0"}


def test_a_rename_is_the_old_file_or_the_new_one():
    disk = Disk([Created("index.lmdb", b"old"), DirectorySynced(""), Created("index.lmdb.new", b"new")])
    disk.apply(Renamed("index.lmdb.new", "index.lmdb"))
    assert disk.image() == {"index.lmdb": b"new"}
    assert disk.image((), names=False) == {"index.lmdb": b"old"}


def test_a_resize_that_is_lost_gives_the_old_size_back():
    disk = Disk([*START, Written(FILE, 0, b"abcd"), Synced(FILE, 5), Resized(FILE, 1)])
    assert disk.image() == {FILE: b"a"}
    assert disk.image(()) == {FILE: b"abcd"}


def test_a_torn_write_leaves_old_sectors_beside_new_ones():
    old = b"o" * 3 * SECTOR
    write = Written(FILE, SECTOR, b"n" * 2 * SECTOR)
    assert torn_write(old, write, [0]) == b"o" * SECTOR + b"n" * SECTOR + b"o" * SECTOR
    assert torn_write(old, write, [1]) == b"o" * 2 * SECTOR + b"n" * SECTOR
    assert torn_write(old, write, []) == old


def index(*pages):
    return b"".join(page.encode() * 4096 for page in pages)


def test_a_torn_commit_has_the_old_meta_pages():
    commit = Committed("index.lmdb", index("a", "b", "c", "d"), index("A", "b", "c", "D", "E"))
    assert changed_sectors(commit) == [*range(24, 32), *range(32, 40)]
    assert torn_commit(commit, []) == commit.before
    assert torn_commit(commit, range(32, 40)) == index("a", "b", "c", "d", "E")
    assert torn_commit(commit, [24])[: 25 * SECTOR] == index("a", "b", "c") + b"D" * SECTOR


def test_every_crash_is_one_of_the_five_kinds_and_makes_an_image():
    commit = Committed("index.lmdb", index("a", "b", "c"), index("A", "b", "C"))
    events = [
        Created("index.lmdb", commit.before),
        *START,
        Written(FILE, 0, b"x" * 2000),
        Written(FILE, 4096, b"y" * 600),
        commit,
    ]
    found = list(crashes(events))
    assert {crash.fault for crash in found} == {
        "crash",
        "lost write",
        "reordered write",
        "torn write",
        "torn commit",
    }
    torn = [crash for crash in found if crash.fault == "torn write" and crash.position == 5]
    assert {len(crash.sectors) for crash in torn} == {1, 2, 3}  # of four sectors
    for crash in found:
        assert crash.image(events) is not None
        assert crash.describe(events).startswith(crash.fault)
    assert found == list(crashes(events))


def test_a_later_write_without_an_earlier_one_is_reordered_and_the_other_way_round_lost():
    events = [*START, Written(FILE, 0, b"ab"), Written(FILE, 2, b"cd")]
    at_end = [crash for crash in crashes(events) if crash.position == 6 and crash.kept is not None]
    assert Crash("lost write", 6, frozenset({4})) in at_end
    assert Crash("reordered write", 6, frozenset({5})) in at_end


@pytest.mark.parametrize("options", [{"sync": False}, {"metasync": False}, {"writemap": True}])
def test_an_index_in_another_mode_than_the_model_knows_is_refused(tmp_path, options):
    with (
        recorded_index(Journal(tmp_path)),
        pytest.raises(AssertionError, match="commits are not durable when they return"),
    ):
        lmdb.open(str(tmp_path / "index.lmdb"), subdir=False, **options)


def test_every_transaction_is_recorded_with_the_file_before_and_after_it(tmp_path):
    journal = Journal(tmp_path)
    path = tmp_path / "index.lmdb"
    with recorded_index(journal):
        env = lmdb.open(str(path), subdir=False, map_size=1 << 20, max_dbs=2)
        db = env.open_db(b"pages")
        for value in (b"1", b"2"):
            with env.begin(write=True, db=db) as txn:
                txn.put(b"key", value)
        with env.begin(write=True, db=db) as txn:
            txn.put(b"key", b"3")
            txn.abort()
        env.close()
    created, made, first, second = journal.events
    assert isinstance(created, Created)
    assert made.before == created.data
    assert (made.after, first.after) == (first.before, second.before)
    assert second.after == path.read_bytes()
    assert lmdb.open is lmdb.Environment
