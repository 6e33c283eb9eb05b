"""Blocks taken together, and block by block: the same hits, the same order of leaving."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.replay.traces import conversation
from tierstore.policy import POLICIES, PageHint, Policy, Reuse
from tierstore_tools.replay.cache import Cache, Memory
from tierstore_tools.replay.oracle import Belady, BeladyHints, NextUses, OracleHints
from tierstore_tools.replay.simulator import Hinter, Simulator
from tierstore_tools.replay.trace import Request

SAVE_STEP = 64


class BlockByBlock:
    """What the simulator does, written down for the tiers of the tiered replay."""

    def __init__(self, policy: Policy, capacity: int, hints: Hinter | None) -> None:
        self.memory = Memory()
        self.cache = Cache(policy, capacity, self.memory)
        self._hints = hints
        self._number = 0

    def step(self, request: Request) -> int:
        cache, memory, blocks = self.cache, self.memory, request.blocks
        memory.now_s = request.timestamp_s
        cache.worth_less(memory.expire_hints())
        hit = kept = stop = cache.held(blocks)
        memory.use(blocks[:hit])
        cache.accessed(blocks[:hit])
        cache.hold(blocks[:hit])
        while True:
            stop = min(kept + SAVE_STEP, len(blocks))
            first, kept = kept, cache.store(blocks[:stop], kept)
            memory.saved(blocks[first:kept])
            cache.accessed(blocks[first:kept])
            if kept < stop or stop == len(blocks):
                break
        said = self._hints.hints(self._number, request) if self._hints is not None else None
        self._number += 1
        if said is not None:
            memory.hint(blocks[:kept], said)
            cache.worth_less(blocks[:kept])
        cache.release(blocks[:kept])
        return hit


class Whims:
    """Any hint for any block, some with a time to live. The same again for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def hints(self, number: int, request: Request) -> Sequence[PageHint] | None:
        if self._random.random() < 0.3:
            return None
        until_s = request.timestamp_s + self._random.randint(1, 6)
        kinds = [PageHint(reuse) for reuse in Reuse]
        kinds += [PageHint(Reuse.LIKELY, 0, until_s), PageHint(Reuse.UNKNOWN, self._random.randint(0, 3))]
        return [self._random.choice(kinds) for _ in request.blocks]


def same(make, capacity: int, requests: Sequence[Request], hints=lambda: None) -> int:
    """Replay both ways; returns the blocks that left."""
    alike, single = (
        Simulator(make(), capacity, hints=hints()),
        BlockByBlock(make(), capacity, hints()),
    )
    for number, request in enumerate(requests):
        assert alike.step(request) == single.step(request), f"request {number}"
        assert len(alike.tier) == len(single.cache)
    alike.tier.check()
    assert alike.result.evicted_blocks == single.cache.evicted_blocks
    return single.cache.evicted_blocks


def chained(prompts: Sequence[Sequence[int]]) -> list[Request]:
    ids: dict[tuple[int, ...], int] = {}
    return [
        Request(
            float(at),
            [ids.setdefault(tuple(prompt[:end]), len(ids)) for end in range(1, len(prompt) + 1)],
            len(prompt),
        )
        for at, prompt in enumerate(prompts)
    ]


# Prompts that part anywhere, and some that are longer than a step of a save.
prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=5), st.sampled_from([0, 0, 1, 3, 70, 130]), st.integers(0, 3)
    ).map(lambda each: [*each[0], *[7 + each[2]] * each[1]]),
    max_size=40,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(
    prompts=prompts, capacity=st.sampled_from([1, 3, 10, 40, 100, 300]), seed=st.none() | st.integers(0, 99)
)
def test_prompts_of_all_shapes(name, prompts, capacity, seed):
    same(POLICIES[name], capacity, chained(prompts), lambda: None if seed is None else Whims(seed))


@pytest.mark.parametrize("name", POLICIES)
def test_real_conversations(name):
    requests = conversation()[:300]
    assert same(POLICIES[name], 700, requests) > 1000
    uses = NextUses(requests)
    same(POLICIES[name], 700, requests, lambda: OracleHints(uses, 0.8))


def test_the_default_through_its_switches():
    duels = []

    def make():
        duels.append(POLICIES["default"]())
        return duels[-1]

    same(make, 1500, conversation()[:1200])
    assert duels[0].switches == duels[1].switches > 0


def test_belady():
    requests = conversation()[:300]
    uses = NextUses(requests)
    same(Belady, 700, requests, lambda: BeladyHints(uses))
