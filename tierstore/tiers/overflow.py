"""A pool on the CPU with more pages than fit into memory: the remaining pages are in an overflow file.

Every page has an address, as in any pool, but only ``resident_pages`` pages have memory at a time. If another
page needs memory, a complete page is written to the file, and its memory is returned to the system
(:mod:`tierstore.tiers.beyond`)::

    the file    [ layer 0: page 0, 1, 2, … ][ layer 1: page 0, 1, 2, … ] …     opened with O_DIRECT, no name

The engine computes layer by layer, and needs one layer of every page of a sequence at a time. So the file has
the layers one after the other, and adjacent pages of a layer are read with one request. :class:`PageStream`
reads the pages of a step in this order, ahead of the computation, into a few staging buffers.

The file has no name, so it disappears with this process, also after kill -9. The file's blocks are allocated
when it is created, so a full volume is an error at the start and not in the middle of a sequence. Each layer
of each page has a checksum in memory. If the disk returns other bytes, the page is *lost*
(:class:`LostPagesError`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore import copying
from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT, Memory
from tierstore.spec import KVSpec, LayerKind
from tierstore.tiers.beyond import (
    BEYOND,
    LOST,
    MEMORY,
    NONE,
    BeyondPool,
    LostPagesError,
    Numbers,
    OverflowFailedError,
    OverflowStats,
)
from tierstore.tiers.device import Event
from tierstore.tiers.disk.io import FileIO, QueuedIO, QueuedRead
from tierstore.tiers.hbm import HostRegion, PagePool, check_pages
from tierstore.tiers.large_pages import WholePages
from tierstore.units import MIB, format_size, round_up

_log = logging.getLogger(__name__)

_STAGING_BYTES = 24 * MIB  # of one staging buffer
_STAGING = 3  # number of staging buffers: two are being filled while the engine uses one
_BOUNCE_BYTES = 32 * MIB
_READ_BYTES = 1 * MIB  # largest read request
_WRITERS = 4
LEAST_STAGED = 64
"""A staging buffer has room for at least this many pages: one page of each sequence of a step."""
ANSWER_S = 30.0
"""Longest time to wait for a read. If it takes longer, the disk counts as failed."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """The storage for pages that do not fit into the memory of a pool.

    The storage is a file of at most ``nbytes`` bytes in ``directory``, with room for every page of the pool.
    For a pool on a GPU, up to ``host_bytes`` of pages are in host memory, and only the remaining pages in the
    file. Without a directory, all are in host memory."""

    directory: Path | None
    nbytes: int
    host_bytes: int = 0

    def check(self, device: str) -> None:
        """Raise :class:`UsageError` if a pool on ``device`` cannot use this storage."""
        if device == "cpu" and (self.host_bytes or self.directory is None):
            raise UsageError("--overflow-host-bytes is for a GPU: on a CPU, give --hbm-bytes more")
        if device != "cpu" and not self.host_bytes:
            raise UsageError(
                "on a GPU, --overflow needs --overflow-host-bytes: pages pass through host memory"
            )
        if self.directory is not None and self.host_bytes >= self.nbytes:
            raise UsageError(
                f"--overflow-host-bytes {format_size(self.host_bytes)} holds all that --overflow-bytes "
                f"{format_size(self.nbytes)} would: leave --overflow out, or give the file more bytes"
            )

    def pages(self, spec: KVSpec, resident: int) -> int:
        """Return the number of pages of a pool of ``spec`` whose memory holds ``resident`` pages. Raise
        :class:`UsageError` if the storage would hold no additional page."""
        [group] = spec.groups
        if group.kind not in (LayerKind.FULL_ATTENTION, LayerKind.MLA_LATENT):
            raise UsageError(
                f"an overflow file needs layers that read every token, and this model has only "
                f"{group.kind.value}, which needs little memory"
            )
        if self.directory is None:
            return resident + self.host_pages(spec) - self.moved_pages(spec)
        page_bytes = len(group.layers) * round_up(spec.layer(group.layers[0]).nbytes, ALIGNMENT)
        pages = self.nbytes // page_bytes
        if pages <= resident:
            raise UsageError(
                f"an overflow file of {format_size(self.nbytes)} holds {pages} pages, and the memory "
                f"{resident}: give it more than {format_size(resident * page_bytes)}, or leave it out"
            )
        return pages

    def host_pages(self, spec: KVSpec) -> int:
        """Return how many pages of ``spec`` fit into ``host_bytes``. Raise :class:`UsageError` for fewer than
        two."""
        page_bytes = round_up(spec.page_bytes, ALIGNMENT)
        pages = self.host_bytes // page_bytes
        if pages < 2:
            raise UsageError(
                f"{format_size(self.host_bytes)} of host memory for the pages that do not fit a GPU's memory "
                f"is less than two pages: give at least {format_size(2 * page_bytes)}"
            )
        return pages

    def moved_pages(self, spec: KVSpec) -> int:
        """Return how many pages move together between a GPU and host memory. Pages are copied to host memory
        before other pages are copied from there, so host memory needs room for this many additional pages."""
        return max(min(_BOUNCE_BYTES // spec.page_bytes, self.host_pages(spec) // 4), 1)


class OverflowFile:
    """A file with ``pages`` pages: first layer 0 of all pages, then layer 1, and so on. Several threads may
    use it for different pages."""

    def __init__(self, spec: KVSpec, pages: int, directory: Path | None, io: FileIO) -> None:
        """Create the file in ``directory`` (None: no file, and no page may be written). Raise
        :class:`UsageError` if the file cannot be created or the volume is too small."""
        [group] = spec.groups
        starts = [spec.layer(layer) for layer in group.layers]
        self.starts = [each.start for each in starts]
        self.slice_bytes = starts[0].nbytes
        self.stride = round_up(self.slice_bytes, ALIGNMENT)
        self.nbytes = len(starts) * pages * self.stride if directory is not None else 0
        self._pages = pages
        self._io = io
        self._sums = np.zeros((len(starts), pages), np.uint64)
        self._fd = None if directory is None else self._create(directory)
        self.read_bytes = self.written_bytes = 0
        self._counting = threading.Lock()
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="tierstore-overflow-write")

    def _create(self, directory: Path) -> int:
        path = directory / f".tierstore-overflow-{os.getpid()}-{id(self):x}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            directory.mkdir(parents=True, exist_ok=True)
            try:
                fd = self._io.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: the file system has no O_DIRECT
                    raise
                with contextlib.suppress(FileNotFoundError):
                    self._io.unlink(path)
                fd = self._io.open(path, flags)
            self._io.unlink(path)
        except OSError as error:
            raise UsageError(f"cannot create an overflow file in {directory}: {error.strerror}") from error
        try:
            self._io.allocate(fd, 0, self.nbytes)
        except OSError as error:
            self._io.close(fd)
            raise UsageError(
                f"no room for an overflow file of {format_size(self.nbytes)} in {directory} "
                f"({error.strerror}). Give another directory or a smaller size"
            ) from error
        return fd

    def write(self, pages: Numbers, memory: Memory, sources: Numbers) -> None:
        """Write ``pages`` (ascending numbers). ``sources`` has the address of each page. ``memory`` is a
        buffer with room for these pages. Raise :class:`OSError` if the disk fails; then the file may have
        wrong bytes for some of the pages."""
        count = len(pages)
        writes = []
        for layer, start in enumerate(self.starts):
            first = layer * count * self.stride
            rows = memory.address + first + np.arange(count) * self.stride
            pairs = zip(rows.tolist(), (sources + start).tolist(), strict=True)
            self._sums[layer, pages] = copying.copy_and_hash(pairs, self.slice_bytes)
            for at, run in runs(pages):
                view = memory.view(first + at * self.stride, run * self.stride)
                writes.append((view, self._offset(layer, int(pages[at]))))
        list(self._writers.map(self._write_one, writes))
        self._count(written=count * len(self.starts) * self.stride)

    def _write_one(self, write: tuple[memoryview, int]) -> None:
        view, offset = write
        while view:
            done = self._io.pwritev(self._descriptor, [view], offset)
            if done <= 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view, offset = view[done:], offset + done

    def read(self, layer: int, pages: Numbers, memory: Memory) -> Numbers:
        """Read one layer of ``pages`` into ``memory``, :attr:`stride` bytes for each page. Return the indices
        of pages that could not be read or do not match their checksums, in two attempts."""
        bad = self._read(layer, pages, memory)
        return self._read(layer, pages, memory) if len(bad) else bad

    def _read(self, layer: int, pages: Numbers, memory: Memory) -> Numbers:
        reads: list[QueuedRead] = []
        spans: list[tuple[int, int]] = []
        most = max(_READ_BYTES // self.stride, 1)
        for first, run in runs(pages):
            for begin in range(first, first + run, most):
                count = min(most, first + run - begin)
                view = memory.view(begin * self.stride, count * self.stride)
                reads.append(QueuedRead(self._descriptor, view, self._offset(layer, int(pages[begin]))))
                spans.append((begin, count))
        good = np.zeros(len(pages), bool)

        def landed(number: int, result: int) -> None:
            begin, count = spans[number]
            good[begin : begin + count] = result == count * self.stride

        try:
            self._io.read_many(reads, landed)
        except OSError:  # the kernel cannot queue reads of this file
            left = [number for number, (begin, _) in enumerate(spans) if not good[begin]]
            one_by_one = [reads[number] for number in left]
            FileIO.read_many(self._io, one_by_one, lambda number, result: landed(left[number], result))
        self._count(read=len(pages) * self.stride)
        addresses = memory.address + np.arange(len(pages)) * self.stride
        sums = np.array(copying.hash_all(addresses.tolist(), self.slice_bytes), np.uint64)
        good &= sums == self._sums[layer, pages]
        return np.flatnonzero(~good)

    def close(self) -> None:
        """Close the file, which frees its blocks."""
        self._writers.shutdown()
        if self._fd is not None:
            self._io.close(self._fd)

    @property
    def _descriptor(self) -> int:
        assert self._fd is not None, "without a file, no page is written or read"
        return self._fd

    def _offset(self, layer: int, page: int) -> int:
        return (layer * self._pages + page) * self.stride

    def _count(self, *, read: int = 0, written: int = 0) -> None:
        with self._counting:
            self.read_bytes += read
            self.written_bytes += written


class OverflowPool(BeyondPool):
    """A pool of ``num_pages`` pages in this process's memory. At most ``resident_pages`` pages have memory at
    a time. The contents of all other pages are in a file. ``spec`` has one layer group.

    The file is closed by :meth:`close`, or when the last reference to the pool is gone.

    >>> import tempfile
    >>> spec = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float32")
    >>> pool = OverflowPool(spec, 4, resident_pages=2, directory=Path(tempfile.mkdtemp()))
    >>> pages = pool.allocate(3)
    >>> for page in pages:
    ...     pool.prepare([page], pages)
    ...     pool.array[page] = page + 1
    >>> [pool.is_resident(page) for page in pages]
    [False, True, True]
    >>> pool.prepare([0], pages)
    >>> int(pool.array[0, 0]), pool.is_resident(1)
    (1, False)
    """

    def __init__(
        self,
        spec: KVSpec,
        num_pages: int,
        *,
        resident_pages: int,
        directory: Path | None,
        io: FileIO | None = None,
        answer_s: float = ANSWER_S,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        """Without a ``directory`` there is no file; then the caller must not have contents in more than
        ``resident_pages`` pages. Raise :class:`UsageError` for a pool without pages, and if the file cannot
        be created."""
        check_pages(spec, min(num_pages, resident_pages))
        self.resident_pages = min(resident_pages, num_pages)
        self.answer_s = answer_s
        self.file = OverflowFile(spec, num_pages, directory, io or QueuedIO())
        region = HostRegion(round_up(spec.page_bytes, ALIGNMENT), num_pages, touched=False)
        self._memory = region.memory
        self._place(spec, region, WholePages(region.large_pages))
        self.silent = False  # whether the disk has stopped responding
        whole = len(self.file.starts) * self.file.stride
        self._bounce_pages = max(_BOUNCE_BYTES // whole, 1)
        self._track(num_pages, at_once=self._bounce_pages)
        self._failed: str | None = None
        self._bounce = Memory(self._bounce_pages * whole, shared=False)
        self.staged_pages = max(staging_bytes // self.file.stride, LEAST_STAGED)
        self._staging = deque(
            Memory(self.staged_pages * self.file.stride, shared=False) for _ in range(_STAGING)
        )
        self._closing = weakref.finalize(self, self.file.close)
        self._readers = ThreadPoolExecutor(_STAGING - 1, thread_name_prefix="tierstore-overflow-read")

    @property
    def failed(self) -> str | None:
        return self._failed

    @property
    def target(self) -> int:
        return self.resident_pages if self._failed else super().target

    @property
    def stats(self) -> OverflowStats:
        with self._lock:
            pages = int((self._content == BEYOND).sum())
            return OverflowStats(
                self.file.nbytes,
                pages,
                self.file.read_bytes,
                self.file.written_bytes,
                self._lost,
                self._failed is not None,
            )

    def forget(self, pages: Numbers) -> None:
        """Drop the contents of these pages, for a pool that uses this one as its storage. The pages' memory
        is kept for other pages."""
        with self._lock:
            self._forget(pages)

    def _give_memory(self, pages: Numbers) -> None:
        """Do nothing, because the kernel provides memory on the first write."""

    def _take_memory(self, pages: Numbers) -> None:
        for first, run in runs(pages):
            start = int(pages[first]) * self.stride
            self._memory.discard(start, start + run * self.stride)

    def _write_here(self, copies: Sequence[tuple[int, int]]) -> None:
        PagePool.write_pages(self, copies)

    def _write_beyond(self, pages: Numbers, sources: Numbers | None = None) -> None:
        if self._failed and len(pages):
            raise OverflowFailedError(self._failed)
        if sources is None:
            sources = self._start + pages * self.stride
        for first in range(0, len(pages), self._bounce_pages):
            some = slice(first, first + self._bounce_pages)
            try:
                self.file.write(pages[some], self._bounce, sources[some])
            except OSError as error:
                self._fail(f"the overflow file takes no more pages: {error.strerror}")
                raise OverflowFailedError(str(self._failed)) from error

    def _fail(self, why: str) -> None:
        if self._failed is None:
            self._failed = why
            _log.warning("%s: sequences that need more than %d pages end", why, self.resident_pages)

    def _bring(self, pages: Numbers) -> None:
        if not len(pages):
            return
        lost = self._read_into(pages, self._start + pages * self.stride)
        good = np.setdiff1d(pages, lost)
        self._content[good] = MEMORY
        self._kept[good] = True
        if lost:
            self.lose(lost)
            raise LostPagesError(lost, "the overflow file did not return what was written")

    def _read_into(self, pages: Numbers, targets: Numbers) -> list[int]:
        """Read whole pages from the file to the addresses ``targets``. Return the lost pages."""
        lost: set[int] = set()
        for first in range(0, len(pages), self._bounce_pages):
            batch = slice(first, first + self._bounce_pages)
            some, addresses = pages[batch], targets[batch]
            for layer, start in enumerate(self.file.starts):
                bad = self.file.read(layer, some, self._bounce)
                lost.update(some[bad].tolist())
                rows = self._bounce.address + np.arange(len(some)) * self.file.stride
                copies = zip((addresses + start).tolist(), rows.tolist(), strict=True)
                copying.copy_all(copies, self.file.slice_bytes)
        return sorted(lost)

    def _read(self, copies: Sequence[tuple[int, int]], after: Event | None) -> set[int]:
        content = self._content[[page for page, _ in copies]].tolist()
        here = [copy for copy, where in zip(copies, content, strict=True) if where == MEMORY]
        there = sorted(copy for copy, where in zip(copies, content, strict=True) if where == BEYOND)
        lost = {page for (page, _), where in zip(copies, content, strict=True) if where in (LOST, NONE)}
        PagePool.read_pages(self, here)
        if there:
            pages, targets = np.array(there, np.int64).T
            lost.update(self._read_into(pages, targets))
        return lost

    def read_as_far(self, copies: Sequence[tuple[int, int]]) -> set[int]:
        """Copy pages to host addresses, except lost pages. Return the lost pages."""
        with self._lock:
            return self._read(copies, None)

    def answers_not(self) -> None:
        """Record that a read took too long. From now on, the file is not used, and all pages in it are
        lost."""
        with self._lock:
            self.silent = True
            self._fail(f"the overflow file's disk did not answer within {self.answer_s:g} s")
            self.lose(np.flatnonzero(self._content == BEYOND).tolist())

    def close(self) -> None:
        """Wait for running reads, and close the file. The pool must not be used any more."""
        self._readers.shutdown()
        self._closing()

    def staging_array(self, address: int) -> npt.NDArray[np.uint8]:
        """Return the staging buffer at ``address`` as an array of bytes."""
        [memory] = [each for each in self._staging if each.address == address]
        return np.frombuffer(memory.view(0, self.staged_pages * self.file.stride), np.uint8)

    # -- reading ahead ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def streaming(self, batches: Sequence[Numbers]) -> Iterator[PageStream]:
        """Return a context manager with a stream of these batches of pages. A batch has at most
        :attr:`staged_pages` pages."""
        stream = PageStream(self, batches, self._staging, self._readers)
        try:
            yield stream
        finally:
            stream.close()


class PageStream:
    """Reads batches of pages layer by layer: layer 0 of all batches, then layer 1, and so on. The stream
    reads ahead into the staging buffers. For use by one thread."""

    def __init__(
        self,
        pool: OverflowPool,
        batches: Sequence[Numbers],
        staging: Iterable[Memory],
        readers: ThreadPoolExecutor,
    ) -> None:
        self._pool = pool
        self._readers = readers
        self._wanted: Iterator[tuple[int, Numbers]] = (
            (layer, pages) for layer in range(len(pool.file.starts)) for pages in batches
        )
        self._coming: deque[tuple[Numbers, Memory, Future[Numbers]]] = deque()
        self._held: Memory | None = None  # the buffer that the caller reads
        for memory in staging:
            self._read_next(memory)

    def take(self) -> int:
        """Return the address of one layer of the next batch of pages. The pages' bytes are ``file.stride``
        bytes apart, and stay there until the next call. Raise :class:`LostPagesError` if the disk has not
        returned the written bytes."""
        if self._held is not None:
            self._read_next(self._held)
        pages, memory, reading = self._coming.popleft()
        self._held = memory
        try:
            bad = reading.result(self._pool.answer_s)
        except FutureTimeoutError:
            self._pool.answers_not()
            raise LostPagesError(pages.tolist(), str(self._pool.failed)) from None
        if len(bad):
            lost = pages[bad].tolist()
            self._pool.lose(lost)
            raise LostPagesError(lost, "the overflow file did not return what was written")
        return memory.address

    def close(self) -> None:
        """Wait for running reads, because they would overwrite the buffers of the next stream. Do not wait
        for a disk that has stopped responding, because there will be no next stream."""
        self._wanted = iter(())
        for _, _, reading in self._coming:
            if not reading.cancel() and not self._pool.silent:
                try:
                    reading.exception(self._pool.answer_s)
                except FutureTimeoutError:
                    self._pool.answers_not()

    def _read_next(self, memory: Memory) -> None:
        wanted = next(self._wanted, None)
        if wanted is not None:
            layer, pages = wanted
            reading = self._readers.submit(self._pool.file.read, layer, pages, memory)
            self._coming.append((pages, memory, reading))


def runs(pages: Numbers) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers in ``pages``, as (index of the run's first number, length).

    >>> runs(np.array([3, 4, 5, 9, 8]))
    [(0, 3), (3, 1), (4, 1)]
    """
    if not len(pages):
        return []
    firsts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    return list(zip(firsts.tolist(), np.diff(firsts, append=len(pages)).tolist(), strict=True))
