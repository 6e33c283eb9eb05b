"""The store's directory: who owns it, and what may be found in it."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from tierstore.errors import StoreUnavailableError

_LOCK = "lock"
_INDEX = "index.lmdb"
_EXTENTS = "extents"
_OURS = {_LOCK, _INDEX, f"{_INDEX}-lock", f"{_INDEX}.new", f"{_INDEX}.new-lock", _EXTENTS}

_held: weakref.WeakSet[StoreDirectory]


class StoreDirectory:
    """A directory locked by this process until :meth:`release` or its death, however it dies."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.index = path / _INDEX
        self.new_index = path / f"{_INDEX}.new"
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
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreUnavailableError(f"cannot lock {path}: {error.strerror}") from error
            raise StoreUnavailableError(
                f"{path} is in use by process {owner or '(unknown)'}: stop it, or give another directory"
            ) from None
        return cls(path, fd)

    def sign(self) -> None:
        """Leave this process's id in the lock, for whoever finds it taken."""
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)

    def allocated_bytes(self) -> int:
        """What the directory takes from its file system, itself included."""
        total = 0
        for root, _, names in os.walk(self.path):
            for each in (Path(root), *(Path(root, name) for name in names)):
                total += each.lstat().st_blocks * 512
        return total

    def release(self) -> None:
        """Give the directory up. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)


def _refuse_strangers(path: Path) -> None:
    if not path.exists():
        return
    names = {entry.name for entry in path.iterdir()}
    if names - _OURS and not names & {_INDEX, _LOCK}:
        raise StoreUnavailableError(
            f"{path} holds other files and no store: give an empty directory, or one that does not exist yet"
        )


def _forget_after_fork() -> None:
    # A child shares the lock's open file, and would hold the directory after its parent's death.
    for directory in list(_held):
        directory.release()


_held = weakref.WeakSet()
os.register_at_fork(after_in_child=_forget_after_fork)
