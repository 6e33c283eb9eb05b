"""The store's directory: who owns it, and what may be found in it."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.tiers.disk.io import FileIO

_LOCK = "lock"
INDEX = "index.lmdb"
_EXTENTS = "extents"
_DAMAGED = f"{INDEX}.damaged"
_OURS = {_LOCK, INDEX, f"{INDEX}-lock", f"{INDEX}.new", f"{INDEX}.new-lock", _DAMAGED, _EXTENTS}

_held: weakref.WeakSet[StoreDirectory]


class StoreInUseError(StoreUnavailableError):
    """Process ``owner`` owns the directory, or another store in this one."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} is in use by process {owner}: stop it, or give another directory")
        self.owner = owner


class StoreDirectory:
    """A directory locked by this process until :meth:`release` or its death, however it dies."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.index = path / INDEX
        self.new_index = path / f"{INDEX}.new"
        self.damaged_index = path / _DAMAGED  # set aside by fsck, until the next opening
        self.extents = path / _EXTENTS
        self._lock_fd = lock_fd
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> StoreDirectory:
        """Make ``path`` if it is not there, and lock it. Nothing is written when it is refused.

        Raises :class:`StoreUnavailableError` when it cannot be written, holds something else than a store,
        or is owned by another process (or by another store in this one).
        """
        try:
            _refuse_strangers(path)
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot use {path} as a store directory: {error.strerror}; give one that this user can write"
            ) from error
        return cls(path, _lock(path, fd))

    @classmethod
    def visit(cls, path: Path, *, make_lock: bool = False) -> StoreDirectory:
        """Lock a store that is there, and change nothing: no file is made, none is written. One without a
        lock file has no owner, since every owner makes one; with ``make_lock`` it is made here too.

        Raises :class:`UsageError` when there is no store in ``path``, and :class:`StoreUnavailableError` when
        it cannot be read or is owned by another process (or by a store in this one).
        """
        try:
            if not (path / INDEX).is_file():
                raise UsageError(f"{path} holds no store: give a directory that a store was opened in")
            return cls(path, _lock(path, _open_lock(path, make=make_lock)))
        except OSError as error:
            raise StoreUnavailableError(f"cannot read the store in {path}: {error.strerror}") from error

    def foreign(self) -> list[str]:
        """The names of what is in the directory and was not put there by a store."""
        names = [entry.name for entry in self.path.iterdir() if entry.name not in _OURS]
        if self.extents.is_dir():
            inside = (entry for entry in self.extents.iterdir() if extent_number(entry) is None)
            names += [f"{_EXTENTS}/{entry.name}" for entry in inside]
        return sorted(names)

    def sign(self) -> None:
        """Leave this process's id in the lock, for a process that finds it taken."""
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def allocated_bytes(self) -> int:
        """What the directory takes from its file system, itself included."""
        total = 0
        for root, _, names in os.walk(self.path):
            for each in (Path(root), *(Path(root, name) for name in names)):
                total += each.lstat().st_blocks * 512
        return total

    def leftovers(self) -> list[Path]:
        """What an index that was being made leaves behind when its process ends."""
        return [path for path in (self.new_index, self.path / f"{self.new_index.name}-lock") if path.exists()]

    def remove_leftovers(self, io: FileIO) -> None:
        """Delete them. Raises :class:`OSError`."""
        for path in self.leftovers():
            io.unlink(path)

    def release(self) -> None:
        """Give the directory up. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)


def extent_number(path: Path) -> int | None:
    """Which extent file that is, by its name; None for anything else."""
    ours = path.name.isascii() and path.name.isdigit() and path.name == f"{int(path.name):06d}"
    return int(path.name) if ours and path.is_file() else None


def _open_lock(path: Path, *, make: bool) -> int:
    """The lock of a directory that must stay as it is otherwise; -1 when there is none."""
    try:
        return os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o600)
    except FileNotFoundError:
        return -1
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)


def _lock(path: Path, fd: int) -> int:
    if fd < 0:
        return fd
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise StoreUnavailableError(f"cannot lock {path}: {error.strerror}") from error
        raise StoreInUseError(path, owner or "(unknown)") from None
    return fd


def _refuse_strangers(path: Path) -> None:
    if not path.exists():
        return
    names = {entry.name for entry in path.iterdir()}
    if names - _OURS and not names & {INDEX, _LOCK}:
        raise StoreUnavailableError(
            f"{path} holds other files and no store: give an empty directory, or one that does not exist yet"
        )


def _forget_after_fork() -> None:
    # A child shares the lock's open file, and would hold the directory after its parent's death.
    for directory in list(_held):
        directory.release()


_held = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_after_fork)
