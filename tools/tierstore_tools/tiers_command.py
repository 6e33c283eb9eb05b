"""``tiers`` from the command line: run, show, write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore.units import format_size
from tierstore_tools import connected, machine, report, tiers


def run(
    directory: Path,
    page_sizes: Sequence[int],
    *,
    total_bytes: int,
    rounds: int,
    store: str | None,
    json: str | None,
) -> None:
    """Measure the daemon at ``store``, or (None) a store of our own under ``directory``."""
    result: tiers.TiersResult | connected.ConnectedResult
    with report.phases() as shown, shown.phase("tiers", measurable=False) as phase:

        def progress(text: str) -> None:
            phase.update(text=text)

        if store is None:
            result = tiers.run(
                directory, page_sizes, total_bytes=total_bytes, rounds=rounds, progress=progress
            )
        else:
            result = connected.run(
                store, page_sizes, total_bytes=total_bytes, rounds=rounds, progress=progress
            )
    to_stderr = json == "-"
    _show_rates(result.rows, to_stderr=to_stderr)
    if isinstance(result, connected.ConnectedResult):
        _show_requests(result, to_stderr=to_stderr)
    report.write_json({"machine": machine.describe(), **result.to_json()}, json)


def _show_rates(rows: Sequence[tiers.TierRow], *, to_stderr: bool) -> None:
    report.table(
        "tiers: GB/s beside the same machine's limit",
        ("tier", "op", "page", "GB/s", "µs/page", "of limit", "limit", "core-s/GB"),
        [
            (
                row.tier,
                row.op,
                format_size(row.page_bytes),
                report.rate(row.gb_per_s),
                f"{row.us_per_page:.0f}",
                report.percent(row.limit_fraction),
                row.limit.removesuffix("_gb_per_s"),
                f"{row.core_s_per_gb:.2f}",
            )
            for row in rows
        ],
        to_stderr=to_stderr,
    )


def _show_requests(result: connected.ConnectedResult, *, to_stderr: bool) -> None:
    report.table(
        "lookups of 100K tokens, hashing included",
        ("prompt", "tokens", "lookups", "p50 ms", "p99 ms"),
        [
            (row.prompt, f"{row.tokens:,}", f"{row.lookups}", f"{row.p50_ms:.2f}", f"{row.p99_ms:.2f}")
            for row in result.lookups
        ],
        to_stderr=to_stderr,
    )
    report.table(
        "core-seconds per GB",
        ("clients", "op", "page", "clients", "daemon", "copy alone", "beyond the copy"),
        [
            (
                f"{row.clients}",
                row.op,
                format_size(row.page_bytes),
                *(f"{each:.2f}" for each in (row.client, row.daemon, row.copy, row.beyond_copy)),
            )
            for row in result.costs
        ],
        to_stderr=to_stderr,
    )
    report.table(
        "saves beside processes that copy and hash, with no daemon",
        ("clients", "page", "copy + hash GB/s", "of memcpy", "saves, of it"),
        [
            (
                f"{row.clients}",
                format_size(row.page_bytes),
                report.rate(row.gb_per_s),
                report.percent(row.copy_fraction),
                report.percent(row.saved_fraction),
            )
            for row in result.bounds
        ],
        to_stderr=to_stderr,
    )
    report.table(
        "lookups of 1K tokens by many clients at once",
        ("clients", "processes", "cores", "lookups/s", "p50 ms", "p99 ms", "least of mean"),
        [
            (
                f"{row.clients}",
                f"{row.processes}",
                f"{row.cores}",
                f"{row.lookups_per_s:,.0f}",
                f"{row.p50_ms:.1f}",
                f"{row.p99_ms:.1f}",
                report.percent(row.least_share),
            )
            for row in result.requests
        ],
        to_stderr=to_stderr,
    )
