"""``tierstore fsck``: verify the pages in a store's directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli import show
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.tiers.disk.fsck import Finding, FsckReport

_SHOWN = 20


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The store's directory", show_default=False)
    ],
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove damaged and unreachable pages, repair the rest")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
) -> None:
    """Verify every page of a store at the speed of the disk.

    No process may use DIR at the same time. Without --repair, nothing is changed. The exit code is 0 if
    everything is right or was repaired, else 1.
    """
    from tierstore.tiers.disk.fsck import CheckWatcher, fsck

    with show.meter("opening") as meter:
        report = fsck(
            directory,
            repair=repair,
            watcher=CheckWatcher(phase=meter.phase, expect=meter.expect, progress=meter.advance),
        )
    if json:
        show.write_json(to_json(report))
    else:
        _print(report)
    raise typer.Exit(0 if report.clean else 1)


def to_json(report: FsckReport) -> dict[str, object]:
    """Return the document of ``--json``."""
    from tierstore.tiers.disk.fsck import Category

    return {
        "directory": report.directory,
        "store": report.store,
        "clean": report.clean,
        "repaired": report.repaired,
        "pages": report.pages,
        "good_pages": report.good_pages,
        **{category.value: report.total(category) for category in Category},
        "unmended": report.unmended,
        "by_kind": {category.value: report.counts[category] for category in Category},
        "verified_pages": report.verified_pages,
        "verified_bytes": report.verified_bytes,
        "index_bytes": report.index_bytes,
        "allocated_bytes": report.allocated_bytes,
        "capacity_bytes": report.capacity_bytes,
        "run_s": report.seconds,
        "payloads_s": report.payload_seconds,
        "gb_per_s": report.gb_per_s,
        "findings": [_finding_to_json(report, finding) for finding in report.findings],
    }


def _finding_to_json(report: FsckReport, finding: Finding) -> dict[str, object]:
    page = report.pages_named.get(finding.serial) if finding.serial is not None else None
    return {
        "category": finding.category.value,
        "kind": finding.what,
        "why": finding.why,
        "name": finding.name or None,
        "serial": finding.serial,
        "model": page.model if page is not None else None,
        "tenant": page.tenant if page is not None else None,
        "start_tokens": page.start_tokens if page is not None else None,
        "stop_tokens": page.stop_tokens if page is not None else None,
        "mendable": finding.mendable,
    }


def _print(report: FsckReport) -> None:
    if report.findings:
        rows = [
            (finding.category.value, finding.what, _subject(report, finding), finding.why)
            for finding in report.findings[:_SHOWN]
        ]
        show.table(("", "what", "which", "why"), rows, left=4)
        found = sum(sum(kinds.values()) for kinds in report.counts.values())
        if found > _SHOWN:
            show.line(f"… and {found - _SHOWN:,} more")
        show.line("")
    cap = "" if report.capacity_bytes is None else f" of {format_size(report.capacity_bytes)}"
    show.line(
        f"{report.verified_pages:,} of {report.pages:,} pages are whole "
        f"({format_size(report.verified_bytes)}, verified in {report.seconds:.2f} s, "
        f"{report.gb_per_s:.2f} GB/s); {format_size(report.allocated_bytes)}{cap} on disk"
    )
    show.line(f"{report.directory}: {_verdict(report)}")


def _subject(report: FsckReport, finding: Finding) -> str:
    if finding.serial is None:
        return finding.name
    return str(report.pages_named.get(finding.serial, f"page {finding.serial}"))


def _verdict(report: FsckReport) -> str:
    counts = ", ".join(
        f"{sum(kinds.values()):,} {category.value}" for category, kinds in report.counts.items() if kinds
    )
    lost = report.pages - report.good_pages
    if not counts:
        return "clean"
    if report.index_lost:
        done = "has set the index aside and made" if report.repaired else "would set the index aside and make"
        return f"{counts}; tierstore fsck --repair {done} an empty one: all pages are lost"
    if not report.repaired:
        return f"{counts}; tierstore fsck --repair would keep {report.good_pages:,} pages and drop {lost:,}"
    left = f"; {report.unmended:,} not repaired: look at them yourself" if report.unmended else ""
    return f"repaired ({counts}): {report.good_pages:,} pages kept, {lost:,} dropped{left}"
