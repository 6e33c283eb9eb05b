"""A disk in trouble is a missing tier: the engine sees misses, a person sees why, it comes back by itself."""

from __future__ import annotations

import errno
import logging
import os
import threading

import pytest

import tierstore
from tests.small_store import SPEC, load_bytes, pages_of
from tests.tierstore.store.troubled import DURABLE, HOT, NAMES, WAIT_S, WRITES, Troubled
from tierstore.core.health import Condition
from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk.child_filter import ChildFilter
from tierstore.tiers.disk.index_db import IndexDB

NEW = list(range(50_000, 50_000 + 16 * 8))


@pytest.fixture
def troubled(open_store):
    each = Troubled(open_store)
    yield each
    each.mend()


# -- writing fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=NAMES.get)
@pytest.mark.parametrize("call", ["pwritev", "sync"])
def test_a_disk_that_takes_no_pages_is_read_only_until_it_does(troubled, code, call, caplog):
    caplog.set_level(logging.WARNING)
    troubled.fail(code, call)
    assert troubled.save(NEW) == len(NEW)
    assert troubled.store.flush(WAIT_S)  # given up
    assert troubled.served(NEW) == len(NEW)
    assert troubled.served(HOT) == len(HOT)
    assert troubled.served(DURABLE) == len(DURABLE)
    stats = troubled.stats()
    assert (stats.health["disk"].condition, stats.disk_writable) == (Condition.READ_ONLY, False)
    assert stats.health_line.startswith("disk: read-only for 0 s (injected")
    assert stats.counters["disk_write_errors"] == 1

    troubled.clock.advance(1)
    troubled.until(lambda: troubled.stats().counters["disk_write_errors"] == 2)  # the probe
    assert troubled.stats().health["disk"].retry_s == pytest.approx(2)
    troubled.comes_back()
    troubled.until(lambda: troubled.stats().tiers["disk"].pages == 40)  # what was missed is made up for
    assert troubled.stats().counters["disk_read_only_s"] == pytest.approx(62)
    troubled.nothing_is_lost()
    assert troubled.served(NEW) == len(NEW)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" for ")[0] for line in lines] == ["disk: read-only", "disk: online, was read-only"]


def test_pages_are_not_queued_for_a_disk_that_is_read_only(troubled):
    troubled.fail(errno.ENOSPC, *WRITES)
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    writes = len(troubled.io.calls)
    for n in range(5):
        troubled.save(list(range(60_000 + 1000 * n, 60_016 + 1000 * n)))
    stats = troubled.stats()
    assert (stats.pending_writes, stats.tiers["host"].leased_pages) == (0, 0)
    assert len(troubled.io.calls) == writes
    troubled.comes_back()
    troubled.nothing_is_lost()


def test_what_was_missed_is_made_up_for_though_it_is_more_than_the_queue_holds(troubled):
    troubled.fail(errno.ENOSPC, "pwritev")
    prompts = [list(range(60_000 + 1000 * n, 60_000 + 1000 * n + 16 * 16)) for n in range(3)]
    for tokens in prompts:  # 48 pages; the queue holds 32
        troubled.save(tokens)
    assert troubled.store.flush(WAIT_S)
    troubled.comes_back()
    troubled.until(lambda: troubled.stats().tiers["disk"].pages == 32 + 48)
    troubled.nothing_is_lost()
    assert [troubled.served(tokens) for tokens in prompts] == [16 * 16] * 3


def test_an_index_that_cannot_be_committed_is_a_disk_that_takes_no_pages(troubled, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the index is full")

    monkeypatch.setattr(IndexDB, "apply", fail)
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    assert "read-only for 0 s (the index is full)" in troubled.stats().health_line
    assert troubled.served(DURABLE) == len(DURABLE)
    monkeypatch.undo()
    troubled.comes_back()
    troubled.nothing_is_lost()


def test_a_disk_that_fails_again_after_each_probe_is_not_tried_every_second(troubled):
    """It takes a small page, and then refuses the batch that comes after it."""
    retries = []
    for n in range(4):
        troubled.fail(errno.ENOSPC, "pwritev")
        troubled.save(list(range(60_000 + 1000 * n, 60_016 + 1000 * n)))
        troubled.until(lambda: troubled.condition is Condition.READ_ONLY)
        retries.append(troubled.stats().health["disk"].retry_s)
        troubled.io.set()
        with troubled.store.backend.core.state.lock:
            troubled.store.backend.core.write_behind._queue._owed.clear()
        troubled.clock.advance(retries[-1])
        troubled.until(lambda: troubled.condition is Condition.ONLINE)
    assert retries == pytest.approx([1, 2, 4, 8])
    troubled.nothing_is_lost()


# -- reading fails -----------------------------------------------------------------------------------


def test_a_read_that_fails_once_is_a_miss_and_costs_no_page(troubled):
    troubled.fail(errno.EIO, "preadv", times=2)  # O_DIRECT, and once more through the page cache
    assert troubled.served(DURABLE) < len(DURABLE)
    stats = troubled.stats()
    assert stats.counters["damaged_pages"] == 0
    assert stats.counters["disk_read_errors"] == 1
    assert stats.tiers["disk"].pages == 32
    assert stats.health["disk"].condition is Condition.ONLINE
    assert troubled.served(DURABLE) == len(DURABLE)
    troubled.nothing_is_lost()


@pytest.mark.parametrize(
    ("code", "failures"),
    [(errno.EIO, 3), (errno.ENODEV, 1), (errno.ESTALE, 1)],
    ids=["EIO", "ENODEV", "ESTALE"],
)
def test_a_disk_that_cannot_be_read_is_offline_and_nothing_is_removed(troubled, code, failures, caplog):
    caplog.set_level(logging.WARNING)
    troubled.fail(code)
    for n in range(failures):
        assert troubled.condition is Condition.ONLINE, n
        assert troubled.store.lookup(DURABLE).tokens == len(DURABLE)
        assert troubled.served(DURABLE) == 0
    assert troubled.condition is Condition.OFFLINE
    asked = len(troubled.io.calls)
    assert troubled.store.lookup(DURABLE).tokens == 0
    assert troubled.served(DURABLE) == 0
    assert troubled.store.lookup(HOT).by_tier == {"host": len(HOT)}
    assert troubled.served(HOT) == len(HOT)
    assert troubled.save(NEW) == len(NEW)
    assert troubled.store.flush(WAIT_S)
    assert troubled.served(NEW) == len(NEW)
    assert len(troubled.io.calls) == asked, "a disk that is offline was asked"
    stats = troubled.stats()
    assert stats.tiers["disk"].pages == 32
    assert stats.health_line.startswith("disk: offline for 0 s (injected")
    troubled.comes_back()
    assert troubled.stats().counters["disk_offline_s"] == pytest.approx(61)
    troubled.until(lambda: troubled.stats().tiers["disk"].pages == 40)
    troubled.nothing_is_lost()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" for ")[0] for line in lines] == ["disk: offline", "disk: online, was offline"]


def test_a_hit_that_begins_in_memory_is_served_as_far_as_memory_goes(troubled):
    with troubled.store.lookup(DURABLE, max_tokens=16 * 5) as hit:
        assert hit.prefetch().wait(WAIT_S) == 16 * 5
    troubled.fail(errno.EIO, "preadv")
    assert [troubled.served(DURABLE) for _ in range(4)] == [16 * 5] * 4
    assert troubled.condition is Condition.OFFLINE
    assert troubled.store.lookup(DURABLE).by_tier == {"host": 16 * 5}
    troubled.comes_back()
    troubled.nothing_is_lost()


@pytest.fixture
def always_looking(monkeypatch):
    """Lookups look at the index for whatever is not in memory, as they do before its links have been read."""
    monkeypatch.setattr(ChildFilter, "may_lead", lambda *_, **__: True)


@pytest.mark.usefixtures("always_looking")
def test_an_index_that_cannot_be_read_is_a_disk_that_cannot_be_read(troubled, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the index failed")

    monkeypatch.setattr(IndexDB, "find", fail)
    for n in range(3):
        assert troubled.condition is Condition.ONLINE, n
        assert troubled.served([*HOT, 1, 2, 3, *range(40)]) == len(HOT)
        assert troubled.served(list(range(70_000 + n, 70_100))) == 0
    assert "the index failed" in troubled.stats().health_line
    assert troubled.stats().counters["disk_read_errors"] >= 3
    assert troubled.served(HOT) == len(HOT)
    monkeypatch.undo()
    troubled.comes_back()
    troubled.nothing_is_lost()


# -- nothing comes back ------------------------------------------------------------------------------


def test_reads_that_hang_hold_nobody_who_does_not_need_the_disk(troubled):
    stall = troubled.stall("preadv")
    hits = [troubled.store.lookup(DURABLE) for _ in range(12)]
    stuck = [
        troubled.store.load(hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]) for hit in hits
    ]
    prefetch = troubled.store.lookup(DURABLE).prefetch()
    assert stall.entered.wait(WAIT_S)
    assert troubled.served(HOT) == len(HOT)  # before anybody knows
    assert not any(transfer.done for transfer in stuck)
    troubled.clock.advance(10)
    assert troubled.store.lookup(DURABLE).tokens == 0
    assert [transfer.wait(WAIT_S).tokens for transfer in stuck] == [0] * 12
    assert prefetch.wait(WAIT_S) == 0
    assert troubled.served(HOT) == len(HOT)
    assert troubled.save(NEW) == len(NEW)
    stats = troubled.stats()
    assert stats.health_line == "disk: offline for 0 s (a call has not returned for 10 s)"
    assert (stats.pending_writes, stats.disk_writable) == (0, False)
    assert stats.counters["disk_stalls"] == 1
    troubled.mend()
    troubled.until(lambda: troubled.condition is Condition.ONLINE)
    troubled.until(lambda: troubled.stats().tiers["disk"].pages == 40)
    troubled.nothing_is_lost()


def test_a_stall_on_a_disk_that_had_failed_before_is_waited_out_and_then_probed(troubled):
    troubled.fail(errno.ENOSPC, "pwritev")
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    stall = troubled.stall("preadv")
    hit = troubled.store.lookup(DURABLE)
    transfer = troubled.store.load(hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)])
    assert stall.entered.wait(WAIT_S)
    with troubled.store.backend.core.state.lock:  # so that the stall is seen before the probe is due
        troubled.clock.advance(10)
        troubled.store.backend.core.state.health.under_way(10)
    assert transfer.wait(WAIT_S).tokens == 0
    assert troubled.condition is Condition.OFFLINE
    assert troubled.served(HOT) == len(HOT)
    troubled.comes_back()
    troubled.nothing_is_lost()


def test_whoever_waits_for_a_load_notices_the_stall_himself(troubled):
    """Nobody else comes by."""
    stall = troubled.stall("preadv")
    hit = troubled.store.lookup(DURABLE)
    transfer = troubled.store.load(hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)])
    waiting = threading.Thread(target=transfer.wait, args=(WAIT_S,))
    waiting.start()
    assert stall.entered.wait(WAIT_S)
    troubled.clock.advance(10)
    waiting.join(WAIT_S)
    assert transfer.wait(0.001).tokens == 0
    troubled.mend()
    troubled.until(lambda: troubled.condition is Condition.ONLINE)
    troubled.nothing_is_lost()


def test_a_load_with_a_deadline_does_not_wait_for_the_stall_to_be_one(troubled):
    stall = troubled.stall("preadv")
    tokens, _ = load_bytes(troubled.store, troubled.store.lookup(DURABLE), deadline_s=0.0)
    assert tokens == 0
    hit = troubled.store.lookup(DURABLE)
    transfer = troubled.store.load(
        hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)], deadline_s=5.0
    )
    assert stall.entered.wait(WAIT_S)
    troubled.clock.advance(5)
    assert transfer.done
    assert troubled.condition is Condition.ONLINE
    troubled.mend()
    troubled.nothing_is_lost()


@pytest.mark.parametrize("call", ["pwritev", "sync"])
def test_writes_that_hang_hold_nobody(troubled, call):
    stall = troubled.stall(call)
    troubled.save(NEW)
    assert stall.entered.wait(WAIT_S)
    assert not troubled.store.flush(0.01)
    assert troubled.served(HOT) == len(HOT)
    troubled.clock.advance(10)
    assert not troubled.store.flush()  # without a timeout
    assert troubled.condition is Condition.OFFLINE
    assert troubled.served(HOT) == len(HOT)
    assert troubled.served(NEW) == len(NEW)
    assert troubled.store.lookup(DURABLE).tokens == 0
    troubled.mend()
    troubled.until(lambda: troubled.condition is Condition.ONLINE)
    assert troubled.store.flush(WAIT_S)
    troubled.until(lambda: troubled.stats().tiers["disk"].pages == 40)
    troubled.nothing_is_lost()


@pytest.mark.parametrize("call", ["preadv", "pwritev", "sync"])
def test_a_store_is_closed_though_its_disk_does_not_answer(troubled, call, tmp_path, caplog):
    stall = troubled.stall(call)
    hit = troubled.store.lookup(DURABLE)
    transfer = troubled.store.load(hit, [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)])
    troubled.save(NEW)
    assert stall.entered.wait(WAIT_S)
    troubled.clock.advance(10)
    troubled.store.close()
    assert "the directory stays locked" in caplog.text
    if call == "preadv":
        assert transfer.wait(WAIT_S).tokens == 0
    with pytest.raises(StoreUnavailableError, match="in use"):
        tierstore.open(tmp_path / "disk", SPEC, host_bytes=1 << 20, disk_bytes=16 << 20)
    closed = troubled.store
    troubled.mend()
    troubled.until(lambda: closed.backend.core._given_back)
    troubled.store = troubled.open()
    assert troubled.served(NEW) == len(NEW)
    troubled.nothing_is_lost()


@pytest.mark.usefixtures("always_looking")
def test_a_lookup_does_not_wait_for_an_index_that_cannot_be_paged_in(troubled, monkeypatch):
    monkeypatch.setattr("tierstore.core.find._LOOK_S", 0.05)
    answering, entered = threading.Event(), threading.Event()
    find = IndexDB.find

    def stuck(*args):
        entered.set()
        answering.wait(WAIT_S)
        return find(*args)

    monkeypatch.setattr(IndexDB, "find", stuck)
    longer = [*HOT, *range(16)]
    for n in range(8):  # more than there are threads to look
        assert troubled.store.lookup(list(range(80_000 + n, 80_040))).tokens == 0
    assert entered.is_set()
    assert troubled.served(longer) == len(HOT)
    assert troubled.stats().counters["disk_slow_lookups"] >= 8
    assert troubled.condition is Condition.ONLINE
    troubled.clock.advance(10)
    assert troubled.served(longer) == len(HOT)
    assert troubled.condition is Condition.OFFLINE
    answering.set()
    monkeypatch.setattr("tierstore.core.find._LOOK_S", WAIT_S)
    troubled.until(lambda: troubled.condition is Condition.ONLINE)
    troubled.nothing_is_lost()


# -- the directory is not there any more -------------------------------------------------------------


def test_a_directory_that_went_away_is_offline_until_it_is_back(troubled, tmp_path):
    os.rename(tmp_path / "disk", tmp_path / "elsewhere")
    troubled.save(NEW)
    assert troubled.store.flush(WAIT_S)
    assert "No such file or directory" in troubled.stats().health_line
    assert troubled.condition is Condition.OFFLINE
    assert troubled.store.lookup(DURABLE).tokens == 0
    assert troubled.served(HOT) == len(HOT)
    (tmp_path / "disk").mkdir()
    troubled.clock.advance(1)
    troubled.until(lambda: "not the directory that was opened" in troubled.stats().health_line)
    (tmp_path / "disk").rmdir()
    os.rename(tmp_path / "elsewhere", tmp_path / "disk")
    troubled.comes_back()
    troubled.until(lambda: troubled.stats().tiers["disk"].pages == 40)
    troubled.nothing_is_lost()


def test_bytes_of_a_page_that_are_wrong_are_damage_also_while_others_fail(troubled, tmp_path):
    """Damage is what the disk says, failure is that it says nothing: only the first costs a page."""
    with (tmp_path / "disk" / "extents" / "000000").open("r+b") as file:
        first = pages_of(DURABLE)[0]
        file.seek(file.read().index(first))
        file.write(bytes([first[0] ^ 1]))
    assert troubled.served(DURABLE) == 0
    assert troubled.stats().counters["damaged_pages"] == 1
    assert troubled.condition is Condition.ONLINE
    troubled.fail(errno.EIO, "preadv")
    assert troubled.served(DURABLE) == 0
    assert troubled.stats().counters["damaged_pages"] == 1
    troubled.mend()
    troubled.save(DURABLE)
    assert troubled.store.flush(WAIT_S)
    troubled.store.evict("host")
    assert troubled.served(DURABLE) == len(DURABLE)
