"""A store's directory: its lock, and the files that may be in it."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.locks import PathLock
from tierstore.tiers.disk.io import FileIO

_LOCK = "lock"
INDEX = "index.lmdb"
_EXTENTS = "extents"
_DAMAGED = f"{INDEX}.damaged"
_OURS = {_LOCK, INDEX, f"{INDEX}-lock", f"{INDEX}.new", f"{INDEX}.new-lock", _DAMAGED, _EXTENTS}
_NO_DIRECTORY_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # network file systems

_held: weakref.WeakSet[StoreDirectory]


class StoreInUseError(StoreUnavailableError):
    """The directory is in use by another process, or by another store in this process. ``owner`` is the
    owner's process id, or "(unknown)" if the lock file with the id is missing."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} is in use by process {owner}: stop it, or give another directory")
        self.owner = owner


class StoreDirectory:
    """A directory locked by this process until :meth:`release` or the end of the process.

    The lock is on the directory itself, because a program that cleans /tmp may remove a file in it, but not a
    directory that is not empty. The file ``lock`` has the owner's process id. The file ``lock`` is locked
    too, because earlier versions of tierstore lock only this file."""

    def __init__(self, path: Path, lock: PathLock | None, lock_fd: int) -> None:
        """``lock`` is None on a file system that cannot lock directories. ``lock_fd`` is -1 if there is no
        lock file."""
        self.path = path
        self._lock = lock
        self.index = path / INDEX
        self.new_index = path / f"{INDEX}.new"
        self.damaged_index = path / _DAMAGED  # fsck keeps a damaged index here until the next opening
        self.extents = path / _EXTENTS
        self._lock_fd = lock_fd
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path) -> StoreDirectory:
        """Create ``path`` if it does not exist, and lock it.

        Raise :class:`StoreUnavailableError` if it cannot be written, holds files of other programs, or is in
        use by another process (or by another store in this process); then the directory is not changed.
        """
        try:
            _refuse_strangers(path)
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            return cls(path, *_lock(path, make=True))
        except OSError as error:
            raise StoreUnavailableError(
                f"cannot use {path} as a store directory: {error.strerror}; give one that this user can write"
            ) from error

    @classmethod
    def visit(cls, path: Path, *, make_lock: bool = False) -> StoreDirectory:
        """Lock an existing store without changing or creating any file. With ``make_lock``, create a missing
        lock file, for :meth:`sign`.

        Raise :class:`UsageError` if there is no store in ``path``, and :class:`StoreUnavailableError` if it
        cannot be read or is in use by another process (or by a store in this process).
        """
        try:
            if not (path / INDEX).is_file():
                raise UsageError(f"{path} holds no store: give a directory that a store was opened in")
            return cls(path, *_lock(path, make=make_lock))
        except OSError as error:
            raise StoreUnavailableError(f"cannot read the store in {path}: {error.strerror}") from error

    def foreign(self) -> list[str]:
        """Return the names of files in the directory that are not the store's."""
        names = [entry.name for entry in self.path.iterdir() if entry.name not in _OURS]
        if self.extents.is_dir():
            inside = (entry for entry in self.extents.iterdir() if extent_number(entry) is None)
            names += [f"{_EXTENTS}/{entry.name}" for entry in inside]
        return sorted(names)

    def sign(self) -> None:
        """Write this process's id into the lock file, for other processes that find the directory locked."""
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def allocated_bytes(self) -> int:
        """Return the disk space of the directory and of everything in it."""
        total = 0
        for root, _, names in os.walk(self.path):
            for each in (Path(root), *(Path(root, name) for name in names)):
                total += each.lstat().st_blocks * 512
        return total

    def leftovers(self) -> list[Path]:
        """Return the files of a new index whose creation was interrupted."""
        return [path for path in (self.new_index, self.path / f"{self.new_index.name}-lock") if path.exists()]

    def remove_leftovers(self, io: FileIO) -> None:
        """Delete the :meth:`leftovers`. Raise :class:`OSError` if the files cannot be deleted."""
        for path in self.leftovers():
            io.unlink(path)

    def release(self) -> None:
        """Unlock the directory. Repeated calls do nothing."""
        fd, self._lock_fd = self._lock_fd, -1
        lock, self._lock = self._lock, None
        _held.discard(self)
        if fd >= 0:
            os.close(fd)
        if lock is not None:
            lock.release()


def extent_number(path: Path) -> int | None:
    """Return the number in an extent file's name; None for any other file."""
    ours = path.name.isascii() and path.name.isdigit() and path.name == f"{int(path.name):06d}"
    return int(path.name) if ours and path.is_file() else None


def _lock(path: Path, *, make: bool) -> tuple[PathLock | None, int]:
    """Lock a directory and its lock file. ``make`` creates a missing lock file. Raise
    :class:`StoreInUseError` if the directory or the file is locked, and :class:`OSError` if the directory
    cannot be opened."""
    _refuse_links(path)
    lock: PathLock | None = None
    try:
        try:
            lock = PathLock(path.resolve())
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_LOCKS:
                raise
        return lock, _lock_file(path / _LOCK, make=make)
    except BlockingIOError:
        owner = _owner(path)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    if lock is not None:
        lock.release()
    raise StoreInUseError(path, owner)


def _lock_file(file: Path, *, make: bool) -> int:
    """Lock the lock file and return its descriptor; -1 if the file is missing and ``make`` is False."""
    if make:
        return PathLock(file).fd
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _owner(path: Path) -> str:
    """Return the process id in the lock file, or "(unknown)"."""
    try:
        with open(path / _LOCK, "rb") as file:
            return file.read(32).decode(errors="replace").strip() or "(unknown)"
    except OSError:
        return "(unknown)"


def _refuse_links(path: Path) -> None:
    """Raise :class:`StoreUnavailableError` if one of the store's files is a symbolic link, because the link's
    target may belong to another user and would be overwritten."""
    extents = path / _EXTENTS
    for entry in (*(path / name for name in _OURS), *(extents.iterdir() if extents.is_dir() else ())):
        if entry.is_symlink():
            raise StoreUnavailableError(
                f"{entry} is a symbolic link: a store keeps its files in its own directory; "
                "remove the link, or give another directory"
            )


def _refuse_strangers(path: Path) -> None:
    if not path.exists():
        return
    names = {entry.name for entry in path.iterdir()}
    if names - _OURS and not names & {INDEX, _LOCK}:
        raise StoreUnavailableError(
            f"{path} holds other files and no store: give an empty directory, or one that does not exist yet"
        )


def _forget_after_fork() -> None:
    # A forked child shares the lock's open file. Without this, the child would keep the directory locked
    # after the end of its parent.
    for directory in list(_held):
        directory.release()


_held = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_after_fork)
