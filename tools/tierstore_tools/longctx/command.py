"""``tierstore-bench longctx``: run, print, write, and fail if answers differ."""

from __future__ import annotations

from pathlib import Path

from tierstore.errors import TierStoreError
from tierstore.units import format_size
from tierstore_tools import machine, report
from tierstore_tools.longctx import cases
from tierstore_tools.longctx.settings import LongContext


def run(settings: LongContext, *, json: str | None, plot: Path | None) -> None:
    """Run the benchmark. Raises :class:`TierStoreError` if a hit answered differently from the cold run."""
    report.require_targets(json, plot)
    with report.phases() as phases:
        result = cases.run(settings, phases)
    described = machine.describe(settings.device)
    _show(result, to_stderr=json == "-")
    report.write_json({"machine": described, "model": settings.model, **result.to_json()}, json)
    if plot is not None:
        from tierstore_tools.longctx import plot as drawing

        title = f"{settings.model} on {described['cpu']}, {described['cores']} cores"
        drawing.draw(result, title, plot)
    wrong = [row.case for row in result.rows if not row.identical]
    if wrong:
        raise TierStoreError(f"the answers of these cases differ from the cold run: {', '.join(wrong)}")


def _show(result: cases.LongContextResult, *, to_stderr: bool) -> None:
    columns = (
        "case",
        "prompt",
        "reused",
        "TTFT",
        "slowest",
        "speed-up",
        "ITL",
        "moved",
        "GB/s",
        "of limit",
        "identical",
        "Δlogit",
        "bound",
    )
    rows = [
        (
            row.case,
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            report.seconds(row.ttft_s),
            report.seconds(row.slowest_ttft_s) if row.slowest_ttft_s > row.ttft_s else "–",
            f"{row.speedup:.1f}×" if row.reused_tokens else "–",
            report.seconds(row.itl_s),
            format_size(row.moved_bytes) if row.moved_bytes else "–",
            report.rate(row.gb_per_s),
            report.percent(row.limit_fraction),
            "yes" if row.identical else "NO",
            f"{row.max_logit_diff:.1g}",
            f"{row.logit_bound:.1g}",
        )
        for row in result.rows
    ]
    report.table("longctx: time to first token, cold and from each tier", columns, rows, to_stderr=to_stderr)
    limits = result.limits
    console = report.stderr if to_stderr else report.stdout
    console.print(
        f"limits: memcpy {limits.memcpy_gb_per_s:.1f} GB/s, disk read {limits.disk.read:.1f}, "
        f"write {limits.disk.write:.1f}; save overhead {100 * result.save_overhead:+.1f} % of cold TTFT"
    )
    for number, part in enumerate(result.parts):
        console.print(
            f"part {number}: a rank sends {part.sent_bytes_per_token:,.0f} bytes a token, "
            f"and holds {format_size(part.held_bytes)} of pages"
        )
