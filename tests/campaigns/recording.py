"""A script that was played and recorded: its events, and what a crash at any moment of it must leave.

A crash in the middle of a step must leave what was acknowledged before the step and is still there after it:
the rest has been evicted, by a decision that was counted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import lmdb

from tests.campaigns.prompts import KEY_FILES, WAIT_S, Evict, Held, Life, Player, Reopen, Step, book_of
from tierstore.tiers.disk import FileIO

# -- journal -------------------------------------------------------------------------------------------
#
# A recording of everything a store does to its directory, in order: what crash images are made from.


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
class Freed:
    """A range of a file has lost its blocks, and reads as zeros."""

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
    Created | Removed | Renamed | Written | Resized | Freed | Synced | DirectorySynced | Committed
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

    def free(self, fd: int, offset: int, nbytes: int) -> None:
        self._inner.free(fd, offset, nbytes)
        self._journal.add(Freed(self._names[fd], offset, nbytes))

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


# -- index_recorder ------------------------------------------------------------------------------------
#
# Recording the index: what every LMDB transaction changes in its file.
#
# LMDB writes past :class:`~tierstore.tiers.disk.FileIO`. But it writes in one way only: the changed pages
# to places that no reader can need, a sync, and one meta page, itself synchronous. So the file before and
# the file after a transaction tell everything that may be on disk at any moment in between. While
# :func:`recorded_index` lasts, indexes in the journal's directory are opened with an environment that takes
# the two copies; all else goes to the real one.


@contextmanager
def recorded_index(journal: Journal) -> Iterator[None]:
    """Records the transactions on every index under the journal's directory that is opened in the block."""
    real = lmdb.open

    def open_(path: str | bytes, **options: Any) -> Any:
        where = Path(os.fsdecode(path))
        if journal.root not in where.parents or options.get("readonly"):
            return real(path, **options)
        return _Environment(real, where, options, journal)

    lmdb.open = open_  # type: ignore[assignment]
    try:
        yield
    finally:
        lmdb.open = real


class _Environment:
    def __init__(
        self, real: Callable[..., Any], path: Path, options: dict[str, Any], journal: Journal
    ) -> None:
        # Anything less would need another model: commits that are lost, or data pages behind their meta page.
        relaxed = [name for name in ("sync", "metasync") if not options.get(name, True)]
        relaxed += [name for name in ("writemap", "map_async") if options.get(name)]
        assert not relaxed, f"the index is opened with {relaxed}: commits are not durable when they return"
        self._path = path
        self._name = journal.name_of(path)
        self._journal = journal
        before = self.read()
        self._env = real(str(path), **options)
        after = self.read()
        if after != before:
            journal.add(Created(self._name, after))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def __enter__(self) -> _Environment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._env.close()

    def open_db(self, *args: Any, **options: Any) -> Any:
        with self.change():
            return self._env.open_db(*args, **options)

    def begin(self, *args: Any, **options: Any) -> Any:
        txn = self._env.begin(*args, **options)
        return _Transaction(self, txn) if options.get("write") else txn

    def read(self) -> bytes:
        return self._path.read_bytes() if self._path.exists() else b""

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around whatever may commit."""
        before = self.read()
        yield
        after = self.read()
        if after != before:
            self._journal.add(Committed(self._name, before, after))


class _Transaction:
    """A write transaction. Only its end writes to the file."""

    def __init__(self, env: _Environment, txn: Any) -> None:
        self._env = env
        self._txn = txn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def __enter__(self) -> _Transaction:
        self._txn.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._env.change():
            self._txn.__exit__(kind, error, trace)

    def commit(self) -> None:
        with self._env.change():
            self._txn.commit()


@dataclass(frozen=True, slots=True)
class Mark:
    """``held`` is on disk after the first ``position`` events."""

    position: int
    held: Held


@dataclass(frozen=True, slots=True)
class Opening:
    """From event ``position`` on the store is open, or being opened, as ``lives[life]``."""

    position: int
    life: int


@dataclass(slots=True)
class Recording:
    """What a script did. ``prompts`` are the longest that were saved: (book, prompt) → tokens."""

    lives: Sequence[Life]
    events: list[Event]
    taken: list[int]  # bytes on disk after each event
    openings: list[Opening] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    prompts: Held = field(default_factory=dict)
    evicted_pages: int = 0
    wrong_pages: int = 0  # served by the script's own loads
    problems: list[str] = field(default_factory=list)
    keys: dict[str, bytes] = field(default_factory=dict)
    """The files with the keys of an encrypted store, at the end. They are not on the disk that crashes."""

    def write_keys(self, directory: Path) -> None:
        """Write the files with the keys."""
        for name, data in self.keys.items():
            path = directory / name
            path.write_bytes(data)
            path.chmod(0o600)

    def must_have(self, position: int) -> Held:
        """What a crash after ``position`` events must leave."""
        before = [mark for mark in self.marks if mark.position <= position]
        if not before:
            return {}
        after = self.marks[min(len(before), len(self.marks) - 1)].held
        both = {
            name: self._common(name[0], before[-1].held[name], after.get(name, 0)) for name in before[-1].held
        }
        return {name: tokens for name, tokens in both.items() if tokens}

    def _common(self, book: int, before: int, after: int) -> int:
        """The leading tokens that are in the same pages before and after a step. A partial page that a longer
        one has replaced may have left before that one came."""
        chunk = self.lives[book].spec.chunk_tokens
        return before if before == after else min(before, after) // chunk * chunk

    def lives_at(self, position: int) -> Sequence[Life]:
        """How a user would open each book's pages after ``position`` events: as it was opened last."""
        lives = list(self.lives)
        for opening in self.openings:
            if opening.position <= position:
                lives[book_of(self.lives, opening.life)] = self.lives[opening.life]
        return lives

    def capacity_at(self, position: int) -> int:
        """What the directory may take after ``position`` events. While a store is being opened with a smaller
        cap than before, the old one counts."""
        capacity = 0
        for opening in self.openings:
            if opening.position <= position:
                ready = any(opening.position < mark.position <= position for mark in self.marks)
                now = self.lives[opening.life].disk_bytes
                capacity = now if ready else max(capacity, now)
        return capacity

    def over_capacity(self) -> int:
        """After how many events the directory took more than it may."""
        return sum(nbytes > self.capacity_at(at) for at, nbytes in enumerate(self.taken))


def record(
    directory: Path,
    lives: Sequence[Life],
    steps: Iterable[Step],
    *,
    over: Callable[[FileIO], FileIO] = lambda io: io,
) -> Recording:
    """Run ``steps`` on a store in ``directory``, which begins as ``lives[0]``, and close it.

    ``over`` may put something between the store and the recording: the calls that it swallows are not
    recorded, which is how the campaign itself is tested.
    """
    journal = Journal(directory)
    recording = Recording(lives, journal.events, journal.taken, [Opening(0, 0)])
    with recorded_index(journal):
        player = Player(directory, lives, over(RecordingIO(journal)), checks=True)
        for step in steps:
            if isinstance(step, Reopen):
                player.store.close()
                recording.openings.append(Opening(len(journal), step.life))
            position = len(journal)
            evicted = player.evicted_pages
            player.play(step)
            writable = player.store.stats().disk_writable
            if isinstance(step, Evict) and player.evicted_pages > evicted and writable:
                journal.wait_for_commit(position, WAIT_S)  # nobody else waits for it
            recording.marks.append(Mark(len(journal), dict(player.held)))
        player.store.close()
        recording.marks.append(Mark(len(journal), dict(player.held)))
    recording.keys = {
        name: path.read_bytes() for name in KEY_FILES if (path := directory.parent / name).exists()
    }
    recording.prompts = dict(player.prompts)
    recording.evicted_pages = player.evicted_pages
    recording.wrong_pages = player.wrong_pages
    recording.problems = player.problems
    return recording
