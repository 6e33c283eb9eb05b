from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.replay import synthetic
from tests.tools.replay.traces import conversation
from tierstore.policy import PageHint, Reuse
from tierstore_tools.replay.hints import BeladyHints, NextUses, OracleHints
from tierstore_tools.replay.policies import POLICY_NAMES
from tierstore_tools.replay.simulator import Simulator, simulate
from tierstore_tools.replay.trace import TraceRequest, extent

CAPACITY = 1500  # blocks
REQUESTS = 1000


def run(policy, requests, capacity, hints=None) -> float:
    simulator = Simulator(policy, capacity, hints=hints)
    for request in requests:
        simulator.step(request)
    return simulator.result.hit_rate


@functools.cache
def hit_rate(name: str, capacity: int = CAPACITY) -> float:
    return simulate(conversation()[:REQUESTS], name, capacity).hit_rate


@functools.cache
def belady() -> float:
    requests = conversation()[:REQUESTS]
    return run("belady", requests, CAPACITY, BeladyHints(NextUses(requests)))


def lru_by_definition(requests, capacity: int) -> float:
    """The most recently used blocks, whatever was done to get there. Of one request the first block counts as
    used last, for the others leave before it."""
    recent: dict[int, None] = {}  # the last one was used last
    hits = total = 0
    for request in requests:
        held = set(list(recent)[-capacity:])
        hits += next(
            (at for at, block in enumerate(request.blocks) if block not in held), len(request.blocks)
        )
        total += len(request.blocks)
        for block in reversed(request.blocks):
            recent.pop(block, None)
            recent[block] = None
        while len(recent) > capacity:
            del recent[next(iter(recent))]
    return hits / total


@pytest.mark.parametrize("capacity", [300, 2000])
def test_lru_is_what_its_definition_says(capacity):
    requests = conversation()[:300]
    assert simulate(requests, "lru", capacity).hit_rate == lru_by_definition(requests, capacity)


def test_with_room_for_everything_the_hit_rate_is_the_ideal():
    requests = conversation()[:300]
    whole = extent(requests)
    assert whole.requests == 300
    assert whole.blocks == sum(len(request.blocks) for request in requests)
    result = simulate(requests, "lru", whole.unique_blocks)
    assert result.hit_rate == whole.ideal > 0.05
    assert result.evicted_blocks == 0
    assert simulate(requests, "lru", whole.unique_blocks // 2).hit_rate < whole.ideal


def test_a_hit_ends_at_the_first_block_that_is_not_there():
    simulator = Simulator("lru", 10)
    assert simulator.step(TraceRequest(0, [1, 2, 3], 3)) == 0
    assert simulator.step(TraceRequest(1, [1, 2, 4], 3)) == 2
    assert simulator.step(TraceRequest(2, [1, 2, 3, 5], 4)) == 3
    assert simulator.step(TraceRequest(3, [9], 1)) == 0
    assert simulator.result.hit_blocks == 5
    assert simulator.result.blocks == 11


def test_a_prompt_that_does_not_fit_is_stored_as_far_as_it_does():
    simulator = Simulator("lru", 4)
    simulator.step(TraceRequest(0, [1, 2], 2))
    simulator.step(TraceRequest(1, list(range(10, 20)), 10))
    assert len(simulator.tier) == 4
    assert simulator.step(TraceRequest(2, list(range(10, 20)), 10)) == 4
    assert simulator.step(TraceRequest(3, [1], 1)) == 0


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=40)


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=10, deadline=None)
@given(prompts=prompts, capacity=st.integers(1, 12))
def test_what_a_tier_holds_is_closed_over_prefixes_and_never_too_much(name, prompts, capacity):
    simulator = Simulator(name, capacity)
    for at, prompt in enumerate(prompts):
        blocks = [hash(tuple(prompt[:end])) & 0xFFFFFFFF for end in range(1, len(prompt) + 1)]
        simulator.step(TraceRequest(at, blocks, len(blocks)))
        assert simulator.tier.held(blocks) == min(len(blocks), capacity)
        simulator.tier.check()


@pytest.mark.parametrize("name", ["lru", "2q", "default"])
def test_nobody_finds_more_than_belady(name):
    assert hit_rate(name) <= belady() < extent(conversation()[:REQUESTS]).ideal


def test_what_is_known_of_these_policies_comes_out():
    assert hit_rate("lru", 5000) >= hit_rate("lfu", 5000), "the order of the published figures"
    assert hit_rate("default") > 1.05 * hit_rate("lru")
    assert belady() > 1.5 * hit_rate("lru")


def test_hints_are_worth_the_more_the_more_often_they_are_right():
    requests = conversation()[:REQUESTS]
    rates = []
    for right in (0.1, 0.9, 1.0):
        hints = OracleHints(NextUses(requests), right)
        rates.append(run("default", requests, CAPACITY, hints))
    assert rates == sorted(rates)
    assert rates[0] < hit_rate("lru") < rates[1]
    assert rates[1] > 0.7 * belady()


def test_a_block_whose_time_is_over_leaves_first():
    class Hints:
        def hints(self, number, request):
            return [PageHint(Reuse.LIKELY, 0, 5.0)] if number == 0 else None

    def hit_at(now_s: float) -> int:
        simulator = Simulator("hinted", 2, hints=Hints())
        for at, block in ((0, 1), (1, 2), (now_s, 3)):
            simulator.step(TraceRequest(at, [block], 1))
        return simulator.step(TraceRequest(now_s, [1], 1))

    assert hit_at(4.0) == 1
    assert hit_at(6.0) == 0


@pytest.mark.parametrize(
    ("kind", "least"), [("chat", 1), ("documents", 1), ("phases", 0.99), ("drift", 0.96)]
)
def test_the_default_is_worse_than_lru_only_where_what_was_used_often_is_over(kind, least):
    requests = synthetic.GENERATORS[kind]()[:500]
    lru = simulate(requests, "lru", 2000).hit_rate
    assert simulate(requests, "default", 2000).hit_rate >= least * lru > 0


@pytest.mark.parametrize(("capacity", "least"), [(700, 1.05), (2000, 1.2), (12_000, 1)])
def test_the_default_finds_more_than_lru_in_conversations(capacity, least):
    lru, default = (simulate(conversation(), name, capacity).hit_rate for name in ("lru", "default"))
    assert default >= least * lru


def test_a_large_cache_of_pages_that_are_over_is_no_worse_than_lru():
    """Their scores have to fall when the first new pages are evicted too soon."""
    trace = synthetic.drift(3000)
    lru = simulate(trace, "lru", 8000)
    assert lru.evicted_blocks > 0
    assert simulate(trace, "default", 8000).hit_rate >= 0.99 * lru.hit_rate


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", synthetic.GENERATORS)
def test_the_default_is_at_no_capacity_much_worse_than_lru(kind):
    """Worst where what was used often is over at once, in a small cache."""
    trace = synthetic.GENERATORS[kind]()
    for capacity in (1000, 1500, 2000, 3000, 5000, 8000, 12_000, 20_000, 30_000, 50_000, 100_000):
        lru = simulate(trace, "lru", capacity).hit_rate
        assert simulate(trace, "default", capacity).hit_rate >= 0.93 * lru, f"{capacity} blocks"


def test_generators_make_the_same_traffic_again():
    for kind, generate in synthetic.GENERATORS.items():
        if kind in ("loop", "drift"):
            assert generate() == generate(), kind
    trace = synthetic.chat(200)
    assert trace == synthetic.chat(200) != synthetic.chat(200, seed=1)
    before: dict[int, int | None] = {}
    for kind in (synthetic.chat, synthetic.agents, synthetic.documents, synthetic.mixed):
        before.clear()
        made = kind(300)
        assert all(a.timestamp_s <= b.timestamp_s for a, b in itertools.pairwise(made))
        for request in made:
            for parent, block in zip([None, *request.blocks], request.blocks, strict=False):
                assert before.setdefault(block, parent) == parent, "ids are chained over prefixes"
