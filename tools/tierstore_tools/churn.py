"""``tierstore-bench churn``: a day of traffic with mixed page sizes through one store, at the disk's speed.

After each batch the benchmark also writes to the disk without a store. Each tenth of the day therefore has
its own limit, and a slow hour of a shared machine does not look like a slow store.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tierstore.errors import TierStoreError
from tierstore.memory import Memory
from tierstore.units import MIB, format_size
from tierstore_tools import machine, report
from tierstore_tools.churn_day import PAGE_SIZES, Day, Tenth

_REQUEST = 4 * MIB
_REQUESTS = 4


class _RawWrites:
    """A writer to a preallocated file, with O_DIRECT if possible and one sync. This is the least work that a
    store of durable pages needs."""

    def __init__(self, path: Path) -> None:
        self._seconds: dict[int, list[float]] = {}
        self._view = Memory(_REQUEST, shared=False).view(0, _REQUEST)
        self._view[:] = os.urandom(_REQUEST)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._fd, 0, _REQUEST * _REQUESTS)
        self.write(-1)  # the first write to a file costs more than later ones

    def write(self, tenth: int) -> None:
        """Write once to measure the limit of the current tenth of the day."""
        started = time.perf_counter()
        for number in range(_REQUESTS):
            os.pwrite(self._fd, self._view, number * _REQUEST)
        os.fdatasync(self._fd)
        self._seconds.setdefault(tenth, []).append(time.perf_counter() - started)

    def gb_per_s(self, tenth: int) -> float:
        """Return the disk's speed in a tenth of the day: all bytes divided by all the time, as for the
        store."""
        seconds = self._seconds.get(tenth, [])
        return len(seconds) * _REQUEST * _REQUESTS / sum(seconds) / 1e9 if seconds else 0.0

    def close(self) -> None:
        os.close(self._fd)


def run(directory: Path, *, capacity_bytes: int, times: float, seed: int, json: str | None) -> None:
    """Run, print, write. The store is made in ``directory`` and removed. Raises :class:`TierStoreError` if it
    exceeded its cap."""
    with (
        tempfile.TemporaryDirectory(prefix="tierstore-churn-", dir=directory) as path,
        report.phases() as phases,
        phases.phase("churn") as phase,
        Day(Path(path) / "store", capacity_bytes=capacity_bytes, times=times, seed=seed) as day,
    ):
        raw = _RawWrites(Path(path) / "raw")

        def progress(done: float, tenth: Tenth) -> None:
            if tenth is not day.evening:
                raw.write(day.tenths.index(tenth))
            used = f"{tenth.utilisation[-1]:.3f} of the cap used" if tenth.utilisation else "filling up"
            phase.update(done, f"churn: {used}, {tenth.gb_per_s:.2f} GB/s")

        day.run(progress)
        raw.close()
        tenths, most_taken = day.tenths, day.most_taken_bytes
        dropped, written = day.dropped_pages, day.written_pages
    limits = [raw.gb_per_s(number) for number in range(len(tenths))]
    _show(tenths, limits, to_stderr=json == "-")
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
        **_summary(tenths, limits),
        "tenths": [
            _row(number, tenth, limit)
            for number, (tenth, limit) in enumerate(zip(tenths, limits, strict=True), 1)
        ],
    }
    report.write_json(document, json)
    if most_taken > capacity_bytes:
        over = format_size(most_taken - capacity_bytes)
        raise TierStoreError(f"the store took {format_size(most_taken)}, {over} over its cap")


def _summary(tenths: Sequence[Tenth], limits: Sequence[float]) -> dict[str, float]:
    """Compare the last tenth of the day with the first one: both have the same traffic, and the store is full
    in both."""
    samples = [sample for tenth in tenths for sample in tenth.utilisation]
    written = sum(tenth.written_bytes for tenth in tenths)
    first, *_, last = (_part(tenth.gb_per_s, limit) for tenth, limit in zip(tenths, limits, strict=True))
    return {
        "mean_utilisation": statistics.mean(samples) if samples else 0.0,
        "least_utilisation": min(samples, default=0.0),
        "samples_below_95_percent": sum(sample < 0.95 for sample in samples),
        "last_to_first_speed": _part(tenths[-1].gb_per_s, tenths[0].gb_per_s),
        "last_to_first_of_raw": _part(last, first),
        "first_to_last_cpu": _part(tenths[0].cpu_s_per_gb, tenths[-1].cpu_s_per_gb),
        "write_amplification": 1 + sum(tenth.moved_bytes for tenth in tenths) / max(written, 1),
    }


def _part(value: float, whole: float) -> float:
    return value / whole if whole else 0.0


def _row(number: int, tenth: Tenth, limit: float) -> dict[str, object]:
    return {
        "tenth": number,
        "write_gb_per_s": tenth.gb_per_s,
        "raw_gb_per_s": limit,
        "cpu_s_per_gb": tenth.cpu_s_per_gb,
        "written_bytes": tenth.written_bytes,
        "moved_bytes": tenth.moved_bytes,
        "write_amplification": tenth.write_amplification,
        "hit_rate": tenth.hit_rate,
        "utilisation": tenth.utilisation,  # after each batch
    }


def _show(tenths: Sequence[Tenth], limits: Sequence[float], *, to_stderr: bool) -> None:
    report.table(
        "churn: how much of the cap holds pages, and how fast they are written",
        (
            "tenth of the day",
            "used, mean",
            "used, least",
            "GB/s",
            "of raw",
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
                report.rate(_part(tenth.gb_per_s, limit)),
                report.rate(tenth.cpu_s_per_gb),
                f"{tenth.write_amplification:.2f}",
                report.percent(tenth.hit_rate),
            )
            for number, (tenth, limit) in enumerate(zip(tenths, limits, strict=True), 1)
        ],
        to_stderr=to_stderr,
    )
