"""What scheduling by cache is worth: time to the first token, hit rate and throughput beside first come,
first served, on the same requests at the same times.

**Workloads.** ``conversation`` is a trace of real requests (:mod:`tierstore_tools.replay.formats`), scaled
down: a block of the trace becomes a ``scale``-th of its tokens, the same ones wherever the block comes again,
and answers are shorter by the same factor. ``tree`` is made up: documents under one system prompt, with
questions and follow-ups, in an order that a seed decides. Both come at the rate that keeps the engine busy
for ``load`` of the time: what it can do is measured first, by giving it all requests at once.

**Time.** ``wall`` is the clock. ``cpu`` is the processor time of this process, and jumps to the next request
where there is nothing to do: the same engine does the same work, and what else the machine does changes
little. Each schedule begins with an engine and a store that are empty.

``simulated`` is a simulator that takes the whole trace at its full lengths, for which one processor is too
slow. It computes one chunk after the other at a speed that is given, finds what an LRU cache of
``--simulated-cache`` tokens holds, and decodes nothing. It has two more orders: the longest match first, and
the least left without a bound and without regard to what is shared.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch

import tierstore
from tierstore.errors import UsageError
from tierstore.keys import PageKey
from tierstore.planner import Prefill
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import LoadedModel, load_model, make_runner
from tierstore_engine.engine import Engine
from tierstore_engine.ordering import Place, WaitingEntry, turns
from tierstore_engine.outputs import RequestId
from tierstore_engine.overtaking import Spent, passed
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import SCHEDULES, EngineSettings
from tierstore_tools import machine
from tierstore_tools.replay import formats
from tierstore_tools.replay.trace import Request as TracedRequest
from tierstore_tools.replay.trace import Trace
from tierstore_tools.report import Phase, percent, phases, require_targets, seconds, table, write_json

CLOCKS = ("wall", "cpu")
WORKLOADS = ("conversation", "tree", "simulated")

_VOCABULARY = 250
_TREE = ((1, 256), (24, 768), (4, 192), (4, 48))  # children of each node of a level, and tokens of each
_ANSWER = 8  # tokens, in the tree
_SIMULATED_CHUNK = 2048
_SIMULATED_ORDERED = 128
_IDLE_S = 0.0005
_PREFILL_PAGES = 8  # of a chunk
_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Bench:
    """``trace`` is what ``conversation`` and ``simulated`` read. ``pool_tokens`` and
    ``host_bytes`` are what the engine may keep pages in."""

    model: str
    workloads: tuple[str, ...]
    trace: Path | None
    requests: int
    scale: int
    load: float
    pool_tokens: int
    host_bytes: int
    overtake_s: float
    rounds: int
    clock: str
    seed: int
    simulated_tokens_per_s: float
    simulated_cache_tokens: int
    simulated_overtake_s: float

    @property
    def chunk_tokens(self) -> int:
        """Of a page: a block of Mooncake's traces, scaled."""
        return max(512 // self.scale, 1)

    def check(self) -> None:
        """Raises :class:`UsageError` for what cannot be run."""
        for name in self.workloads:
            if name not in WORKLOADS:
                raise UsageError(f"there is no workload {name!r}: known are {', '.join(WORKLOADS)}")
        if self.clock not in CLOCKS:
            raise UsageError(f"--clock is one of {', '.join(CLOCKS)}, not {self.clock!r}")
        if {"conversation", "simulated"} & set(self.workloads) and self.trace is None:
            raise UsageError("conversation and simulated need a --trace, as replay reads it")
        if not 0 < self.load < 4:
            raise UsageError(f"--load is a share of what the engine can do, above 0, not {self.load:g}")


@dataclass(frozen=True, slots=True)
class Request:
    """``at`` is when it comes, in units of the workload's own until :func:`timed` has set the rate."""

    at: float
    prompt: tuple[int, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Served:
    """A workload by one schedule: ``ttft_s`` of each request, in their order."""

    ttft_s: list[float]
    held_tokens: int
    computed_tokens: int
    tokens: int
    seconds: float
    longest_overtaken_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """Of one schedule, medians over the rounds. ``longest_extra_s`` is how much later than by ``fcfs`` of the
    same round any request had its first token; ``overtaken_s`` what the scheduler itself counted, at most."""

    workload: str
    schedule: str
    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    hit_rate: float
    tokens_per_s: float
    requests_per_s: float
    longest_extra_s: float
    overtaken_s: float
    ttft_mean_over_fcfs: float
    least_over_fcfs: float
    most_over_fcfs: float
    throughput_over_fcfs: float


# -- workloads -----------------------------------------------------------------------------------------


def conversation(trace: Trace, *, requests: int, scale: int, longest: int, seed: int) -> list[Request]:
    """The first requests of a trace, of which no prompt is longer than the model takes."""
    if trace.block_tokens % scale:
        raise UsageError(f"--scale must divide the trace's blocks of {trace.block_tokens} tokens")
    width = trace.block_tokens // scale
    made = []
    for request in trace[:requests]:
        tokens: list[int] = []
        for block in request.blocks:
            draw = random.Random(seed << 32 | block)
            tokens += [draw.randrange(_VOCABULARY) for _ in range(width)]
        answer = max(request.output_tokens // scale, 1)
        length = min(max(request.input_tokens // scale, 1), longest - answer - 1)
        made.append(Request(request.timestamp_s, tuple(tokens[:length]), answer))
    return made


def tree(*, requests: int, seed: int) -> list[Request]:
    """Prompts from the root to each leaf of a tree, shuffled, at random times."""
    draw = random.Random(seed)

    def walk(level: int, before: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if level == len(_TREE):
            yield before
            return
        children, tokens = _TREE[level]
        for _ in range(children):
            yield from walk(level + 1, (*before, *(draw.randrange(_VOCABULARY) for _ in range(tokens))))

    prompts = list(walk(0, ()))
    draw.shuffle(prompts)
    at, made = 0.0, []
    for prompt in prompts[:requests]:
        at += draw.expovariate(1.0)
        made.append(Request(at, prompt, _ANSWER))
    return made


def timed(requests: Sequence[Request], span_s: float) -> list[Request]:
    """The same requests over ``span_s`` seconds."""
    first = requests[0].at
    stretch = span_s / max(requests[-1].at - first, 1e-9)
    return [replace(request, at=(request.at - first) * stretch) for request in requests]


# -- the engine ----------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass: by the wall, or of this process's work, with the idle ones left out."""

    def __init__(self, kind: str) -> None:
        self._now = time.monotonic if kind == "wall" else time.process_time
        self._skips = kind == "cpu"
        self._ahead = 0.0

    def __call__(self) -> float:
        return self._now() + self._ahead

    def wait_until(self, at: float) -> None:
        """There is nothing to do before."""
        if self._skips:
            self._ahead += max(at - self(), 0.0)
        else:
            time.sleep(min(max(at - self(), 0.0), _IDLE_S))


def serve(
    model: LoadedModel, bench: Bench, requests: Sequence[Request], schedule: str, phase: Phase | None = None
) -> Served:
    """All of ``requests``, each given to a new engine when it is due."""
    clock = Clock(bench.clock)
    engine = _engine(model, bench, schedule, clock)
    numbers: dict[RequestId, int] = {}
    ttft_s = [0.0] * len(requests)
    held = tokens = 0
    try:
        _warm_up(engine)
        computed = engine.stats().computed_tokens
        gc.collect()
        started, coming = clock(), 0
        while coming < len(requests) or engine.has_work:
            now = clock() - started
            while coming < len(requests) and requests[coming].at <= now:
                request = requests[coming]
                params = SamplingParams(max_new_tokens=request.answer, ignore_eos=True)
                numbers[engine.add(request.prompt, params)] = coming
                coming += 1
            if not engine.has_work:
                clock.wait_until(started + requests[coming].at)
                continue
            outputs = engine.step()
            now = clock() - started
            for output in outputs:
                number = numbers[output.request_id]
                ttft_s[number] = ttft_s[number] or now - requests[number].at
                if output.completion is not None:
                    metrics = output.completion.metrics
                    held += metrics.reused_tokens
                    tokens += metrics.prompt_tokens + metrics.generated_tokens
            if phase is not None:
                phase.update(coming / len(requests))
        stats = engine.stats()
        took_s = clock() - started
        return Served(
            ttft_s, held, stats.computed_tokens - computed, tokens, took_s, stats.longest_overtaken_s
        )
    finally:
        engine.close()


def _engine(model: LoadedModel, bench: Bench, schedule: str, clock: Callable[[], float]) -> Engine:
    chunk = bench.chunk_tokens
    spec = model.kv_spec(chunk_tokens=chunk)
    identity = model.identity(spec)
    pool = tierstore.open_pool(spec, bench.pool_tokens // chunk)
    store = tierstore.open(None, spec, identity=identity, pools=pool, host_bytes=bench.host_bytes)
    settings = EngineSettings(
        prefill_chunk=_PREFILL_PAGES * chunk,
        max_sequences=_SEQUENCES,
        schedule=schedule,
        overtake_s=bench.overtake_s,
    )
    runner = make_runner(model, [pool], settings)
    return Engine(runner, model.tokenizer, StoreConnector(store), settings, clock=clock)


def _warm_up(engine: Engine) -> None:
    """The first steps take longer than all others, and the speed of computing is measured on them."""
    draw = random.Random(0)
    for _ in range(4):
        prompt = [_VOCABULARY + draw.randrange(6) for _ in range(512)]
        engine.generate([prompt], SamplingParams(max_new_tokens=2, ignore_eos=True))


def _rows(workload: str, requests: Sequence[Request], rounds: Sequence[dict[str, Served]]) -> list[Row]:
    rows = []
    for schedule in SCHEDULES[::-1]:
        served = [each[schedule] for each in rounds]
        base = [each["fcfs"] for each in rounds]
        means = [statistics.fmean(one.ttft_s) for one in served]
        ratios = [mean / statistics.fmean(one.ttft_s) for mean, one in zip(means, base, strict=True)]
        extra = [
            max(late - first for late, first in zip(one.ttft_s, before.ttft_s, strict=True))
            for one, before in zip(served, base, strict=True)
        ]
        prompt_tokens = sum(len(request.prompt) for request in requests)
        rate = [one.tokens / one.seconds for one in served]
        rows.append(
            Row(
                workload,
                schedule,
                len(requests),
                statistics.median(means),
                statistics.median(statistics.median(one.ttft_s) for one in served),
                statistics.median(_percentile(one.ttft_s, 0.99) for one in served),
                statistics.median(one.held_tokens / prompt_tokens for one in served),
                statistics.median(rate),
                statistics.median(len(requests) / one.seconds for one in served),
                max(extra),
                max(one.longest_overtaken_s for one in served),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                statistics.median(
                    mine * before.seconds / before.tokens for mine, before in zip(rate, base, strict=True)
                ),
            )
        )
    return rows


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


# -- the simulator -------------------------------------------------------------------------------------

Order: TypeAlias = Callable[[Sequence[WaitingEntry], float], WaitingEntry]
"""Whose chunk is next, of those that wait, at a time."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What the simulator says of one order. ``hit_rate`` is of the prompts' tokens."""

    order: str
    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    hit_rate: float
    longest_extra_s: float
    ttft_mean_over_fcfs: float


def orders(prefill: Prefill, *, block_tokens: int, overtake_s: float) -> dict[str, Order]:
    """By name; ``cache`` is the engine's."""

    def by_turns(bound_s: float) -> Order:
        def first(entries: Sequence[WaitingEntry], now_s: float) -> WaitingEntry:
            found = turns(entries, prefill, chunk_tokens=block_tokens, bound_s=bound_s, now_s=now_s)
            return next(found).entry

        return first

    def longest_match(entries: Sequence[WaitingEntry], now_s: float) -> WaitingEntry:
        return min(entries, key=lambda entry: (-entry.held, entry.place))

    def least_left(entries: Sequence[WaitingEntry], now_s: float) -> WaitingEntry:
        return min(entries, key=lambda e: (prefill.seconds(max(e.tokens - e.held, 0), e.held), e.place))

    return {
        "fcfs": lambda entries, now_s: min(entries, key=lambda entry: entry.place),
        "longest match": longest_match,
        "least left": least_left,
        "cache": by_turns(overtake_s),
    }


def simulate(
    trace: Trace, order: Order, prefill: Prefill, *, requests: int, stretch: float, cache_tokens: int
) -> tuple[list[float], float]:
    """The time to the first token of each request, and the hit rate. ``stretch`` is by how much arrivals are
    slower than the trace's."""
    width = trace.block_tokens
    cache: OrderedDict[bytes, None] = OrderedDict()
    coming = [
        (
            request.timestamp_s * stretch,
            WaitingEntry(
                (0, number, number),
                [PageKey(block.to_bytes(16, "big")) for block in request.blocks],
                max(request.input_tokens, 1),
            ),
        )
        for number, request in enumerate(trace[:requests])
    ]
    coming.reverse()
    ttft_s, arrived = [0.0] * len(coming), {entry.place: at for at, entry in coming}
    waiting: list[WaitingEntry] = []
    now = hits = total = 0.0

    def held(entry: WaitingEntry) -> int:
        count = next((n for n, key in enumerate(entry.keys) if key not in cache), len(entry.keys))
        return min(count * width, entry.tokens - 1)

    begun: set[Place] = set()
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            waiting.append(coming.pop()[1])
            waiting[-1].held = held(waiting[-1])
        entry = order(waiting[:_SIMULATED_ORDERED], now)
        if entry.place not in begun:
            begun.add(entry.place)
            entry.held = held(entry)
            hits += entry.held
            total += entry.tokens
        tokens = min(entry.tokens - entry.held, _SIMULATED_CHUNK)
        seconds = prefill.seconds(tokens, entry.held)
        now += seconds
        entry.held += tokens
        passed(waiting, Spent({entry.place: 1}), seconds)
        if entry.held < entry.tokens:
            continue
        waiting.remove(entry)
        ttft_s[entry.place[2]] = now - arrived[entry.place]
        for key in reversed(entry.keys[: entry.tokens // width]):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > cache_tokens // width:
            cache.popitem(last=False)
        for other in waiting:
            if other.place not in begun:
                other.held = held(other)
    return ttft_s, hits / max(total, 1)


def simulations(bench: Bench, trace: Trace, phase: Phase | None = None) -> list[Simulated]:
    """Each order on the whole trace at its full lengths."""
    prefill = Prefill(1 / bench.simulated_tokens_per_s)
    some = trace[:]
    unique = _computed_at_least(some, trace.block_tokens)
    span_s = max(some[-1].timestamp_s - some[0].timestamp_s, 1e-9)
    stretch = prefill.seconds(unique) / bench.load / span_s
    by_order = {}
    named = orders(prefill, block_tokens=trace.block_tokens, overtake_s=bench.simulated_overtake_s)
    for number, (name, order) in enumerate(named.items()):
        by_order[name] = simulate(
            trace,
            order,
            prefill,
            requests=len(some),
            stretch=stretch,
            cache_tokens=bench.simulated_cache_tokens,
        )
        if phase is not None:
            phase.update((number + 1) / len(named))
    base, _ = by_order["fcfs"]
    return [
        Simulated(
            name,
            len(ttft_s),
            statistics.fmean(ttft_s),
            statistics.median(ttft_s),
            _percentile(ttft_s, 0.99),
            hit_rate,
            max(late - first for late, first in zip(ttft_s, base, strict=True)),
            statistics.fmean(ttft_s) / statistics.fmean(base),
        )
        for name, (ttft_s, hit_rate) in by_order.items()
    ]


def _computed_at_least(requests: Sequence[TracedRequest], block_tokens: int) -> int:
    """The tokens that must be computed if nothing is ever forgotten."""
    seen: set[int] = set()
    tokens = 0
    for request in requests:
        known = next((n for n, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        tokens += max(request.input_tokens - known * block_tokens, 1)
        seen.update(request.blocks)
    return tokens


# -- the command ---------------------------------------------------------------------------------------


def measure(bench: Bench, trace: Trace | None) -> tuple[list[Row], dict[str, float]]:
    """The rows of each workload, and the tokens a second of an engine that has all of it at once."""
    rows: list[Row] = []
    speeds: dict[str, float] = {}
    names = [name for name in bench.workloads if name != "simulated"]
    if not names:
        return rows, speeds
    model = load_model(bench.model, device="cpu")
    with phases() as shown:
        for name in names:
            if name == "tree":
                requests = tree(requests=bench.requests, seed=bench.seed)
            else:
                assert trace is not None
                longest = min(model.config.max_positions, bench.pool_tokens)
                requests = conversation(
                    trace, requests=bench.requests, scale=bench.scale, longest=longest, seed=bench.seed
                )
            with shown.phase(f"{name}: all at once") as phase:
                most = serve(model, bench, timed(requests, 0.0), "fcfs", phase)
                speeds[name] = most.tokens / most.seconds
            requests = timed(requests, most.seconds / bench.load)
            rounds = []
            for number in range(bench.rounds):
                served = {}
                for schedule in SCHEDULES:
                    with shown.phase(f"{name}: {schedule}, round {number + 1}") as phase:
                        served[schedule] = serve(model, bench, requests, schedule, phase)
                rounds.append(served)
            rows += _rows(name, requests, rounds)
    return rows, speeds


def run(bench: Bench, *, json: str | None) -> None:
    """Measure, and print tables."""
    bench.check()
    require_targets(json)
    torch.set_num_threads(1)  # two of them on a busy machine wait for one another
    trace = _read(bench.trace) if bench.trace is not None else None
    rows, speeds = measure(bench, trace)
    simulated: list[Simulated] = []
    if "simulated" in bench.workloads:
        assert trace is not None
        with phases() as shown, shown.phase("simulated, at full lengths") as phase:
            simulated = simulations(bench, trace, phase)
    to_stderr = json == "-"
    columns = ("workload", "schedule", "mean TTFT", "p50", "p99", "held", "tokens/s", "extra")
    if rows:
        table(
            f"{bench.model}, load {bench.load:g}, {bench.clock} time, {bench.rounds} rounds, "
            f"overtaken at most {bench.overtake_s:g} s",
            (*columns, "of fcfs", "range"),
            [
                (
                    row.workload,
                    row.schedule,
                    *map(seconds, (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p99_s)),
                    percent(row.hit_rate),
                    f"{row.tokens_per_s:.0f}",
                    seconds(row.longest_extra_s),
                    f"{row.ttft_mean_over_fcfs:.2f}",
                    f"{row.least_over_fcfs:.2f}–{row.most_over_fcfs:.2f}",
                )
                for row in rows
            ],
            to_stderr=to_stderr,
        )
    if simulated:
        table(
            f"Simulated, full lengths at {bench.simulated_tokens_per_s:g} tokens/s",
            ("order", "mean TTFT", "p50", "p99", "held", "extra", "of fcfs"),
            [
                (
                    each.order,
                    *map(seconds, (each.ttft_mean_s, each.ttft_p50_s, each.ttft_p99_s)),
                    percent(each.hit_rate),
                    seconds(each.longest_extra_s),
                    f"{each.ttft_mean_over_fcfs:.2f}",
                )
                for each in simulated
            ],
            to_stderr=to_stderr,
        )
    settings = {**asdict(bench), "trace": None if bench.trace is None else bench.trace.name}
    document = {
        "machine": machine.describe(),
        "settings": settings,
        "all_at_once_tokens_per_s": speeds,
        "schedules": [asdict(row) for row in rows],
        "simulated": [asdict(each) for each in simulated],
    }
    write_json(document, json)


def _read(path: Path) -> Trace:
    loaded = formats.load(path)
    if not isinstance(loaded.trace, Trace) or not loaded.trace.timed:
        raise UsageError(f"{path} does not say what its prompts share, and when they came")
    return loaded.trace
