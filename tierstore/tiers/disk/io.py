"""The system calls of the disk tier's extent files, behind one small object.

Everything that touches payload bytes goes through here, so that a test can make any one call fail, fall
short or lie while the rest of the tier runs the code that users run. Nothing is interpreted here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
from collections.abc import Sequence
from pathlib import Path

from tierstore.tiers.disk.aio import Landed, QueuedRead, ReadQueue

_QUEUE_DEPTH = 128
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


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

    def read_many(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        """Do reads that may all be in flight at once, and say of each what became of it, in any order. Raises
        :class:`OSError` when there is no doing it this way: those that have not landed were not done.

        Here they happen one after the other, as :meth:`preadv`; see :class:`QueuedIO`.
        """
        for number, read in enumerate(reads):
            try:
                result = self.preadv(read.fd, [read.view], read.offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            landed(number, result)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written: fewer than asked for when the disk fills up half way."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the range blocks on disk, growing the file where it is shorter."""
        os.posix_fallocate(fd, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the range's blocks back to the file system: it reads as zeros, and the size stays. EOPNOTSUPP
        where that cannot be done."""
        if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

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


class QueuedIO(FileIO):
    """The operating system's files, with queues for reads in the kernel."""

    def __init__(self) -> None:
        self._idle: queue.SimpleQueue[ReadQueue] = queue.SimpleQueue()  # one for each thread that reads

    def read_many(self, reads: Sequence[QueuedRead], landed: Landed) -> None:
        try:
            own = self._idle.get_nowait()
        except queue.Empty:
            own = ReadQueue(_QUEUE_DEPTH)
        try:
            own.read(reads, landed)
        finally:
            self._idle.put(own)
