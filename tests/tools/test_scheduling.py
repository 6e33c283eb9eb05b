"""What ``--schedule cache`` is worth on real conversations, as docs/benchmarks.md says it.

A simulator serves the trace at its full lengths. It computes 8,000 tokens per second, one chunk after the
other, finds what an LRU cache of 3 million tokens holds, and decodes nothing."""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from tierstore.keys import PageKey
from tierstore.planner import Prefill
from tierstore_engine.ordering import Place, Spent, WaitingEntry, passed, turns
from tierstore_tools.replay import formats
from tierstore_tools.replay.trace import Trace

TRACE = Path("tests/data/mooncake/conversation_2000.jsonl.gz").absolute()
SPEED = Prefill(1 / 8000)
LOAD = 0.8  # share of the time in which the engine computes, if nothing is ever forgotten
CACHE_TOKENS = 3_000_000
CHUNK = 2048  # tokens between two decisions
ORDERED = 128  # the scheduler orders so many
BOUND_S = 60.0

Order: TypeAlias = Callable[[Sequence[WaitingEntry], float], WaitingEntry]
"""Choose whose chunk is next at a time."""


@cache
def the_trace() -> Trace:
    trace = formats.load(TRACE).trace
    assert isinstance(trace, Trace)
    return trace


def fcfs(entries: Sequence[WaitingEntry], now_s: float) -> WaitingEntry:
    return min(entries, key=lambda entry: entry.place)


def longest_match(entries: Sequence[WaitingEntry], now_s: float) -> WaitingEntry:
    return min(entries, key=lambda entry: (-entry.held, entry.place))


def by_cache(bound_s: float) -> Order:
    width = the_trace().block_tokens

    def first(entries: Sequence[WaitingEntry], now_s: float) -> WaitingEntry:
        return next(turns(entries, SPEED, chunk_tokens=width, bound_s=bound_s, now_s=now_s)).entry

    return first


class Pages:
    """The blocks that an LRU cache holds."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._blocks: OrderedDict[PageKey, None] = OrderedDict()

    def held(self, entry: WaitingEntry) -> int:
        count = next((n for n, key in enumerate(entry.keys) if key not in self._blocks), len(entry.keys))
        return min(count * self._width, entry.tokens - 1)

    def save(self, entry: WaitingEntry) -> None:
        for key in reversed(entry.keys[: entry.tokens // self._width]):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > CACHE_TOKENS // self._width:
            self._blocks.popitem(last=False)


def simulated(order: Order) -> list[float]:
    """The time to the first token of each request."""
    trace, slower = the_trace(), stretch()
    coming = [
        (
            request.timestamp_s * slower,
            WaitingEntry(
                (0, number, number),
                [PageKey(block.to_bytes(16, "big")) for block in request.blocks],
                request.input_tokens,
            ),
        )
        for number, request in enumerate(trace[:])
    ][::-1]
    arrived = {entry.place: at for at, entry in coming}
    pages, now = Pages(trace.block_tokens), 0.0
    waiting: list[WaitingEntry] = []
    begun: set[Place] = set()
    first_token_s: dict[Place, float] = {}
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            waiting.append(coming.pop()[1])
            waiting[-1].held = pages.held(waiting[-1])
        entry = order(waiting[:ORDERED], now)
        begun.add(entry.place)
        tokens = min(entry.tokens - entry.held, CHUNK)
        seconds = SPEED.seconds(tokens, entry.held)
        now += seconds
        entry.held += tokens
        passed(waiting, Spent({entry.place: 1}), seconds)
        if entry.held == entry.tokens:
            waiting.remove(entry)
            first_token_s[entry.place] = now - arrived[entry.place]
            pages.save(entry)
            for other in waiting:
                if other.place not in begun:
                    other.held = pages.held(other)
    return [first_token_s[place] for place in sorted(first_token_s)]


def stretch() -> float:
    """By how much slower requests come than in the trace, for this load."""
    requests, width = the_trace()[:], the_trace().block_tokens
    seen: set[int] = set()
    tokens = 0
    for request in requests:
        known = sum(block in seen for block in request.blocks)
        tokens += max(request.input_tokens - known * width, 1)
        seen.update(request.blocks)
    return SPEED.seconds(tokens) / LOAD / (requests[-1].timestamp_s - requests[0].timestamp_s)


def test_the_cache_order_is_worth_its_place() -> None:
    first_come, cached = simulated(fcfs), simulated(by_cache(BOUND_S))
    mean_s = statistics.fmean(cached)
    assert mean_s == pytest.approx(9.86, rel=0.01)  # as in docs/benchmarks.md
    assert mean_s < 0.3 * statistics.fmean(first_come)
    assert mean_s < 0.4 * statistics.fmean(simulated(longest_match))
    step_s = SPEED.seconds(CHUNK)
    longest_s = max(late - first for late, first in zip(cached, first_come, strict=True))
    assert longest_s <= BOUND_S + step_s


def test_a_bound_of_nothing_is_first_come_first_served() -> None:
    assert simulated(by_cache(0.0)) == simulated(fcfs)
