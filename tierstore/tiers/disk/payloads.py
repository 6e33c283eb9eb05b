"""Payload bytes between memory and extents: several requests in flight, checksums on the way.

A batch becomes a queue of requests. The calling thread works it off together with helpers from a crew, so
that a batch always makes progress, however busy the crew is. Each thread hashes what it has just moved while
the others wait for the disk. Both the system calls and the hash run without the GIL. Reads of small pages
that lie apart are handed to the kernel all at once instead, where that is faster (aio.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.tiers.disk.buffers import PageBuffer
from tierstore.tiers.disk.crew import Crew
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.reads import PageRead, ReadBatch
from tierstore.tiers.disk.records import PageRecord
from tierstore.tiers.disk.requests import Extent, Request, plan
from tierstore.units import KIB, MIB

_log = logging.getLogger(__name__)

_LEAST_REQUEST = 1 * MIB
_MOST_REQUEST = 4 * MIB
_WRITERS = 2  # batches are mostly being written at once, and share the streams
_MOST_QUEUED = 512 * KIB  # larger requests keep a thread busy, and the disk too
_LEAST_QUEUED = 16  # fewer are read as fast by threads


@dataclass(frozen=True, slots=True)
class ReadMode:
    """How this disk is best read."""

    direct: bool
    streams: int  # requests in flight per batch
    queued: bool = False  # small ones all at once, from one thread (aio.py)


class Payloads:
    """Reads and writes page payloads. Thread-safe."""

    def __init__(self, extents: ExtentFiles, *, io_threads: int) -> None:
        self._extents = extents
        self._streams = io_threads
        self.read_mode = ReadMode(direct=True, streams=io_threads)
        # Apart, so that demand reads never queue behind write-behind.
        self._readers = Crew(io_threads, name="tierstore-disk-read")
        self._writers = Crew(io_threads, name="tierstore-disk-write")

    def write(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> None:
        """Write the payloads to their places and fill in the records' checksums.

        On return, also by :class:`OSError`, no request is in flight any more.
        """
        batch = _Batch(pages)
        for buffer in batch.buffers:
            buffer.fill_tail()
        self._extents.grow(batch.end)

        def work(request: Request) -> None:
            self._extents.write(request.offset, batch.memory(request), direct=batch.aligned)
            batch.hash(request, request.nbytes)

        requests = batch.plan(self._streams // _WRITERS, self._extents.file_bytes)
        _work_off(requests, work, self._writers, self._streams)
        for (record, _), buffer in zip(pages, batch.buffers, strict=True):
            assert buffer.checksum is not None, f"page {record.serial} was written in part"
            record.checksum = buffer.checksum

    def read(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> ReadBatch:
        """Fill the views, and say of each page whether it came back whole and with its checksum."""
        batch = _Batch(pages)
        mode = self.read_mode
        failed: dict[int, OSError] = {}  # by page

        def attempt(request: Request, direct: bool) -> OSError | None:
            try:
                got = self._extents.read(request.offset, batch.memory(request), direct=direct)
            except OSError as error:
                return error
            batch.hash(request, got, read=True)
            return None

        def work(request: Request) -> None:
            if attempt(request, mode.direct and batch.aligned) is not None:
                for single in request.singles():  # one bad block must not cost its neighbours
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
            else:  # bytes that did not come say nothing of those that are there
                outcomes.append(PageRead.FAILED if number in failed else PageRead.DAMAGED)
        return ReadBatch(outcomes, next(iter(failed.values()), None))

    def _read_queued(self, batch: _Batch, requests: Sequence[Request]) -> list[Request]:
        """Do the small requests all at once. Returns the others, and those that did not come as they should
        have: they are done again, one by one."""
        small: list[Request] = []
        left: list[Request] = []
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
            _log.debug("disk tier: %d reads were not taken at once: %s", len(waiting), error)
        return [*left, *waiting.values()]

    def close(self) -> None:
        """Wait for what is in flight."""
        self._readers.close()
        self._writers.close()


class _Batch:
    """The pages of one call: their extents and their memory."""

    def __init__(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> None:
        self.buffers = [PageBuffer(view) for _, view in pages]
        self.aligned = all(buffer.aligned for buffer in self.buffers)
        self._extents = [
            Extent(record.place, buffer.nbytes)
            for (record, _), buffer in zip(pages, self.buffers, strict=True)
        ]

    @property
    def end(self) -> int:
        """The first byte of the extent space beyond this batch."""
        return max((extent.place + extent.nbytes for extent in self._extents), default=0)

    def plan(self, streams: int, file_bytes: int) -> list[Request]:
        """The requests to make, and each page made ready for them."""
        # Large requests are faster, but only while there are enough of them to keep every stream busy.
        share = sum(extent.nbytes for extent in self._extents) // (2 * max(streams, 1))
        request_bytes = min(max(share // _LEAST_REQUEST * _LEAST_REQUEST, _LEAST_REQUEST), _MOST_REQUEST)
        requests = plan(self._extents, request_bytes=request_bytes, file_bytes=file_bytes)
        for request in requests:
            for part in request.parts:
                if part.stop - part.start < self._extents[part.page].nbytes and part.start == 0:
                    self.buffers[part.page].expect_pieces()
        return requests

    def memory(self, request: Request) -> list[memoryview]:
        return [
            view for part in request.parts for view in self.buffers[part.page].memory(part.start, part.stop)
        ]

    def hash(self, request: Request, moved: int, *, read: bool = False) -> None:
        """Hash the parts of a request that lie within the ``moved`` bytes."""
        for part in request.parts:
            moved -= part.stop - part.start
            if moved < 0:
                return
            buffer = self.buffers[part.page]
            if read and part.stop == buffer.nbytes:
                buffer.empty_tail()
            buffer.hash(part.start, part.stop)


def _work_off(requests: Sequence[Request], work: Callable[[Request], None], crew: Crew, streams: int) -> None:
    """Do ``work`` for all requests, ``streams`` at a time, the caller included. After an error no further
    request is begun, those in flight are waited for, and the error is raised."""
    queue = deque(requests)

    def drain() -> None:
        while (request := _next(queue)) is not None:
            try:
                work(request)
            except BaseException:
                queue.clear()
                raise

    helpers = [crew.submit(drain) for _ in range(min(streams, len(requests)) - 1)]
    try:
        drain()
    finally:
        errors = [helper.exception() for helper in helpers if not helper.cancel()]
    for error in errors:
        if error is not None:
            raise error


def _next(queue: deque[Request]) -> Request | None:
    try:
        return queue.popleft()
    except IndexError:  # another thread took the last one
        return None
