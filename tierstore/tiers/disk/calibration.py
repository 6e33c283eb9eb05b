"""Which way of reading this disk does better: measured once, when a directory is made.

On NVMe, O_DIRECT with several requests in flight wins; on some virtual disks one buffered stream with the
kernel's readahead is twice as fast. So a few blocks of real data are written and read back both ways, the
page cache dropped before each, through the very code that will read pages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tierstore.memory import Memory
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.payloads import Payloads, ReadMode
from tierstore.tiers.disk.records import PageRecord
from tierstore.units import MIB

_PAGE_BYTES = 1 * MIB
_MOST_PAGES = 24
_LEAST_PAGES = 8
_ROUNDS = 3
_TIME_LIMIT_S = 0.12  # then what has been measured so far decides


class Calibration(msgspec.Struct, frozen=True):
    """What was chosen, when, and the best figure of each way in GB/s."""

    direct: bool
    streams: int
    measured_at_s: float  # wall clock
    direct_gb_per_s: float = 0.0
    buffered_gb_per_s: float = 0.0

    @property
    def mode(self) -> ReadMode:
        return ReadMode(self.direct, self.streams)


def calibrate(payloads: Payloads, extents: ExtentFiles, *, io_threads: int) -> Calibration:
    """Measure and choose. Uses the beginning of an extent space that holds nothing yet.

    Raises :class:`OSError` when the disk cannot be written.
    """
    direct = ReadMode(direct=True, streams=io_threads)
    pages = min(extents.capacity_bytes // _PAGE_BYTES, _MOST_PAGES)
    if pages < _LEAST_PAGES:
        return Calibration(direct.direct, direct.streams, time.time())
    deadline = time.perf_counter() + _TIME_LIMIT_S
    memory = Memory(pages * _PAGE_BYTES, shared=False)
    memory.populate()
    batch = [(_record(number), memory.view(number * _PAGE_BYTES, _PAGE_BYTES)) for number in range(pages)]
    payloads.write(batch)
    extents.sync()
    best = dict.fromkeys((direct, ReadMode(direct=False, streams=1)), 0.0)
    for _ in range(_ROUNDS):
        for mode in best:
            if time.perf_counter() < deadline:
                best[mode] = max(best[mode], _speed(payloads, extents, batch, mode))
    chosen = max(best, key=lambda mode: best[mode])
    of_direct, of_buffered = best.values()
    return Calibration(chosen.direct, chosen.streams, time.time(), of_direct, of_buffered)


def _speed(
    payloads: Payloads, extents: ExtentFiles, batch: Sequence[tuple[PageRecord, memoryview]], mode: ReadMode
) -> float:
    nbytes = len(batch) * _PAGE_BYTES
    extents.forget(0, nbytes)
    payloads.read_mode = mode
    start = time.perf_counter()
    read = payloads.read(batch)
    return nbytes / (time.perf_counter() - start) / 1e9 if read.all_good else 0.0


def _record(number: int) -> PageRecord:
    return PageRecord(
        serial=number + 1,
        parent=0,
        key=bytes(16),
        identity=bytes(32),
        tokens=b"",
        nbytes=_PAGE_BYTES,
        place=number * _PAGE_BYTES,
    )
