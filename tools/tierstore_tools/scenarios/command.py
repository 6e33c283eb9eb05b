"""``tierstore-bench scenarios``: start all targets, measure, print, write."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tierstore.errors import TierStoreError, UsageError
from tierstore.units import format_size
from tierstore_tools import machine, report
from tierstore_tools.scenarios import runs
from tierstore_tools.scenarios.runs import Agreement, Progress, ScenarioResult, StreamRow
from tierstore_tools.scenarios.settings import Scenarios
from tierstore_tools.scenarios.targets import Left, Target, Workshop
from tierstore_tools.vllm import models


def run(settings: Scenarios, *, json: str | None, plot: Path | None) -> None:
    """Measure all targets, print tables, write JSON and a picture. Raises :class:`UsageError` for an unknown
    name or file, and :class:`TierStoreError` if no target is available or if one failed. If a target failed,
    the results of the other targets are printed and written first."""
    report.require_targets(json, plot)
    result = ScenarioResult()
    steps = list(_steps(settings, result))
    targets = list(_targets(settings, result.left_out))
    if not targets:
        whys = "; ".join(f"{each.name}: {each.why}" for each in result.left_out)
        raise TierStoreError(f"there is no target to measure: {whys}")
    with report.phases() as phases, ExitStack() as stack:
        for target in targets:
            stack.callback(target.close)
            with phases.phase(f"{target.name}: start", measurable=False), _failures(target, result):
                target.start()
        for step in steps:
            for target in reversed(targets) if step.backwards else targets:
                if target.name not in {each.name for each in result.failed}:
                    with phases.phase(f"{step.name}: {target.name}") as phase, _failures(target, result):
                        step.run(target, settings.request_s, phase.update)
    _show(result, settings, to_stderr=json == "-")
    document = {"machine": machine.describe(), "settings": _described(settings), **asdict(result)}
    report.write_json(document, json)
    if plot is not None and any((result.batch, result.longctx, result.online, result.stream)):
        from tierstore_tools.scenarios import plot as drawing

        drawing.draw(result, f"{settings.model} on {machine.describe()['cpu']}", plot)
    if result.failed:
        raise TierStoreError("; ".join(each.why for each in result.failed))


@contextmanager
def _failures(target: Target, result: ScenarioResult) -> Iterator[None]:
    """Record the failure of a target. This target is not measured any more; the other targets are."""
    try:
        yield
    except UsageError:
        raise
    except TierStoreError as error:
        result.failed.append(Left(target.name, str(error)))


@dataclass(frozen=True, slots=True)
class _Step:
    """Send one load to one target after the other, so that a slow moment of the machine affects all of them
    alike. With ``backwards``, begin with the last target."""

    name: str
    work: Callable[..., Coroutine[Any, Any, Any]]
    keep: Callable[[Any], None]
    backwards: bool = False

    def run(self, target: Target, request_s: float, progress: Progress) -> None:
        self.keep(asyncio.run(self.work(target, request_s=request_s, progress=progress)))


def _steps(settings: Scenarios, result: ScenarioResult) -> Iterator[_Step]:
    """Yield the loads of the chosen scenarios. The scenario that restarts servers comes last."""
    work: Callable[..., Coroutine[Any, Any, Any]]
    agreement = Agreement()
    if "batch" in settings.scenarios:
        work = partial(runs.batch, asks=settings.batch(), agreement=agreement)
        yield _Step("batch", work, result.batch.append)
    if "online" in settings.scenarios:
        for rate in settings.rates_per_s:
            for name, arrivals in settings.arrivals(rate).items():
                traffic = runs.NamedArrivals(name, rate, arrivals)
                work = partial(runs.online, traffic=traffic, slo=settings.slo)
                yield _Step(f"online, {name}, {rate:g} per s", work, result.online.append)
    if "stream" in settings.scenarios:
        for round in range(settings.rounds):
            for readers in settings.readers(round):
                work = partial(runs.stream, round=round, readers=readers)
                name = f"stream, {readers.beside}, round {round + 1}"
                yield _Step(name, work, result.stream.append, backwards=bool(round % 2))
    if "longctx" in settings.scenarios:
        work = partial(runs.longctx, prompts=settings.long(), agreement=agreement)
        yield _Step("longctx", work, result.longctx.extend)


def _targets(settings: Scenarios, left_out: list[Left]) -> Iterator[Target]:
    yield from (Target(url, url) for url in settings.urls)
    workshop: Workshop | None = None
    for name in settings.targets:
        why = Workshop.why_not(name, settings.vllm)
        if why is not None:
            left_out.append(Left(name, why))
            continue
        if workshop is None:
            workshop = Workshop(_model(settings), settings.room, settings.directory, settings.vllm)
        yield workshop.make(name)


def _model(settings: Scenarios) -> Path:
    if settings.model in models.KINDS:
        return models.make(settings.model, settings.directory / settings.model)
    folder = Path(settings.model)
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder} is neither a Hugging Face folder nor one of {', '.join(models.KINDS)}")
    return folder


def _described(settings: Scenarios) -> dict[str, object]:
    described = {
        name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()
    }
    # the document leaves out paths, because figures do not depend on them
    del described["directory"], described["vllm"]
    return described


def _rounds(rows: Sequence[StreamRow]) -> list[list[StreamRow]]:
    """Group the rounds by load and target."""
    found: dict[tuple[str, str], list[StreamRow]] = {}
    for row in rows:
        found.setdefault((row.beside, row.target), []).append(row)
    return list(found.values())


Column = Callable[[Any], str]
"""Return the text of one cell of a table."""

_BATCH: dict[str, Column] = {
    "target": lambda row: row.target,
    "tokens/s": lambda row: f"{row.output_tokens_per_s:.0f}",
    "prompt/s": lambda row: f"{row.prompt_tokens_per_s:,.0f}",
    "held": lambda row: report.percent(row.hit_rate),
    "KV reserved": lambda row: "–" if row.kv_peak_tokens is None else f"{row.kv_peak_tokens:,.0f}",
    "used": lambda row: report.percent(row.kv_used),
    "memory": lambda row: "–" if row.peak_memory_bytes is None else format_size(row.peak_memory_bytes),
    "core-s": lambda row: "–" if row.core_s is None else f"{row.core_s:.1f}",
    "same": lambda row: report.percent(row.same_answers),
    "failed": lambda row: f"{row.failed}",
}
_LONGCTX: dict[str, Column] = {
    "target": lambda row: row.target,
    "case": lambda row: row.case,
    "prompt": lambda row: f"{row.prompt_tokens:,}",
    "held": lambda row: f"{row.cached_tokens:,}",
    "found in": lambda row: row.found,
    "TTFT": lambda row: report.seconds(row.ttft_s),
    "slowest": lambda row: report.seconds(row.slowest_ttft_s),
    "speed-up": lambda row: f"{row.speedup:.1f}×",
    "same": lambda row: report.percent(row.same_answers),
}
_ONLINE: dict[str, Column] = {
    "target": lambda row: row.target,
    "arrivals": lambda row: f"{row.arrivals} {row.rate_per_s:g}/s",
    "good/s": lambda row: f"{row.goodput_per_s:.2f}",
    "good": lambda row: report.percent(row.slo_met),
    "TTFT p50": lambda row: report.seconds(row.ttft_p50_s),
    "TTFT p99": lambda row: report.seconds(row.ttft_p99_s),
    "ITL p50": lambda row: report.seconds(row.itl_p50_s),
    "ITL p99": lambda row: report.seconds(row.itl_p99_s),
    "held": lambda row: report.percent(row.hit_rate),
    "failed": lambda row: f"{row.failed}",
}
_STREAM: dict[str, Column] = {  # one row of the table has all rounds of one target
    "target": lambda rows: rows[0].target,
    "beside": lambda rows: rows[0].beside,
    "ITL p50": lambda rows: report.seconds(statistics.median(row.itl_p50_s for row in rows)),
    "p99": lambda rows: report.seconds(statistics.median(row.itl_p99_s for row in rows)),
    "from": lambda rows: report.seconds(min(row.itl_p99_s for row in rows)),
    "to": lambda rows: report.seconds(max(row.itl_p99_s for row in rows)),
    "jitter": lambda rows: report.seconds(statistics.median(row.jitter_s for row in rows)),
    "longest": lambda rows: report.seconds(max(row.itl_max_s for row in rows)),
    "memory": lambda rows: _most_memory(rows),
    "failed": lambda rows: f"{sum(row.failed for row in rows)}",
}


def _most_memory(rows: Sequence[StreamRow]) -> str:
    known = [row.memory_bytes for row in rows if row.memory_bytes is not None]
    return format_size(max(known)) if known else "–"


def _show(result: ScenarioResult, settings: Scenarios, *, to_stderr: bool) -> None:
    def table(title: str, columns: Mapping[str, Column], rows: Sequence[Any]) -> None:
        lines = [[cell(row) for cell in columns.values()] for row in rows]
        report.table(title, list(columns), lines, to_stderr=to_stderr)

    if result.batch:
        table(f"batch: {settings.requests} requests about a few documents, all at once", _BATCH, result.batch)
    if result.longctx:
        table("longctx: time to first token", _LONGCTX, result.longctx)
    if result.online:
        ttft, itl = report.seconds(settings.slo.ttft_s), report.seconds(settings.slo.itl_s)
        good = f"a good request has its first token within {ttft} and a mean of {itl} between later tokens"
        table(f"online: {good}", _ONLINE, result.online)
    if result.stream:
        quick = f"gaps between tokens of {result.stream[0].quick_readers} quick readers"
        table(f"stream: {quick}, medians of {settings.rounds} rounds", _STREAM, _rounds(result.stream))
    console = report.stderr if to_stderr else report.stdout
    for each in result.left_out:
        console.print(f"left out: {each.name}: {each.why}", markup=False, highlight=False)
