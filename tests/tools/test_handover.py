"""The hand-over benchmark and its simulation: a small run with real engines, and arithmetic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.errors import UsageError
from tierstore_tools.handover import Costs, Traffic, run
from tierstore_tools.handover_plan import Requests, compare, highest_rate, read_costs, simulate
from tierstore_tools.handover_plan import run as run_plan

SMALL = Traffic(
    model="tiny-text",
    tokens=640,
    answer=4,
    streams=1,
    rate_per_s=8.0,
    seconds=1.0,
    rounds=1,
    prefill_chunk=256,
    chunks=(),
    pairs=1,
    seed=1,
)
COSTS = Costs(step_s=0.01, sequence_s=0.001, token_s=0.0005, prefill_chunk=1000, handover_s=0.02)
REQUESTS = Requests(tokens=4000, answer=50, ttft_s=10.0, itl_s=0.2)
QUIET = 0.001  # requests a second that never meet


@pytest.mark.timeout(900)  # six processes, each of which imports torch
def test_a_run_measures_all_arrangements_and_what_a_simulation_needs(tmp_path: Path) -> None:
    target = tmp_path / "handover.json"
    run(SMALL, tmp_path, json=str(target))
    measured = json.loads(target.read_text())
    by_name = {each["arrangement"]: each for each in measured["mixed"]}
    assert set(by_name) == {"one", "two", "apart"}
    for each in by_name.values():
        assert each["prompts"] > 0
        assert each["failed"] == 0
        assert 0 < each["ttft_p50"] <= each["ttft_p99"]
        assert each["itl_p50"] <= each["itl_p99"]
    [row] = measured["handovers"]
    assert 0 < row["overlapped"] <= 1
    assert row["ttft_s"] == pytest.approx(row["prefill_s"] + row["decode_ttft_s"])
    ratio = by_name["apart"]["itl_p99"] / by_name["two"]["itl_p99"]
    assert measured["itl_p99_apart_to_two"] == pytest.approx(ratio)
    assert read_costs(target).token_s > 0


def test_a_request_alone_takes_what_its_steps_take() -> None:
    decode_s = COSTS.step_s + COSTS.sequence_s
    together = simulate(QUIET, 0, 2, REQUESTS, COSTS)
    assert together.ttft_p50 == pytest.approx(4 * COSTS.step_s + 4000 * COSTS.token_s)
    assert together.itl_p99 == pytest.approx(decode_s)
    apart = simulate(QUIET, 1, 1, REQUESTS, COSTS)
    assert apart.ttft_p50 == pytest.approx(together.ttft_p50 + COSTS.handover_s)
    assert apart.itl_p99 == pytest.approx(decode_s)


def test_a_prompt_is_seen_by_those_that_decode_beside_it_and_not_by_those_elsewhere() -> None:
    busy = 0.3
    assert simulate(busy, 0, 2, REQUESTS, COSTS).itl_p99 > 1000 * COSTS.token_s
    apart = simulate(busy, 1, 1, REQUESTS, COSTS)
    assert apart.itl_p99 < COSTS.step_s + 10 * COSTS.sequence_s


@pytest.mark.parametrize("engines", [2, 4])
def test_the_highest_rate_is_below_what_prefill_can_do(engines: int) -> None:
    loose = replace(REQUESTS, itl_s=10.0, ttft_s=20.0)
    together, _ = highest_rate(0, engines, loose, COSTS)
    assert 0.6 < together * (4000 * COSTS.token_s + 4 * COSTS.step_s) / engines < 1.1
    point = compare(engines, loose, COSTS)
    assert point.together == together
    assert point.apart < together, "where nobody minds, an engine that only decodes is an engine less"
    strict = compare(engines, REQUESTS, COSTS)
    assert strict.together < 0.6 * together, "prompts beside streams break the limit"
    assert strict.apart > strict.together
    assert 0 < strict.prefill < engines


def test_a_limit_that_nothing_meets() -> None:
    point = compare(2, replace(REQUESTS, ttft_s=0.001), COSTS)
    assert (point.together, point.apart) == (0, 0)


def test_what_cannot_be_run_is_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Hugging Face folder"):
        run(replace(SMALL, model="nothing"), tmp_path, json=None)
    with pytest.raises(UsageError, match="--tokens is at least 400"):
        replace(SMALL, tokens=100)
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(UsageError, match="has no costs"):
        read_costs(tmp_path / "no.json")
    with pytest.raises(UsageError, match="cannot read"):
        read_costs(tmp_path / "gone.json")
    with pytest.raises(UsageError, match="at least 2"):
        run_plan([1], [50], REQUESTS, COSTS, json=None)
