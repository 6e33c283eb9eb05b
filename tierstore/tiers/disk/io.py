"""The system calls of the disk tier's extent files, behind one small object.

Everything that touches payload bytes goes through here, so that a test can make any one call fail, fall
short or lie while the rest of the tier runs the code that users run. Nothing is interpreted here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class FileIO:
    """The operating system's files. Every method may raise :class:`OSError`; all are thread-safe."""

    def open(self, path: Path, flags: int) -> int:
        """A file descriptor, closed on exec; a file made by this is 0600."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read: fewer than asked for at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written: fewer than asked for when the disk fills up half way."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the range blocks on disk, growing the file where it is shorter."""
        os.posix_fallocate(fd, offset, nbytes)

    def sync(self, fd: int) -> None:
        """On return everything written to the file, and its size, survives a power loss."""
        os.fdatasync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        """Drop a range from the page cache."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rename(self, path: Path, to: Path) -> None:
        """Give a file another name, in place of whatever had it."""
        os.replace(path, to)

    def sync_directory(self, path: Path) -> None:
        """Make the creation and removal of files in ``path`` durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
