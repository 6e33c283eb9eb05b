"""From which traffic on prefill and decode pay apart: a small simulation from measured costs.

Requests come at random and go to the engine with the fewest prompt tokens. An engine computes in steps, as
the bundled one does: a token for each sequence that decodes, and in what is left of a step a chunk of the
oldest prompt. Together, every engine does both. Apart, some engines do nothing but prompts, and a prompt's
sequence decodes at another engine ``handover_s`` later. Which split is best is tried.

An arrangement *serves* a rate when the 99th percentiles of the time to the first token and of the time
between tokens are within limits. It is a model of queues: all engines are alike, memory never runs out,
nothing is in the cache, and a hand-over takes what was measured on one host.
"""

from __future__ import annotations

import heapq
import itertools
import json as json_format
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from tierstore.errors import UsageError
from tierstore_tools import machine, report
from tierstore_tools.handover import Costs, percentile

_REQUESTS = 400  # for each engine …
_MOST_REQUESTS = 2_000  # … and of a simulation
_STEPS = 8  # of halving, in which the highest rate is found
_SPLITS = 7


@dataclass(frozen=True, slots=True)
class Requests:
    """Prompts of ``tokens`` tokens with ``answer`` generated; limits in seconds."""

    tokens: int
    answer: int
    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """What a rate comes to, in seconds."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


@dataclass(frozen=True, slots=True)
class Point:
    """``engines`` engines. ``together`` and ``apart`` are the highest rates of requests a second that are
    served within the limits (0: none is), ``prefill`` is how many engines compute prompts then."""

    engines: int
    together: float
    apart: float
    prefill: int
    together_at_its_best: Served
    apart_at_its_best: Served


@dataclass(slots=True, eq=False)
class _Engine:
    """Steps follow one another as long as there is something to do. A sequence that joins within a step is
    computed from the next one on. Steps that are all alike, since nothing but tokens is generated until a
    sequence ends, are one event, which is cut short when somebody comes."""

    prompts: deque[_Prompt] = field(default_factory=deque)
    queued_tokens: int = 0  # of these
    decoding: int = 0
    joining: list[float] = field(default_factory=list)  # when each had its last token
    joined: list[float] = field(default_factory=list)  # the same, of those whose first step this is
    ending: Counter[int] = field(default_factory=Counter)  # sequences by their last step
    step: int = 0
    computing: int = 0  # tokens of a prompt, in this step
    begun_at: float = 0.0  # these steps, of which there are …
    steps: int = 1
    step_s: float = 0.0
    stint: int = 0  # which of an engine's events still counts
    busy: bool = False

    @property
    def load(self) -> int:
        """What is to be done, in tokens."""
        return self.queued_tokens + self.decoding + len(self.joining)


@dataclass(slots=True, eq=False)
class _Prompt:
    came_at: float
    left: int


class _Simulation:
    """A run. What happens is in ``events``, in order of time."""

    def __init__(self, prefill: int, decode: int, requests: Requests, costs: Costs) -> None:
        engines = [_Engine() for _ in range(prefill + decode)]
        self._apart = bool(prefill)
        self._for_prompts, self._for_tokens = engines[: prefill or decode], engines[prefill:]
        self._requests = requests
        self._costs = costs
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._ttfts: list[float] = []
        self._gaps: list[tuple[float, int]] = []  # with how many there are of each

    def run(self, rate_per_s: float, count: int, seed: int) -> Served:
        draw, at = random.Random(seed), 0.0
        for _ in range(count):
            at += draw.expovariate(rate_per_s)
            self._at(at, partial(self._come, _Prompt(at, self._requests.tokens)))
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return Served(
            percentile(self._ttfts, 0.5),
            percentile(self._ttfts, 0.99),
            _weighted_percentile(self._gaps, 0.5),
            _weighted_percentile(self._gaps, 0.99),
        )

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _come(self, prompt: _Prompt, now: float) -> None:
        engine = min(self._for_prompts, key=lambda each: each.load)
        engine.prompts.append(prompt)
        engine.queued_tokens += prompt.left
        self._wake(engine, now)

    def _first_token(self, prompt: _Prompt, engine: _Engine | None, now: float) -> None:
        """Of a prompt that has been computed; ``engine`` goes on, or the one with the least to do."""
        self._ttfts.append(now - prompt.came_at)
        if self._requests.answer > 1:
            engine = engine or min(self._for_tokens, key=lambda each: each.load)
            engine.joining.append(now)
            self._wake(engine, now)

    def _wake(self, engine: _Engine, now: float) -> None:
        """Somebody has come."""
        if not engine.busy:
            self._begin(engine, now)
        elif engine.steps > 1:
            begun = int((now - engine.begun_at) / engine.step_s) + 1
            engine.steps = min(begun, engine.steps)
            self._plan(engine)

    def _plan(self, engine: _Engine) -> None:
        engine.stint += 1
        ends_at = engine.begun_at + engine.steps * engine.step_s
        self._at(ends_at, partial(self._stepped, engine, engine.stint))

    def _begin(self, engine: _Engine, now: float) -> None:
        costs = self._costs
        engine.begun_at = now
        if engine.joining:
            engine.ending[engine.step + self._requests.answer - 1] += len(engine.joining)
            engine.decoding += len(engine.joining)
        engine.joined, engine.joining = engine.joining, []
        engine.computing = 0
        if engine.prompts:
            room = max(costs.prefill_chunk - engine.decoding, 1)
            engine.computing = min(engine.prompts[0].left, room)
        engine.busy = bool(engine.computing or engine.decoding)
        if engine.busy:
            took = costs.step_s + engine.decoding * costs.sequence_s + engine.computing * costs.token_s
            engine.step_s = took
            engine.steps = 1 if engine.computing else min(engine.ending) - engine.step
            self._plan(engine)

    def _stepped(self, engine: _Engine, stint: int, now: float) -> None:
        if stint != engine.stint:
            return
        engine.step += engine.steps
        self._gaps.append((engine.step_s, engine.decoding * engine.steps - len(engine.joined)))
        first_at = engine.begun_at + engine.step_s
        self._gaps += [(first_at - last_at, 1) for last_at in engine.joined]
        engine.decoding -= engine.ending.pop(engine.step, 0)
        if engine.computing:
            prompt = engine.prompts[0]
            prompt.left -= engine.computing
            engine.queued_tokens -= engine.computing
            if not prompt.left:
                engine.prompts.popleft()
                if self._apart:
                    self._at(now + self._costs.handover_s, partial(self._first_token, prompt, None))
                else:
                    self._first_token(prompt, engine, now)
        self._begin(engine, now)


def simulate(
    rate_per_s: float, prefill: int, decode: int, requests: Requests, costs: Costs, *, seed: int = 1
) -> Served:
    """``decode`` engines, with ``prefill`` engines for prompts before them (0: they do both)."""
    count = min(_REQUESTS * (prefill + decode), _MOST_REQUESTS)
    return _Simulation(prefill, decode, requests, costs).run(rate_per_s, count, seed)


def highest_rate(prefill: int, decode: int, requests: Requests, costs: Costs) -> tuple[float, Served]:
    """The highest rate that is served within the limits, and how; 0 where one request at a time is not."""
    alone = requests.tokens * costs.token_s + requests.answer * (costs.step_s + costs.sequence_s)
    low, high = 0.0, 1.5 * (prefill or decode) / (requests.tokens * costs.token_s)
    best = simulate(0.01 / alone, prefill, decode, requests, costs)
    if not _within(best, requests):
        return 0.0, best
    for _ in range(_STEPS):
        middle = (low + high) / 2
        served = simulate(middle, prefill, decode, requests, costs)
        if _within(served, requests):
            low, best = middle, served
        else:
            high = middle
    return low, best


def compare(engines: int, requests: Requests, costs: Costs) -> Point:
    """The best that ``engines`` engines do together, and apart."""
    together, how = highest_rate(0, engines, requests, costs)
    found = [(*highest_rate(count, engines - count, requests, costs), count) for count in _splits(engines)]
    apart, how_apart, prefill = max(found, key=lambda each: each[0])
    return Point(engines, together, apart, prefill, how, how_apart)


def read_costs(file: Path) -> Costs:
    """What ``tierstore-bench handover --json`` has measured. Raises :class:`UsageError`."""
    try:
        return msgspec.convert(json_format.loads(file.read_text())["costs"], Costs)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} has no costs: make it with tierstore-bench handover --json") from error


def run(
    engines: Sequence[int],
    answers: Sequence[int],
    requests: Requests,
    costs: Costs,
    *,
    json: str | None,
) -> None:
    """Simulate, and print a table: for each number of tokens generated, each number of engines."""
    report.require_targets(json)
    if min(engines) < 2:
        raise UsageError("--engines are at least 2: one for prompts and one that goes on")
    points: list[tuple[int, Point]] = []
    with report.phases() as phases:
        for answer in answers:
            with phases.phase(f"answers of {answer} tokens") as phase:
                for number, count in enumerate(engines):
                    asked = Requests(requests.tokens, answer, requests.ttft_s, requests.itl_s)
                    points.append((answer, compare(count, asked, costs)))
                    phase.update((number + 1) / len(engines))
    report.table(
        f"prompts of {requests.tokens:,} tokens, requests a second with p99 of TTFT ≤ "
        f"{report.seconds(requests.ttft_s)} and of ITL ≤ {report.seconds(requests.itl_s)}",
        (
            "answer",
            "engines",
            "together",
            "apart",
            "prefill + decode",
            "apart is",
            "ITL p99 together",
            "apart",
        ),
        [
            (
                str(answer),
                str(point.engines),
                f"{point.together:.2f}",
                f"{point.apart:.2f}",
                f"{point.prefill} + {point.engines - point.prefill}",
                f"{point.apart / point.together:.2f} ×"
                if point.together
                else "the only one"
                if point.apart
                else "–",
                report.seconds(point.together_at_its_best.itl_p99),
                report.seconds(point.apart_at_its_best.itl_p99),
            )
            for answer, point in points
        ],
        to_stderr=json == "-",
    )
    document = {
        "machine": machine.describe(),
        "requests": {**asdict(requests), "answer": list(answers)},
        "costs": asdict(costs),
        "points": [{"answer": answer, **asdict(point)} for answer, point in points],
    }
    report.write_json(document, json)


def _splits(engines: int) -> list[int]:
    """Numbers of prefill engines to try: all, or some that are spread evenly."""
    tried = min(engines - 1, _SPLITS)
    return sorted({round(1 + at * (engines - 2) / max(tried - 1, 1)) for at in range(tried)})


def _weighted_percentile(values: Sequence[tuple[float, int]], share: float) -> float:
    """Of values with how many there are of each; 0 of none."""
    left = int(sum(count for _, count in values) * share)
    for value, count in sorted(values):
        left -= count
        if left < 0:
            return value
    return 0.0


def _within(served: Served, requests: Requests) -> bool:
    return served.ttft_p99 <= requests.ttft_s and served.itl_p99 <= requests.itl_s
