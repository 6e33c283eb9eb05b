"""Measure this machine's own limits, in the same run as the figures that are compared with them.

memcpy is one thread that calls libc's memmove between two populated buffers. The disk figures are the best of
O_DIRECT and buffered I/O with one and four threads: sequential, requests of 4 MiB. Writes end with fdatasync,
reads begin without a page cache. All figures are medians of several passes, because machines are noisy.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.memory import Memory

_REQUEST = 4 << 20
_THREADS = (1, 4)


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """GB/s of each way to use the disk, with the best number of threads. ``read`` and ``write`` are the rates
    of the fastest ways."""

    read_direct_gb_per_s: float
    read_buffered_gb_per_s: float
    write_direct_gb_per_s: float
    write_buffered_gb_per_s: float

    @property
    def read(self) -> float:
        return max(self.read_direct_gb_per_s, self.read_buffered_gb_per_s)

    @property
    def write(self) -> float:
        return max(self.write_direct_gb_per_s, self.write_buffered_gb_per_s)


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The measured limits of memory and disk."""

    memcpy_gb_per_s: float
    disk: DiskLimits

    def to_json(self) -> dict[str, float]:
        return {
            "memcpy_gb_per_s": self.memcpy_gb_per_s,
            "disk_read_gb_per_s": self.disk.read,
            "disk_write_gb_per_s": self.disk.write,
            **{f"disk_{name}": value for name, value in asdict(self.disk).items()},
        }


def measure(directory: Path, *, nbytes: int = 256 << 20, passes: int = 3) -> MachineLimits:
    """Measure all limits. The disk is measured with a temporary file of ``nbytes`` in
    ``directory``."""
    return MachineLimits(memcpy(nbytes, passes=passes), disk(directory, nbytes=nbytes, passes=passes))


def memcpy(nbytes: int = 256 << 20, *, piece: int = 1 << 20, passes: int = 3) -> float:
    """Return GB/s of one thread that copies ``nbytes`` in pieces."""
    copies = Memcpy(nbytes, piece=piece)
    return statistics.median(copies.gb_per_s() for _ in range(passes))


def libc_copy(to: int, of: int, nbytes: int, *, piece: int) -> None:
    """Copy ``nbytes`` from one address to another with libc's memmove, a piece at a time."""
    for at in range(0, nbytes, piece):
        ctypes.memmove(to + at, of + at, min(piece, nbytes - at))


class Memcpy:
    """One thread that copies ``nbytes`` in pieces between two populated buffers."""

    def __init__(self, nbytes: int, *, piece: int) -> None:
        self._nbytes = nbytes
        self._piece = piece
        self._source, self._destination = (Memory(nbytes, shared=False) for _ in range(2))
        self._source.populate()
        self._destination.populate()

    def gb_per_s(self) -> float:
        """Return GB/s of one pass."""
        start = time.perf_counter()
        libc_copy(self._destination.address, self._source.address, self._nbytes, piece=self._piece)
        return self._nbytes / (time.perf_counter() - start) / 1e9


def disk(directory: Path, *, nbytes: int = 256 << 20, passes: int = 3) -> DiskLimits:
    """Measure the four disk figures."""
    with RawDisk(directory, nbytes) as raw:
        return raw.survey(passes)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to use the disk: with O_DIRECT or the page cache, by a number of threads."""

    direct: bool
    threads: int


class RawDisk:
    """Raw I/O on a file like a store's: preallocated, then written for the first time, which costs more than
    overwriting. Without O_DIRECT, buffered I/O replaces it. The file is in ``directory`` until :meth:`close`,
    and its bytes are random."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._path = directory / f".tierstore-limits-{os.getpid()}"
        self._nbytes = nbytes
        self._memory = Memory(max(_THREADS) * _REQUEST, shared=False)
        self._memory.view(0, self._memory.nbytes)[:] = os.urandom(1 << 20) * (self._memory.nbytes >> 20)
        self._best_write = self._best_read = _Way(direct=True, threads=1)

    def __enter__(self) -> RawDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)

    def survey(self, passes: int) -> DiskLimits:
        """Measure all ways in turn within each pass, so a slow moment affects all of them, and remember the
        best way to write and to read."""
        writes: dict[_Way, list[float]] = {}
        reads: dict[_Way, list[float]] = {}
        ways = [_Way(direct, threads) for threads in _THREADS for direct in (True, False)]
        for _ in range(passes):
            for way in ways:
                writes.setdefault(way, []).append(self._write_once(way))
                reads.setdefault(way, []).append(self._read_once(way))
        write = {way: statistics.median(values) for way, values in writes.items()}
        read = {way: statistics.median(values) for way, values in reads.items()}
        self._best_write = max(write, key=write.__getitem__)
        self._best_read = max(read, key=read.__getitem__)

        def best(rates: dict[_Way, float], direct: bool) -> float:
            return max(rate for way, rate in rates.items() if way.direct is direct)

        return DiskLimits(best(read, True), best(read, False), best(write, True), best(write, False))

    def write(self) -> float:
        """Write the file once more, in the way that was fastest, and return GB/s."""
        return self._write_once(self._best_write)

    def read(self) -> float:
        """Read the file once more in the fastest way, and return GB/s. Call :meth:`write` before."""
        return self._read_once(self._best_read)

    def _write_once(self, way: _Way) -> float:
        self._path.unlink(missing_ok=True)
        fd = self._open(os.O_RDWR | os.O_CREAT, way)
        try:
            os.posix_fallocate(fd, 0, self._nbytes)
            os.fsync(fd)
            start = time.perf_counter()
            self._in_parallel(self._write, fd, way.threads)
            os.fdatasync(fd)
            return self._nbytes / (time.perf_counter() - start) / 1e9
        finally:
            os.close(fd)

    def _read_once(self, way: _Way) -> float:
        fd = self._open(os.O_RDONLY, way)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            self._in_parallel(self._read, fd, way.threads)
            return self._nbytes / (time.perf_counter() - start) / 1e9
        finally:
            os.close(fd)

    def _open(self, flags: int, way: _Way) -> int:
        if way.direct:
            try:
                return os.open(self._path, flags | os.O_DIRECT, 0o600)
            except OSError:
                pass  # this file system has no O_DIRECT
        return os.open(self._path, flags, 0o600)

    def _in_parallel(self, move: Callable[[int, int, int], None], fd: int, threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda worker: move(fd, worker, threads), range(threads)))

    def _write(self, fd: int, worker: int, threads: int) -> None:
        view = self._memory.view(worker * _REQUEST, _REQUEST)
        for offset in range(worker * _REQUEST, self._nbytes, threads * _REQUEST):
            os.pwrite(fd, view, offset)

    def _read(self, fd: int, worker: int, threads: int) -> None:
        view = self._memory.view(worker * _REQUEST, _REQUEST)
        for offset in range(worker * _REQUEST, self._nbytes, threads * _REQUEST):
            os.preadv(fd, [view], offset)


def drop_page_cache(directory: Path) -> None:
    """Drop the page cache of the files under ``directory``, which must have been synced."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
