"""Making room on disk: who leaves, who moves, and who is left alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.tierstore.store.room_bench import LARGE, SMALL, Bench
from tierstore.index import Tier
from tierstore.tiers.disk.space import Shortage
from tierstore.units import KIB


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path / "store")
    yield bench
    bench.room.moves.vacate()
    bench.commit()
    bench.verify()
    bench.disk.close()
    bench.host.close()


def scattered(bench, *, every=4):
    """Fill the disk with small pages, of which all but every fourth are old, wherever they are."""
    records = bench.fill(SMALL)
    for record in records[::every]:
        bench.state.access_log.touch([bench.page(record)], hit=True)
    return records


def test_a_class_of_its_own_makes_room_for_itself(bench):
    records = bench.fill(SMALL)
    assert bench.save(SMALL) is not None
    assert records[0].serial not in bench.disk.page_table
    assert bench.room.moves.stats().moved_pages == 0


def test_pages_in_use_all_over_the_disk_make_way_and_stay(bench):
    records = scattered(bench)
    kept = {record.serial for record in records[::4]}
    large = [bench.save(LARGE) for _ in range(4)]
    assert None not in large
    assert bench.room.moves.stats().moved_pages > 0
    assert kept <= bench.records().keys()
    gone = len(records) - sum(record.serial in bench.disk.page_table for record in records)
    assert gone * SMALL <= 4 * LARGE + 2 * LARGE, "more has left than was needed"
    assert {record.serial for record in records[1:20] if record.serial not in kept}.isdisjoint(
        bench.records()
    )


def test_pages_that_sleep_move_too(bench):
    scattered(bench)
    bench.state._loaded_pages_most = 0
    bench.state.unload_idle()
    assert not bench.state.index.by_serial
    assert bench.save(LARGE) is not None
    assert bench.room.moves.stats().moved_pages > 0


def test_a_leased_page_does_not_move(bench):
    records = scattered(bench)
    held = [bench.page(record) for record in records[::4]]
    lease = bench.state.leases.take([(page, Tier.DISK) for page in held], 60.0)
    places = [page.record.place for page in held]
    for _ in range(3):
        bench.save(LARGE)
    assert [page.record.place for page in held] == places
    bench.state.leases.release(lease)
    assert bench.save(LARGE) is not None


def test_a_page_that_is_leased_while_it_is_copied_stays(bench):
    records = scattered(bench)
    leases = []
    write = bench.disk.write

    def write_and_lease(pages, **options):
        write(pages, **options)
        woken = [bench.state.index.by_serial[record.serial] for record, _ in pages]
        leases.append(bench.state.leases.take([(page, Tier.DISK) for page in woken[:1]], 60.0))
        places.update({page.serial: page.record.place for page in woken[:1]})

    places = {}
    bench.disk.write = write_and_lease
    assert bench.room.make(LARGE, {LARGE: 1}) in (True, False)
    bench.disk.write = write
    assert places
    found = bench.records()
    assert all(found[serial].place == place for serial, place in places.items())
    for lease in leases:
        bench.state.leases.release(lease)
    assert len(records) >= len(found)


def test_who_reads_at_the_old_place_can_go_on(bench):
    scattered(bench)
    reading = []

    def lease(moved):
        record, before = moved[0]
        page = bench.state.index.by_serial[record.serial]
        reading.append((page.record, bench.state.leases.take([(page, Tier.DISK)], 60.0)))
        assert page.record.place == before

    bench.after_relocation = lease
    bench.room.make(LARGE, {LARGE: 1})
    bench.after_relocation = None
    assert reading
    while bench.save(SMALL) and bench.disk.space.free_bytes() > 2 * LARGE:
        pass
    for record, held in reading:
        view = memoryview(bytearray(record.nbytes))
        assert bench.disk.read([(record, view)]).all_good
        assert bench.page(record).record.place != record.place
        bench.state.leases.release(held)
    bench.room.moves.vacate()
    assert not bench.disk.space._vacant


def test_a_page_that_leaves_while_its_record_is_changed_is_gone_for_good(bench):
    scattered(bench)
    gone = []

    def evict(moved):
        record, _ = moved[0]
        with bench.state.lock:
            assert bench.state.eviction.leaves_disk(record.serial)
        gone.append(record.serial)

    bench.after_relocation = evict
    bench.room.make(LARGE, {LARGE: 1})
    bench.after_relocation = None
    bench.commit()
    assert gone
    assert not set(gone) & {serial for serial, _ in bench.disk.scan()}


def test_a_record_found_before_its_page_moved_is_not_believed(bench):
    scattered(bench)
    before = bench.records()
    bench.state._loaded_pages_most = 0
    bench.state.unload_idle()
    assert bench.save(LARGE) is not None
    after = bench.records()
    moved = [serial for serial, record in before.items() if serial in after and after[serial] != record]
    assert moved
    for serial in moved:
        assert not bench.wake(before[serial])
        assert bench.wake(after[serial])


def test_a_damaged_page_is_found_out_when_it_is_to_move(bench):
    records = scattered(bench)
    damaged = records[::4]
    for record in damaged:
        bench.disk._payloads.write([(replace(record), memoryview(bytearray(b"?" * SMALL)))])
    assert bench.save(LARGE) is not None
    assert bench.room.moves.stats().moved_pages == 0
    assert bench.state.counters.damaged_pages > 0
    with bench.state.lock:  # those that nobody has looked at
        for record in damaged:
            bench.state.eviction.leaves_disk(record.serial)
    bench.commit()


def test_what_lies_idle_is_collected_without_anybody_leaving(bench):
    records = bench.fill(SMALL)
    with bench.state.lock:
        for record in records[::2]:
            bench.state.eviction.leaves_disk(record.serial)
    bench.commit()
    before = len(bench.disk.page_table)
    saved = [bench.save(LARGE) for _ in range(5)]
    assert None not in saved
    assert len(bench.disk.page_table) == before + 5
    assert bench.room.moves.stats().moved_bytes <= 5 * LARGE


def test_a_disk_that_fails_while_pages_move_is_no_error(bench, monkeypatch):
    scattered(bench)

    def fail(moved):
        raise OSError(5, "injected")

    monkeypatch.setattr(bench.disk, "relocate", fail)
    bench.room.make(LARGE, {LARGE: 1})
    assert bench.room.moves.stats().moved_pages == 0


def test_small_pages_leave_when_it_is_the_index_that_is_full(bench):
    large = bench.save(LARGE)  # the oldest of all
    small = [record for _ in range(8) for record in bench.save_all(16 * KIB, 50)]
    space = bench.disk.space
    usage = space._index
    space._index_bytes = usage.used_bytes + 2 * usage.tree_bytes + 32 * KIB
    assert space.shortage(LARGE) is Shortage.INDEX
    assert bench.save(LARGE) is not None
    held = bench.records()
    assert large.serial in held
    assert any(record.serial not in held for record in small)
