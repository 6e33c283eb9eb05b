"""The default follows the better of its two, and LRU while there is doubt."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from tests.tierstore.policy.caches import PlainCache, requests
from tierstore.policy import LRU, Duel, PageFacts, Tenure
from tierstore.policy.departed import FINGERPRINTS, MOST_WATCHED, fingerprint
from tierstore.policy.shadow import ShadowCache


def told(duel: Duel, names, capacity: int) -> None:
    for name in names:
        page = fingerprint(name)
        if page < duel.watched:
            duel.accessed([page], capacity)


def again_and_again(rounds: int, first: int):
    """A few hundred pages that are used all the time, and thousands that are used once."""
    for at in range(rounds):
        yield first + at % 400
        for once in range(12):
            yield first + 10_000 + at * 12 + once


def used_often_and_then_never(rounds: int, first: int):
    """Each page is used eleven times within a short time."""
    for at in range(rounds):
        for back in range(0, 460, 45):
            yield first + at - back


def test_a_shadow_of_lru_is_lru():
    shadow, exact = ShadowCache(LRU()), OrderedDict()
    for name in requests(3000, names=300, seed=3):
        found = shadow.access([name], 60)
        assert found == [name in exact]
        exact[name] = None
        exact.move_to_end(name)
        if len(exact) > 60:
            exact.popitem(last=False)
        assert len(shadow) == len(exact)


def test_in_a_shadow_pages_of_one_prompt_leave_from_its_end():
    for policy in (LRU(), Tenure()):
        shadow = ShadowCache(policy)
        shadow.access([1, 2, 3, 4], 6)
        shadow.access([11, 12, 13, 14], 6)
        assert shadow.access([1, 2, 3, 4], 6)[:2] == [True, True]
        assert shadow.access([11, 12, 13, 14], 6)[2:] == [False, False]


def test_it_changes_over_to_what_finds_more_and_back():
    duel = Duel()
    assert isinstance(duel.leader, LRU)
    told(duel, again_and_again(4000, 0), 3000)
    assert isinstance(duel.leader, Tenure)
    told(duel, used_often_and_then_never(9000, 10**6), 3000)
    assert isinstance(duel.leader, LRU)
    assert duel.switches >= 2


def test_it_stays_with_lru_where_both_find_the_same():
    duel = Duel()
    told(duel, range(20_000), 2000)
    told(duel, [name % 1000 for name in range(20_000)], 2000)
    assert isinstance(duel.leader, LRU)
    assert duel.switches == 0


def test_its_score_is_that_of_whoever_leads():
    duel = Duel()
    used = PageFacts(4096, 0, 100, 7)
    duel.leaves(used, 40.0, 100)
    assert duel.score(used) == 100
    told(duel, again_and_again(4000, 0), 3000)
    assert duel.score(used) == pytest.approx(100 + 0.7 * 3 * 60)


class Scripted:
    """Says that it has found ``found`` pages of each access."""

    def __init__(self, found: int) -> None:
        self.found = found

    def access(self, pages, capacity):
        return [at < self.found for at in range(len(pages))]

    def keep_below(self, limit):
        pass


@pytest.mark.parametrize(("more", "worth_it"), [(10, False), (50, True)])
def test_a_lead_that_is_sure_but_small_is_not_worth_a_change(more, worth_it):
    """Of 1800 hits, 10 more are half a hundredth, and 50 nearly three."""
    duel = Duel()
    duel._shadows = Scripted(1800), Scripted(1800 + more)
    for _ in range(50):
        duel.accessed(range(2000), 4000)
    assert isinstance(duel.leader, Tenure) == worth_it


@pytest.mark.parametrize("capacity", [300, 30_000, 1_000_000])
def test_the_sample_stays_small(capacity):
    duel = Duel()
    told(duel, range(40_000), capacity)
    share = duel.watched / FINGERPRINTS
    assert duel.watched <= MOST_WATCHED
    assert capacity * share <= 513
    assert capacity < 5000 or capacity * share > 200
    assert all(len(shadow) <= 513 for shadow in duel._shadows)


def test_a_cache_under_it_comes_close_to_the_better_one():
    """What counts: the hits of the whole, with the time it takes to see who is better."""

    class Told(PlainCache):
        def ask(self, name):
            if fingerprint(name) < duel.watched:
                duel.accessed([fingerprint(name)], 3000)
            return super().ask(name)

    for traffic in (again_and_again(1500, 0), used_often_and_then_never(3000, 10**6)):
        duel = Duel()
        names = list(traffic)
        hits = []
        for cache in (Told(duel, 3000), PlainCache(LRU(), 3000), PlainCache(Tenure(), 3000)):
            hits.append(sum(cache.ask(name) for name in names))
        assert hits[0] >= 0.99 * hits[1]
        assert hits[0] >= 0.9 * max(hits)
