"""The tier's promises when nothing goes wrong."""

from __future__ import annotations

import threading

import pytest

from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.policy import LRU
from tierstore.tiers.disk import INLINE, DiskTier, PageUse
from tierstore.tiers.disk.payloads import ReadMode
from tierstore.units import KIB, MIB, parse_size

SIZES = [1, 4096, 5000, 16 * KIB, 16 * KIB + 1, 64 * KIB, 300_000, 1 * MIB, 5 * MIB - 12]


def test_pages_of_all_sizes_come_back(open_shelf):
    shelf = open_shelf()
    shelf.save(SIZES)
    shelf.verify()
    assert {record.nbytes for record, _ in shelf.saved.values()} == set(SIZES)


def test_pages_are_there_in_the_next_life(open_shelf):
    shelf = open_shelf()
    shelf.save(SIZES, chained=True)
    assert [record.nbytes for record in shelf.reopen()] == SIZES
    shelf.verify()


def test_small_pages_live_in_the_index(open_shelf):
    shelf = open_shelf(inline_bytes=16 * KIB)
    small, large = shelf.save([16 * KIB, 16 * KIB + 1])
    assert small.place == INLINE
    assert large.place >= 0


def test_everything_may_live_in_the_index(open_shelf):
    shelf = open_shelf(page_bytes=1 * MIB, inline_bytes=1 * MIB)
    records = shelf.save([1 * MIB] * 8)
    assert [record.place for record in records] == [INLINE] * 8
    shelf.reopen()
    shelf.verify()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("streams", [1, 5])
def test_both_ways_of_reading_serve_the_same(open_shelf, direct, streams):
    shelf = open_shelf()
    shelf.save(SIZES)
    shelf.tier._payloads.read_mode = ReadMode(direct, streams)
    shelf.verify()


def test_memory_that_is_not_aligned_works_too(open_shelf):
    shelf = open_shelf()
    (record,) = shelf.save([300_000])
    buffer = memoryview(bytearray(300_003))[3:]
    assert shelf.tier.read([(record, buffer)]).all_good
    assert buffer == shelf.saved[record.serial][1]
    place = shelf.tier.reserve(300_000)
    copy = shelf.record(300_000, place)
    shelf.tier.write([(copy, buffer)])
    shelf.tier.commit([(copy, buffer)], [], {})
    assert copy.checksum == record.checksum
    shelf.saved[copy.serial] = (copy, bytes(buffer))
    shelf.verify()


def test_nothing_beyond_a_view_is_touched(open_shelf):
    shelf = open_shelf()
    (record,) = shelf.save([300_000])
    memory = Memory(400_000, shared=False)
    memory.view(0, 400_000)[:] = b"\x55" * 400_000
    assert shelf.tier.read([(record, memory.view(0, 300_000))]).all_good
    assert bytes(memory.view(300_000, 100_000)) == b"\x55" * 100_000


def test_a_place_is_free_again_only_after_the_commit_that_removed_it(open_shelf):
    shelf = open_shelf(capacity_bytes=2 * MIB)
    while shelf.save([64 * KIB]):
        pass
    full = len(shelf.saved)
    assert full >= 20
    assert shelf.tier.reserve(64 * KIB) is None
    shelf.remove([next(iter(shelf.saved.values()))[0]])
    assert len(shelf.save([64 * KIB])) == 1
    assert shelf.tier.reserve(64 * KIB) is None
    shelf.reopen()
    assert len(shelf.saved) == full
    shelf.verify()


def test_an_unreserved_place_is_free(open_shelf):
    shelf = open_shelf(capacity_bytes=2 * MIB)
    places = list(iter(lambda: shelf.tier.reserve(64 * KIB), None))
    for place in places:
        shelf.tier.unreserve(place, 64 * KIB)
    assert sorted(iter(lambda: shelf.tier.reserve(64 * KIB), None)) == sorted(places)
    for place in places:
        shelf.tier.unreserve(place, 64 * KIB)


def test_serials_are_never_used_again(open_shelf):
    shelf = open_shelf()
    used = {record.serial for record in shelf.save([4096, 64 * KIB])}
    shelf.remove([record for record, _ in shelf.saved.values()])
    shelf.reopen()
    assert shelf.tier.serials.new() > max(used)


def test_a_page_may_leave_and_come_back_in_one_commit(open_shelf):
    shelf = open_shelf()
    (record,) = shelf.save([64 * KIB])
    again = shelf.record(64 * KIB, shelf.tier.reserve(64 * KIB))
    again.serial = record.serial
    view = Memory(64 * KIB, shared=False).view(0, 64 * KIB)
    shelf.tier.write([(again, view)])
    shelf.tier.commit([(again, view)], [shelf.tier.page_table.remove(record.serial)], {})
    shelf.saved = {again.serial: (again, bytes(view))}
    (found,) = shelf.reopen()
    assert found.place == again.place != record.place
    shelf.verify()


def test_a_removal_that_comes_late_spares_the_page_that_came_back(open_shelf):
    shelf = open_shelf()
    (record,) = shelf.save([64 * KIB])
    again = shelf.record(64 * KIB, shelf.tier.reserve(64 * KIB))
    again.serial = record.serial
    view = Memory(64 * KIB, shared=False).view(0, 64 * KIB)
    shelf.tier.write([(again, view)])
    removal = shelf.tier.page_table.remove(record.serial)
    shelf.tier.commit([(again, view)], [], {})
    shelf.tier.commit([], [removal], {})
    shelf.saved = {again.serial: (again, bytes(view))}
    shelf.reopen()
    shelf.verify()


def test_use_times_are_remembered(open_shelf):
    shelf = open_shelf()
    first, second = shelf.save([4096, 64 * KIB])
    before = shelf.use(second.serial)
    shelf.tier.commit([], [], {first.serial: PageUse(9, 1e9, 7), 12345: PageUse(1, 1.0, 1)}, 9)
    shelf.reopen()
    assert shelf.use(first.serial) == PageUse(9, 1e9, 7)
    assert shelf.use(second.serial) == before
    assert shelf.tier.tick == 9


def test_children_leave_before_their_parents_and_the_longest_unused_first(open_shelf):
    shelf = open_shelf()
    a, b = shelf.save([4096, 4096])
    (a_child,) = shelf.save([4096], parent=a.serial)
    (b_child,) = shelf.save([4096], parent=b.serial)
    shelf.tier.page_table.touch({each.serial: PageUse(shelf.tick, 50.0, 1) for each in (b, b_child)})
    shelf.tier.page_table.touch({each.serial: PageUse(shelf.tick + 1, 50.0, 1) for each in (a, a_child)})
    order = [b_child.serial, b.serial, a_child.serial, a.serial]
    assert shelf.tier.page_table.next_to_leave(LRU(), 4) == order
    assert shelf.tier.page_table.next_to_leave(LRU(), 4) == []
    assert shelf.tier.page_table.next_to_leave(LRU(), 2) == order[:2]
    shelf.tier.page_table.touch({a_child.serial: PageUse(shelf.tick + 2, 60.0, 1)})
    assert (
        shelf.tier.page_table.next_to_leave(LRU(), 4) == []
    )  # it waits for its child, which is in use again
    assert shelf.tier.page_table.next_to_leave(LRU(), 4) == order


def test_a_page_leaves_right_after_the_last_one_below_it_however_long_it_was_not_used(open_shelf):
    shelf = open_shelf()
    (head,) = shelf.save([4096])
    tails = [shelf.save([4096], parent=head.serial)[0] for _ in range(2)]
    (other,) = shelf.save([4096])
    for tick, page in enumerate((head, tails[0], other, tails[1])):
        shelf.tier.page_table.touch({page.serial: PageUse(shelf.tick + tick, 50.0, 1)})
    order = []
    while chosen := shelf.tier.page_table.next_to_leave(LRU(), 1):
        order += chosen
        shelf.tier.page_table.remove(chosen[0])
    assert order == [tails[0].serial, other.serial, tails[1].serial, head.serial]


def test_a_page_without_its_parent_is_dropped_for_good(open_shelf):
    shelf = open_shelf()
    (parent,) = shelf.save([64 * KIB])
    (child,) = shelf.save([64 * KIB], parent=parent.serial)
    shelf.save([64 * KIB], parent=child.serial)
    shelf.tier._index_db.forget([parent.serial])
    assert shelf.reopen() == []
    assert len(shelf.tier._index_db) == 0


def test_writes_commits_and_reads_run_side_by_side(open_shelf):
    shelf = open_shelf()
    records = shelf.save([64 * KIB] * 100)
    errors = []

    def read():
        memory = Memory(64 * KIB, shared=False)
        view = memory.view(0, 64 * KIB)
        for record in records:
            ok = shelf.tier.read([(record, view)]).all_good
            if not ok or bytes(view) != expected[record.serial]:
                errors.append(record.serial)

    expected = {serial: data for serial, (_, data) in shelf.saved.items()}
    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        shelf.remove(shelf.save([64 * KIB, 4096, 1 * MIB]))
    for reader in readers:
        reader.join()
    assert not errors


@pytest.mark.parametrize("capacity_bytes", [0, 100 * KIB, 1 * MIB])
def test_a_capacity_below_one_page_is_refused_before_anything_is_written(path, capacity_bytes):
    with pytest.raises(UsageError, match="give at least"):
        DiskTier.open(path, capacity_bytes=capacity_bytes, page_bytes=1 * MIB)
    assert not path.exists()


@pytest.mark.parametrize("page_bytes", [100, 4 * KIB, 16 * KIB, 64 * KIB, 1 * MIB, 33 * MIB])
def test_the_capacity_that_the_refusal_asks_for_is_enough(tmp_path, page_bytes):
    with pytest.raises(UsageError) as refused:
        DiskTier.open(tmp_path / "no", capacity_bytes=1, page_bytes=page_bytes)
    wanted = str(refused.value).rsplit("at least ", 1)[1]
    with DiskTier.open(tmp_path / "yes", capacity_bytes=_bytes(wanted), page_bytes=page_bytes) as tier:
        assert tier.reserve(page_bytes) is not None


def _bytes(text):
    return parse_size(text) + 1


def test_stats_name_what_happened(open_shelf):
    shelf = open_shelf()
    shelf.save([4096, 64 * KIB])
    shelf.verify()
    stats = shelf.tier.stats()
    assert (stats.pages, stats.written_pages, stats.read_pages, stats.bad_pages) == (2, 2, 2, 0)
    assert stats.written_bytes == stats.read_bytes == 4096 + 64 * KIB
    assert stats.extent_used_bytes == 64 * KIB
    assert stats.used_bytes <= stats.capacity_bytes
