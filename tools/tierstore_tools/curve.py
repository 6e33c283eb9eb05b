"""``curve``: what the estimate of other capacities costs the lookups that it is made from.

Prompts that a store holds are looked up in random order, a block of lookups at a time. Their keys then go to
a curve without a thread, and three things are timed in turn, in processor time:

* **lookup**: one lookup of the store, its call into the store's own curve included;
* **call**: that call alone, which is all that a lookup pays;
* **work**: working a prompt off, which the store does in a thread of its own. ``keeps_up_with`` is how many
  prompts a second that thread can take in the share of a core it may use; what comes faster is left out and
  counted.

All prompts fit into the sample while there are few of them, which is when working them off takes longest.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import tierstore
from tierstore.curve import BATCH, DUTY, ReuseCurve
from tierstore.errors import UsageError
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore_tools import machine, report
from tierstore_tools.replay.formats import LengthsTrace, load

_SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")
_IDENTITY = Identity.of(_SPEC, model="lookups")
_TOKENS_HELD = 200_000  # in all prompts together
_REQUESTS = 100  # of a trace
_LEAST_TURNS = 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Of lookups of ``prompts`` (all of one length, or those of a trace) of ``tokens`` tokens on average.
    Medians of blocks; a share of 0.01 is 1 %."""

    prompts: str
    tokens: int
    lookup_us: float
    call_us: float
    call_share: float  # of the lookup
    work_us: float
    keeps_up_with: float  # lookups and saves a second


def run(tokens: Sequence[int], *, trace: Path | None = None, seconds: float, json: str | None) -> None:
    """Measure for ``seconds`` each, show, write: prompts of each of these lengths, and those of a ``trace``.
    Raises :class:`UsageError` for a length that makes no page, and for a file that is no trace of prompts."""
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
        ("prompts", "mean tokens", "lookup µs", "call µs", "call %", "work µs", "keeps up with, per s"),
        [
            (
                cost.prompts,
                f"{cost.tokens:,}",
                f"{cost.lookup_us:.1f}",
                f"{cost.call_us:.2f}",
                f"{100 * cost.call_share:.2f}",
                f"{cost.work_us:.0f}",
                f"{cost.keeps_up_with:,.0f}",
            )
            for cost in costs
        ],
        to_stderr=json == "-",
    )
    report.write_json(
        {"machine": machine.describe(), "seconds": seconds, "costs": [asdict(cost) for cost in costs]}, json
    )


def _measure(name: str, prompts: Sequence[Prompt], seconds: float) -> Cost:
    pages = sum(len(prompt.keys) + 1 for prompt in prompts)
    generator = random.Random(0)
    curve = ReuseCurve()
    lookups: list[float] = []
    calls: list[float] = []
    works: list[float] = []
    host_bytes = 2 * pages * _SPEC.page_bytes
    with tierstore.open(None, _SPEC, identity=_IDENTITY, host_bytes=host_bytes) as store:
        for prompt in prompts:
            store.save(prompt, [bytes(_SPEC.page_bytes)] * len(prompt.keys)).wait()
        end = time.monotonic() + seconds
        while len(lookups) < _LEAST_TURNS or time.monotonic() < end:
            block = generator.choices(prompts, k=BATCH)
            began = time.thread_time()
            for prompt in block:
                store.lookup(prompt).release()
            looked_up = time.thread_time()
            for prompt in block:
                curve.looked_up(prompt.keys, len(prompt), len(prompt), _SPEC.chunk_tokens, _SPEC.page_bytes)
            called = time.thread_time()
            curve.work()
            worked = time.thread_time()
            lookups.append((looked_up - began) / BATCH)
            calls.append((called - looked_up) / BATCH)
            works.append((worked - called) / BATCH)
    lookup_s, call_s, work_s = map(statistics.median, (lookups, calls, works))
    return Cost(
        name,
        round(statistics.fmean(map(len, prompts))),
        lookup_us=lookup_s * 1e6,
        call_us=call_s * 1e6,
        call_share=call_s / lookup_s,
        work_us=work_s * 1e6,
        keeps_up_with=DUTY / work_s,
    )


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
    """Prompts, some of which have their first quarter in common."""
    generator = random.Random(tokens)
    systems = [[generator.randrange(50_000) for _ in range(tokens // 4)] for _ in range(8)]
    prompts = []
    for number in range(max(_TOKENS_HELD // tokens, 8)):
        system = systems[number % len(systems)]
        rest = [generator.randrange(50_000) for _ in range(tokens - len(system))]
        prompts.append(Prompt(_IDENTITY, [*system, *rest], chunk_tokens=_SPEC.chunk_tokens))
    return prompts
