"""Locks between processes: a process locks a file or a directory until it ends."""

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
    with the same name, and both processes would believe that they own the lock. So a lock is valid only if
    ``path`` still names the locked file after locking. :meth:`current` tells whether ``path`` still does, and
    the owner must check it before removing anything that the lock protects. Cleaners never remove a directory
    in use: lock the directory itself, if there is one, and not a file in it.

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
            os.close(self.fd)  # the file was removed between open and lock: lock the one that replaced it

    def current(self) -> bool:
        """Return whether the path still names the locked file."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.fd))

    def release(self) -> None:
        """Release the lock. The file is not removed, because the removal would race with the next owner.
        Repeated calls do nothing."""
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
