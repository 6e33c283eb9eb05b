"""What the store's policies keep to, and how their queue goes on."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.policy import (
    LRU,
    POLICIES,
    EvictionQueue,
    FrequencyAgedLRU,
    Number,
    PageFacts,
    QueueEntry,
    Reuse,
)

facts = st.builds(
    PageFacts,
    nbytes=st.sampled_from([4096, 1 << 20]),
    depth=st.integers(0, 5000),
    last_use=st.integers(0, 10**7),
    hits=st.integers(0, 1000),
    reuse=st.sampled_from([int(reuse) for reuse in Reuse]),
    priority=st.integers(-100, 100),
    worth=st.integers(0, 7),
)


def columns(pages):
    return PageFacts(*(np.array(column) for column in zip(*pages, strict=True)))


def seasoned(name):
    """A policy that has seen pages leave."""
    policy = POLICIES[name]()
    for tick in range(1000, 9000, 500):
        page = PageFacts(4096, 3, tick - 700, 2)
        policy.leaves(page, float(policy.score(page)), tick)
    return policy


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(pages=st.lists(facts, min_size=1, max_size=20))
def test_a_page_alone_is_worth_what_it_is_worth_among_many(name, pages):
    policy = seasoned(name)
    many = np.broadcast_to(policy.score(columns(pages)), len(pages))
    assert many.tolist() == pytest.approx([float(policy.score(page)) for page in pages], rel=1e-12)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(page=facts, later=st.integers(1, 1000))
def test_worth_does_not_fall_with_use(name, page, later):
    policy = seasoned(name)
    used = page._replace(last_use=page.last_use + later, hits=page.hits + 1)
    assert policy.score(used) >= policy.score(page)


def test_hints_come_before_everything_else():
    policy = FrequencyAgedLRU()
    page = PageFacts(4096, 0, 10**6, 100)
    order = [
        page._replace(reuse=Reuse.DONE, priority=100),
        page._replace(reuse=Reuse.UNLIKELY, last_use=5),
        page._replace(reuse=Reuse.UNLIKELY, last_use=6, hits=0),
        page._replace(priority=-1),
        page._replace(last_use=1, hits=0),
        page,
        page._replace(priority=1, last_use=1, hits=0),
        page._replace(reuse=Reuse.LIKELY, priority=-100, last_use=1),
    ]
    scores = [float(policy.score(each)) for each in order]
    assert scores == sorted(scores)
    assert len(set(scores)) == len(scores)


def test_the_default_is_lru_until_something_has_left_and_then_uses_count():
    policy = FrequencyAgedLRU(lifetimes=1.0)
    new, used = PageFacts(1, 0, 100, 0), PageFacts(1, 0, 100, 3)
    assert policy.score(used) == policy.score(new) == 100
    policy.leaves(new, 60.0, 100)
    assert policy.score(new) == 100
    assert policy.score(used) == policy.score(new._replace(worth=2)) == 100 + 2 * 40


def test_what_leaves_because_of_a_hint_says_nothing_of_lifetimes():
    policy = FrequencyAgedLRU()
    policy.leaves(PageFacts(1, 0, 100, 0, Reuse.DONE), -1e12, 100)
    policy.leaves(PageFacts(1, 0, 100, 0, priority=-1), -1e12, 100)
    assert policy.score(PageFacts(1, 0, 100, 3)) == 100


# -- the queue -------------------------------------------------------------------------------------------


class Page(QueueEntry, eq=False):
    name: str
    last_use: int
    depth: int = 0
    held: bool = False


def queue_of(*pages: Page) -> EvictionQueue[Page]:
    queue = EvictionQueue[Page](
        LRU(), lambda page: PageFacts(1, page.depth, page.last_use, 0), lambda page: not page.held
    )
    for page in pages:
        queue.offer(page)
    return queue


def drained(queue: EvictionQueue[Page]) -> list[str]:
    names = []
    while (page := queue.victim(0)) is not None:
        assert not page.queued
        names.append(page.name)
    return names


def test_a_use_counts_though_nothing_told_the_queue_of_it():
    pages = [Page(f"{number}", number) for number in range(100)]
    queue = queue_of(*random.Random(0).sample(pages, 100))
    for page in pages[:50]:
        page.last_use += 1000
    assert drained(queue) == [page.name for page in (*pages[50:], *pages[:50])]


def test_among_equals_the_deepest_leaves_first():
    assert drained(queue_of(Page("a", 1, 0), Page("c", 1, 2), Page("b", 1, 1))) == ["c", "b", "a"]


def test_what_may_not_leave_is_passed_over_until_it_is_offered_again():
    first, second = Page("first", 1, held=True), Page("second", 2)
    queue = queue_of(first, second)
    assert drained(queue) == ["second"]
    assert not first.queued
    first.held = False
    assert drained(queue) == []
    queue.offer(first)
    assert queue.queued() == {id(first)}
    assert drained(queue) == ["first"]


def test_a_page_whose_score_has_fallen_leaves_once_and_in_its_new_place():
    first, second = Page("first", 1), Page("second", 2)
    queue = queue_of(first, second)
    second.last_use = 0
    queue.offer(second)
    assert drained(queue) == ["second", "first"]


def test_what_is_gone_is_not_found_again():
    first, second = Page("first", 1), Page("second", 2)
    queue = queue_of(first, second)
    first.queued = False
    assert drained(queue) == ["second"]


class Fickle(LRU):
    """Keeps what was used often for ever, until it no longer does."""

    kept = True

    def score(self, facts: PageFacts) -> Number:
        return facts.last_use + 10**6 * facts.hits * self.kept


def test_pages_do_not_stay_for_a_score_that_has_fallen():
    policy = Fickle()
    pages = [Page(f"{number}", number) for number in range(400)]
    queue = EvictionQueue[Page](
        policy, lambda page: PageFacts(1, 0, page.last_use, int(page.last_use < 200)), lambda page: True
    )
    for page in pages:
        queue.offer(page)
    policy.kept = False
    policy.revision += 1
    left = [int(page.name) for _ in range(200) if (page := queue.victim(0)) is not None]
    # Eight are looked at for each that leaves: all, before an eighth of them has left.
    assert sum(number < 200 for number in left) >= 150
    assert len(drained(queue)) == 200


def test_a_shorter_lifetime_is_a_revision():
    policy = FrequencyAgedLRU()
    policy.leaves(PageFacts(1, 0, 0, 0), 0.0, 1000)
    assert policy.revision == 0
    for _ in range(256):
        policy.leaves(PageFacts(1, 0, 0, 0), 0.0, 100)
    assert policy.revision > 0
