"""``curve``: what the estimate of other capacities costs the lookups that it is made from.

Blocks of a few lookups as they are, and as many without a note, in random order in one process: the median of
the differences, in processor time of the thread that looks up. What is left out is the whole note, and not
only what is behind a call. The same between two blocks without notes says how far off that may be.

* **calm**: all lookups are noted. What waits is worked off between two blocks, in time that is not counted.
* **under load**: lookups follow one another without a pause, which no engine does. Notes come faster than
  they can be worked off, so only prompts of a thin sample are noted.
* **thread**: the processor time of the thread that works them off, under load, as a share of that of all
  lookups, once the thread has used up what it had saved up. Without load it is the same share of the time
  at most.

What a lookup is slower by under load is the sum of the last two.

A note costs about the same whatever the prompt, so its share depends on how long prompts are. With a trace
the prompts are those of its first requests, common beginnings and all, in random order: the share is that of
all the time that such traffic spends in lookups.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tierstore.errors import UsageError
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.store.base import checked_prompt
from tierstore.store.embedded import EmbeddedStore
from tierstore.store.hit import EmbeddedHit
from tierstore_tools import machine, report
from tierstore_tools.replay.formats import LengthsTrace, load

_SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")
_IDENTITY = Identity.of(_SPEC, model="lookups")
_TOKENS_HELD = 200_000  # in all prompts together
_TOKENS_OF_A_BLOCK = 20_000
_REQUESTS = 100  # of a trace
_LEAST_TURNS = 20
_ORDER = 4096


@dataclass(frozen=True, slots=True)
class Cost:
    """Of lookups of ``prompts`` (all of one length, or those of a trace) of ``tokens`` tokens on average:
    processor time of the note, and as a share of a lookup without it (0.01 is 1 %), each with what the same
    lookups without notes are apart."""

    prompts: str
    tokens: int
    lookup_us: float  # without a note
    calm_note_us: float
    calm_share: float
    calm_noise_share: float
    load_note_us: float
    load_share: float
    load_noise_share: float
    thread_share: float
    left_out: float  # of all notes, under load


class _Lookups:
    """Lookups of these prompts in random order, all of them held."""

    def __init__(self, store: EmbeddedStore, prompts: Sequence[Prompt]) -> None:
        self._store = store
        self._random = random.Random(0)
        self._order = self._random.choices(prompts, k=_ORDER)
        self._at = 0
        self._block = max(_TOKENS_OF_A_BLOCK // _mean_tokens(prompts), 4)
        self.noted = 0

    def time_s(self, noted: bool) -> float:
        """Processor time of this thread for one, with or without a note: the mean of a block."""
        look_up = self._store.lookup if noted else self._without
        prompts = self._order[self._at : self._at + self._block]
        # So that all blocks begin with the same in the processor's cache: the prompts, and of the code only
        # what both sides run. (Begun with the very code of one side, the other seems a microsecond slower.)
        for prompt in prompts:
            self._store._look_up(prompt, len(prompt)).release()
        began = time.thread_time()
        for prompt in prompts:
            look_up(prompt).release()
        took = time.thread_time() - began
        self.noted += noted * len(prompts)
        return took / len(prompts)

    def _without(self, prompt: Prompt) -> EmbeddedHit:
        prompt = checked_prompt(self._store, self._store._layout, prompt)
        return self._store._look_up(prompt, len(prompt))

    def turns(
        self,
        seconds: float,
        after: Callable[[], object] = lambda: None,
        until: Callable[[], bool] = lambda: True,
    ) -> _Turns:
        """Blocks by turns for so long, and ``until`` something holds; ``after`` each of them, something that
        is not counted."""
        turns = _Turns([], [], [])
        end = time.monotonic() + seconds
        while len(turns.bare) < _LEAST_TURNS or time.monotonic() < end or not until():
            self._at = self._random.randrange(_ORDER - self._block)
            sides = [(turns.noted, True), (turns.bare, False), (turns.again, False)]
            for times, noted in self._random.sample(sides, 3):
                times.append(self.time_s(noted))
                after()
        return turns


@dataclass(frozen=True, slots=True)
class _Turns:
    """Seconds for a lookup, by block: with a note, without, and without again."""

    noted: list[float]
    bare: list[float]
    again: list[float]

    @property
    def lookup_s(self) -> float:
        return statistics.median(self.bare)

    @property
    def note_s(self) -> float:
        return _apart(self.noted, self.bare)

    @property
    def noise_s(self) -> float:
        return abs(_apart(self.again, self.bare))


def _apart(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(some, others, strict=True))


def run(tokens: Sequence[int], *, trace: Path | None = None, seconds: float, json: str | None) -> None:
    """Measure, show, write: prompts of each of these lengths, and those of a ``trace``. Each takes about
    three times ``seconds``, and longer where the thread has not worked by then. Raises :class:`UsageError`
    for a length that makes no page, and for a file that is no trace of prompts."""
    for length in tokens:
        if length < _SPEC.chunk_tokens:
            raise UsageError(f"a prompt has at least one page of {_SPEC.chunk_tokens} tokens, not {length}")
    cases = [(f"{length:,} tokens", _made(length)) for length in tokens]
    cases += [] if trace is None else [(trace.name, _traced(trace))]
    with report.phases() as phases:
        costs = []
        for name, prompts in cases:
            with phases.phase(f"curve: lookups of {name}", measurable=False):
                costs.append(_measure(name, prompts, seconds))
    report.table(
        "what the curve costs a lookup",
        ("prompts", "mean tokens", "lookup µs", "calm %", "±", "under load %", "±", "thread %", "left out %"),
        [
            (
                cost.prompts,
                f"{cost.tokens:,}",
                f"{cost.lookup_us:.1f}",
                *(
                    f"{100 * share:.2f}"
                    for share in (
                        cost.calm_share,
                        cost.calm_noise_share,
                        cost.load_share,
                        cost.load_noise_share,
                        cost.thread_share,
                    )
                ),
                f"{100 * cost.left_out:.0f}",
            )
            for cost in costs
        ],
        to_stderr=json == "-",
    )
    report.write_json(
        {
            "machine": machine.describe(),
            "seconds": seconds,
            "costs": [asdict(cost) for cost in costs],
        },
        json,
    )


def _measure(name: str, prompts: Sequence[Prompt], seconds: float) -> Cost:
    pages = sum(len(prompt.keys) + 1 for prompt in prompts)
    with _open(2 * pages * _SPEC.page_bytes) as store:
        for prompt in prompts:
            store.save(prompt, [bytes(_SPEC.page_bytes)] * len(prompt.keys)).wait()
        lookups = _Lookups(store, prompts)
        calm = lookups.turns(seconds, store._assembly.curve.work)
        # Until the sample is thin, and the thread has used what it had saved up.
        lookups.turns(seconds)
        worker = store._assembly.curve_worker
        lookups.noted, noted_before = 0, store.stats().curve.left_out
        began_s, worked_s = time.thread_time(), worker.worked_s
        load = lookups.turns(seconds, until=lambda: worker.worked_s > worked_s)
        thread_share = (worker.worked_s - worked_s) / (time.thread_time() - began_s)
        left_out = store.stats().curve.left_out - noted_before
    return Cost(
        name,
        _mean_tokens(prompts),
        calm.lookup_s * 1e6,
        calm.note_s * 1e6,
        calm.note_s / calm.lookup_s,
        calm.noise_s / calm.lookup_s,
        load.note_s * 1e6,
        load.note_s / load.lookup_s,
        load.noise_s / load.lookup_s,
        thread_share,
        left_out / lookups.noted,
    )


def _open(host_bytes: int) -> EmbeddedStore:
    store = Store.open(None, _SPEC, identity=_IDENTITY, host_bytes=host_bytes)
    assert isinstance(store, EmbeddedStore)
    return store


def _mean_tokens(prompts: Sequence[Prompt]) -> int:
    return round(statistics.fmean(map(len, prompts)))


def _traced(path: Path) -> list[Prompt]:
    """The first prompts of a trace that have a page. Equal blocks have equal tokens."""
    trace = load(path).trace
    if isinstance(trace, LengthsTrace):
        raise UsageError(f"{path} has lengths and no prompts: give a trace with block ids")
    prompts = []
    for request in trace[:_REQUESTS]:
        blocks = [
            np.random.default_rng(block).integers(0, 50_000, trace.block_tokens, np.uint32)
            for block in request.blocks
        ]
        if blocks and request.input_tokens >= _SPEC.chunk_tokens:
            tokens = np.concatenate(blocks)[: request.input_tokens]
            prompts.append(Prompt(_IDENTITY, tokens, chunk_tokens=_SPEC.chunk_tokens))
    if not prompts:
        raise UsageError(f"{path} begins with {_REQUESTS} requests without a page of prompt")
    return prompts


def _made(tokens: int) -> list[Prompt]:
    """Some of them with a beginning in common, a quarter of each."""
    generator = random.Random(tokens)
    systems = [[generator.randrange(50_000) for _ in range(tokens // 4)] for _ in range(8)]
    prompts = []
    for number in range(max(_TOKENS_HELD // tokens, 8)):
        system = systems[number % len(systems)]
        rest = [generator.randrange(50_000) for _ in range(tokens - len(system))]
        prompts.append(Prompt(_IDENTITY, [*system, *rest], chunk_tokens=_SPEC.chunk_tokens))
    return prompts
