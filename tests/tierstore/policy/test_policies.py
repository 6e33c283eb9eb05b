"""What every policy keeps to, whatever it thinks of a page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.policy import GDSF, POLICIES, S3FIFO, Duel, Hinted, PageFacts, Priority, Reuse, Tenure
from tierstore.policy.hinted import reconciled

facts = st.builds(
    PageFacts,
    nbytes=st.sampled_from([4096, 1 << 20]),
    depth=st.integers(0, 5000),
    last_use=st.integers(0, 10**7),
    hits=st.integers(0, 1000),
    arrived=st.integers(0, 10**7),
    reuse=st.sampled_from([int(reuse) for reuse in Reuse]),
    priority=st.integers(-100, 100),
    segment=st.just(0),
    spent=st.just(0),
)


def columns(pages):
    return PageFacts(*(np.array(column) for column in zip(*pages, strict=True)))


def seasoned(name):
    """A policy that has seen pages leave."""
    policy = POLICIES[name]()
    for tick in range(1000, 9000, 500):
        page = PageFacts(4096, 3, tick - 700, 2, arrived=tick - 900)
        policy.leaves(page, float(policy.score(page)), tick)
    return policy


@pytest.mark.parametrize("name", [name for name, policy in POLICIES.items() if policy.segments == 1])
@settings(max_examples=15, deadline=None)
@given(pages=st.lists(facts, min_size=1, max_size=20))
def test_a_page_alone_is_worth_what_it_is_worth_among_many(name, pages):
    policy = seasoned(name)
    many = np.broadcast_to(policy.rank(columns(pages)), len(pages))
    assert many.tolist() == pytest.approx([float(policy.score(page)) for page in pages], rel=1e-12)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15, deadline=None)
@given(page=facts, later=st.integers(1, 1000))
def test_worth_does_not_fall_with_use(name, page, later):
    policy = seasoned(name)
    used = page._replace(last_use=page.last_use + later, hits=page.hits + 1)
    assert policy.score(used) >= policy.score(page)


@pytest.mark.parametrize("policy", [Hinted(), Duel()])
def test_hints_come_before_everything_else(policy):
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


def test_priority_knows_priorities_and_ends_only():
    policy = Priority()
    page = PageFacts(4096, 0, 50, 0)
    assert policy.score(page._replace(reuse=Reuse.LIKELY)) == policy.score(page)
    assert policy.score(page._replace(priority=1, last_use=1)) > policy.score(page)
    assert policy.score(page._replace(reuse=Reuse.DONE, priority=100)) < policy.score(
        page._replace(priority=-100, last_use=0)
    )


def test_gdsf_keeps_what_is_dear_until_the_clock_has_passed_it():
    policy = GDSF(doubling_depth=100)
    cheap, dear = PageFacts(1 << 20, 0, 0, 0), PageFacts(1 << 20, 200, 0, 0)
    assert policy.score(dear) == 3 * policy.score(cheap)
    for tick in range(1, 5001):
        policy.leaves(cheap, tick / 1000, tick)
    new = cheap._replace(last_use=5000)
    assert policy.score(new) == pytest.approx(6.0)
    assert policy.score(dear) == pytest.approx(3.0)
    middle = policy.score(cheap._replace(last_use=2500))
    assert middle == pytest.approx(3.5, rel=0.01), "the clock of long ago is known, if coarsely"
    assert len(policy._ticks) <= 1025


def test_tenure_is_lru_until_something_has_left_and_then_uses_count():
    policy = Tenure(lifetimes=1.0)
    new, used = PageFacts(1, 0, 100, 0), PageFacts(1, 0, 100, 3)
    assert policy.score(used) == policy.score(new) == 100
    policy.leaves(new, 60.0, 100)
    assert policy.score(new) == 100
    assert policy.score(used) == 100 + 2 * 40


def test_on_disk_pages_on_trial_leave_down_to_their_share():
    hits = np.array([0] * 6 + [1] * 4)
    pages = PageFacts(
        np.full(10, 4096),
        np.zeros(10),
        last_use=np.arange(10)[::-1],
        hits=hits,
        arrived=np.arange(10),
        segment=(hits > 0).astype(int),
    )
    order = np.argsort(S3FIFO().rank(pages), kind="stable").tolist()
    assert order == [0, 1, 2, 3, 4, 9, 8, 7, 6, 5], "five are too many; then the main line; then who is new"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ([], []),
        ([1, 1, 1], [1, 1, 1]),
        ([-2, -2], [-2, -2]),
        ([1, -2, 1, 1, -2, -2], [1, 1, 1, 1, -2, -2]),
        ([-2, -2, -2, -2, 1, -2], [-2, -2, -2, -2, 0, -2]),
        ([0, 0, 1, 0], [1, 1, 1, 0]),
        ([0, -1, 0], [0, -1, 0]),
    ],
)
def test_hints_of_one_prompt_are_freed_of_contradictions(said, meant):
    assert reconciled(said) == meant
