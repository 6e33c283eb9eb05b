"""Measure a decode step of the bundled engine on the CPU, with its compiled part and with torch alone.

    python benchmarks/decode.py --model ./smollm2 --past 300 --batches 1,4,16

Each batch has sequences of ``--past`` tokens in pages, and computes one more token for each of them per step.
The two ways take turns, step by step, so that a busy machine slows both. Weights are the same tensors; those
of a quantised model stay quantised unless ``--expand-weights``. The result is the median of ``--steps``
steps, and the median of the ratio of neighbouring steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer

from tierstore import native
from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.pool_sizes import pages_for_tokens
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Runner, Step
from tierstore_tools import machine, report

COMPILED = native.DECODE


@dataclass(frozen=True)
class StepRow:
    """A batch. ``of_torch`` is the time of the compiled part over torch's, step by step."""

    batch: int
    compiled_s: float
    torch_s: float
    of_torch: float


def main(
    model: str = "deep",
    dtype: str | None = None,
    expand_weights: bool = False,
    tokenizer: str | None = None,
    past: int = 300,
    batches: str = "1,4,16",
    steps: int = 20,
    threads: int = 1,
    json: str | None = None,
) -> None:
    """Measure decode steps of BATCHES sequences with PAST tokens each."""
    report.require_targets(json)
    if COMPILED is None:
        raise UsageError("the compiled part is missing: tierstore doctor says how to build it")
    sizes = numbers(batches)
    if min(past, steps, threads) < 1:
        raise UsageError("--past, --steps and --threads begin at 1")
    torch.set_num_threads(threads)
    reading = {"dtype": dtype, "expand_weights": expand_weights, "tokenizer": tokenizer}
    loaded = load_model(open_model(model, device="cpu", **reading))
    with report.phases() as phases:
        rows = []
        for batch in sizes:
            with phases.phase(f"{batch} sequences", measurable=False):
                rows.append(measured(loaded, batch, past, steps))
    report.table(
        f"a decode step after {past} tokens, {loaded.config.dtype}, {threads} threads",
        ("sequences", "compiled", "torch", "÷ torch"),
        [
            (
                str(row.batch),
                report.seconds(row.compiled_s),
                report.seconds(row.torch_s),
                f"{row.of_torch:.2f}",
            )
            for row in rows
        ],
        to_stderr=json == "-",
    )
    facts = {"machine": machine.describe(), "model": Path(model).name, "dtype": loaded.config.dtype}
    facts |= {"past": past, "threads": threads, "expanded": expand_weights}
    report.write_json({**facts, "rows": [asdict(row) for row in rows]}, json)


def numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise UsageError(f"--batches are numbers of sequences, such as 1,4,16, got {text!r}")
    return found


def measured(model: LoadedModel, batch: int, past: int, steps: int) -> StepRow:
    ways = [DecodedBatch(model, batch, past, compiled=compiled) for compiled in (True, False)]
    taken = [[way.step() for way in ways] for _ in range(steps + 1)][1:]  # the first one warms up
    compiled_s, torch_s = zip(*taken, strict=True)
    ratios = [one / other for one, other in taken]
    medians = map(statistics.median, (compiled_s, torch_s, ratios))
    return StepRow(batch, *medians)


class DecodedBatch:
    """DecodedBatch in pages of their own, computed with the compiled part or by torch alone."""

    def __init__(self, model: LoadedModel, batch: int, past: int, *, compiled: bool) -> None:
        self._library = COMPILED if compiled else None
        spec = model.kv_spec()
        pages = pages_for_tokens(spec, 2 * past + 256)  # decoding does not reach the end
        pool = PagePool(spec, batch * pages)
        self._chunk, self._past = spec.chunk_tokens, past
        self._tables = [range(first * pages, (first + 1) * pages) for first in range(batch)]
        with self._alone():
            self._runner: Runner = make_runner(model, [pool], EngineSettings())
            for table in self._tables:
                self._compute([Span((table,), 0, past)], [token % 200 for token in range(past)])

    def step(self) -> float:
        """Decode one token of each sequence. Return the seconds."""
        spans = [Span((table,), self._past, self._past + 1) for table in self._tables]
        self._past += 1
        with self._alone():
            begun = time.perf_counter()
            self._compute(spans, [7] * len(spans))
            return time.perf_counter() - begun

    @contextmanager
    def _alone(self) -> Iterator[None]:
        native.DECODE = self._library
        try:
            yield
        finally:
            native.DECODE = COMPILED

    def _compute(self, spans: Sequence[Span], tokens: list[int]) -> None:
        ends = torch.tensor([span.tokens for span in spans]).cumsum(0) - 1
        self._runner.compute(Step(tuple(spans), tokens, ends.tolist(), COMPLETED, self._chunk))


if __name__ == "__main__":
    with one_line_errors("decode"):
        typer.run(main)
