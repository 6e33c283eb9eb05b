"""``curve``: what the estimate of other capacities costs the lookups that it is made from.

Three figures for each length of prompts, all beside the same lookup without it:

* the note that a lookup leaves, alone, as a share of a lookup;
* pairs: a lookup with and one without, by turns, in one process. Median and mean of all;
* stretches: as many lookups with as without, in processor time of the whole process. That has the thread that
  works off the notes in it, and nothing that other processes do to the clock.

Lookups follow one another without a pause, which no engine does: the notes come faster than they could be
worked off, and so this is what a lookup costs under load, when only the prompts of a thin sample are noted.
The last column says how many notes were left out before the sample was thin enough.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tierstore.curve import Notes
from tierstore.curve.notes import MOST
from tierstore.errors import UsageError
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore.store.embedded import EmbeddedStore
from tierstore_tools import machine, report

_SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")
_IDENTITY = Identity.of(_SPEC, model="lookups")
_TOKENS_HELD = 200_000  # in all prompts together
_STRETCHES = 20
_LEAST_PAIRS = 20
_ROWS_OF_NOTES = 500


@dataclass(frozen=True, slots=True)
class Cost:
    """Of lookups of one length. Times in microseconds."""

    tokens: int
    lookup_us: float  # without a curve: the median
    note_us: float
    median_share: float  # of pairs: by how much the one with a curve is slower, 0.01 is 1 %
    mean_share: float
    processor_share: float  # of stretches
    left_out: float  # of all notes

    @property
    def note_share(self) -> float:
        return self.note_us / self.lookup_us


class _Silence(Notes):
    """Takes no notes. Being asked to is on both sides: about 0.3 µs."""

    def prompt_looked_up(
        self, keys: Sequence[PageKey], tokens: int, held_tokens: int, page_tokens: int, page_bytes: int
    ) -> None:
        pass


class _Lookups:
    """Lookups of random prompts of one length, all of them held, with the notes of a store or without any."""

    def __init__(self, store: EmbeddedStore, prompts: Sequence[Prompt]) -> None:
        self._store = store
        self._prompts = prompts
        self._random = random.Random(0)
        self._notes = {True: store._notes, False: _Silence()}
        self.noted = 0

    def time_s(self, noted: bool) -> float:
        """How long one took."""
        prompt = self._random.choice(self._prompts)
        self._store._notes = self._notes[noted]
        self.noted += noted
        began = time.perf_counter()
        hit = self._store.lookup(prompt)
        took = time.perf_counter() - began
        hit.release()
        return took


def run(tokens: Sequence[int], *, seconds: float, json: str | None) -> None:
    """Measure, show, write. Each of the three figures of a length takes about ``seconds``. Raises
    :class:`UsageError` for a length that makes no page."""
    for length in tokens:
        if length < _SPEC.chunk_tokens:
            raise UsageError(f"a prompt has at least one page of {_SPEC.chunk_tokens} tokens, not {length}")
    with report.phases() as phases:
        costs = []
        for length in tokens:
            with phases.phase(f"curve: lookups of {length:,} tokens", measurable=False):
                costs.append(_measure(length, seconds))
    report.table(
        "what the curve costs a lookup",
        ("tokens", "lookup µs", "note µs", "note %", "median %", "mean %", "processor %", "left out %"),
        [
            (
                f"{cost.tokens:,}",
                f"{cost.lookup_us:.1f}",
                f"{cost.note_us:.2f}",
                *(
                    f"{100 * share:.2f}"
                    for share in (cost.note_share, cost.median_share, cost.mean_share, cost.processor_share)
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
            "lengths": [asdict(cost) | {"note_share": cost.note_share} for cost in costs],
        },
        json,
    )


def _measure(tokens: int, seconds: float) -> Cost:
    pages = tokens // _SPEC.chunk_tokens
    prompts = _prompts(tokens)
    host_bytes = 2 * len(prompts) * (pages + 1) * _SPEC.page_bytes
    with _open(host_bytes) as store:
        for prompt in prompts:
            store.save(prompt, [bytes(_SPEC.page_bytes)] * pages).wait()
        lookups = _Lookups(store, prompts)
        # Until the sample is there, and the worker has used what it had saved up.
        pairs = _pairs(lookups, seconds)
        lookups.noted = 0
        noted_before = store.stats().curve.left_out
        times = _pairs(lookups, seconds)
        processor = _stretches(lookups, max(len(pairs[True]) // _STRETCHES, 1))
        left_out = store.stats().curve.left_out - noted_before
    without = statistics.median(times[False])
    return Cost(
        tokens,
        without * 1e6,
        _note_s(prompts[0]) * 1e6,
        statistics.median(times[True]) / without - 1,
        statistics.mean(times[True]) / statistics.mean(times[False]) - 1,
        processor,
        left_out / lookups.noted,
    )


def _open(host_bytes: int) -> EmbeddedStore:
    store = Store.open(None, _SPEC, identity=_IDENTITY, host_bytes=host_bytes)
    assert isinstance(store, EmbeddedStore)
    return store


def _prompts(tokens: int) -> list[Prompt]:
    """Some of them with a beginning in common, a quarter of each."""
    generator = random.Random(tokens)
    systems = [[generator.randrange(50_000) for _ in range(tokens // 4)] for _ in range(8)]
    prompts = []
    for number in range(max(_TOKENS_HELD // tokens, 8)):
        system = systems[number % len(systems)]
        rest = [generator.randrange(50_000) for _ in range(tokens - len(system))]
        prompts.append(Prompt(_IDENTITY, [*system, *rest], chunk_tokens=_SPEC.chunk_tokens))
    return prompts


def _pairs(lookups: _Lookups, seconds: float) -> dict[bool, list[float]]:
    """Seconds of each lookup, with notes (True) and without; who is first goes by turns."""
    times: dict[bool, list[float]] = {True: [], False: []}
    end = time.monotonic() + seconds
    for number in itertools.count():
        if number >= _LEAST_PAIRS and time.monotonic() > end:
            break
        for noted in (number % 2 == 0, number % 2 == 1):
            times[noted].append(lookups.time_s(noted))
    return times


def _stretches(lookups: _Lookups, each: int) -> float:
    """By how much more processor time goes by in stretches with notes, of so many lookups each: the median of
    neighbours."""
    shares = []
    for number in range(_STRETCHES):
        spent = {}
        for noted in (number % 2 == 0, number % 2 == 1):
            began = time.process_time()
            for _ in range(each):
                lookups.time_s(noted)
            spent[noted] = time.process_time() - began
        shares.append(spent[True] / spent[False] - 1)
    return statistics.median(shares)


def _note_s(prompt: Prompt) -> float:
    """One note, while there is room: the best of many rows, for nothing in it takes longer at one time than
    at another."""
    tokens = len(prompt)
    best = math.inf
    for _ in range(_ROWS_OF_NOTES):
        notes = Notes()
        began = time.perf_counter()
        for _ in range(MOST // 4):
            notes.prompt_looked_up(prompt.keys, tokens, tokens, prompt.chunk_tokens, _SPEC.page_bytes)
        best = min(best, (time.perf_counter() - began) / (MOST // 4))
    return best
