"""Locks between processes: a file, or a directory, that one process owns while it lives."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path


class PathLock:
    """An exclusive lock on the file or directory at ``path``, until :meth:`release` or the end of the
    process.

    A cleaner of /tmp may remove a lock file while it is locked. A second process would then lock a new file
    of the same name, and both would believe that they own the lock. So the lock is taken only on the file
    that ``path`` still names afterwards, and :meth:`current` tells whether it still does. The owner must
    check :meth:`current` before it removes anything that the lock protects. A directory in use is never
    removed: if there is one, lock it instead of a file in it.

    A missing file is created with mode 0600. A symbolic link is never followed.

    Raise :class:`BlockingIOError` while another process has the lock, and :class:`OSError` for a path that
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
            os.close(self.fd)  # removed between open and lock: lock the present file

    def current(self) -> bool:
        """Return whether the path still names the locked file."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))

    def release(self) -> None:
        """Release the lock. The file stays: removing it would race with the next owner. Repeated calls do
        nothing."""
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
