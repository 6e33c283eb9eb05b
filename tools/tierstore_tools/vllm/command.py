"""``vllm`` from the command line: run, show, write, and say so when answers differ."""

from __future__ import annotations

from pathlib import Path

from tierstore.cli.checks.vllm import installed_version
from tierstore.errors import TierStoreError, UsageError
from tierstore_tools import machine, report
from tierstore_tools.vllm import cases, engine
from tierstore_tools.vllm.paired import Ratio
from tierstore_tools.vllm.settings import VllmBench


def run(settings: VllmBench, *, json: str | None) -> None:
    """Raises :class:`TierStoreError` where vLLM is missing, or when a hit answered other than a cold run."""
    missing = engine.missing()
    if missing is not None:
        raise TierStoreError(f"{missing}: nothing was measured")
    if json and json != "-" and not Path(json).absolute().parent.is_dir():
        raise UsageError(f"cannot write {json}: there is no such directory")
    with report.phases() as phases:
        result = cases.run(settings, phases)
    _show(result, to_stderr=json == "-")
    described = {**machine.describe(), "vllm": installed_version() or "unknown"}
    report.write_json(
        {
            "machine": described,
            "model": settings.model,
            "dtype": settings.dtype,
            "pairs": settings.pairs,
            **result.to_json(),
        },
        json,
    )
    wrong = [row.case for row in result.rows if not row.identical]
    if wrong:
        raise TierStoreError(f"the answers of these cases differ from vLLM's own: {', '.join(wrong)}")


def _show(result: cases.Result, *, to_stderr: bool) -> None:
    columns = ("case", "prompt", "from store", "TTFT", "speed-up", "identical", "Δlogprob")
    rows = [
        (
            row.case,
            f"{row.prompt_tokens:,}",
            f"{row.hit_tokens:,}",
            report.seconds(row.ttft_s),
            f"{row.speedup:.2f}×",
            "yes" if row.identical else "NO",
            "–" if row.max_logprob_diff is None else f"{row.max_logprob_diff:.1g}",
        )
        for row in result.rows
    ]
    report.table(
        f"vllm: time to first token, medians of {result.rows[0].rounds} prompts",
        columns,
        rows,
        to_stderr=to_stderr,
    )
    overhead = result.overhead
    console = report.stderr if to_stderr else report.stdout
    console.print(
        f"with nothing to reuse, with the connector over without: TTFT {_ratio(overhead.ttft)}, "
        f"CPU time {_ratio(overhead.cpu)}, tokens/s {_ratio(overhead.throughput)} "
        f"({overhead.ttft.pairs} pairs; in brackets where the median lies, at 95 %)"
    )
    for line in result.skipped:
        console.print(f"skipped {line}")


def _ratio(value: Ratio) -> str:
    return f"{value.median:.3f} ({value.low:.3f} … {value.high:.3f})"
