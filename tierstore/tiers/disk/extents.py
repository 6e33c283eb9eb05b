"""The extent space: bytes 0 to ``capacity_bytes``, stored in a few preallocated files.

Byte ``n`` of the space is byte ``n % file_bytes`` of file ``n // file_bytes``. A write that needs more space
creates files and extends them in steps, but never past the capacity. At open, the files are truncated to the
capacity, after fitting.py has moved all pages before that point. Each file is opened twice: with O_DIRECT for
aligned memory, and through the page cache for other memory, and for disks that read faster that way. The
kernel keeps both views of the file coherent.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.io import FileIO, Landed, QueuedRead
from tierstore.units import MIB

_GROWTH = 128 * MIB  # step of growth; ext4 can store it as one extent
VOLUME_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class _ExtentFile:
    cached_fd: int
    direct_fd: int | None  # None: the file system has no O_DIRECT
    nbytes: int


class ExtentFiles:
    """The extent files in ``directory``. Thread-safe. Different ranges may be read and written at the same
    time."""

    def __init__(
        self, directory: Path, *, capacity_bytes: int, file_bytes: int, io: FileIO, spare_bytes: int = 0
    ) -> None:
        """Open the existing files. If the volume is too full for the usual step, :meth:`grow` uses a smaller
        step and leaves ``spare_bytes`` of the volume free. Data beyond ``capacity_bytes`` can be read until
        :meth:`cut`. Raise :class:`OSError` if a file cannot be opened."""
        self.capacity_bytes = capacity_bytes
        self.file_bytes = file_bytes
        self._spare_bytes = spare_bytes
        self._directory = directory
        self._io = io
        self._growing = threading.Lock()  # guards _files and the sizes in it
        self._files: list[_ExtentFile] = []
        self._dirty_lock = threading.Lock()
        self._dirty: set[int] = set()  # numbers of the files written since their last sync
        try:
            while (path := self._path(len(self._files))).exists():
                self._open(path)
        except OSError:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether the file system has O_DIRECT. True while there is no file."""
        return all(file.direct_fd is not None for file in self._files)

    @property
    def allocated_bytes(self) -> int:
        """The sum of the files' sizes."""
        return sum(file.nbytes for file in self._files)

    def cut(self) -> None:
        """Truncate the files to the capacity. No page may be beyond the capacity. Raise :class:`OSError` if
        the disk fails."""
        with self._growing:
            while len(self._files) > -(-self.capacity_bytes // self.file_bytes):
                self._close_file(self._files.pop())
            for path in sorted(self._directory.iterdir(), reverse=True):
                if path.name.isdigit():
                    self._cut_file(path, self.capacity_bytes - int(path.name) * self.file_bytes)
            for file in self._files:
                file.nbytes = self._io.size(file.cached_fd)

    def grow(self, end: int) -> None:
        """Allocate disk blocks for bytes 0 … ``end`` of the space. Raise :class:`OSError`, with an error
        number in :data:`VOLUME_FULL` if the volume has no room."""
        assert end <= self.capacity_bytes, (
            f"{end} is beyond the {self.capacity_bytes} bytes of the extent space"
        )
        with self._growing:
            for number in range(-(-end // self.file_bytes)):
                within = min(end - number * self.file_bytes, self.file_bytes)
                if number == len(self._files):
                    self._open(self._path(number))
                    self._io.sync_directory(self._directory)
                if within > self._files[number].nbytes:
                    self._grow_file(number, within)

    def read(self, offset: int, views: Sequence[memoryview], *, direct: bool) -> int:
        """Fill ``views`` from one file. Return the number of bytes read, which is smaller if the file ends.

        Raise :class:`OSError` if the disk fails, if the file is missing, or if the disk returns no bytes
        before the end of the file. ``direct`` requires addresses, lengths and ``offset`` that are multiples
        of 4096. Without ``direct``, the range is dropped from the page cache afterwards.
        """
        number, start = divmod(offset, self.file_bytes)
        if number >= len(self._files):
            raise FileNotFoundError(errno.ENOENT, f"there is no extent file {self._path(number)}")
        file = self._files[number]
        if direct and file.direct_fd is not None:
            return self._read_fully(file.direct_fd, start, views)
        got = self._read_fully(file.cached_fd, start, views)
        if got:
            self._io.forget(file.cached_fd, start, got)
        return got

    def read_many(self, places: Sequence[tuple[int, memoryview]], landed: Landed) -> None:
        """Fill each view from its offset, all at once and with O_DIRECT, and call ``landed`` with each
        outcome. A missing file, or a file without O_DIRECT, has the outcome -ENOENT. Raise :class:`OSError`
        if the kernel cannot queue reads; reads without a call of ``landed`` were not done."""
        reads = []
        numbers = []
        for number, (offset, view) in enumerate(places):
            file, start = divmod(offset, self.file_bytes)
            fd = self._files[file].direct_fd if file < len(self._files) else None
            if fd is None:
                landed(number, -errno.ENOENT)
            else:
                reads.append(QueuedRead(fd, view, start))
                numbers.append(number)
        self._io.read_many(reads, lambda read, result: landed(numbers[read], result))

    def write(self, offset: int, views: Sequence[memoryview], *, direct: bool) -> None:
        """Write ``views`` to one file, into space that :meth:`grow` has allocated. Raise :class:`OSError` if
        the disk fails."""
        number, start = divmod(offset, self.file_bytes)
        file = self._files[number]
        try:
            while views:
                done = self._write_some(file, start, views, direct)
                start += done
                views = _after(views, done)
        finally:
            # Mark the file after the write: a sync that began before the end of the write does not cover it.
            with self._dirty_lock:
                self._dirty.add(number)

    def sync(self) -> None:
        """Make all completed writes durable. Raise :class:`OSError` if the disk fails."""
        with self._dirty_lock:
            dirty, self._dirty = self._dirty, set()
        for number in sorted(dirty):
            self._io.sync(self._files[number].cached_fd)

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop a range within one file from the page cache."""
        number, start = divmod(offset, self.file_bytes)
        self._io.forget(self._files[number].cached_fd, start, nbytes)

    def close(self) -> None:
        files, self._files = self._files, []
        for file in files:
            self._close_file(file)

    def _cut_file(self, path: Path, most: int) -> None:
        if most <= 0:
            self._io.unlink(path)
            self._io.sync_directory(self._directory)
        elif path.stat().st_size > min(most, self.file_bytes):
            fd = self._io.open(path, os.O_RDWR)
            try:
                self._io.truncate(fd, min(most, self.file_bytes))
                self._io.sync(fd)  # otherwise the file could be larger than the capacity after a power loss
            finally:
                self._io.close(fd)

    def _close_file(self, file: _ExtentFile) -> None:
        self._io.close(file.cached_fd)
        if file.direct_fd is not None:
            self._io.close(file.direct_fd)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}"

    def _open(self, path: Path) -> None:
        fd = self._io.open(path, os.O_RDWR | os.O_CREAT)
        try:
            direct_fd = self._open_direct(path)
            self._files.append(_ExtentFile(fd, direct_fd, self._io.size(fd)))
        except OSError:
            self._io.close(fd)
            raise

    def _open_direct(self, path: Path) -> int | None:
        try:
            return self._io.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return None

    def _grow_file(self, number: int, nbytes: int) -> None:
        file = self._files[number]
        most = min(self.file_bytes, self.capacity_bytes - number * self.file_bytes)
        wanted = min(-(-nbytes // _GROWTH) * _GROWTH, most)
        while True:
            try:
                self._io.allocate(file.cached_fd, file.nbytes, wanted - file.nbytes)
                break
            except OSError as error:
                if error.errno not in VOLUME_FULL:
                    raise
                self._io.truncate(file.cached_fd, file.nbytes)  # free the blocks of the failed attempt
                room = min(
                    self._io.available(file.cached_fd) - self._spare_bytes, (wanted - file.nbytes) // 2
                )
                wanted = file.nbytes + room // ALIGNMENT * ALIGNMENT
                if wanted < nbytes:
                    raise
        file.nbytes = wanted
        with self._dirty_lock:
            self._dirty.add(number)

    def _write_some(self, file: _ExtentFile, offset: int, views: Sequence[memoryview], direct: bool) -> int:
        if direct and file.direct_fd is not None:
            try:
                return _at_least_one(self._io.pwritev(file.direct_fd, views, offset))
            except OSError as error:
                # EINVAL: the file system opens files with O_DIRECT but does not support it, or a write
                # stopped early and its remaining bytes are not aligned. Write through the page cache instead.
                if error.errno != errno.EINVAL:
                    raise
        return _at_least_one(self._io.pwritev(file.cached_fd, views, offset))

    def _read_fully(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        total = 0
        while views:
            got = self._io.preadv(fd, views, offset + total)
            if got == 0:
                if self._io.size(fd) > offset + total:
                    raise OSError(errno.EIO, "the disk returned no bytes before the end of the file")
                break
            total += got
            views = _after(views, got)
        return total


def _after(views: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the rest of ``views`` after their first ``nbytes`` bytes."""
    for index, view in enumerate(views):
        if nbytes < view.nbytes:
            return [view[nbytes:], *views[index + 1 :]]
        nbytes -= view.nbytes
    return []


def _at_least_one(nbytes: int) -> int:
    if nbytes < 1:
        raise OSError(errno.EIO, "the disk accepted no bytes")
    return nbytes
