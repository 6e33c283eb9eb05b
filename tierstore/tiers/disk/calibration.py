"""Measure which way of reading a disk is fastest, once, when a directory is created.

On NVMe, O_DIRECT with several requests in flight is fastest. On some virtual disks, reading through the page
cache, one request at a time with the kernel's readahead, is twice as fast. So the calibration writes a few
blocks, and reads them in both ways with an empty page cache, through the code that will read pages.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import xxhash

from tierstore.memory import Memory
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.io import InFlightCalls
from tierstore.tiers.disk.payloads import Payloads, ReadMode
from tierstore.tiers.disk.records import PageRecord
from tierstore.tiers.disk.space import Space
from tierstore.units import KIB, MIB

_PAGE_BYTES = 1 * MIB
_MOST_PAGES = 24
_LEAST_PAGES = 8
_ROUNDS = 3
_TIME_LIMIT_S = 0.12  # after this time, the measurements so far decide
_SMALL_BYTES = 128 * KIB
_MOST_SMALL = 32  # pages
# Threads must be faster by this factor to be preferred to the kernel's queue. On a file system that reads
# queued requests one by one, they are several times as fast.
_CLEARLY = 1.25


class DiskCalibration(msgspec.Struct, frozen=True):
    """The chosen way of reading, the time of the measurement, and the best rate of each way in GB/s."""

    direct: bool
    streams: int
    measured_at_s: float  # wall clock
    direct_gb_per_s: float = 0.0
    buffered_gb_per_s: float = 0.0
    queued: bool = False  # small reads are faster from the kernel's queue than from threads

    @property
    def mode(self) -> ReadMode:
        return ReadMode(self.direct, self.streams, self.queued)


def calibrate(payloads: Payloads, extents: ExtentFiles, *, io_threads: int) -> DiskCalibration:
    """Measure the ways of reading and return the fastest. Overwrites the start of the extent space, which
    must not have pages yet. Raise :class:`OSError` if the disk cannot be written."""
    direct = ReadMode(direct=True, streams=io_threads)
    pages = min(extents.capacity_bytes // _PAGE_BYTES, _MOST_PAGES)
    if pages < _LEAST_PAGES:
        return DiskCalibration(direct.direct, direct.streams, time.time())
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
    queued = chosen.direct and extents.direct and _queue_is_worth_it(payloads, memory, chosen.streams)
    return DiskCalibration(chosen.direct, chosen.streams, time.time(), of_direct, of_buffered, queued)


def _queue_is_worth_it(payloads: Payloads, memory: Memory, streams: int) -> bool:
    """Return whether small pages that are not adjacent should be read through the kernel's queue: yes, unless
    threads are clearly faster. The queue needs less processor time, and this short measurement may be wrong
    on a busy machine."""
    count = min(memory.nbytes // (2 * _SMALL_BYTES), _MOST_SMALL)
    batch = []
    for number in range(count):
        record = _record(number, _SMALL_BYTES, 2 * number * _SMALL_BYTES)
        view = memory.view(record.place, record.nbytes)
        record.checksum = xxhash.xxh3_64_intdigest(view)
        batch.append((record, view))
    best = {True: 0.0, False: 0.0}
    for _ in range(_ROUNDS):
        for queued in best:
            payloads.read_mode = ReadMode(direct=True, streams=streams, queued=queued)
            start = time.perf_counter()
            good = payloads.read(batch).all_good
            best[queued] = max(best[queued], good / (time.perf_counter() - start))
    return best[True] * _CLEARLY >= best[False]


def _speed(
    payloads: Payloads, extents: ExtentFiles, batch: Sequence[tuple[PageRecord, memoryview]], mode: ReadMode
) -> float:
    nbytes = len(batch) * _PAGE_BYTES
    extents.forget(0, nbytes)
    payloads.read_mode = mode
    start = time.perf_counter()
    read = payloads.read(batch)
    return nbytes / (time.perf_counter() - start) / 1e9 if read.all_good else 0.0


def _record(number: int, nbytes: int = _PAGE_BYTES, place: int | None = None) -> PageRecord:
    return PageRecord(
        serial=number + 1,
        parent=0,
        key=bytes(16),
        identity=bytes(32),
        tokens=b"",
        nbytes=nbytes,
        place=number * nbytes if place is None else place,
    )


# -- probe -------------------------------------------------------------------------------------------
#
# A probe finds out whether a failed disk works again, before users' pages are written to it.
#
# A probe writes a page like any other, with the same calls. The probe reserves a place, which may grow the
# extent files, and fails on a full disk. The probe writes random bytes, syncs them together with a
# transaction of the index, and reads them back. No record refers to the place, so it is free again
# afterwards. A probe of a separate file would not test preallocation, O_DIRECT and the index.


_PROBE_BYTES = 4096


class Presence:
    """Checks whether a path still leads to the same directory. After a lazy unmount of the file system,
    reads and writes of its open files still succeed, but the written data may be lost."""

    def __init__(self, path: Path, in_flight: InFlightCalls) -> None:
        self._path = path.absolute()  # the process may change its working directory
        self._in_flight = in_flight
        self._id = self._found()

    def require(self) -> None:
        """Raise :class:`OSError` if the path leads to another directory, or to none."""
        if self._found() != self._id:
            raise OSError(errno.ENODEV, f"{self._path} is not the directory that was opened: not mounted")

    def _found(self) -> tuple[int, int]:
        with self._in_flight.call():
            found = os.stat(self._path)
        return found.st_dev, found.st_ino


def try_out(space: Space, payloads: Payloads, commit: Callable[[], object]) -> None:
    """Write a page to the extents, make it durable with ``commit``, which syncs files and index, and read the
    page back. Raise :class:`OSError` if one of these fails, or the bytes differ."""
    place = space.reserve_outside(_PROBE_BYTES)
    if place is None:  # the extent space is full or has no slots: only the sync and the index can be tested
        commit()
        return
    try:
        page = (_record(0, _PROBE_BYTES, place), Memory(_PROBE_BYTES, shared=False).view(0, _PROBE_BYTES))
        page[1][:] = os.urandom(_PROBE_BYTES)  # random, so that bytes of an earlier write do not match
        payloads.write([page])
        commit()
        read = payloads.read([page])
    finally:
        space.unreserve(place, _PROBE_BYTES)
    if not read.all_good:
        raise read.error or OSError(errno.EIO, "the bytes read back differ from those written")
