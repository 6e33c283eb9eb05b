"""Reads and writes payloads in the extents, with several requests in flight, and computes their checksums.

A batch becomes a queue of requests. The calling thread works through the queue together with threads of a
pool, so that a batch makes progress even if the pool is busy. Each thread hashes the bytes that it has just
copied, while other threads wait for the disk. System calls and hashing both run without the GIL. Reads of
small pages that are not adjacent are passed to the kernel all at once, if that is faster (io.py).
"""

from __future__ import annotations

import enum
import errno
import logging
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from tierstore.codec import by_number
from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT, Memory, address_of
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.io_threads import IOThreads
from tierstore.tiers.disk.records import PageRecord, Removal
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import KIB, MIB, round_up

# -- outcomes ------------------------------------------------------------------------------------------


class PageRead(enum.Enum):
    """The result of reading one page."""

    GOOD = "good"  # the disk returned the saved bytes
    DAMAGED = "damaged"  # the disk returned other bytes: the page must not be read again
    FAILED = "failed"  # the disk returned an error: the page may still be good


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """The outcome for each page of one read, and one of the errors (None if there was no error)."""

    outcomes: Sequence[PageRead]
    error: OSError | None = None

    @property
    def good(self) -> int:
        """Number of pages whose outcome is GOOD."""
        return sum(outcome is PageRead.GOOD for outcome in self.outcomes)

    @property
    def all_good(self) -> bool:
        return self.good == len(self.outcomes)


# -- planning requests ---------------------------------------------------------------------------------


MAX_BUFFERS = 512  # per request; the kernel accepts 1024, and a page may need two


class Extent(NamedTuple):
    """Bytes ``place … place + nbytes`` of the extent space."""

    place: int
    nbytes: int


class ExtentPart(NamedTuple):
    """Bytes ``start … stop`` of extent number ``page`` of the batch."""

    page: int
    start: int
    stop: int


@dataclass(slots=True)
class ExtentRequest:
    """One read or write of adjacent ``parts``, which begin at ``offset`` of the extent space, in one file."""

    offset: int
    nbytes: int
    parts: list[ExtentPart]

    def singles(self) -> Iterator[ExtentRequest]:
        """Yield a request for each part."""
        offset = self.offset
        for part in self.parts:
            yield ExtentRequest(offset, part.stop - part.start, [part])
            offset += part.stop - part.start


def plan(extents: Sequence[Extent], *, request_bytes: int, file_bytes: int) -> list[ExtentRequest]:
    """Return the requests that cover ``extents``, which do not overlap, in order of their places.

    Adjacent extents share a request of up to ``request_bytes``. An extent that is larger than a request, or
    that crosses the border of two files, is divided.
    """
    requests: list[ExtentRequest] = []
    last: ExtentRequest | None = None
    for index in sorted(range(len(extents)), key=lambda index: extents[index].place):
        place = extents[index].place
        for start, stop in _cuts(extents[index], request_bytes, file_bytes):
            if last is not None and _joins(last, place + start, stop - start, request_bytes, file_bytes):
                last.nbytes += stop - start
                last.parts.append(ExtentPart(index, start, stop))
            else:
                last = ExtentRequest(place + start, stop - start, [ExtentPart(index, start, stop)])
                requests.append(last)
    return requests


def _joins(last: ExtentRequest, offset: int, nbytes: int, request_bytes: int, file_bytes: int) -> bool:
    return (
        last.offset + last.nbytes == offset
        and offset % file_bytes != 0
        and last.nbytes + nbytes <= request_bytes
        and len(last.parts) < MAX_BUFFERS
    )


def _cuts(extent: Extent, request_bytes: int, file_bytes: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < extent.nbytes:
        to_border = file_bytes - (extent.place + start) % file_bytes
        stop = min(start + min(request_bytes, to_border), extent.nbytes)
        yield start, stop
        start = stop


# -- memory --------------------------------------------------------------------------------------------


class PageBuffer:
    """The memory of one page's payload while it is read or written: whole blocks, as O_DIRECT requires.

    If the payload does not end at a block's border, its last bytes go through a separate block, so that the
    memory after the caller's view is not touched.
    """

    __slots__ = ("_pieces", "_tail", "_tail_start", "checksum", "nbytes", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = slot_bytes(view.nbytes)  # on disk
        self.checksum: int | None = None  # XXH3-64 of the payload; None until all of it was transferred
        self._tail_start = view.nbytes // ALIGNMENT * ALIGNMENT
        self._tail = memoryview(mmap.mmap(-1, ALIGNMENT)) if self._tail_start < self.nbytes else None
        self._pieces: _PieceHash | None = None

    @property
    def aligned(self) -> bool:
        return address_of(self.view, writable=False) % ALIGNMENT == 0

    def fill_tail(self) -> None:
        """Copy the end of the payload into the separate block, before writing."""
        if self._tail is not None:
            self._tail[: self.view.nbytes - self._tail_start] = self.view[self._tail_start :]

    def empty_tail(self) -> None:
        """Copy the end of the payload out of the separate block, after reading."""
        if self._tail is not None:
            self.view[self._tail_start :] = self._tail[: self.view.nbytes - self._tail_start]

    def expect_pieces(self) -> None:
        """Prepare for a transfer in more than one piece. Must be called before the transfer."""
        self._pieces = _PieceHash(self.view)

    def memory(self, start: int, stop: int) -> list[memoryview]:
        """Return the memory for bytes ``start … stop`` of the extent, both multiples of 4096."""
        if self._tail is None or stop <= self._tail_start:
            return [self.view[start:stop]]
        if start == self._tail_start:
            return [self._tail]
        return [self.view[start : self._tail_start], self._tail]

    def hash(self, start: int, stop: int) -> None:
        """Hash bytes ``start … stop``, which were just transferred and are in this core's cache."""
        if self._pieces is None:
            self.checksum = xxhash.xxh3_64_intdigest(self.view)
        else:
            whole = self._pieces.add(start, min(stop, self.view.nbytes))
            if whole is not None:  # None must not overwrite the checksum of a thread that added later pieces
                self.checksum = whole


class _PieceHash:
    """XXH3-64 over pieces that arrive in any order, from several threads."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._hash = xxhash.xxh3_64()
        self._hashed = 0
        self._waiting: dict[int, int] = {}  # start -> stop

    def add(self, start: int, stop: int) -> int | None:
        """Hash this piece if all pieces before it were hashed. Otherwise the thread that adds the missing
        piece will hash both. Return the checksum if all pieces have been hashed, otherwise None."""
        with self._lock:
            self._waiting[start] = stop
            while self._hashed in self._waiting:
                stop = self._waiting.pop(self._hashed)
                self._hash.update(self._view[self._hashed : stop])
                self._hashed = stop
            return self._hash.intdigest() if self._hashed == self._view.nbytes else None


Fill = Callable[[int, memoryview], None]
"""Writes the payload of a page, given by its number in the batch, into a view. May raise :class:`OSError`."""


class FilledBuffer(PageBuffer):
    """A buffer whose payload is produced just before it is written, by the first thread that writes a part of
    it. So one page's payload is produced while other pages are written."""

    __slots__ = ("_fill", "_lock", "_number")

    def __init__(self, number: int, view: memoryview, fill: Fill) -> None:
        super().__init__(view)
        self._number = number
        self._fill: Fill | None = fill
        self._lock = threading.Lock()

    def fill_tail(self) -> None:
        with self._lock:
            if self._fill is not None:
                self._fill(self._number, self.view)
                self._fill = None
                super().fill_tail()


Unseal = Callable[[PageRecord, memoryview, memoryview], bool]
"""Decrypts a record's payload from the first view into the second. Returns False if the payload does not
match the record."""


def _unsealed(record: PageRecord, sealed: memoryview, out: memoryview) -> bool:
    return False  # the directory is not encrypted


class EncodedBuffer(PageBuffer):
    """The buffer of an encoded or encrypted page while it is read. The thread that reads the last piece
    decodes the payload into ``page``. ``checksum`` is that of the decoded page, and stays None if the payload
    cannot be decoded.

    For an encoded page, ``view`` has whole blocks, so more bytes may be read than are decoded. A page that is
    encrypted but not encoded is decrypted in place: ``view`` and ``page`` are the same memory.
    """

    __slots__ = ("_arrived", "_arrived_bytes", "_lock", "_page", "_record", "_unseal")

    def __init__(
        self, record: PageRecord, view: memoryview, page: memoryview, unseal: Unseal = _unsealed
    ) -> None:
        super().__init__(view)
        self._record = record
        self._page = page
        self._unseal = unseal
        self._lock = threading.Lock()
        self._arrived: set[int] = set()  # starts of the pieces
        self._arrived_bytes = 0

    def expect_pieces(self) -> None:
        pass  # hash counts all pieces

    def hash(self, start: int, stop: int) -> None:
        with self._lock:
            if start not in self._arrived:
                self._arrived.add(start)
                self._arrived_bytes += stop - start
            whole = self._arrived_bytes == self.nbytes
        if whole:
            self.checksum = self._decoded()

    def _decoded(self) -> int | None:
        record, payload = self._record, self.view[: self._record.payload_bytes]
        if record.seal:
            opened = memoryview(bytearray(record.payload_bytes)) if record.codec else self._page
            if not self._unseal(record, self.view[: record.room], opened):
                return None
            if not record.codec:
                return record.checksum  # the tag has authenticated every byte
            payload = opened
        codec = by_number(record.codec)
        if codec is None or not codec.decode(payload, self._page):
            return None
        return xxhash.xxh3_64_intdigest(self._page)


class Staging:
    """Memory for encoded or encrypted payloads. Thread-safe.

    Up to ``kept_bytes`` of returned memory are kept for later calls, because the first use of new memory
    takes as much time as a read from disk.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, nbytes: int) -> Memory:
        """Return a memory of at least ``nbytes`` bytes, for :meth:`give_back` later."""
        with self._lock:
            for at, memory in enumerate(self._free):
                if nbytes <= memory.nbytes <= 4 * nbytes:
                    return self._free.pop(at)
        return Memory(round_up(nbytes, _STAGING_STEP), shared=False)

    def give_back(self, memories: Iterable[Memory]) -> None:
        with self._lock:
            self._free += memories
            while sum(memory.nbytes for memory in self._free) > self._kept_bytes:
                self._free.pop(0)


_log = logging.getLogger(__name__)

_STAGING_STEP = 64 * KIB
_STAGING_BYTES = 64 * MIB
_ERASED_AT_ONCE = 64  # pages
_LEAST_REQUEST = 1 * MIB
_MOST_REQUEST = 4 * MIB
_WRITERS = 2  # two batches are usually written at the same time, and share the streams
_MOST_QUEUED = 512 * KIB  # threads read larger requests as fast as the kernel's queue
_LEAST_QUEUED = 16  # threads read fewer requests as fast as the kernel's queue


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How pages are read: the fastest way that was measured for the disk."""

    direct: bool
    streams: int  # requests in flight per batch
    queued: bool = False  # one thread passes all small reads to the kernel at once (io.py)


class Payloads:
    """Reads and writes page payloads. Thread-safe."""

    def __init__(self, extents: ExtentFiles, *, io_threads: int) -> None:
        self._extents = extents
        self._streams = io_threads
        self.read_mode = ReadMode(direct=True, streams=io_threads)
        self.unseal: Unseal = _unsealed
        self._staging = Staging(_STAGING_BYTES)
        # Separate pools, so that reads for requests do not wait for background writes.
        self._readers = IOThreads(io_threads, name="tierstore-disk-read")
        self._writers = IOThreads(io_threads, name="tierstore-disk-write")

    def write(self, pages: Sequence[tuple[PageRecord, memoryview]], fill: Fill | None = None) -> None:
        """Write the payloads to their places, and set the checksums of unencoded pages. With ``fill``, the
        views are empty, and each writing thread calls ``fill`` for a page before it writes the page.

        No request is in flight when this returns or raises :class:`OSError`.
        """
        filled = (
            [FilledBuffer(number, view, fill) for number, (_, view) in enumerate(pages)] if fill else None
        )
        batch = _PagesInMemory(pages, filled)
        self._extents.grow(batch.end)

        def work(request: ExtentRequest) -> None:
            for part in request.parts:
                batch.buffers[part.page].fill_tail()
            self._extents.write(request.offset, batch.memory(request), direct=batch.aligned)
            batch.hash(request, request.nbytes)

        requests = batch.plan(self._streams // _WRITERS, self._extents.file_bytes)
        _work_off(requests, work, self._writers, self._streams)
        for (record, _), buffer in zip(pages, batch.buffers, strict=True):
            assert buffer.checksum is not None, f"page {record.serial} was written in part"
            if not record.codec:
                record.checksum = buffer.checksum

    def erase(self, removed: Sequence[Removal]) -> None:
        """Overwrite the payloads of these pages with zeros. The pages' places must not be free yet. Raise
        :class:`OSError` if the disk fails."""
        zeros = Memory(max(each.nbytes for each in removed), shared=False) if removed else None
        for start in range(0, len(removed), _ERASED_AT_ONCE):
            assert zeros is not None
            some = removed[start : start + _ERASED_AT_ONCE]
            blank = [PageRecord(0, 0, b"", b"", b"", each.nbytes, each.place) for each in some]
            self.write([(record, zeros.view(0, record.nbytes)) for record in blank])

    def read(self, pages: Sequence[tuple[PageRecord, memoryview]], *, encoded: bool = False) -> ReadBatch:
        """Fill the views, and return for each page whether it is complete and matches its checksum. With
        ``encoded``, fill the views with the payloads as they are on disk, and still verify them. For
        encrypted pages, ``encoded`` requires the stored form of the records."""
        # Read the whole room of each page, so that adjacent pages share a request. Use one block of memory
        # for all pages, because mapping many blocks takes long.
        sizes = [
            slot_bytes(record.nbytes if encoded else record.room) if record.codec else 0
            for record, _ in pages
        ]
        try:
            staged = self._staging.take(sum(sizes)) if any(sizes) else None
        except UsageError as error:  # not enough memory
            return ReadBatch([PageRead.FAILED] * len(pages), OSError(errno.ENOMEM, str(error)))
        try:
            buffers = []
            start = 0
            for (record, view), nbytes in zip(pages, sizes, strict=True):
                own = staged.view(start, nbytes) if staged is not None and nbytes else view
                buffers.append(self._buffer(record, view, own, encoded))
                start += nbytes
            return self._read(pages, _PagesInMemory(pages, buffers))
        finally:
            if staged is not None:
                self._staging.give_back([staged])

    def _read(self, pages: Sequence[tuple[PageRecord, memoryview]], batch: _PagesInMemory) -> ReadBatch:
        mode = self.read_mode
        failed: dict[int, OSError] = {}  # by page

        def attempt(request: ExtentRequest, direct: bool) -> OSError | None:
            try:
                got = self._extents.read(request.offset, batch.memory(request), direct=direct)
            except OSError as error:
                return error
            batch.hash(request, got, read=True)
            return None

        def work(request: ExtentRequest) -> None:
            if attempt(request, mode.direct and batch.aligned) is not None:
                for single in request.singles():  # one bad block must not affect its neighbours
                    error = attempt(single, False)
                    if error is not None:
                        failed[single.parts[0].page] = error

        requests = batch.plan(mode.streams, self._extents.file_bytes)
        if mode.queued and mode.direct and batch.aligned:
            requests = self._read_queued(batch, requests)
        _work_off(requests, work, self._readers, mode.streams)
        outcomes = []
        for number, ((record, _), buffer) in enumerate(zip(pages, batch.buffers, strict=True)):
            if buffer.checksum == record.checksum:
                outcomes.append(PageRead.GOOD)
            else:  # after an error, or without the codec, it is unknown whether the stored bytes are good
                unread = number in failed or (record.codec and by_number(record.codec) is None)
                outcomes.append(PageRead.FAILED if unread else PageRead.DAMAGED)
        return ReadBatch(outcomes, next(iter(failed.values()), None))

    def _read_queued(self, batch: _PagesInMemory, requests: Sequence[ExtentRequest]) -> list[ExtentRequest]:
        """Do the small requests all at once. Return the requests that were not done or failed."""
        small: list[ExtentRequest] = []
        left: list[ExtentRequest] = []
        places: list[tuple[int, memoryview]] = []
        for request in requests:
            views = batch.memory(request)
            if len(views) == 1 and request.nbytes <= _MOST_QUEUED:
                small.append(request)
                places.append((request.offset, views[0]))
            else:
                left.append(request)
        if len(small) < _LEAST_QUEUED:
            return [*requests]
        waiting = dict(enumerate(small))

        def landed(number: int, result: int) -> None:
            if result == small[number].nbytes:
                batch.hash(waiting.pop(number), result, read=True)

        try:
            self._extents.read_many(places, landed)
        except OSError as error:
            _log.debug("disk tier: the kernel refused %d queued reads: %s", len(waiting), error)
        return [*left, *waiting.values()]

    def _buffer(self, record: PageRecord, view: memoryview, own: memoryview, encoded: bool) -> PageBuffer:
        """Return the buffer of a page that is read into ``view``. ``own`` is the memory for the payload of an
        encoded page. A page that is only encrypted is decrypted in place, because a second memory would halve
        the speed of AES."""
        if not record.codec and not record.seal:
            return PageBuffer(view)
        if encoded:
            return EncodedBuffer(record, view, own[: record.nbytes])
        return EncodedBuffer(record, own, view, self.unseal)

    def close(self) -> None:
        """Wait for requests in flight, and stop the threads."""
        self._readers.close()
        self._writers.close()


class _PagesInMemory:
    """The extents and the memory of the pages of one read or write."""

    def __init__(
        self, pages: Sequence[tuple[PageRecord, memoryview]], buffers: Sequence[PageBuffer] | None = None
    ) -> None:
        self.buffers = buffers or [PageBuffer(view) for _, view in pages]
        self.aligned = all(buffer.aligned for buffer in self.buffers)
        # the offset in the extent space after the last of these pages
        self.end = max((record.place + slot_bytes(record.room) for record, _ in pages), default=0)
        self._extents = [
            Extent(record.place, buffer.nbytes)
            for (record, _), buffer in zip(pages, self.buffers, strict=True)
        ]

    def plan(self, streams: int, file_bytes: int) -> list[ExtentRequest]:
        """Return the requests, and prepare the buffers of pages that are divided over several requests."""
        # Large requests are faster, but only if there are enough to keep every stream busy.
        share = sum(extent.nbytes for extent in self._extents) // (2 * max(streams, 1))
        request_bytes = min(max(share // _LEAST_REQUEST * _LEAST_REQUEST, _LEAST_REQUEST), _MOST_REQUEST)
        requests = plan(self._extents, request_bytes=request_bytes, file_bytes=file_bytes)
        for request in requests:
            for part in request.parts:
                if part.stop - part.start < self._extents[part.page].nbytes and part.start == 0:
                    self.buffers[part.page].expect_pieces()
        return requests

    def memory(self, request: ExtentRequest) -> list[memoryview]:
        return [
            view for part in request.parts for view in self.buffers[part.page].memory(part.start, part.stop)
        ]

    def hash(self, request: ExtentRequest, moved: int, *, read: bool = False) -> None:
        """Hash the parts of a request that are complete within its first ``moved`` bytes."""
        for part in request.parts:
            moved -= part.stop - part.start
            if moved < 0:
                return
            buffer = self.buffers[part.page]
            if read and part.stop == buffer.nbytes:
                buffer.empty_tail()
            buffer.hash(part.start, part.stop)


def _work_off(
    requests: Sequence[ExtentRequest], work: Callable[[ExtentRequest], None], threads: IOThreads, streams: int
) -> None:
    """Do ``work`` for all requests on ``streams`` threads, including the calling thread. After an error,
    start no further request, wait for the requests in flight, and raise the error."""
    queue = deque(requests)

    def drain() -> None:
        while (request := _next(queue)) is not None:
            try:
                work(request)
            except BaseException:
                queue.clear()
                raise

    helpers = [threads.submit(drain) for _ in range(min(streams, len(requests)) - 1)]
    try:
        drain()
    finally:
        errors = [helper.exception() for helper in helpers if not helper.cancel()]
    for error in errors:
        if error is not None:
            raise error


def _next(queue: deque[ExtentRequest]) -> ExtentRequest | None:
    try:
        return queue.popleft()
    except IndexError:  # another thread took the last one
        return None
