from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tierstore.daemon.server.conftest import RunningDaemon
from tierstore.daemon.settings import Settings
from tierstore.errors import TierStoreError, UsageError
from tierstore_tools import connected, tiers
from tierstore_tools.connected_bytes import Sample, measure

DISK_OPS = [("disk", op) for op in ("put", "save", "get", "scatter")]
OPS = [*((tier, op) for tier in ("host", "hbm") for op in ("put", "get")), *DISK_OPS]


def test_every_tier_is_measured_beside_its_limit(tmp_path):
    result = tiers.run(tmp_path, [64 << 10, 1 << 20], total_bytes=8 << 20, rounds=1)
    assert [(row.tier, row.op) for row in result.rows] == OPS * 2
    for row in result.rows:
        assert row.gb_per_s > 0
        assert row.limit_fraction == pytest.approx(row.gb_per_s / result.limits[row.limit], rel=5)
        assert row.us_per_page == pytest.approx(row.page_bytes / row.gb_per_s / 1e3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [1000, 0, 1 << 30])
def test_page_sizes_that_cannot_be_measured_are_refused(tmp_path, size):
    with pytest.raises(UsageError, match="page size"):
        tiers.run(tmp_path, [size], total_bytes=1 << 20, rounds=1)


def test_the_command_prints_a_table_and_one_json_document(tmp_path):
    options = ["--page-bytes", "128KiB", "--total", "2MiB", "--rounds", "1", "--dir", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tierstore_tools.cli", "tiers", *options],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(done.stdout)
    assert set(document) == {"machine", "limits", "rows"}
    assert set(document["rows"][0]) >= {
        "tier",
        "op",
        "page_bytes",
        "gb_per_s",
        "us_per_page",
        "limit_fraction",
    }
    assert "of limit" in done.stderr


@pytest.fixture
def daemon(tmp_path):
    running = RunningDaemon(Settings(listen=(f"ipc://{tmp_path}/sock",), host_bytes=48 << 20))
    yield running
    running.stop()


@pytest.fixture
def briefly(monkeypatch):
    for name, value in {
        "_PROMPTS": 2,
        "_CLIENTS": 1,
        "_MANY": 4,
        "_MANY_PROCESSES": 1,
        "_MANY_S": 0.1,
    }.items():
        monkeypatch.setattr(connected, name, value)


def test_a_daemon_is_measured_beside_memcpy(daemon, briefly):
    result = connected.run(daemon.url, [64 << 10], total_bytes=8 << 20, rounds=1)
    rows = [(row.tier, row.op, row.limit) for row in result.rows]
    limits = {"daemon": "memcpy_gb_per_s", "daemon ×2": "memcpy_2_gb_per_s"}
    assert rows == [(tier, op, limit) for tier, limit in limits.items() for op in ("put", "get")]
    assert set(result.limits) == set(limits.values())
    for row in result.rows:
        assert row.limit_fraction == pytest.approx(row.gb_per_s / result.limits[row.limit])
    assert [(row.clients, row.op) for row in result.costs] == [(1, "put"), (1, "get"), (2, "put"), (2, "get")]
    for cost in result.costs:
        assert min(cost.client, cost.daemon, cost.copy) > 0
        assert cost.beyond_copy == pytest.approx(cost.client + cost.daemon - cost.copy)
    assert [(row.clients, row.page_bytes) for row in result.bounds] == [(1, 64 << 10), (2, 64 << 10)]
    for bound in result.bounds:
        assert min(bound.gb_per_s, bound.copy_fraction, bound.saved_fraction) > 0
    assert daemon.daemon.stats().store.counters["evicted_pages"]["host"] > 0, "the arena was full"
    assert [(row.prompt, row.lookups) for row in result.lookups] == [("whole", 2), ("tail", 20)]
    assert all(0 < row.p50_ms <= row.p99_ms for row in result.lookups)
    (many,) = result.requests
    assert (many.clients, many.tokens) == (4, 1024)
    assert 0 < many.least_share <= 1 < many.lookups_per_s


def test_over_tcp_the_limit_is_a_bare_pair_of_sockets(briefly):
    running = RunningDaemon(Settings(listen=("tcp://127.0.0.1:0",), host_bytes=48 << 20))
    try:
        result = connected.run(running.address, [1 << 20], total_bytes=8 << 20, rounds=1)
    finally:
        running.stop()
    assert [(row.op, row.limit) for row in result.rows] == [
        ("put", "zmq_pair_gb_per_s"),
        ("get", "zmq_pair_gb_per_s"),
    ]
    assert all(row.gb_per_s > 0 and row.limit_fraction > 0 for row in result.rows)
    assert not result.bounds


def test_no_daemon_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tierstore_tools.connected_bytes._CONNECT_S", 0.1)
    with pytest.raises(TierStoreError, match="there is no daemon"):
        connected.run(f"ipc://{tmp_path}/s", [1 << 20], total_bytes=8 << 20, rounds=1)


def test_a_client_process_that_fails_is_heard_of(daemon):
    sample = Sample(daemon.url, daemon.daemon.stats().pid, 1 << 20, 96 << 20, 1, clients=2)
    with pytest.raises(TierStoreError, match=r"(?s)a client process failed.*give it more --host-bytes"):
        measure(sample)


def test_a_daemon_that_is_too_small_is_said_so(daemon):
    with pytest.raises(TierStoreError, match="give it more --host-bytes"):
        connected.run(daemon.url, [1 << 20], total_bytes=96 << 20, rounds=1)
