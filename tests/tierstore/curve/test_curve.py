"""The estimate against brute force, and the thread that makes it."""

from __future__ import annotations

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tierstore
from tests.tierstore.curve.exact import (
    distances,
    hit_rates,
    keys_of,
    long_documents,
    mooncake,
    shared_beginnings,
)
from tierstore.curve import QUEUED, SAMPLE_PAGES, ReuseCurve
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore.testing.clock import ManualClock

PAGE = 1 << 20
PAGE_TOKENS = 64
SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")


def ask(curve, keys, page_bytes=PAGE):
    """Ask for a prompt, and save what is missing of it."""
    tokens = len(keys) * PAGE_TOKENS
    curve.looked_up(keys, tokens, 0, PAGE_TOKENS, page_bytes)
    curve.saved(keys, tokens, PAGE_TOKENS, page_bytes)


def replay(curve, prompts, page_bytes=PAGE):
    for keys in prompts:
        ask(curve, keys, page_bytes)
        curve.work()


def capacities_of(trace) -> list[int]:
    unique = len({page for prompt in trace for page in prompt})
    return [max(int(share * unique), 1) for share in SHARES]


def errors(trace, sample_pages=SAMPLE_PAGES) -> np.ndarray:
    """Estimated less exact hit rates of a trace, for four samples (other keys) and eight capacities."""
    capacities = capacities_of(trace)
    found = []
    for salt in range(4):
        curve = ReuseCurve(sample_pages=sample_pages)
        replay(curve, keys_of(trace, salt))
        curve.check()
        found.append(curve.hit_rates([capacity * PAGE for capacity in capacities]))
    return np.array(found) - hit_rates(trace, capacities)


def test_real_conversations_are_within_two_points_of_an_exact_replay():
    assert np.abs(errors(mooncake())).max() < 0.02


def test_a_sample_of_a_sixteenth_is_within_three_points():
    trace = mooncake()
    pages = len({page for prompt in trace for page in prompt})
    assert np.abs(errors(trace, sample_pages=pages // 16)).max() < 0.03


@pytest.mark.parametrize("make", [shared_beginnings, long_documents])
def test_few_prompts_that_decide_most_are_within_three_points_as_a_rule(make):
    assert np.sqrt((errors(make()) ** 2).mean(axis=0)).max() < 0.03


def test_it_takes_less_than_two_megabytes():
    prompts = keys_of([*shared_beginnings(400), *mooncake()])
    tracemalloc.start()
    try:
        curve = ReuseCurve()
        replay(curve, prompts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    curve.check()
    assert peak < 2 << 20
    assert curve.stats({}, 0.0).sampled > SAMPLE_PAGES // 2


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
@given(st.lists(steps, min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 40))
def test_without_sampling_it_is_exact(prompts, capacity, horizon):
    """But for the width of a bin: pages of two sizes, and a horizon that no capacity lies behind."""
    trace = [[hash(tuple(prompt[: end + 1])) for end in range(len(prompt))] for prompt in prompts]
    curve = ReuseCurve(horizon_bytes=max(horizon, capacity) * PAGE, sample_pages=256)
    sizes = {True: 3 << 20, False: 1 << 20}
    for prompt, keys in zip(trace, keys_of(trace), strict=True):
        replay(curve, [keys], sizes[_first_is_large(prompt)])
        curve.check()
    large = {page for prompt in trace if _first_is_large(prompt) for page in prompt}
    below, at_most = hit_rates(
        trace, [capacity * 0.95 * PAGE, capacity * 1.05 * PAGE], lambda page: sizes[page in large]
    )
    (found,) = curve.hit_rates([capacity * PAGE])
    assert below - 1e-9 <= found <= at_most + 1e-9


def _first_is_large(prompt):
    return prompt[0] % 2 == 0  # pages of one identity have one size, and no prefix is of two


def test_what_is_asked_for_and_never_saved_is_no_hit():
    curve = ReuseCurve()
    (keys,) = keys_of([list(range(50))])
    for _ in range(10):
        curve.looked_up(keys, 50 * 64, 0, 64, PAGE)
    assert curve.hit_rates([1e15]) == [0.0]


def test_what_the_store_found_is_known_though_nobody_has_saved_it_in_this_life():
    curve = ReuseCurve()
    (keys,) = keys_of([list(range(37))])
    for _ in range(50):
        curve.looked_up(keys, 37 * 64, 24 * 64, 64, PAGE)
    assert curve.hit_rates([1e15]) == [pytest.approx(24 / 37 * 49 / 50)]


def test_a_partial_tail_is_asked_for_and_never_found():
    curve = ReuseCurve()
    (keys,) = keys_of([[1, 2, 3]])
    for _ in range(2):
        curve.looked_up(keys, 3 * 64 + 63, 0, 64, PAGE)
        curve.saved(keys, 3 * 64, 64, PAGE)
    assert curve.hit_rates([1e15]) == [3 * 64 / 2 / (3 * 64 + 63)]


def test_what_lies_behind_the_horizon_is_forgotten():
    trace = [[page] for page in range(200)] * 2
    near, far = (ReuseCurve(horizon_bytes=pages * PAGE, sample_pages=256) for pages in (100, 1000))
    for curve in (near, far):
        replay(curve, keys_of(trace))
        replay(curve, keys_of([[-page] for page in range(1, 200)]))
        curve.check()
    assert near.stats({}, 0.0).ceiling == 0.0
    assert near.stats({}, 0.0).rate == 1.0, "pages behind the horizon have made the sample thinner"
    assert far.stats({}, 0.0).ceiling == pytest.approx(200 / 599, abs=0.05)
    assert far.stats({}, 0.0).rate < 1


def test_a_prompt_may_grow_while_it_waits_to_be_worked_off():
    curve = ReuseCurve()
    (keys,) = keys_of([list(range(200))])
    curve.looked_up(keys, 200 * 64, 0, 64, PAGE)
    keys += keys_of([list(range(1000, 2000))])[0]
    curve.saved(keys, len(keys) * 64, 64, PAGE)
    curve.looked_up(keys, len(keys) * 64, len(keys) * 64, 64, PAGE)
    stats = curve.stats({}, 0.0)
    assert stats.asked_tokens == 64 * (200 + 1200)
    assert stats.ceiling == pytest.approx(1200 / 1400)


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


# -- the queue and its thread ----------------------------------------------------------------------------


def test_what_finds_no_room_in_the_queue_is_left_out_and_counted():
    curve = ReuseCurve()
    for keys in keys_of([[number] for number in range(QUEUED + 10)]):
        curve.looked_up(keys, 64, 0, 64, PAGE)
    stats = curve.stats({}, 0.0)
    assert (stats.asked_tokens, stats.left_out) == (64 * QUEUED, 10)


class Watched(ReuseCurve):
    """Says when some of the queue has been worked off."""

    def __init__(self):
        super().__init__()
        self.worked = threading.Event()

    def work(self, prompts=QUEUED):
        super().work(prompts)
        self.worked.set()


class Held(ReuseCurve):
    """Begins to work, and goes on when it may."""

    def __init__(self):
        super().__init__()
        self.began = threading.Event()
        self.goes_on = threading.Event()

    def work(self, prompts=QUEUED):
        self.began.set()
        assert self.goes_on.wait(30)
        super().work(prompts)


def curve_threads() -> set[threading.Thread]:
    """The process's threads that measure a curve: stores of other tests may have theirs."""
    return {thread for thread in threading.enumerate() if thread.name == "tierstore-curve"}


def test_the_thread_works_off_what_waits_and_stops():
    others = curve_threads()
    curve = Watched()
    curve.start()
    prompts = keys_of([[number] for number in range(QUEUED)])
    for keys in prompts:
        curve.looked_up(keys, 64, 0, 64, PAGE)
    assert curve.worked.wait(30), "nothing works it off"
    curve.stop()
    assert curve_threads() <= others
    curve.worked.clear()
    for keys in prompts[: QUEUED // 2]:
        curve.saved(keys, 64, 64, PAGE)
    assert not curve.worked.is_set()
    curve.stats({}, 0.0)
    curve.looked_up(prompts[0], 64, 0, 64, PAGE)
    stats = curve.stats({}, 0.0)
    assert stats.ceiling == pytest.approx(1 / (QUEUED + 1 - stats.left_out), rel=0.5)


def test_the_thread_stops_also_in_the_middle_of_its_work():
    others = curve_threads()
    curve = Held()
    curve.start()
    for keys in keys_of([[number] for number in range(QUEUED)]):
        curve.looked_up(keys, 64, 0, 64, PAGE)
    assert curve.began.wait(30)
    stopping = threading.Thread(target=curve.stop, daemon=True)
    stopping.start()
    curve.goes_on.set()
    stopping.join(30)
    assert not stopping.is_alive()
    assert curve_threads() <= others


def test_a_store_is_measured_until_it_is_closed():
    identity = Identity.of(SPEC, model="measured")
    others = curve_threads()
    with tierstore.open(None, SPEC, identity=identity, host_bytes=1 << 20) as store:
        assert len(curve_threads() - others) == 1
        prompt = Prompt(identity, range(64 * 40 + 7), chunk_tokens=64)
        with store.lookup(prompt) as hit:
            assert hit.tokens == 0
        store.save(prompt, [bytes(SPEC.page_bytes)] * 40).wait(30)
        with store.lookup(prompt, max_tokens=64 * 39) as hit:
            assert hit.tokens == 64 * 39
        curve = store.stats().curve
        assert curve.asked_tokens == 64 * 79 + 7
        assert curve.ceiling == pytest.approx(64 * 39 / (64 * 79 + 7))
    assert curve_threads() <= others
