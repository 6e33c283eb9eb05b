"""The state machine alone: what each kind of trouble does to a tier, and how it comes back."""

from __future__ import annotations

import errno

import pytest

from tierstore.core.health import Condition, Health
from tierstore.testing.clock import ManualClock

FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def clock():
    return ManualClock(1000.0)


@pytest.fixture
def health(clock):
    return Health("disk", clock)


def test_in_order_there_is_nothing_to_say(health):
    assert (health.readable, health.writable, health.probe_due) == (True, True, False)
    assert health.line == "disk: online"
    assert health.snapshot().retry_s is None
    assert not health.has_news


def test_a_write_that_fails_leaves_the_tier_readable(health, clock):
    health.write_failed(FULL)
    clock.advance(0.6)
    assert (health.condition, health.readable, health.writable) == (Condition.READ_ONLY, True, False)
    assert health.line == "disk: read-only for 1 s (No space left on device), 1 write error; retry in 1 s"
    snapshot = health.snapshot()
    assert snapshot.reason == "No space left on device"
    assert snapshot.since_s == pytest.approx(0.6)
    assert snapshot.errors == {"write": 1}


def test_the_time_between_probes_doubles_up_to_a_minute(health, clock):
    health.write_failed(FULL)
    waited = []
    for _ in range(9):
        waited.append(health.retry_s)
        clock.advance(health.retry_s - 0.01)
        assert not health.probe_due
        clock.advance(0.01)
        assert health.probe_due
        health.probe_failed(FULL)
    assert waited == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])


def test_only_real_success_makes_the_probes_frequent_again(health, clock):
    for expected in (1, 2, 4):
        health.write_failed(FULL)
        assert health.retry_s == pytest.approx(expected)
        clock.advance(expected)
        health.probe_succeeded()
        assert health.writable
    health.written()
    health.write_failed(FULL)
    assert health.retry_s == pytest.approx(1)


def test_one_failed_read_is_an_incident_and_three_in_a_row_are_a_state(health):
    for _ in range(5):
        health.read_failed(BROKEN)
        health.read_failed(BROKEN)
        health.was_read()
    assert health.condition is Condition.ONLINE
    for _ in range(3):
        health.read_failed(BROKEN)
    assert (health.condition, health.readable) == (Condition.OFFLINE, False)
    assert health.probe_due is False


def test_an_index_in_the_page_cache_does_not_excuse_a_disk(health):
    for _ in range(3):
        health.read_failed(BROKEN, "pages")
        health.was_read("records")
    assert health.condition is Condition.OFFLINE


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENXIO, errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("doing", ["read", "write"])
def test_a_disk_that_has_gone_is_offline_at_once(health, code, doing):
    (health.read_failed if doing == "read" else health.write_failed)(OSError(code, "gone"))
    assert health.condition is Condition.OFFLINE


def test_failing_reads_are_worse_than_failing_writes_and_late_answers_change_nothing(health, clock):
    health.write_failed(FULL)
    for _ in range(3):
        health.read_failed(BROKEN)
    assert health.condition is Condition.OFFLINE
    health.write_failed(FULL)
    health.was_read()
    health.written()
    assert health.condition is Condition.OFFLINE
    clock.advance(1)
    health.probe_succeeded()
    assert health.condition is Condition.ONLINE


def test_a_stall_lasts_as_long_as_the_call(health, clock):
    assert not health.under_way(9.9)
    assert health.under_way(10.0)
    assert (health.condition, health.stalled, health.probe_due) == (Condition.OFFLINE, True, False)
    clock.advance(7)
    assert health.line == "disk: offline for 7 s (a call has not returned for 10 s)"
    assert not health.under_way(17.0)
    assert health.under_way(0.0)
    assert health.condition is Condition.ONLINE
    assert health.stalls == 1
    assert health.take_news() == [
        "disk: offline for 0 s (a call has not returned for 10 s)",
        "disk: online, was offline for 7 s (a call has not returned for 10 s)",
    ]


def test_behind_a_stall_the_fault_that_was_there_before_goes_on(health, clock):
    health.write_failed(FULL)
    health.under_way(10.0)
    clock.advance(5)
    assert not health.probe_due
    health.under_way(0.0)
    assert health.condition is Condition.READ_ONLY
    assert health.probe_due


def test_what_can_never_be_written_in_this_life_is_not_tried(health, clock):
    health.never_write("the index could not be read")
    assert (health.condition, health.retry_s) == (Condition.READ_ONLY, None)
    for _ in range(3):
        health.read_failed(BROKEN)
    clock.advance(1)
    assert health.probe_due
    health.probe_succeeded()
    assert health.condition is Condition.READ_ONLY
    assert health.line == "disk: read-only for 0 s (the index could not be read), 3 read errors"


def test_a_person_is_told_once_for_each_change(health, clock):
    for _ in range(4):
        health.write_failed(FULL)
    clock.advance(1)
    health.probe_failed(FULL)
    clock.advance(2)
    health.probe_succeeded()
    assert health.take_news() == [
        "disk: read-only for 0 s (No space left on device), 1 write error; retry in 1 s",
        "disk: online, was read-only for 3 s (No space left on device), 4 write errors, 1 probe error",
    ]
    assert health.take_news() == []


def test_time_in_each_condition_adds_up(health, clock):
    health.write_failed(FULL)
    clock.advance(3)
    for _ in range(3):
        health.read_failed(BROKEN)
    clock.advance(5)
    assert health.spent_s(Condition.READ_ONLY) == pytest.approx(3)
    assert health.spent_s(Condition.OFFLINE) == pytest.approx(5)
    health.probe_succeeded()
    clock.advance(7)
    assert health.spent_s(Condition.READ_ONLY) == pytest.approx(3)
    assert health.spent_s(Condition.OFFLINE) == pytest.approx(5)


def test_a_probe_that_finds_the_disk_gone_makes_it_worse(health, clock):
    health.write_failed(FULL)
    clock.advance(1)
    health.probe_failed(OSError(errno.ENODEV, "not mounted"))
    assert health.condition is Condition.OFFLINE
    assert health.snapshot().reason == "not mounted"
