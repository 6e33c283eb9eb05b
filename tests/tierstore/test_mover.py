from __future__ import annotations

import logging
import threading

from tierstore.mover import Lane, Mover, Priority


def test_urgent_tasks_overtake_and_equal_ones_keep_their_order():
    mover = Mover(1)
    gate, order = threading.Event(), []
    mover.submit(Priority.SAVE, lambda: gate.wait(5))
    for n, priority in enumerate([Priority.SAVE, Priority.LOAD, Priority.PREFETCH, Priority.LOAD]):
        mover.submit(priority, lambda n=n, priority=priority: order.append((priority, n)))
    assert mover.pending == 5
    gate.set()
    assert mover.drain(5)
    assert order == [(Priority.LOAD, 1), (Priority.LOAD, 3), (Priority.PREFETCH, 2), (Priority.SAVE, 0)]
    mover.close()


def test_a_task_that_raises_is_counted_and_the_others_go_on(caplog):
    mover = Mover(2)
    done = []
    with caplog.at_level(logging.CRITICAL):
        mover.submit(Priority.LOAD, lambda: 1 // 0)
        mover.submit(Priority.LOAD, lambda: done.append(1))
        assert mover.drain(5)
    assert done == [1]
    assert mover.failed_tasks == 1
    mover.close()


def test_closing_runs_what_is_queued_and_nothing_after():
    mover, done = Mover(2), []
    for _ in range(50):
        mover.submit(Priority.SAVE, lambda: done.append(1))
    mover.close()
    mover.close()
    mover.submit(Priority.LOAD, lambda: done.append(2))
    assert done == [1] * 50


def test_tasks_that_hang_in_the_disk_lane_hold_up_nobody_in_memory():
    mover = Mover(1, disk_threads=2)
    gate, done = threading.Event(), []
    for _ in range(4):
        mover.submit(Priority.LOAD, lambda: gate.wait(30), lane=Lane.DISK)
    for n in range(4):
        mover.submit(Priority.SAVE, lambda n=n: done.append(n))
    reached = threading.Event()
    mover.submit(Priority.SAVE, reached.set)
    assert reached.wait(30)
    assert done == [0, 1, 2, 3]
    assert not mover.drain(0.01)
    gate.set()
    assert mover.drain(30)
    mover.close()


def test_closing_waits_for_what_one_lane_hands_to_the_other():
    mover, done = Mover(1, disk_threads=1), []
    mover.submit(Priority.LOAD, lambda: mover.submit(Priority.LOAD, lambda: done.append(1), lane=Lane.DISK))
    mover.close()
    assert done == [1]
