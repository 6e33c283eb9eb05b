"""What this machine can do without tierstore: the figures every measurement is held against, taken in the
same run.

memcpy is one thread copying between two populated buffers. The disk figures are the best of O_DIRECT and
buffered I/O with one and four threads, sequential, 4 MiB requests, writes ending with fdatasync, reads with
the page cache dropped before. All are medians of several passes: machines are shared and noisy.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore import memory
from tierstore.memory import Memory

_REQUEST = 4 << 20
_THREADS = (1, 4)


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """GB/s of each way to move bytes, best thread count; ``read`` and ``write`` are the better of the two."""

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
class Limits:
    """``memcpy_gb_per_s`` and the disk's figures."""

    memcpy_gb_per_s: float
    disk: DiskLimits

    def to_json(self) -> dict[str, float]:
        return {
            "memcpy_gb_per_s": self.memcpy_gb_per_s,
            "disk_read_gb_per_s": self.disk.read,
            "disk_write_gb_per_s": self.disk.write,
            **{f"disk_{name}": value for name, value in asdict(self.disk).items()},
        }


def measure(directory: Path, *, nbytes: int = 256 << 20, passes: int = 3) -> Limits:
    """All limits; the disk's with a temporary file of ``nbytes`` in ``directory``."""
    return Limits(memcpy(nbytes, passes=passes), disk(directory, nbytes=nbytes, passes=passes))


def memcpy(nbytes: int = 256 << 20, *, piece: int = 1 << 20, passes: int = 3) -> float:
    """GB/s of one thread copying ``nbytes`` in pieces."""
    source, destination = Memory(nbytes, shared=False), Memory(nbytes, shared=False)
    source.populate()
    destination.populate()

    def copy_all() -> None:
        for start in range(0, nbytes, piece):
            memory.copy_all(
                [(destination.address + start, source.address + start)], min(piece, nbytes - start)
            )

    return _median_gb_per_s(copy_all, nbytes, passes)


def disk(directory: Path, *, nbytes: int = 256 << 20, passes: int = 3) -> DiskLimits:
    """The four disk figures, in turn within each pass so that a slow moment hits all of them."""
    path = directory / f".tierstore-limits-{os.getpid()}"
    rates: dict[str, list[float]] = {}
    try:
        raw = _Raw(path, nbytes)
        for _ in range(passes):
            for threads in _THREADS:
                for name, seconds in raw.once(threads).items():
                    rates.setdefault(f"{name}/{threads}", []).append(nbytes / seconds / 1e9)
    finally:
        path.unlink(missing_ok=True)

    def best(name: str) -> float:
        return max(statistics.median(values) for key, values in rates.items() if key.startswith(name))

    return DiskLimits(
        best("read direct"), best("read buffered"), best("write direct"), best("write buffered")
    )


class _Raw:
    """Raw I/O on a file as a store makes them: preallocated, then written for the first time (which costs
    file systems more than writing over). Buffered I/O stands in where O_DIRECT is not to be had."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._memory = Memory(max(_THREADS) * _REQUEST, shared=False)
        self._memory.view(0, self._memory.nbytes)[:] = os.urandom(1 << 20) * (self._memory.nbytes >> 20)

    def once(self, threads: int) -> dict[str, float]:
        """Seconds of each way, once."""
        return {
            "write direct": self._time_write(os.O_DIRECT, threads),
            "read direct": self._time_read(os.O_DIRECT, threads),
            "write buffered": self._time_write(0, threads),
            "read buffered": self._time_read(0, threads),
        }

    def _time_write(self, flags: int, threads: int) -> float:
        self._path.unlink(missing_ok=True)
        fd = self._open(os.O_RDWR | os.O_CREAT | flags)
        try:
            os.posix_fallocate(fd, 0, self._nbytes)
            os.fsync(fd)
            start = time.perf_counter()
            self._in_parallel(self._write, fd, threads)
            os.fdatasync(fd)
            return time.perf_counter() - start
        finally:
            os.close(fd)

    def _time_read(self, flags: int, threads: int) -> float:
        fd = self._open(os.O_RDONLY | flags)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            self._in_parallel(self._read, fd, threads)
            return time.perf_counter() - start
        finally:
            os.close(fd)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self._path, flags, 0o600)
        except OSError:
            return os.open(self._path, flags & ~os.O_DIRECT, 0o600)

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
    """Make the kernel forget what it cached of the files under ``directory`` (they must have been synced)."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _median_gb_per_s(work: Callable[[], None], nbytes: int, passes: int) -> float:
    rates = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        rates.append(nbytes / (time.perf_counter() - start) / 1e9)
    return statistics.median(rates)
