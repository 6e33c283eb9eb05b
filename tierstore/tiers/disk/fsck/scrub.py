"""Read every payload and verify its checksum, at the speed of the disk.

The pages are sorted by place and divided into batches of adjacent pages. Each batch is one read request. A
few threads process the batches: while one thread hashes the bytes that it has just read, other threads wait
for the disk. The threads start as soon as the records are known, so that the other trees of the index are
examined meanwhile. Inline payloads are read from the index.

``ExtentFiles`` and ``Payloads`` are not used, because they create, grow and truncate files, and wait for the
end of each batch. A check must not change any file, and files in the middle may be missing.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tierstore.codec import by_number
from tierstore.memory import ALIGNMENT, Memory
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.payloads import ReadMode
from tierstore.tiers.disk.records import INLINE
from tierstore.units import MIB, round_up

_BATCH_BYTES = 4 * MIB
_LARGEST_ENCODED = 1 << 30  # largest page in bytes that a codec encodes
_GAP = 256 * 1024  # reading a gap of this size between two pages takes no longer than another request

Progress = Callable[[int, int], None]  # pages and bytes verified since the last call, from any thread


class PageVerdict(enum.IntEnum):
    """The outcome for one payload."""

    GOOD = 0
    DIFFERENT = 1
    CUT_SHORT = 2
    UNREADABLE = 3


WHY = {
    PageVerdict.DIFFERENT: "its payload does not match its checksum",
    PageVerdict.CUT_SHORT: "its payload is incomplete",
    PageVerdict.UNREADABLE: "its payload cannot be read: the disk reports an error",
}


class ExtentReader:
    """Reads the extent space, in which files may be missing. Changes no file. Thread-safe."""

    def __init__(self, files: dict[int, Path], *, file_bytes: int, io: FileIO) -> None:
        """Open the files, given by number. Raise :class:`OSError` if a file cannot be opened."""
        self._io = io
        self.file_bytes = file_bytes
        # number → (descriptor through the page cache, descriptor with O_DIRECT)
        self._fds: dict[int, tuple[int, int]] = {}
        try:
            for number, path in files.items():
                cached = io.open(path, os.O_RDONLY)
                self._fds[number] = (cached, cached)
                self._fds[number] = (cached, self._open_direct(path, cached))
        except OSError:
            self.close()
            raise

    def __enter__(self) -> ExtentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, offset: int, view: memoryview, *, direct: bool) -> int:
        """Fill ``view`` from one or several files. Return the number of bytes read, which is smaller if a
        file is missing or too short. Raise :class:`OSError` if the disk fails."""
        total = 0
        while total < view.nbytes:
            number, start = divmod(offset + total, self.file_bytes)
            wanted = min(view.nbytes - total, self.file_bytes - start)
            got = self._read_file(number, start, view[total : total + wanted], direct)
            total += got
            if got < wanted:
                break
        return total

    def close(self) -> None:
        """Close the files. Repeated calls do nothing."""
        fds, self._fds = self._fds, {}
        for fd in {fd for pair in fds.values() for fd in pair}:
            self._io.close(fd)

    def _read_file(self, number: int, start: int, view: memoryview, direct: bool) -> int:
        if number not in self._fds:
            return 0
        cached_fd, direct_fd = self._fds[number]
        fd = direct_fd if direct else cached_fd
        total = 0
        while total < view.nbytes:
            got = self._io.preadv(fd, [view[total:]], start + total)
            total += got
            # A file may end within a block. O_DIRECT cannot continue there, and the file has no more bytes.
            if got == 0 or (fd == direct_fd != cached_fd and got % ALIGNMENT):
                break
        if not direct and total:
            # drop the range, so that a check does not evict other processes' pages from the page cache
            self._io.forget(cached_fd, start, total)
        return total

    def _open_direct(self, path: Path, cached_fd: int) -> int:
        try:
            return self._io.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # the file system has no O_DIRECT
            return cached_fd


class _Payload(NamedTuple):
    """The payload of one row."""

    row: int
    place: int
    nbytes: int
    checksum: int  # the checksum of the page
    page_bytes: int
    codec: int  # the page's codec; 0: the payload is the page


@dataclass(frozen=True, slots=True)
class _ScrubBatch:
    """Adjacent pages that are read with one request. A page larger than the usual batch has its own."""

    offset: int
    nbytes: int
    pages: list[_Payload]


class ExtentScrub:
    """Verifies each row's payload on threads of its own. Skips inline payloads. ``seconds`` is the time from
    the start to the last batch."""

    def __init__(
        self, rows: npt.NDArray[np.void], reader: ExtentReader, mode: ReadMode, progress: Progress
    ) -> None:
        self.seconds = 0.0
        self._verdicts = np.zeros(len(rows), np.int8)
        self._batches = _batches(rows)
        self._taking = threading.Lock()
        self._stopped = False
        self._reader = reader
        self._direct = mode.direct
        self._progress = progress
        self._started = time.perf_counter()
        threads = max(mode.streams, 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tierstore-fsck")
        self._running = [self._pool.submit(self._work) for _ in range(threads)]

    def __enter__(self) -> ExtentScrub:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the running batches."""
        self._stopped = True
        self._pool.shutdown()

    def verdicts(self) -> npt.NDArray[np.int8]:
        """Wait until all payloads were verified, and return a verdict for each row. Raise the error of a
        failed thread."""
        for each in self._running:
            each.result()
        return self._verdicts

    def _work(self) -> None:
        scrubber = _Scrubber(self._reader, self._direct)
        while (batch := self._next()) is not None:
            try:
                for row, verdict in scrubber.verdicts(batch):
                    self._verdicts[row] = verdict
                self._progress(len(batch.pages), sum(page.nbytes for page in batch.pages))
            except BaseException:
                self._stopped = True
                raise

    def _next(self) -> _ScrubBatch | None:
        with self._taking:
            batch = None if self._stopped else next(self._batches, None)
            self.seconds = time.perf_counter() - self._started
            return batch


def scrub_inline(rows: npt.NDArray[np.void], index_db: IndexDB, progress: Progress) -> npt.NDArray[np.int8]:
    """Return the verdicts for the rows whose payload is in the index."""
    verdicts = np.zeros(len(rows), np.int8)
    inline = np.flatnonzero(rows["place"] == INLINE).tolist()
    records = index_db.records(int(rows["serial"][row]) for row in inline)
    for row, record in zip(inline, records, strict=True):
        if record is None or record.nbytes > index_db.map_bytes:
            verdicts[row] = PageVerdict.CUT_SHORT
            continue
        view = memoryview(bytearray(record.nbytes))
        if not index_db.read_payload(record, view):
            verdicts[row] = PageVerdict.CUT_SHORT
        elif xxhash.xxh3_64_intdigest(view) != record.checksum:
            verdicts[row] = PageVerdict.DIFFERENT
        progress(1, record.nbytes)
    return verdicts


def _batches(rows: npt.NDArray[np.void]) -> Iterator[_ScrubBatch]:
    outside = np.flatnonzero(rows["place"] != INLINE)
    outside = outside[np.argsort(rows["place"][outside], kind="stable")]
    names = ("place", "payload_bytes", "checksum", "page_bytes", "codec")
    columns = (outside, *(rows[name][outside] for name in names))
    pages: list[_Payload] = []
    start = stop = 0
    for page in map(_Payload, *(column.tolist() for column in columns)):
        place, end = page.place, page.place + round_up(page.nbytes, ALIGNMENT)
        if pages and (place - stop > _GAP or max(end, stop) - start > _BATCH_BYTES):
            yield _ScrubBatch(start, stop - start, pages)
            pages = []
        if not pages:
            start = stop = place
        pages.append(page)
        stop = max(stop, end)
    if pages:
        yield _ScrubBatch(start, stop - start, pages)


class _Scrubber:
    """Verifies batches, with a buffer for one thread."""

    def __init__(self, reader: ExtentReader, direct: bool) -> None:
        self._reader = reader
        self._direct = direct
        self._view = Memory(_BATCH_BYTES, shared=False).view(0, _BATCH_BYTES)
        self._decoded = memoryview(bytearray())  # buffer for decoded pages

    def verdicts(self, batch: _ScrubBatch) -> Iterator[tuple[int, PageVerdict]]:
        got = 0
        if batch.nbytes <= _BATCH_BYTES:
            try:
                got = self._reader.read(batch.offset, self._view[: batch.nbytes], direct=self._direct)
            except OSError:
                got = 0  # one bad block must not affect other pages: read each page separately
        for page in batch.pages:
            start = page.place - batch.offset
            if start + page.nbytes <= got:
                good = self._is_page(page, self._view[start : start + page.nbytes])
                yield page.row, PageVerdict.GOOD if good else PageVerdict.DIFFERENT
        if got < batch.nbytes:
            for page in batch.pages:
                if page.place - batch.offset + page.nbytes > got:
                    yield page.row, self._alone(page)

    def _is_page(self, page: _Payload, payload: memoryview) -> bool:
        if page.codec:
            codec = by_number(page.codec)
            if codec is None or page.page_bytes > _LARGEST_ENCODED:
                return False
            if self._decoded.nbytes < page.page_bytes:
                self._decoded = memoryview(bytearray(page.page_bytes))
            whole = self._decoded[: page.page_bytes]
            if not codec.decode(payload, whole):
                return False
            payload = whole
        return xxhash.xxh3_64_intdigest(payload) == page.checksum

    def _alone(self, page: _Payload) -> PageVerdict:
        hashed = xxhash.xxh3_64()
        payload = bytearray()  # the payload of a page that has to be decoded
        for start in range(0, page.nbytes, _BATCH_BYTES):
            wanted = min(_BATCH_BYTES, page.nbytes - start)
            try:
                got = self._read(page.place + start, wanted)
            except OSError:
                return PageVerdict.UNREADABLE
            if got < wanted:
                return PageVerdict.CUT_SHORT
            if page.codec:
                payload += self._view[:wanted]
            else:
                hashed.update(self._view[:wanted])
        good = self._is_page(page, memoryview(payload)) if page.codec else hashed.intdigest() == page.checksum
        return PageVerdict.GOOD if good else PageVerdict.DIFFERENT

    def _read(self, offset: int, wanted: int) -> int:
        view = self._view[: round_up(wanted, ALIGNMENT)]
        try:
            got = self._reader.read(offset, view, direct=self._direct)
        except OSError:
            got = 0
        return got if got >= wanted else self._reader.read(offset, self._view[:wanted], direct=False)
