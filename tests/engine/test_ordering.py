"""Whose prompt is next, as a property: least mean, and nobody waits more than the bound longer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.keys import Identity, PageKey, Prompt
from tierstore.planner import Prefill
from tierstore.spec import KVSpec
from tierstore_engine.ordering import Place, Spent, WaitingEntry, common_chunks, passed, turns

CHUNK = 4
SPEED = Prefill(1.0)  # a second for each token
SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, dtype="float32", chunk_tokens=CHUNK)
IDENTITY = Identity.of(SPEC, model="none")

# A prompt is a walk down a tree: which branch it takes at each of its first chunks, and tokens of its own.
prompts = st.tuples(st.lists(st.integers(1, 2), max_size=3), st.integers(1, 30))


def keys_of(branches: Sequence[int]) -> list[PageKey]:
    tokens = [branch for branch in branches for _ in range(CHUNK)]
    return Prompt(IDENTITY, tokens, chunk_tokens=CHUNK).keys


@dataclass
class Arrival:
    at: float
    priority: int
    keys: list[PageKey]
    tokens: int


def order(entries: Sequence[WaitingEntry], bound_s: float = math.inf, now_s: float = 0.0) -> list[Place]:
    found = turns(entries, SPEED, chunk_tokens=CHUNK, bound_s=bound_s, now_s=now_s)
    return [turn.entry.place for turn in found]


def entries_of(shapes: Sequence[tuple[list[int], int]]) -> list[WaitingEntry]:
    return [
        WaitingEntry((0, age, age), keys_of(branches), CHUNK * len(branches) + own)
        for age, (branches, own) in enumerate(shapes)
    ]


def mean_s(entries: Sequence[WaitingEntry], places: Sequence[Place]) -> float:
    """The mean time to the first token in an order, where what is shared is computed once."""
    by_place = {entry.place: entry for entry in entries}
    now = total = 0.0
    done: list[WaitingEntry] = []
    for place in places:
        entry = by_place[place]
        held = max((common_chunks(entry.keys, other.keys) for other in done), default=0) * CHUNK
        now += entry.tokens - max(held, entry.held)
        total += now
        done.append(entry)
    return total / len(entries)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_no_other_order_has_a_lower_mean_if_nothing_is_shared(tokens: list[int]) -> None:
    entries = [WaitingEntry((0, age, age), [], count) for age, count in enumerate(tokens)]
    best = min(mean_s(entries, [e.place for e in some]) for some in permutations(entries))
    assert mean_s(entries, order(entries)) == pytest.approx(best)


@given(st.lists(prompts, min_size=1, max_size=8))
def test_turns_say_what_they_take(shapes: list[tuple[list[int], int]]) -> None:
    entries = entries_of(shapes)
    found = list(turns(entries, SPEED, chunk_tokens=CHUNK, bound_s=math.inf, now_s=0.0))
    assert {turn.entry.place for turn in found} == {entry.place for entry in entries}
    now = total = 0.0
    for turn in found:
        now += turn.seconds
        total += now
    assert total / len(entries) == pytest.approx(mean_s(entries, [turn.entry.place for turn in found]))


@given(st.lists(prompts, min_size=1, max_size=8))
def test_without_overtaking_it_is_first_come_first_served(shapes: list[tuple[list[int], int]]) -> None:
    entries = entries_of(shapes)
    assert order(entries, bound_s=0.0) == [entry.place for entry in entries]


def test_what_is_held_counts_as_computed() -> None:
    long = WaitingEntry((0, 0, 0), keys_of([1, 1, 1]), 13, held=12)
    assert order([long, WaitingEntry((0, 1, 1), [], 5)]) == [(0, 0, 0), (0, 1, 1)]
    long.held = 0
    assert order([long, WaitingEntry((0, 1, 1), [], 5)]) == [(0, 1, 1), (0, 0, 0)]


def test_a_priority_comes_first_whatever_it_takes() -> None:
    urgent, quick = WaitingEntry((-1, 1, 1), [], 1000), WaitingEntry((0, 0, 0), [], 1)
    assert order([quick, urgent]) == [urgent.place, quick.place]


def test_nobody_is_overtaken_past_its_deadline() -> None:
    first, quick = WaitingEntry((0, 0, 0), [], 100, deadline_s=104.0), WaitingEntry((0, 1, 1), [], 5)
    assert order([first, quick]) == [first.place, quick.place]
    assert order([first, quick], now_s=50.0) == [quick.place, first.place]  # that cannot be met any more
    first.deadline_s = 105.0
    assert order([first, quick]) == [quick.place, first.place]


arrivals = st.lists(
    st.builds(
        lambda gap, priority, shape: (gap, priority, shape),
        st.integers(0, 20),
        st.sampled_from([0, 0, 0, -1, 1]),
        prompts,
    ),
    min_size=1,
    max_size=14,
)


@dataclass(frozen=True)
class Served:
    """When a request has its first token, and for how long it was overtaken."""

    at: float
    overtaken_s: float


def served(requests: Sequence[Arrival], *, bound_s: float, step: int) -> dict[Place, Served]:
    """What becomes of each: chunks of ``step`` tokens are computed one after the other, and whose is
    decided anew before each."""
    now = 0.0
    ends: dict[Place, Served] = {}
    computed: list[WaitingEntry] = []
    waiting: list[WaitingEntry] = []
    coming = [
        (request.at, WaitingEntry((request.priority, number, number), request.keys, request.tokens))
        for number, request in enumerate(requests)
    ]
    while coming or waiting:
        if not waiting:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            waiting.append(coming.pop(0)[1])
        for entry in waiting:
            shared = (
                min(common_chunks(entry.keys, other.keys) * CHUNK, other.held // CHUNK * CHUNK)
                for other in (*computed, *waiting)
            )
            entry.held = max(entry.held, min(max(shared, default=0), entry.tokens - 1))
        turn = next(turns(waiting, SPEED, chunk_tokens=CHUNK, bound_s=bound_s, now_s=now))
        tokens = min(step, turn.entry.tokens - turn.entry.held)
        now += tokens
        turn.entry.held += tokens
        passed(waiting, Spent({turn.entry.place: 1}), tokens)
        if turn.entry.held == turn.entry.tokens:
            ends[turn.entry.place] = Served(now, turn.entry.overtaken_s)
            waiting.remove(turn.entry)
            computed.append(turn.entry)
    return ends


@given(arrivals, st.sampled_from([0.0, 3.0, 20.0, 100.0]), st.sampled_from([1, 4, 16]))
def test_no_request_waits_more_than_the_bound_longer(
    some: list[tuple[int, int, tuple[list[int], int]]], bound_s: float, step: int
) -> None:
    requests, now = [], 0
    for gap, priority, (branches, own) in some:
        now += gap
        requests.append(Arrival(now, priority, keys_of(branches), CHUNK * len(branches) + own))
    first_come = served(requests, bound_s=0.0, step=step)
    by_cache = served(requests, bound_s=bound_s, step=step)
    assert all(each.overtaken_s <= bound_s for each in by_cache.values())
    # Who had to wait may find more urgent requests coming meanwhile; who is most urgent finds none. (A step
    # that has begun is not interrupted, in either order.)
    most_urgent = min(place[0] for place in first_come)
    for place, first in first_come.items():
        if place[0] == most_urgent:
            assert by_cache[place].at <= first.at + bound_s + step


def test_who_is_in_line_is_not_overtaken_by_what_takes_no_time_either() -> None:
    older, loaded = WaitingEntry((0, 0, 0), [], 40), WaitingEntry((0, 1, 1), [], 20, held=20)

    def first(strict_prefix: Place | None) -> Place:
        found = turns(
            [older, loaded], SPEED, chunk_tokens=CHUNK, bound_s=1.0, now_s=0.0, strict_prefix=strict_prefix
        )
        return next(found).entry.place

    assert first(None) == loaded.place
    assert first(older.place) == older.place
