"""``tierstore-bench longctx --beyond``: decode contexts that are larger than their memory.

A context is made of pages with random numbers, as a load from a store would leave them. A decode step attends
to all of them: with all pages in memory, and with memory for ``tokens`` tokens and the others in an overflow
file. Steps take turns with the operations that limit them: reading the bytes of the same keys and values from
memory, and reading those of the file with O_DIRECT and nothing else. A busy machine therefore slows the steps
and the limits alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tierstore.errors import TierStoreError, UsageError
from tierstore.machine import memory_bytes
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import COMPLETED, PagePool
from tierstore.tiers.overflow import OverflowPool
from tierstore.units import format_size
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Runner, Step
from tierstore_tools import machine, processes, report
from tierstore_tools.limits import RawDisk
from tierstore_tools.report import Phase

_STEPS = 5  # the number of steps for the longest context; shorter contexts take more steps
_MOST_STEPS = 60
_RAW_BYTES = 1 << 30
_SPARE_PAGES = 4  # pages beside those of ``tokens`` tokens


@dataclass(frozen=True)
class BeyondRow:
    """A context. Rates are tokens and bytes per second, medians of steps; ``of_…`` are the medians of ratios
    of neighbouring steps. Without room for all pages in memory, the figures of memory are None.

    ``of_here`` is the speed with an overflow file, divided by the speed with all pages in memory and no file.
    With ``times`` = 1 both have all pages in memory.

    ``process_bytes`` is the memory (PSS) of the process while it decodes beyond memory, ``pages_bytes`` that
    of the pages in it. ``max_logit_diff`` is the largest difference between its logits and those computed
    with all pages in memory.
    """

    times: int
    tokens: int
    kv_bytes: int
    pages_bytes: int
    process_bytes: int
    from_disk: float
    disk_bytes_per_s: float
    of_disk: float
    from_memory: float | None = None
    memory_bytes_per_s: float | None = None
    of_memory: float | None = None
    of_here: float | None = None
    max_logit_diff: float | None = None


def run(
    model: str,
    times: Sequence[int],
    *,
    tokens: int,
    directory: Path,
    dtype: str | None,
    chunk_tokens: int,
    json: str | None,
) -> None:
    """Run the benchmark. Raises :class:`TierStoreError` if logits differ from those with all pages in
    memory."""
    report.require_targets(json)
    loaded = load_model(open_model(model, device="cpu", dtype=dtype))
    longest = max(times) * tokens
    if longest + 64 > loaded.config.max_positions:
        raise UsageError(f"{model} has only {loaded.config.max_positions:,} positions")
    spec = loaded.kv_spec(chunk_tokens=chunk_tokens)
    if len(spec.groups) > 1:
        raise UsageError("--beyond measures models with one layer group: give another model")
    rows = []
    with report.phases() as phases:
        for each in times:
            with phases.phase(f"a context of {each} × {tokens:,} tokens") as phase:
                steps = min(_STEPS * max(times) // each, _MOST_STEPS)
                rows.append(_measure(loaded, spec, directory, each, tokens, steps, phase))
    memory = ("memory", "of limit")
    disk = ("disk", "of limit", "of memory")
    columns = ("context", "KV", "in memory", "process", *memory, *disk, "Δlogit")
    table = [
        (
            f"{row.tokens:,}",
            format_size(row.kv_bytes),
            format_size(row.pages_bytes),
            format_size(row.process_bytes),
            "–" if row.from_memory is None else f"{row.from_memory:.2f}/s",
            report.percent(row.of_memory),
            f"{row.from_disk:.2f}/s",
            report.percent(row.of_disk),
            report.percent(row.of_here),
            "–" if row.max_logit_diff is None else f"{row.max_logit_diff:.1g}",
        )
        for row in rows
    ]
    title = "longctx --beyond: tokens a second, with all pages in memory and with few of them"
    report.table(title, columns, table, to_stderr=json == "-")
    described = machine.describe("cpu")
    report.write_json({"machine": described, "model": model, "rows": [asdict(row) for row in rows]}, json)
    wrong = [row.times for row in rows if row.max_logit_diff]
    if wrong:
        raise TierStoreError(f"wrong logits in contexts of {wrong} times the memory: please report this")


def fill(pool: PagePool, pages: Sequence[int], dtype: torch.dtype) -> None:
    """Write random numbers into the pages. All pages get the same series of numbers, but each begins at
    another place in it."""
    count = pool.spec.page_bytes // dtype.itemsize
    numbers = torch.randn(2 * count, generator=torch.Generator().manual_seed(1))
    filled = (numbers * 0.5).to(dtype)
    for number, page in enumerate(pages):
        pool.write_pages([(page, filled[number % count :].data_ptr())])


class DecodedContext:
    """A sequence of ``pages`` pages of random numbers in a pool, and steps behind it."""

    def __init__(self, model: LoadedModel, pool: PagePool, pages: int) -> None:
        self.pool = pool
        self._runner: Runner = make_runner(model, [pool], EngineSettings())
        found = pool.allocate(pages + 1)
        assert found is not None
        self.table = found
        self._past = pages * pool.spec.chunk_tokens
        fill(pool, found[:-1], getattr(torch, model.config.dtype))

    def step(self) -> tuple[float, torch.Tensor]:
        """Decode a token. Run one step. Return its seconds and its logits."""
        span = Span((self.table,), self._past, self._past + 1)
        self._past += 1
        begun = time.perf_counter()
        logits = self._runner.compute(Step((span,), [7], [0], COMPLETED, self.pool.spec.chunk_tokens))
        return time.perf_counter() - begun, logits

    def read(self) -> None:
        """Read the bytes of all pages once, with as many threads as a step has."""
        torch.from_numpy(self.pool.array)[: len(self.table) - 1].view(torch.int64).sum()


def _measure(
    model: LoadedModel, spec: KVSpec, directory: Path, times: int, tokens: int, steps: int, phase: Phase
) -> BeyondRow:
    fitting = -(-tokens // spec.chunk_tokens)
    pages = times * fitting
    kv_bytes = pages * spec.page_bytes
    resident = fitting + _SPARE_PAGES
    pool = OverflowPool(spec, resident + pages, resident_pages=resident, directory=directory)
    try:
        beyond = DecodedContext(model, pool, pages)
        beyond.step()
        process = processes.memory_bytes([os.getpid()])
        phase.update(0.3)
        here = None
        if kv_bytes < memory_bytes().available // 2:
            here = DecodedContext(model, PagePool(spec, pages + 1), pages)
            here.step()
        with RawDisk(directory, _RAW_BYTES) as raw:
            raw.survey(1)
            taken = [_take_turns(beyond, pool, raw, here) for _ in range(steps)]
    finally:
        pool.close()
    median = statistics.median
    row = BeyondRow(
        times,
        pages * spec.chunk_tokens,
        kv_bytes,
        resident * spec.page_bytes,
        process,
        from_disk=1 / median(each.beyond_s for each in taken),
        disk_bytes_per_s=median(each.raw for each in taken),
        of_disk=median(each.read / each.beyond_s / each.raw for each in taken),
    )
    if here is None:
        return row
    return replace(
        row,
        from_memory=1 / median(each.here_s for each in taken),
        memory_bytes_per_s=median(kv_bytes / each.sum_s for each in taken),
        of_memory=median(each.sum_s / each.here_s for each in taken),
        of_here=median(each.here_s / each.beyond_s for each in taken),
        max_logit_diff=max(each.difference for each in taken),
    )


@dataclass(frozen=True)
class _Turn:
    """The times of a step beyond memory and of one in memory, the bytes that the first one read from the
    file, and the limits. The limits are the disk's bytes per second, and the seconds to read the same bytes
    from memory."""

    beyond_s: float
    read: int
    raw: float
    here_s: float = 0.0
    sum_s: float = 0.0
    difference: float = 0.0


def _take_turns(
    beyond: DecodedContext, pool: OverflowPool, raw: RawDisk, here: DecodedContext | None
) -> _Turn:
    before = pool.stats.read_bytes
    beyond_s, logits = beyond.step()
    turn = _Turn(beyond_s, pool.stats.read_bytes - before, raw.read() * 1e9)
    if here is None:
        return turn
    here_s, expected = here.step()
    begun = time.perf_counter()
    here.read()
    sum_s = time.perf_counter() - begun
    difference = float((logits - expected).abs().max())
    return replace(turn, here_s=here_s, sum_s=sum_s, difference=difference)
