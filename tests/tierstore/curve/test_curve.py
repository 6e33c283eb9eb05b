"""The estimate against brute force."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.tierstore.curve.exact import (
    distances,
    hit_rates,
    keys_of,
    long_documents,
    mooncake,
    shared_beginnings,
)
from tierstore.curve import ReuseCurve
from tierstore.curve.curve import MOST_PAGES
from tierstore.curve.groups import ABOVE_ALL, groups
from tierstore.curve.notes import MOST
from tierstore.curve.recency import Recency, Uses
from tierstore.curve.table import worth
from tierstore.testing.clock import ManualClock

PAGE = 1 << 20
PAGE_TOKENS = 64
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


def replay(curve, prompts, page_bytes=PAGE):
    """Ask for each prompt, and save what is missing of it."""
    for keys in prompts:
        asked = groups(keys)
        tokens = len(keys) * PAGE_TOKENS
        curve.notes.looked_up(asked, tokens, 0, PAGE_TOKENS, page_bytes)
        curve.notes.saved(asked, tokens, PAGE_TOKENS, page_bytes)
        if curve.notes.enough.is_set():
            curve.work()


def errors(trace) -> np.ndarray:
    """Estimated less exact hit rates of a trace, for four samples (other keys) and eight capacities."""
    unique = len({page for prompt in trace for page in prompt})
    capacities = [max(int(share * unique), 1) for share in SHARES]
    found = []
    for salt in range(4):
        curve = ReuseCurve()
        replay(curve, keys_of(trace, salt))
        curve.check()
        found.append(curve.hit_rates([capacity * PAGE for capacity in capacities]))
    return np.array(found) - hit_rates(trace, capacities)


def test_within_two_points_of_an_exact_replay_of_real_conversations():
    assert np.abs(errors(mooncake())).max() < 0.02


@pytest.mark.parametrize(("faster", "most"), [(4, 0.03), (8, 0.04)])
def test_within_four_points_when_lookups_come_many_times_faster_than_they_can_be_worked_off(faster, most):
    """The worker only comes when so many times as many notes as call it have come. The trace comes again and
    again, with other keys, so that there is time to get used to it: to no distance does that make a
    difference."""
    trace = mooncake()
    capacities = capacities_of(trace)
    curve = ReuseCurve()
    replay_faster(curve, trace, faster, salts=6)
    stats = curve.stats({}, 0.0)
    assert stats.left_out < 0.1 * 12 * len(trace)
    assert stats.asked_tokens == pytest.approx(6 * PAGE_TOKENS * sum(map(len, trace)), rel=0.1)
    found = curve.hit_rates([capacity * PAGE for capacity in capacities])
    assert np.abs(np.array(found) - hit_rates(trace, capacities)).max() < most


def few_prompts(prompts=80, *, pages=20, asked=3000, seed=0) -> list[list[int]]:
    """A working set of few prompts, the first of which are asked for most."""
    generator = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(prompts)]
    return [
        [prompt * pages + page for page in range(pages)]
        for prompt in generator.choices(range(prompts), weights, k=asked)
    ]


def same_lengths(prompts=1000, *, pages=8, asked=6000, seed=0) -> list[list[int]]:
    """Prompts that all end at the same place."""
    generator = random.Random(seed)
    return [
        [prompt * pages + page for page in range(pages)]
        for prompt in (generator.randrange(prompts) for _ in range(asked))
    ]


def replay_faster(curve, trace, faster, salts=1):
    """The worker only comes when so many times as many notes as call it have come."""
    came = 0
    for salt in range(salts):
        for keys in keys_of(trace, salt):
            tokens = len(keys) * PAGE_TOKENS
            curve.notes.prompt_looked_up(keys, tokens, 0, PAGE_TOKENS, PAGE, ABOVE_ALL)
            curve.notes.saved(groups(keys), tokens, PAGE_TOKENS, PAGE)
            came += 2
            if came >= faster * MOST // 2 and curve.notes.enough.is_set():
                curve.work()
                came = 0
    curve.check()


def capacities_of(trace) -> list[int]:
    unique = len({page for prompt in trace for page in prompt})
    return [max(int(share * unique), 1) for share in SHARES]


def test_where_all_prompts_end_at_the_same_place_of_a_cell_distances_are_right():
    trace = same_lengths()
    capacities = capacities_of(trace)
    curve = ReuseCurve()
    replay_faster(curve, trace, 4)
    assert curve.stats({}, 0.0).rate < 1
    found = np.array(curve.hit_rates([capacity * PAGE for capacity in capacities]))
    assert np.abs(found - hit_rates(trace, capacities)).max() < 0.06


@pytest.mark.parametrize("faster", [1, 16])
@pytest.mark.parametrize("make", [mooncake, few_prompts, shared_beginnings, long_documents])
def test_what_the_sample_cannot_tell_is_in_the_error(make, faster):
    """Also where the estimate is off by 20 points, because the pages in use are few and the load is high."""
    trace = make()
    capacities = capacities_of(trace)
    curve = ReuseCurve()
    replay_faster(curve, trace, faster)
    sizes = [capacity * PAGE for capacity in capacities]
    off = np.abs(np.array(curve.hit_rates(sizes)) - hit_rates(trace, capacities))
    errors = np.array(curve.errors(sizes))
    assert (off <= errors).mean() > 0.8
    assert (off <= 1.5 * errors + 0.01).all()
    if make is mooncake and faster == 1:
        assert errors.max() < 0.1, "nothing is said"


def test_when_groups_begin_to_stand_for_cells_what_is_known_grows_with_them():
    """Three pages, of which the second stands for no cell; then the first is asked for again."""
    recency = Recency()

    def use(hashes, widens):
        count = len(hashes)
        ones = np.ones(count, np.bool_)
        request, nbytes = np.zeros(count, np.int64), np.full(count, PAGE, np.complex128)
        return recency.use(
            Uses(np.array(hashes, np.uint64), np.array(widens, np.int64), request, nbytes, ones, ones, 1.0)
        )

    use([3, 2, 1], [7, 0, 5])
    recency.widen()
    recency.check()
    assert len(recency) == 2
    asked, above = use([3], [1])
    assert (asked.tolist(), above.tolist()) == ([0], [5 * PAGE])


def test_a_full_sample_has_no_error():
    curve = ReuseCurve()
    replay(curve, keys_of(shared_beginnings(50)))
    stats = curve.stats({"host": 1 << 30}, 0.0)
    assert stats.rate == 1
    assert {point.error for point in stats.points} == {0.0}


@pytest.mark.parametrize("make", [shared_beginnings, long_documents])
def test_hard_cases_are_within_two_points_as_a_rule(make):
    """Few prompts, of which a few pages decide most."""
    assert np.sqrt((errors(make()) ** 2).mean(axis=0)).max() < 0.02


def test_it_takes_less_than_a_megabyte():
    prompts = keys_of([*shared_beginnings(400), *mooncake()])
    tracemalloc.start()
    try:
        curve = ReuseCurve()
        replay(curve, prompts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    curve.check()
    assert peak < 1 << 20
    assert curve.stats({}, 0.0).sampled > MOST_PAGES // 2


# -- what the estimate rests on --------------------------------------------------------------------------

# Prompts in a forest: a page's number is that of its prefix.
steps = st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2), max_size=6)).map(lambda t: [t[0], *t[1]])


@given(st.lists(steps, min_size=1, max_size=30))
def test_distances_never_fall_along_a_prompt(prompts):
    """So what is counted page by page is what a lookup finds: a page is a hit only if all before it are."""
    trace = [[hash(tuple(prompt[: end + 1])) for end in range(len(prompt))] for prompt in prompts]
    found = iter(distances(trace))
    for prompt in trace:
        along = [smallest or 1 << 60 for _, smallest in (next(found) for _ in prompt)]
        assert along == sorted(along)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 8))
def test_without_sampling_it_is_exact(prompts, capacity, batches):
    """Up to the width of a bin, pages of two sizes, and worked off after any number of prompts."""
    assume(max(Counter(prompt[0] for prompt in prompts).values()) < 8)  # no beginning is a common one
    trace = [[hash(tuple(prompt[: end + 1])) for end in range(len(prompt))] for prompt in prompts]
    curve = ReuseCurve()
    sizes = {True: 3 << 20, False: 1 << 20}
    keys = keys_of(trace)
    for at, (prompt, prompt_keys) in enumerate(zip(trace, keys, strict=True)):
        replay(curve, [prompt_keys], sizes[_first_is_large(prompt)])
        if at % batches == 0:
            curve.check()
            curve.hit_rates([1.0])
    large = {page for prompt in trace if _first_is_large(prompt) for page in prompt}
    below, at_most = hit_rates(
        trace, [capacity * 0.92 * PAGE, capacity * 1.08 * PAGE], lambda page: sizes[page in large]
    )
    (found,) = curve.hit_rates([capacity * PAGE])
    assert below - 1e-9 <= found <= at_most + 1e-9


def _first_is_large(prompt):
    return prompt[0] % 2 == 0  # pages of one identity have one size, and no prefix is of two


def test_what_is_asked_for_and_never_saved_is_no_hit():
    curve = ReuseCurve()
    (keys,) = keys_of([list(range(50))])
    for _ in range(100):
        curve.notes.looked_up(groups(keys), 50 * 64, 0, 64, PAGE)
    assert curve.hit_rates([1e15]) == [0.0]


def test_what_the_store_found_is_known_though_nobody_has_saved_it_in_this_life():
    curve = ReuseCurve()
    (keys,) = keys_of([list(range(37))])
    for _ in range(100):  # more often than it takes to become a common beginning
        curve.notes.looked_up(groups(keys), 37 * 64, 24 * 64, 64, PAGE)
    # Twice something is seen for the first time: as single pages, and as a common beginning.
    assert curve.hit_rates([1e15]) == [pytest.approx(24 / 37 * 98 / 100, abs=0.001)]


def test_a_partial_tail_is_asked_for_and_never_found():
    curve = ReuseCurve()
    (keys,) = keys_of([[1, 2, 3]])
    for _ in range(2):
        curve.notes.looked_up(groups(keys), 3 * 64 + 63, 0, 64, PAGE)
        curve.notes.saved(groups(keys), 3 * 64, 64, PAGE)
    assert curve.hit_rates([1e15]) == [3 * 64 / 2 / (3 * 64 + 63)]


def test_what_lies_behind_the_horizon_is_forgotten():
    trace = [[page] for page in range(200)] * 2
    near, far = ReuseCurve(horizon_bytes=100 * PAGE), ReuseCurve(horizon_bytes=1000 * PAGE)
    for curve in (near, far):
        # One prompt at a time, as in a quiet store.
        for keys in keys_of(trace):
            replay(curve, [keys])
            curve.hit_rates([1.0])
        curve.check()
    assert near.stats({}, 0.0).ceiling == 0.0
    assert near.stats({}, 0.0).sampled == 100
    assert far.stats({}, 0.0).ceiling == 0.5


def test_what_is_long_past_counts_less():
    clock = ManualClock()
    curve = ReuseCurve(clock=clock)
    first, second = keys_of([[1, 2], [3, 4]])
    for _ in range(100):
        replay(curve, [first])
    assert curve.hit_rates([1e15])[0] > 0.98
    clock.advance(30 * 86_400)
    for number in range(100):
        replay(curve, keys_of([[number, -number]], salt=7))
    assert curve.hit_rates([1e15])[0] < 0.02
    replay(curve, [second])


def test_threads_may_feed_it_together():
    curve = ReuseCurve()
    prompts = keys_of(shared_beginnings(400))
    threads = [threading.Thread(target=replay, args=(curve, prompts[at::4])) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    curve.check()
    assert curve.stats({}, 0.0).asked_tokens == sum(map(len, prompts)) * PAGE_TOKENS


def test_the_table_marks_the_tiers_and_adds_to_the_coldest_that_holds_the_rest():
    curve = ReuseCurve()
    replay(curve, keys_of([[page] for page in range(100)] * 3))  # nothing below 100 pages, everything there
    stats = curve.stats({"hbm": 10 * PAGE, "host": 60 * PAGE, "disk": 40 * PAGE}, 0.25)
    assert stats.measured_hit_rate == 0.25
    assert stats.ceiling == pytest.approx(2 / 3)
    assert {tier: each.hit_rate for tier, each in stats.tiers.items()} == {"hbm": 0, "host": 0, "disk": 0}
    # A disk that is smaller than the host tier adds nothing until it is larger than that.
    assert stats.tiers["disk"].capacity_bytes == 60 * PAGE
    more = {
        tier: {each.share: each.added_hit_rate for each in worth.more} for tier, worth in stats.tiers.items()
    }
    assert more["host"][1] == pytest.approx(2 / 3)
    assert more["host"][0.5] == 0
    assert more["disk"][0.5] == 0
    assert more["disk"][2] == pytest.approx(2 / 3)
    assert {60 * PAGE, 10 * PAGE, 40 * PAGE} <= {point.capacity_bytes for point in stats.points}
    rates = [point.hit_rate for point in stats.points]
    assert rates == sorted(rates)


def test_more_room_never_takes_anything_away():
    """Not by a rounding, either: +-0.0 points."""
    rates = iter([0.5892881773053420, 0.5892881773053419] * 20)
    (host,) = worth(lambda _: next(rates), {"host": 1 << 20}).values()
    assert all(f"{more.added_hit_rate:+.1f}" == "+0.0" for more in host.more)
