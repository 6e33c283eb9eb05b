"""Locks between processes: a file, or a directory, that one process owns while it lives."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path


class PathLock:
    """An exclusive lock on the file or directory at ``path``, until :meth:`release` or the process ends.

    A cleaner of /tmp may remove a lock file while it is locked. A second process would then lock a new file
    under the same name, and both would believe that they are alone. So the lock is taken only on the file
    that ``path`` still names afterwards, and :meth:`current` says whether it still does. Before the owner
    removes anything that the lock protects, it asks :meth:`current`. Nothing removes a directory that is in
    use: where there is one, lock it instead of a file in it.

    A file is made where there is none, with mode 0600. A symbolic link is never followed.

    Raises :class:`BlockingIOError` while another process has the lock, and :class:`OSError` for a path that
    cannot be opened (ELOOP for a symbolic link).

    >>> import tempfile
    >>> lock = PathLock(Path(tempfile.mkdtemp()) / "lock")
    >>> lock.current()
    True
    >>> lock.path.unlink()
    >>> lock.current()
    False
    >>> lock.release()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self.fd = _open(path)
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.current():
                    return
            except OSError:
                os.close(self.fd)
                raise
            os.close(self.fd)  # it was removed between open and lock: lock the one that is there now

    def current(self) -> bool:
        """Return whether the path still names what is locked."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))

    def release(self) -> None:
        """Give the lock up. The file stays: to remove it would race with the next owner. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open(path: Path) -> int:
    common = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | common, 0o600)
    except IsADirectoryError:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | common)
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe or a device
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return fd
