"""Which calls to the disk have not returned yet: how a device that has stopped answering is noticed.

A thread in a system call cannot be called back, and a thread that watched the others could itself be late. So
each call is written down when it begins and crossed out when it returns, and whoever wants to know looks at
the oldest one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tierstore.tiers.disk.aio import Landed, QueuedRead
from tierstore.tiers.disk.io import FileIO


class Watch:
    """The calls under way. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._begun: dict[_Call, float] = {}  # in the order in which they began

    def call(self) -> _Call:
        """A context manager around one call, or a few that take no longer together than one should."""
        return _Call(self)

    def longest_s(self) -> float:
        """For how long the oldest call has been under way; 0 when there is none."""
        with self._lock:
            begun = next(iter(self._begun.values()), None)
        return 0.0 if begun is None else self._clock() - begun

    def begin(self, call: _Call) -> None:
        with self._lock:
            self._begun[call] = self._clock()

    def end(self, call: _Call) -> None:
        with self._lock:
            del self._begun[call]


class _Call:
    """One call. (A generator would do, but takes four times as long.)"""

    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._watch.begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.end(self)


class WatchedIO(FileIO):
    """Another one's system calls, each of them watched."""

    def __init__(self, inner: FileIO, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def open(self, path: Path, flags: int) -> int:
        with self._watch.call():
            return self._inner.open(path, flags)

    def close(self, fd: int) -> None:
        with self._watch.call():
            self._inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._watch.call():
            return self._inner.preadv(fd, buffers, offset)

    def read_many(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        with self._watch.call():
            self._inner.read_many(reads, landed)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._watch.call():
            return self._inner.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        with self._watch.call():
            self._inner.allocate(fd, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        with self._watch.call():
            self._inner.punch(fd, offset, nbytes)

    def sync(self, fd: int) -> None:
        with self._watch.call():
            self._inner.sync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        with self._watch.call():
            self._inner.truncate(fd, nbytes)

    def size(self, fd: int) -> int:
        with self._watch.call():
            return self._inner.size(fd)

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        with self._watch.call():
            self._inner.forget(fd, offset, nbytes)

    def unlink(self, path: Path) -> None:
        with self._watch.call():
            self._inner.unlink(path)

    def rename(self, path: Path, to: Path) -> None:
        with self._watch.call():
            self._inner.rename(path, to)

    def sync_directory(self, path: Path) -> None:
        with self._watch.call():
            self._inner.sync_directory(path)
