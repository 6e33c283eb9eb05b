"""The simulation agrees with arithmetic where that has an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierstore_tools.cluster_plan import Costs, Traffic, simulate

COSTS = Costs(20e-6, 0.2e-6, 1.4e-9, 0.5e-9)
TRAFFIC = Traffic(
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


@pytest.mark.parametrize("hosts", [10, 100, 1000])
def test_what_is_busy_is_what_the_load_makes_it(hosts):
    result = simulate(hosts, TRAFFIC, COSTS)
    asked_per_s = hosts * 4.0 * 0.5
    assert result.master_busy == pytest.approx(asked_per_s * (20e-6 + 100 * 0.2e-6), rel=0.1)
    moved_per_s = 4.0 * 0.5 * (0.4 + 0.2) * NBYTES
    assert result.link_busy == pytest.approx(moved_per_s / 1e9, rel=0.1)
    assert result.host_cores == pytest.approx(moved_per_s * 1.4e-9, rel=0.1)
    assert result.bring_p50_s > 0.999 * NBYTES / 1e9
    assert result.late_looks == 0


def test_a_master_with_too_many_hosts_is_late_and_nothing_is_brought_then():
    busy = simulate(20_000, TRAFFIC, COSTS)
    assert busy.master_busy > 0.99
    assert busy.late_looks > 0.5
    assert busy.link_busy < simulate(100, TRAFFIC, COSTS).link_busy


def test_a_slow_link_queues():
    slow = simulate(100, replace(TRAFFIC, link_bytes_per_s=2e8), COSTS)
    assert slow.bring_p99_s > 2 * NBYTES / 2e8
