"""Measure the time that the estimate of other capacities adds to a lookup.

    python benchmarks/curve.py --tokens 1000,10000,100000

A store looks up its prompts in random order. The same keys then go to a :class:`ReuseCurve` without a thread.
The script times a lookup of the store (with its own call into the curve), that call alone, and the work that
the store does later in a thread. On 2 busy cores the call took 2 to 3 µs, less than 1 % of a lookup.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import typer

import tierstore
from tierstore.command_line import one_line_errors
from tierstore.curve import BATCH, DUTY, ReuseCurve
from tierstore.errors import UsageError
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore_tools import machine, report

SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")
IDENTITY = Identity.of(SPEC, model="lookups")
TOKENS_HELD = 200_000  # in all prompts together
LEAST_ROUNDS = 20


@dataclass(frozen=True)
class Cost:
    """Medians for prompts of ``tokens`` tokens. ``call_share`` is the call's share of the lookup,
    ``keeps_up_with`` the lookups per second that the thread can process in its share of a core."""

    tokens: int
    lookup_us: float
    call_us: float
    call_share: float
    work_us: float
    keeps_up_with: float


def main(tokens: str = "1000,10000,100000", seconds: float = 5.0, json: str | None = None) -> None:
    """Measure the time that the estimate of other capacities adds to a lookup, for SECONDS per length."""
    report.require_targets(json)
    lengths = [int(length) for length in tokens.split(",")]
    if min(lengths) < SPEC.chunk_tokens:
        raise UsageError(f"--tokens must be at least a page of {SPEC.chunk_tokens}, got {min(lengths)}")
    costs = [measure(made(length), seconds) for length in lengths]
    columns = ("tokens", "lookup µs", "call µs", "call %", "work µs", "keeps up with, per s")
    lines = [
        (
            f"{cost.tokens:,}",
            f"{cost.lookup_us:.1f}",
            f"{cost.call_us:.2f}",
            f"{100 * cost.call_share:.2f}",
            f"{cost.work_us:.0f}",
            f"{cost.keeps_up_with:,.0f}",
        )
        for cost in costs
    ]
    report.table("the curve's part of a lookup", columns, lines, to_stderr=json == "-")
    report.write_json({"machine": machine.describe(), "costs": [asdict(cost) for cost in costs]}, json)


def measure(prompts: Sequence[Prompt], seconds: float) -> Cost:
    """Time lookups of ``prompts`` and the curve's two parts in turn."""
    pages = sum(len(prompt.keys) + 1 for prompt in prompts)
    generator = random.Random(0)
    curve = ReuseCurve()
    lookups: list[float] = []
    calls: list[float] = []
    works: list[float] = []
    with tierstore.open(None, SPEC, identity=IDENTITY, host_bytes=2 * pages * SPEC.page_bytes) as store:
        for prompt in prompts:
            store.save(prompt, [bytes(SPEC.page_bytes)] * len(prompt.keys)).wait()
        end = time.monotonic() + seconds
        while len(lookups) < LEAST_ROUNDS or time.monotonic() < end:
            block = generator.choices(prompts, k=BATCH)
            began = time.thread_time()
            for prompt in block:
                store.lookup(prompt).release()
            looked_up = time.thread_time()
            for prompt in block:
                curve.looked_up(prompt.keys, len(prompt), len(prompt), SPEC.chunk_tokens, SPEC.page_bytes)
            called = time.thread_time()
            curve.work()
            lookups.append((looked_up - began) / BATCH)
            calls.append((called - looked_up) / BATCH)
            works.append((time.thread_time() - called) / BATCH)
    lookup_s, call_s, work_s = map(statistics.median, (lookups, calls, works))
    tokens = round(statistics.fmean(map(len, prompts)))
    return Cost(tokens, lookup_s * 1e6, call_s * 1e6, call_s / lookup_s, work_s * 1e6, DUTY / work_s)


def made(tokens: int) -> list[Prompt]:
    """Return prompts; some of them share their first quarter."""
    generator = random.Random(tokens)
    systems = [[generator.randrange(50_000) for _ in range(tokens // 4)] for _ in range(8)]
    prompts = []
    for number in range(max(TOKENS_HELD // tokens, 8)):
        system = systems[number % len(systems)]
        rest = [generator.randrange(50_000) for _ in range(tokens - len(system))]
        prompts.append(Prompt(IDENTITY, [*system, *rest], chunk_tokens=SPEC.chunk_tokens))
    return prompts


if __name__ == "__main__":
    with one_line_errors("curve"):
        typer.run(main)
