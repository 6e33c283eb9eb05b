"""The simulations agree with arithmetic where arithmetic has an answer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.portions import chosen
from tierstore.errors import UsageError
from tierstore_tools import plan
from tierstore_tools.cli import app
from tierstore_tools.plan import (
    ClusterCosts,
    ClusterTraffic,
    HandoverCosts,
    HandoverRequests,
    compare,
    highest_rate,
    simulate_cluster,
    simulate_handover,
)

CLUSTER_COSTS = ClusterCosts(20e-6, 0.2e-6, 1.4e-9, 0.5e-9)
TRAFFIC = ClusterTraffic(
    requests_per_s=4.0,
    tokens=6400,
    chunk_tokens=64,
    page_bytes=1 << 20,
    asking=0.5,
    found=0.4,
    published=0.2,
    link_bytes_per_s=1e9,
)
NBYTES = 100 << 20
COSTS = HandoverCosts(step_s=0.01, sequence_s=0.001, token_s=0.0005, prefill_chunk=1000, handover_s=0.02)
REQUESTS = HandoverRequests(tokens=4000, answer=50, ttft_s=10.0, itl_s=0.2)
QUIET = 0.001  # requests a second that never meet


@pytest.mark.parametrize("hosts", [10, 100, 1000])
def test_utilisation_follows_from_the_load(hosts):
    result = simulate_cluster(hosts, TRAFFIC, CLUSTER_COSTS)
    asked_per_s = hosts * 4.0 * 0.5
    assert result.master_busy == pytest.approx(asked_per_s * (20e-6 + 100 * 0.2e-6), rel=0.1)
    moved_per_s = 4.0 * 0.5 * (0.4 + 0.2) * NBYTES
    assert result.link_busy == pytest.approx(moved_per_s / 1e9, rel=0.1)
    assert result.host_cores == pytest.approx(moved_per_s * 1.4e-9, rel=0.1)
    assert result.fetch_p50_s > 0.999 * NBYTES / 1e9
    assert result.late_lookups == 0


def test_a_master_with_too_many_hosts_is_late_and_nothing_is_fetched_then():
    busy = simulate_cluster(20_000, TRAFFIC, CLUSTER_COSTS)
    assert busy.master_busy > 0.99
    assert busy.late_lookups > 0.5
    assert busy.link_busy < simulate_cluster(100, TRAFFIC, CLUSTER_COSTS).link_busy


def test_a_slow_link_queues():
    slow = simulate_cluster(100, replace(TRAFFIC, link_bytes_per_s=2e8), CLUSTER_COSTS)
    assert slow.fetch_p99_s > 2 * NBYTES / 2e8


def test_a_request_alone_takes_the_time_of_its_steps():
    decode_s = COSTS.step_s + COSTS.sequence_s
    together = simulate_handover(QUIET, 0, 2, REQUESTS, COSTS)
    assert together.ttft_p50 == pytest.approx(4 * COSTS.step_s + 4000 * COSTS.token_s)
    assert together.itl_p99 == pytest.approx(decode_s)
    apart = simulate_handover(QUIET, 1, 1, REQUESTS, COSTS)
    assert apart.ttft_p50 == pytest.approx(together.ttft_p50 + COSTS.handover_s)
    assert apart.itl_p99 == pytest.approx(decode_s)


def test_a_prompt_delays_the_sequences_that_decode_beside_it_and_no_others():
    busy = 0.3
    assert simulate_handover(busy, 0, 2, REQUESTS, COSTS).itl_p99 > 1000 * COSTS.token_s
    apart = simulate_handover(busy, 1, 1, REQUESTS, COSTS)
    assert apart.itl_p99 < COSTS.step_s + 10 * COSTS.sequence_s


@pytest.mark.parametrize("engines", chosen([2, 4], 2))
def test_the_highest_rate_is_below_the_speed_of_prefill(engines):
    loose = replace(REQUESTS, itl_s=10.0, ttft_s=20.0)
    together, _ = highest_rate(0, engines, loose, COSTS)
    assert 0.6 < together * (4000 * COSTS.token_s + 4 * COSTS.step_s) / engines < 1.1
    point = compare(engines, loose, COSTS)
    assert point.together == together
    assert point.apart < together, "with loose limits, an engine that only decodes is an engine less"
    strict = compare(engines, REQUESTS, COSTS)
    assert strict.together < 0.6 * together, "prompts beside sequences break the limit"
    assert strict.apart > strict.together
    assert 0 < strict.prefill < engines


def test_a_limit_that_nothing_meets():
    point = compare(2, replace(REQUESTS, ttft_s=0.001), COSTS)
    assert (point.together, point.apart) == (0, 0)


def test_one_engine_cannot_be_split():
    with pytest.raises(UsageError, match="at least 2"):
        plan.run_handover([1], [50], REQUESTS, COSTS, json=None)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["cluster", "--hosts", "10,100"], "hosts"),
        (["handover", "--engines", "2", "--answer", "8"], "points"),
    ],
)
def test_the_commands_show_and_write(tmp_path, arguments, rows):
    out = tmp_path / "plan.json"
    result = CliRunner().invoke(app, ["plan", *arguments, "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())[rows]
