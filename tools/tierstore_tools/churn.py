"""``churn``: a day of traffic of mixed page sizes through one store, at the disk's speed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import TierStoreError
from tierstore.testing.churn import PAGE_SIZES, Day, Tenth
from tierstore.units import format_size
from tierstore_tools import machine, report


def run(directory: Path, *, capacity_bytes: int, times: float, seed: int, json: str | None) -> None:
    """Run, show, write. The store is made in ``directory`` and removed. Raises :class:`TierStoreError` when
    the cap was exceeded."""
    with (
        tempfile.TemporaryDirectory(prefix="tierstore-churn-", dir=directory) as path,
        report.phases() as phases,
        phases.phase("churn") as phase,
        Day(Path(path) / "store", capacity_bytes=capacity_bytes, times=times, seed=seed) as day,
    ):

        def progress(done: float, tenth: Tenth) -> None:
            used = f"{tenth.utilisation[-1]:.3f} of the cap used" if tenth.utilisation else "filling up"
            phase.update(done, f"churn: {used}, {tenth.gb_per_s:.2f} GB/s")

        day.run(progress)
        tenths, most_taken = day.tenths, day.most_taken_bytes
        dropped, written = day.dropped_pages, day.written_pages
    _show(tenths, to_stderr=json == "-")
    document = {
        "machine": machine.describe(),
        "capacity_bytes": capacity_bytes,
        "times": times,
        "seed": seed,
        "page_bytes": list(PAGE_SIZES),
        "most_taken_bytes": most_taken,
        "over_capacity": most_taken > capacity_bytes,
        "written_pages": written,
        "dropped_pages": dropped,
        **_summary(tenths),
        "tenths": [_row(number, tenth) for number, tenth in enumerate(tenths, 1)],
    }
    report.write_json(document, json)
    if most_taken > capacity_bytes:
        over = format_size(most_taken - capacity_bytes)
        raise TierStoreError(f"the store took {format_size(most_taken)}, {over} over its cap")


def _summary(tenths: Sequence[Tenth]) -> dict[str, float]:
    samples = [sample for tenth in tenths for sample in tenth.utilisation]
    written = sum(tenth.written_bytes for tenth in tenths)
    first, last = tenths[0].gb_per_s, tenths[-1].gb_per_s
    return {
        "mean_utilisation": statistics.mean(samples) if samples else 0.0,
        "least_utilisation": min(samples, default=0.0),
        "last_to_first_speed": last / first if first else 0.0,
        "write_amplification": 1 + sum(tenth.moved_bytes for tenth in tenths) / max(written, 1),
    }


def _row(number: int, tenth: Tenth) -> dict[str, object]:
    return {
        "tenth": number,
        "write_gb_per_s": tenth.gb_per_s,
        "cpu_s_per_gb": tenth.cpu_s_per_gb,
        "written_bytes": tenth.written_bytes,
        "moved_bytes": tenth.moved_bytes,
        "write_amplification": tenth.write_amplification,
        "hit_rate": tenth.hit_rate,
        "utilisation": tenth.utilisation,  # after each batch, once the store was full
    }


def _show(tenths: Sequence[Tenth], *, to_stderr: bool) -> None:
    report.table(
        "churn: how much of the cap holds pages, and how fast they are written",
        (
            "tenth of the day",
            "used, mean",
            "used, least",
            "GB/s",
            "CPU s/GB",
            "bytes written per byte",
            "hit rate",
        ),
        [
            (
                f"{number}",
                f"{statistics.mean(tenth.utilisation):.3f}" if tenth.utilisation else "–",
                f"{min(tenth.utilisation):.3f}" if tenth.utilisation else "–",
                report.rate(tenth.gb_per_s),
                report.rate(tenth.cpu_s_per_gb),
                f"{tenth.write_amplification:.2f}",
                report.percent(tenth.hit_rate),
            )
            for number, tenth in enumerate(tenths, 1)
        ],
        to_stderr=to_stderr,
    )
