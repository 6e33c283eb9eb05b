from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore.planner import Prefill
from tierstore_tools.replay.machine import Bandwidths, Machine, read_bandwidths, read_prefill
from tierstore_tools.replay.simulator import simulate
from tierstore_tools.replay.tiered import Link, SimulatedWrites, TieredEngine, TieredRow, Waits
from tierstore_tools.replay.trace import RawRequest, Trace, extent

BLOCK = 64
BLOCK_BYTES = 1_000_000
FAST = Bandwidths(1e6, 1e6, 1e6)


def machine(hbm=0, host=0, disk=0, *, bandwidths=FAST, prefill=Prefill(0.001)) -> Machine:
    return Machine(hbm, host, disk, BLOCK_BYTES, bandwidths, prefill)


def conversations(seed: int, count: int = 400) -> Trace:
    """Chats of many users that grow by a few blocks a turn, all with one system prompt."""
    chance = random.Random(seed)
    trace = Trace(BLOCK)
    chats: list[list[int]] = []
    numbers = iter(range(1_000_000))
    system = [next(numbers) for _ in range(3)]
    for at in range(count):
        if not chats or chance.random() < 0.3:
            chats.append(list(system))
        chat = chance.choice(chats if chance.random() < 0.2 else chats[-12:])
        chat += [next(numbers) for _ in range(chance.randint(1, 6))]
        tokens = len(chat) * BLOCK + chance.choice((0, 10))
        name = f"{chats.index(chat)}"
        trace.append(RawRequest(at * 0.5, list(chat), tokens, 5, session=name))
    trace.close()
    return trace


def through(trace: Trace, machine: Machine, *, policy: str = "lru", prefetch: bool = False) -> TieredRow:
    engine = TieredEngine(machine, policy, block_tokens=trace.block_tokens, prefetch=prefetch)
    for request in trace:
        engine.step(request)
    return engine.row()


# -- hits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["hbm", "host"])
def test_one_tier_alone_hits_what_the_simulator_hits(tier):
    trace = conversations(1)
    row = through(trace, machine(**{tier: 150}))
    simulated = simulate(trace, "lru", 150)
    # The last token of a prompt is always computed.
    spare = sum(request.input_tokens == len(request.blocks) * BLOCK for request in trace)
    hits = row.hit_tokens.hbm + row.hit_tokens.host
    assert simulated.hit_blocks * BLOCK - spare <= hits <= simulated.hit_blocks * BLOCK
    assert simulated.hit_blocks > 0.2 * trace.blocks


def test_tiers_that_hold_everything_hit_what_is_there_to_hit():
    trace = conversations(2)
    row = through(trace, machine(hbm=50, host=150, disk=10**6))
    ideal = extent(trace).ideal * trace.blocks * BLOCK
    assert row.hit_tokens.hbm > 0
    assert row.hit_tokens.host > 0
    assert row.hit_tokens.disk > 0
    hits = row.hit_tokens.hbm + row.hit_tokens.host + row.hit_tokens.disk
    assert ideal - len(trace) <= hits <= ideal  # the last token of a prompt is always computed


def test_every_token_is_either_a_hit_or_computed_and_bytes_go_where_tokens_come_from():
    row = through(conversations(3), machine(hbm=40, host=100, disk=200))
    hits, moved = row.hit_tokens, row.moved_bytes
    assert moved.disk_to_host == pytest.approx(hits.disk / BLOCK * BLOCK_BYTES, rel=0.05)
    assert moved.host_to_hbm == pytest.approx((hits.host + hits.disk) / BLOCK * BLOCK_BYTES, rel=0.05)
    assert moved.host_to_disk > 0
    assert row.write_amplification > 1  # what the disk evicted was written again
    assert hits.hbm + hits.host + hits.disk <= row.hit_rate * row.input_tokens + 1


# -- time ------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 50),
    host_gb=st.sampled_from((0.01, 0.1, 20.0)),
    disk_gb=st.sampled_from((0.001, 0.05, 5.0)),
    prefetch=st.booleans(),
)
def test_a_store_is_never_slower_than_none(seed, host_gb, disk_gb, prefetch):
    trace = conversations(seed, 40)
    bandwidths = Bandwidths(host_gb, disk_gb, 1.0)
    prefill = Prefill(0.0002, 1e-7)
    engine = TieredEngine(
        machine(10, 30, 300, bandwidths=bandwidths, prefill=prefill),
        "lru",
        block_tokens=BLOCK,
        prefetch=prefetch,
    )
    for request in trace:
        assert engine.step(request) <= prefill.seconds(request.input_tokens) + 1e-12


def test_what_a_slow_disk_has_is_computed_again():
    trace = conversations(4)
    slow = through(trace, machine(20, 60, 10**6, bandwidths=Bandwidths(1e6, 1e-4, 1e6)))
    without = through(trace, machine(20, 60, 0, bandwidths=Bandwidths(1e6, 1.0, 1.0)))
    assert slow.hit_tokens.declined > 0
    assert slow.hit_tokens.disk < 0.05 * slow.hit_tokens.declined
    assert slow.ttft.mean_s == pytest.approx(without.ttft.mean_s, rel=0.02)


def test_the_time_to_a_first_token_is_loading_and_then_computing():
    trace = Trace(BLOCK)
    trace.append(RawRequest(0.0, [1, 2, 3, 4], 4 * BLOCK, 1))
    trace.append(RawRequest(9.0, [8, 9], 2 * BLOCK, 1))  # takes the places in HBM
    trace.append(RawRequest(20.0, [1, 2, 3, 4, 5], 5 * BLOCK, 1))
    trace.close()
    # 1 MB blocks at 0.01 GB/s are 0.1 s each; a block is computed in 0.64 s.
    engine = TieredEngine(
        machine(4, 100, 0, bandwidths=Bandwidths(0.01, 1.0, 1.0), prefill=Prefill(0.01)),
        "lru",
        block_tokens=BLOCK,
    )
    first, second, third = (engine.step(request) for request in trace)
    assert first == pytest.approx(4 * 0.64)
    assert second == pytest.approx(2 * 0.64)
    # Two blocks of the first prompt are still in HBM, two have to be loaded, one is new.
    assert third == pytest.approx(2 * 0.1 + 0.64)
    assert engine.row().hit_tokens.hbm == engine.row().hit_tokens.host == 2 * BLOCK


def test_a_load_waits_for_the_one_before_it():
    link = Link(0.001)
    assert link.move(10.0, 2_000_000) == pytest.approx(12.0)
    assert link.would_end(11.0, 1_000_000) == pytest.approx(13.0)
    assert link.move(11.0, 0) == 11.0
    assert link.move(20.0, 1_000_000) == pytest.approx(21.0)


def test_writes_that_would_wait_too_long_are_dropped():
    writes = SimulatedWrites(0.001, most_bytes=5_000_000)
    assert writes.room(0.0, 1_000_000) == 5
    writes.write(0.0, 4_000_000)
    assert writes.room(0.0, 1_000_000) == 1
    assert writes.room(2.5, 1_000_000) == 3
    row = through(conversations(5), machine(10, 20, 10**6, bandwidths=Bandwidths(1e6, 1e6, 0.002)))
    assert row.moved_bytes.not_written > 0


# -- before the next turn --------------------------------------------------------------------------------


def regular_turns(session_named: bool) -> Trace:
    """One agent that comes every ten seconds, among others that never come again and fill the host tier."""
    trace = Trace(BLOCK)
    requests = []
    for number in range(300):
        fresh = [10_000 + 8 * number + at for at in range(8)]
        requests.append((number * 1.0, fresh, f"once {number}"))
    for number in range(30):
        requests.append((number * 10.0 + 0.5, list(range(10 + number)), "agent"))
    for at_s, ids, name in sorted(requests):
        session = name if session_named else None
        trace.append(RawRequest(at_s, ids, len(ids) * BLOCK + 1, 1, session=session, stop="tool_use"))
    trace.close()
    return trace


@pytest.mark.parametrize("session_named", [True, False])
def test_a_regular_visitor_finds_its_pages_in_memory(session_named):
    trace = regular_turns(session_named)
    # The host tier forgets a page after 5 s; the disk reads a block in 10 ms.
    slow = machine(0, 60, 10**6, bandwidths=Bandwidths(100.0, 0.1, 1.0), prefill=Prefill(0.01))
    without = through(trace, slow)
    ahead = through(trace, slow, prefetch=True)
    assert without.hit_tokens.host < 0.1 * without.hit_tokens.disk
    assert ahead.hit_tokens.host > 5 * ahead.hit_tokens.disk
    assert ahead.moved_bytes.prefetched_used > 0.8 * ahead.moved_bytes.prefetched
    assert ahead.ttft.mean_s < without.ttft.mean_s
    assert without.moved_bytes.prefetched == 0


def test_nothing_is_read_ahead_that_is_in_memory_anyway():
    row = through(regular_turns(True), machine(0, 10**6, 10**6), prefetch=True)
    assert row.moved_bytes.prefetched == 0


# -- what the machine can do -----------------------------------------------------------------------------


def test_percentiles_are_waits_that_occurred():
    waits = Waits.of([float(number) for number in range(1, 101)])
    assert waits == Waits(50.5, 50.0, 90.0, 99.0)
    assert Waits.of([3.0]) == Waits(3.0, 3.0, 3.0, 3.0)
    assert Waits.of([]) == Waits(0.0, 0.0, 0.0, 0.0)


def test_the_speed_of_prefill_is_read_from_longctx(tmp_path):
    path = tmp_path / "longctx.json"
    true = Prefill(2e-4, 3e-9)
    rows = [
        {"case": "store_off"},
        {"case": "cold", "prompt_tokens": 100_000, "ttft_s": true.seconds(100_000)},
    ]
    path.write_text(json.dumps({"rows": rows}))
    assert read_prefill(path).seconds(100_000) == pytest.approx(true.seconds(100_000))
    sweep = [{"prompt_tokens": each, "cold_s": true.seconds(each)} for each in (1_000, 16_000, 64_000)]
    path.write_text(json.dumps({"rows": rows, "sweep": sweep}))
    fitted = read_prefill(path)
    assert (fitted.token_s, fitted.pair_s) == pytest.approx((true.token_s, true.pair_s))
    assert true.seconds(600) + true.seconds(400, 600) == pytest.approx(true.seconds(1000))


def test_bandwidths_are_read_from_tiers_at_the_nearest_page_size(tmp_path):
    path = tmp_path / "tiers.json"
    rows = [
        {"tier": tier, "op": op, "page_bytes": size, "gb_per_s": speed * size / 1e6}
        for tier, op, speed in (("hbm", "put", 3), ("disk", "get", 2), ("disk", "put", 1), ("host", "put", 9))
        for size in (1_000_000, 8_000_000)
    ]
    path.write_text(json.dumps({"rows": rows}))
    assert read_bandwidths(path, 1_200_000) == Bandwidths(3.0, 2.0, 1.0)
    assert read_bandwidths(path, 64_000_000) == Bandwidths(24.0, 16.0, 8.0)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{"tier": "hbm"}]}', '{"rows": 5}', "\x00"])
def test_files_of_something_else_are_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="tierstore-bench tiers --json"):
        read_bandwidths(path, 1000)
    with pytest.raises(UsageError, match="tierstore-bench longctx --json"):
        read_prefill(path)
