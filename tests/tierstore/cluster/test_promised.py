"""One loop asks for all promised prompts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import SimpleNamespace

from tierstore.cluster import orders as o
from tierstore.cluster import promised
from tierstore.cluster.objects import PageObject
from tierstore.cluster.promised import PromisedPages
from tierstore.testing.clock import ManualClock, wait_until

WAIT_S = 30.0


class Pool:
    """What has been published, and what was asked and brought of it."""

    def __init__(self) -> None:
        self.published: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.calls = 0
        self.ended: dict[int, int] = {}
        self.changed = threading.Condition()
        self.damaged: set[int] = set()
        self.pages = PromisedPages(self.exists, self.fetch_remote, self.end)

    def exists(self, names):
        with self.changed:
            self.calls += 1
            self.asked.update(names)
            self.changed.notify_all()
            return [name in self.published for name in names]

    def fetch_remote(self, prompt):
        if prompt.order.id in self.damaged:
            return 0
        there = [each.name in self.published for each in prompt.objects[prompt.done :]]
        return [*there, False].index(False)

    def end(self, prompt):
        with self.changed:
            assert prompt.order.id not in self.ended, "told twice"
            self.ended[prompt.order.id] = prompt.done
            self.changed.notify_all()

    def publish(self, number, *chunks):
        with self.changed:
            self.published |= {name(number, chunk) for chunk in chunks}

    def promise(self, number, chunks=4, wait_s=WAIT_S):
        pages = o.PromptPages({}, 0, 16, b"", b"")
        order = o.FetchOrder(number, pages, 0, chunks, wait_s, promised=True)
        self.pages.add(order, [an_object(number, chunk) for chunk in range(chunks)])

    def wait(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


def name(number, chunk):
    return an_object(number, chunk).name


def an_object(number, chunk):
    return PageObject(b"", 64, 16, chunk, f"{number}/{chunk}".encode())


def test_pages_come_as_they_are_published():
    pool = Pool()
    pool.promise(1)
    pool.publish(1, 0, 1, 3)  # the third is of no use without the second
    pool.wait(lambda: pool.asked[name(1, 2)] > 2)
    assert not pool.ended
    assert not pool.asked[name(1, 3)]
    pool.publish(1, 2)
    pool.wait(lambda: pool.ended == {1: 4})


def test_all_prompts_are_asked_for_in_one_call():
    pool = Pool()
    for number in range(100):
        pool.promise(number)
    pool.wait(lambda: min(pool.asked[name(number, 0)] for number in range(100)) >= 3)
    assert sum(pool.asked.values()) > 20 * pool.calls
    pool.publish(99, 0, 1, 2, 3)
    pool.wait(lambda: pool.ended == {99: 4})


def test_what_does_not_come_ends_when_it_was_said_to(monkeypatch):
    clock = ManualClock(time.monotonic())
    monkeypatch.setattr(promised, "time", SimpleNamespace(monotonic=clock))
    pool = Pool()
    pool.publish(1, 0)
    pool.promise(1, wait_s=0.3)
    pool.promise(2)
    pool.wait(lambda: pool.asked[name(1, 1)])
    clock.advance(0.2)
    pool.wait(lambda: pool.asked[name(1, 1)] > 1)
    assert not pool.ended
    clock.advance(0.2)
    pool.wait(lambda: pool.ended == {1: 1})


def test_what_is_not_wanted_any_more_ends_at_once():
    pool = Pool()
    pool.promise(1)
    pool.wait(lambda: pool.calls > 1)
    pool.pages.stop(1)
    pool.pages.stop(7)  # there is no such order
    pool.wait(lambda: pool.ended == {1: 0})


def test_a_page_that_cannot_be_had_ends_it():
    pool = Pool()
    pool.damaged.add(1)
    pool.promise(1)
    pool.publish(1, 0, 1, 2, 3)
    pool.wait(lambda: pool.ended == {1: 0})


def test_what_has_had_no_turn_until_its_end_is_not_brought():
    """Each of a few hundred would take its time after its end, and the agent that answers late is killed."""
    pool, gate, fetched = Pool(), threading.Event(), []

    def fetch_remote(prompt):
        fetched.append(prompt.order.id)
        assert gate.wait(WAIT_S)
        return Pool.fetch_remote(pool, prompt)

    pool.pages = PromisedPages(pool.exists, fetch_remote, pool.end)
    for number in range(4):
        pool.promise(number)
        pool.publish(number, 0, 1, 2, 3)
    wait_until(lambda: len(fetched) == 4)
    pool.promise(4, wait_s=0.2)
    ends = time.monotonic() + 0.2
    pool.publish(4, 0, 1, 2, 3)
    pool.wait(lambda: pool.asked[name(4, 0)])
    time.sleep(max(ends - time.monotonic(), 0))
    gate.set()
    pool.wait(lambda: len(pool.ended) == 5)
    assert pool.ended[4] == 0
    assert 4 not in fetched
