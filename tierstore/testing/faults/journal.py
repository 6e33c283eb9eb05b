"""A recording of everything a store does to its directory, in order: what crash images are made from."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tierstore.tiers.disk import FileIO

INDEX = "index.lmdb"


@dataclass(frozen=True, slots=True)
class Created:
    """A file came to be, with ``data`` in it that nobody has synced yet."""

    name: str
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Removed:
    name: str


@dataclass(frozen=True, slots=True)
class Renamed:
    name: str
    to: str


@dataclass(frozen=True, slots=True)
class Written:
    name: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resized:
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Punched:
    """A range has no blocks any more and reads as zeros."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Synced:
    """A sync has returned: what was done to the file before event ``began`` is durable."""

    name: str
    began: int


@dataclass(frozen=True, slots=True)
class DirectorySynced:
    name: str  # "" for the store's own


@dataclass(frozen=True, slots=True)
class Committed:
    """One LMDB transaction: the index file before and after it."""

    name: str
    before: bytes
    after: bytes


Event: TypeAlias = (
    Created | Removed | Renamed | Written | Resized | Punched | Synced | DirectorySynced | Committed
)


class Journal:
    """The events of one store directory. Thread-safe.

    ``taken`` is what the directory took on disk (``st_blocks``) just after each event.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: list[Event] = []
        self.taken: list[int] = []
        self._lock = threading.Condition()

    def __len__(self) -> int:
        return len(self.events)

    def add(self, event: Event) -> None:
        with self._lock:
            self._append(event)
            self._lock.notify_all()

    def wait_for_commit(self, position: int, timeout: float) -> bool:
        """Wait until a transaction has been recorded at ``position`` or behind it; False when ``timeout``
        seconds pass."""
        with self._lock:
            return self._lock.wait_for(
                lambda: any(isinstance(event, Committed) for event in self.events[position:]), timeout
            )

    def name_of(self, path: Path) -> str:
        """``path`` as the events name it: relative to the store's directory."""
        name = os.path.relpath(path, self.root)
        return "" if name == "." else name

    def _append(self, event: Event) -> None:
        self.events.append(event)
        self.taken.append(allocated_bytes(self.root))


class RecordingIO(FileIO):
    """Passes calls on to ``inner`` and writes down in ``journal`` what they changed.

    A write is in the journal when it has returned, with as many bytes as it has moved. Calls that raise are
    not in it.
    """

    def __init__(self, journal: Journal, inner: FileIO | None = None) -> None:
        self._journal = journal
        self._inner = inner or FileIO()
        self._names: dict[int, str] = {}

    def open(self, path: Path, flags: int) -> int:
        name = self._journal.name_of(path)
        made = bool(flags & os.O_CREAT) and not path.exists()
        fd = self._inner.open(path, flags)
        self._names[fd] = name
        if made:
            self._journal.add(Created(name))
        return fd

    def close(self, fd: int) -> None:
        self._inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._inner.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = self._inner.pwritev(fd, buffers, offset)
        self._journal.add(Written(self._names[fd], offset, b"".join(buffers)[:done]))
        return done

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._inner.allocate(fd, offset, nbytes)
        self._journal.add(Resized(self._names[fd], self._inner.size(fd)))

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        self._inner.punch(fd, offset, nbytes)
        self._journal.add(Punched(self._names[fd], offset, nbytes))

    def sync(self, fd: int) -> None:
        began = len(self._journal)
        self._inner.sync(fd)
        self._journal.add(Synced(self._names[fd], began))

    def truncate(self, fd: int, nbytes: int) -> None:
        self._inner.truncate(fd, nbytes)
        self._journal.add(Resized(self._names[fd], nbytes))

    def size(self, fd: int) -> int:
        return self._inner.size(fd)

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        self._inner.forget(fd, offset, nbytes)

    def unlink(self, path: Path) -> None:
        self._inner.unlink(path)
        if not path.name.endswith("-lock"):  # LMDB's: no data, made anew by every open
            self._journal.add(Removed(self._journal.name_of(path)))

    def rename(self, path: Path, to: Path) -> None:
        self._inner.rename(path, to)
        self._journal.add(Renamed(self._journal.name_of(path), self._journal.name_of(to)))

    def sync_directory(self, path: Path) -> None:
        self._inner.sync_directory(path)
        if self._journal.root in (path, *path.parents):
            self._journal.add(DirectorySynced(self._journal.name_of(path)))


def allocated_bytes(directory: Path) -> int:
    """What a directory takes from its file system, itself included. Files may come and go meanwhile."""
    total = 0
    for root, _, names in os.walk(directory):
        for path in (root, *(os.path.join(root, name) for name in names)):
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
