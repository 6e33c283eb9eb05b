from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierstore.planner import Plan, Planner, Prefill, RateEstimate, TierPart, TierRate, fit_prefill, plan

BYTES = 1000  # of a token
bytes_per_s = st.floats(1e3, 1e12)
rates = st.builds(TierRate, bytes_per_s, st.floats(0, 1), st.floats(0, 5))
prefills = st.builds(Prefill, st.floats(1e-6, 1e-1), st.floats(0, 1e-5))


@st.composite
def hits(draw):
    sizes = [draw(st.integers(0, 20_000)) for _ in range(3)]
    parts = [
        TierPart(tier, size, 0 if tier == "hbm" else size * BYTES)
        for tier, size in zip(("hbm", "host", "disk"), sizes, strict=True)
        if size
    ]
    assume(parts)
    return parts


def total(parts) -> int:
    return sum(part.tokens for part in parts)


problems = st.tuples(
    hits(),
    st.integers(1, 20_000),
    st.fixed_dictionaries({"host": rates, "disk": rates}),
    prefills,
    st.booleans(),
)


def solve(problem) -> Plan:
    parts, rest, by_tier, prefill, both = problem
    return plan(parts, total(parts) + rest, by_tier, prefill, block=8 if both else 0)


def near(value: float) -> float:
    return value * (1 + 1e-9) + 1e-12


@given(problems)
def test_a_plan_is_never_slower_than_computing_and_never_exceeds_its_own_deadline(problem):
    parts, rest, _, prefill, _ = problem
    made = solve(problem)
    free = parts[0].tokens if parts[0].tier == "hbm" else 0
    prompt = total(parts) + rest
    assert made.ttft_s <= near(prefill.seconds(prompt - free, free))
    assert made.deadline_s is not None
    assert made.load_s <= near(made.deadline_s)
    assert made.tokens + sum(made.declined.values()) == total(parts)
    assert free <= made.meeting_point <= made.tokens


@given(problems, st.sampled_from(["host", "disk"]), st.floats(1, 1e4))
def test_more_bandwidth_never_makes_a_plan_worse(problem, tier, times):
    parts, rest, by_tier, prefill, both = problem
    faster = {**by_tier, tier: replace(by_tier[tier], bytes_per_s=by_tier[tier].bytes_per_s * times)}
    assert solve((parts, rest, faster, prefill, both)).ttft_s <= near(solve(problem).ttft_s)


@given(problems, st.integers(1, 20_000))
def test_a_longer_hit_never_makes_a_plan_worse(problem, more):
    parts, rest, by_tier, prefill, both = problem
    assume(more < rest)
    last = parts[-1]
    longer = [
        *parts[:-1],
        TierPart(last.tier, last.tokens + more, last.nbytes + (more * BYTES if last.nbytes else 0)),
    ]
    # Where both ends meet is a whole token, and so is the difference that this can make.
    token_s = prefill.seconds(1, total(parts) + rest) if both else 0.0
    assert solve((longer, rest - more, by_tier, prefill, both)).ttft_s <= near(
        solve(problem).ttft_s + token_s
    )


@given(problems)
def test_from_both_ends_is_never_worse_than_one_way(problem):
    parts, rest, by_tier, prefill, _ = problem
    one, both = (solve((parts, rest, by_tier, prefill, both_ends)) for both_ends in (False, True))
    assert both.ttft_s <= near(one.ttft_s + prefill.seconds(1, total(parts) + rest))


def test_where_both_take_equally_long_they_meet_in_the_middle_and_it_takes_little_more_than_half():
    made = plan([TierPart("disk", 1000, 1e6)], 1001, {"disk": TierRate(1e6)}, Prefill(0.001), block=1)
    assert made.meeting_point == pytest.approx(500, abs=1)
    assert made.ttft_s == pytest.approx(0.668, rel=0.01)


def test_a_tier_that_is_faster_by_far_is_loaded_whole():
    made = plan([TierPart("host", 1000, 1e6)], 1001, {"host": TierRate(1e10)}, Prefill(0.001), block=1)
    assert (made.tokens, made.meeting_point) == (1000, 0)


def test_a_slow_part_is_declined_and_the_fast_one_before_it_is_not():
    parts = [TierPart("hbm", 10, 0), TierPart("host", 100, 1e5), TierPart("disk", 100, 1e5)]
    made = plan(parts, 300, {"host": TierRate(1e9), "disk": TierRate(1e3)}, Prefill(0.001))
    assert made.tokens == 110
    assert made.declined == {"disk": 100}


def test_an_unknown_tier_is_tried_with_a_deadline_and_without_a_prefill_speed_there_is_none():
    parts = [TierPart("disk", 1000, 1e6)]
    made = plan(parts, 1001, {}, Prefill(0.001))
    assert made.tokens == 1000
    assert made.deadline_s is not None
    assert 0 < made.deadline_s < 1
    assert plan(parts, 1001, {}, None).deadline_s is None


@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-7))
def test_a_prefill_speed_is_found_from_steps_at_several_positions(token_s, pair_s):
    true = Prefill(token_s, pair_s)
    found = fit_prefill([(512, behind, true.seconds(512, behind)) for behind in range(0, 8192, 512)])
    assert found.seconds(512, 20_000) == pytest.approx(true.seconds(512, 20_000), rel=1e-3)


@given(st.floats(1e7, 1e11), st.floats(0, 0.1))
def test_a_rate_is_found_from_loads_of_several_sizes(bytes_per_s, latency_s):
    estimate = RateEstimate()
    for at, size in enumerate((1e5, 1e6, 1e7, 3e6), 1):
        estimate.moved(size, latency_s + size / bytes_per_s, at * 5.0)
    rate = estimate.rate(20.0)
    assert rate is not None
    assert rate.seconds(5e6) == pytest.approx(latency_s + 5e6 / bytes_per_s, rel=1e-3)


def test_a_rate_is_pessimistic_about_what_is_slow_now_and_then():
    estimate = RateEstimate()
    for number in range(8):
        estimate.moved(1e6, 1.0 if number % 3 == 0 else 0.01, 2.0 * number)
    rate = estimate.rate(16.0)
    assert rate is not None
    assert rate.seconds(1e6) == pytest.approx(1.0)


@given(st.integers(1, 8), st.integers(4, 40), st.floats(0.0, 1.0))
def test_bytes_that_wait_for_one_another_are_counted_once(at_once, loads, late):
    """A device that takes a second for each load, asked for several at once. Of every other load it is told
    ``late``, when the next one has come, too."""
    estimate = RateEstimate()
    for number in range(loads):
        ended = number + 1.0 if number % 2 else number + 1.0 + late
        estimate.moved(1e6, ended - max(number - at_once + 1, 0), ended)
    rate = estimate.rate(loads + 1.0)
    assert rate is not None
    assert 0.7 < rate.seconds(1e6) < 2.5


def test_what_did_not_come_is_as_slow_as_that_until_more_is_known():
    estimate = RateEstimate()
    estimate.late(1e6, 1.0, 0.0)
    assert estimate.rate(1.0) == TierRate(1e6)
    estimate.moved(1e6, 2.0, 3.0)
    assert estimate.rate(3.0) == TierRate(pytest.approx(5e5))
    estimate.late(1e6, 1.0, 4.0)  # says nothing new
    assert estimate.rate(4.0) == TierRate(pytest.approx(5e5))
    estimate.late(1e6, 4.0, 9.0)
    assert estimate.rate(9.0) == TierRate(pytest.approx(2.5e5))
    estimate.moved(1e6, 2.0, 12.0)
    assert estimate.rate(12.0) == TierRate(pytest.approx(5e5))
    assert estimate.rate(100.0) is None


def disk_planner() -> tuple[Planner, list[TierPart]]:
    planner = Planner()
    planner.computed(1000, 0, 1.0)
    return planner, [TierPart("disk", 1000, 1e6)]


def test_a_disk_that_becomes_slow_is_declined_within_ten_requests():
    planner, parts = disk_planner()
    for at in range(30):
        planner.moved("disk", 1e6, 0.01, now_s=at)
    loads = 0
    while planner.plan(parts, 1001, now_s=30 + 5 * loads).tokens:
        planner.moved("disk", 1e6, 5.0, now_s=30 + 5 * loads)
        loads += 1
    assert 0 < loads <= 10


def test_a_disk_that_has_recovered_is_taken_again_within_a_minute():
    planner, parts = disk_planner()
    for at in range(-40, 1, 5):
        planner.moved("disk", 1e6, 5.0, now_s=at)
    taken = None
    for second in range(60):
        if planner.plan(parts, 1001, now_s=second).tokens:
            taken = second
            break
        if planner.take_probe("disk", second):
            planner.moved("disk", 1e5, 0.001, now_s=second)
    assert taken is not None
    assert taken > 0


def test_what_a_daemon_tells_counts_until_it_is_measured_here():
    planner, parts = disk_planner()
    planner.report("disk", TierRate(1e5), now_s=0.0)
    assert planner.plan(parts, 1001, now_s=0.0).declined == {"disk": 1000}
    planner.moved("disk", 1e6, 0.01, now_s=0.0)
    assert planner.plan(parts, 1001, now_s=0.0).tokens == 1000
    planner.report("disk", TierRate(1e5, backlog_s=60.0), now_s=0.0)  # but there is a queue in front of it
    assert planner.plan(parts, 1001, now_s=0.0).tokens == 0
