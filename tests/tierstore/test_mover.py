from __future__ import annotations

import logging
import threading

from tierstore.mover import Mover, Priority


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
