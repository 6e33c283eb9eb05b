"""The scheduling benchmark: its workloads, its simulator, and a small run with a real engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.errors import UsageError
from tierstore.planner import Prefill
from tierstore_tools.replay.trace import RawRequest, Trace
from tierstore_tools.scheduling import Bench, conversation, orders, run, simulate, timed, tree

TRACE = Path("tests/data/mooncake/conversation_2000.jsonl.gz").absolute()
SMALL = Bench(
    model="tiny",
    workloads=("conversation", "tree", "simulated"),
    trace=TRACE,
    requests=12,
    scale=64,
    load=0.9,
    pool_tokens=8192,
    host_bytes=8 << 20,
    overtake_s=5.0,
    rounds=1,
    clock="cpu",
    seed=1,
    simulated_tokens_per_s=8000.0,
    simulated_cache_tokens=1_000_000,
    simulated_overtake_s=60.0,
)


def trace_of(*prompts: tuple[float, tuple[int, ...]]) -> Trace:
    trace = Trace(8)
    for at, ids in prompts:
        trace.append(RawRequest(at, ids, 8 * len(ids), 16))
    trace.close()
    return trace


def test_prompts_share_what_they_share_in_the_trace() -> None:
    trace = trace_of((0.0, (1, 2, 3)), (2.0, (1, 2, 4)), (4.0, (5,)))
    first, second, third = conversation(trace, requests=3, scale=2, longest=100, seed=0)
    assert len(first.prompt) == 12
    assert first.prompt[:8] == second.prompt[:8]
    assert first.prompt[8:] != second.prompt[8:]
    assert third.prompt != first.prompt[:4]
    assert [request.answer for request in (first, second, third)] == [8, 8, 8]
    [short] = conversation(trace, requests=1, scale=2, longest=10, seed=0)
    assert len(short.prompt) + short.answer < 10
    assert [request.at for request in timed([first, second, third], 10.0)] == [0.0, 5.0, 10.0]


def test_the_tree_is_the_same_each_time() -> None:
    made = tree(requests=50, seed=3)
    assert made == tree(requests=50, seed=3)
    assert len({request.prompt for request in made}) == 50
    assert len({request.prompt[:256] for request in made}) == 1
    assert len({request.prompt[:1024] for request in made}) > 1


def test_the_simulator_counts_what_the_orders_do() -> None:
    trace = trace_of((0.0, (1, 2, 3, 4, 5, 6, 7, 8)), (1.0, (9, 10, 11, 12)), (2.0, (13,)))
    prefill = Prefill(1.0)
    found = {}
    for name, order in orders(prefill, block_tokens=8, overtake_s=1000.0).items():
        found[name] = simulate(trace, order, prefill, requests=3, stretch=1.0, cache_tokens=10**6)
    assert found["fcfs"] == ([64.0, 95.0, 102.0], 0.0)
    assert found["cache"] == found["least left"] == ([64.0, 103.0, 70.0], 0.0)
    assert found["longest match"] == found["fcfs"]
    again = trace_of((0.0, (1, 2)), (100.0, (1, 2)))
    fcfs = orders(prefill, block_tokens=8, overtake_s=0.0)["fcfs"]
    ttft_s, hit_rate = simulate(again, fcfs, prefill, requests=2, stretch=1.0, cache_tokens=10**6)
    assert ttft_s == [16.0, 1.0]
    assert hit_rate == 15 / 32


def test_a_small_run_has_a_row_for_each_schedule(tmp_path: Path) -> None:
    target = tmp_path / "scheduling.json"
    run(SMALL, json=str(target))
    document = json.loads(target.read_text())
    rows = {(row["workload"], row["schedule"]): row for row in document["schedules"]}
    assert len(rows) == 4
    for (_, schedule), row in rows.items():
        assert row["requests"] == 12
        assert row["ttft_mean_s"] > 0
        assert row["tokens_per_s"] > 0
        assert 0 <= row["hit_rate"] < 1
        if schedule == "fcfs":
            assert row["ttft_mean_over_fcfs"] == 1
            assert row["longest_extra_s"] == 0
    assert rows["tree", "cache"]["hit_rate"] > 0.15  # the system prompt
    assert {each["order"] for each in document["simulated"]} >= {"fcfs", "cache"}


def test_what_cannot_be_run_is_said_in_a_line() -> None:
    with pytest.raises(UsageError, match="no workload 'chat'"):
        run(replace(SMALL, workloads=("chat",)), json=None)
    with pytest.raises(UsageError, match="need a --trace"):
        run(replace(SMALL, trace=None), json=None)
    with pytest.raises(UsageError, match="--clock is one of wall, cpu"):
        run(replace(SMALL, clock="sun"), json=None)
    with pytest.raises(UsageError, match="must divide"):
        conversation(Trace(8), requests=1, scale=3, longest=10, seed=0)
