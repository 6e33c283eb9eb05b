"""The disk tier: reserve a place, write the payload, commit the record; read it back, remove it.

It decides nothing: what is written and what leaves is the store's business.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import xxhash

from tierstore.tiers.disk.catalog import Change
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.layout import Layout, split
from tierstore.tiers.disk.opening import OpenedParts, open_parts
from tierstore.tiers.disk.records import INLINE, PageRecord
from tierstore.tiers.disk.stats import DiskStats
from tierstore.units import KIB


class DiskTier:
    """One open store directory. Thread-safe.

    A page's life: :meth:`reserve`, :meth:`write`, :meth:`commit` as added, any number of :meth:`read`,
    :meth:`commit` as removed. Whoever calls sees to it that a page is not removed while it is being read.
    """

    def __init__(self, parts: OpenedParts, layout: Layout) -> None:
        self._layout = layout
        self._directory = parts.directory
        self._catalog = parts.catalog
        self._extents = parts.extents
        self._payloads = parts.payloads
        self._space = parts.space
        self._records = _parents_first(parts.records)
        self._commit_lock = threading.Lock()
        self._closed = False
        # Guarded by _lock.
        self._lock = threading.Lock()
        self._next_serial = parts.catalog.next_serial
        self._pages = len(parts.records)
        self._written: dict[
            int, int
        ] = {}  # place -> number of failed syncs before the write; until committed
        self._failed_syncs = 0
        self._counts: Counter[str] = Counter()

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        capacity_bytes: int,
        page_bytes: int,
        inline_bytes: int = 16 * KIB,
        io_threads: int = 8,
        io: FileIO | None = None,
    ) -> DiskTier:
        """Open ``directory``, which is made if it is not there.

        ``capacity_bytes`` caps everything under it. ``page_bytes`` is the size this life will mostly write;
        pages of ``inline_bytes`` and less live in the index. ``io_threads`` requests are in flight per batch.
        Any of these may differ from life to life: pages that no longer fit are dropped.

        Raises :class:`~tierstore.errors.UsageError` for a capacity below one page and
        :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
        """
        layout = split(capacity_bytes, page_bytes=page_bytes, inline_bytes=inline_bytes)
        parts = open_parts(
            directory, layout, inline_bytes=inline_bytes, io_threads=io_threads, io=io or FileIO()
        )
        return cls(parts, layout)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DiskTier({self._directory.path}, {self._pages} pages, {self._space})"

    def records(self) -> list[PageRecord]:
        """The pages found at open: parents before children, and the longest unused first among equals in
        depth. The list is handed over: a second call returns nothing."""
        records, self._records = self._records, []
        return records

    def new_serial(self) -> int:
        """A serial that no page in this directory ever had."""
        with self._lock:
            self._next_serial += 1
            return self._next_serial - 1

    # -- places --------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int | None:
        """A place for a payload of ``nbytes``, or None when there is no room. Does no I/O."""
        return self._space.reserve(nbytes)

    def unreserve(self, place: int, nbytes: int) -> None:
        """Give back a place that :meth:`reserve` gave and no :meth:`commit` has added."""
        with self._lock:
            self._written.pop(place, None)
        self._space.unreserve(place, nbytes)

    # -- bytes ---------------------------------------------------------------------------------------

    def write(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> None:
        """Write payloads to their reserved places, and fill in ``record.checksum``.

        Nothing is durable before :meth:`commit`. Views at addresses that are multiples of 4096 go straight to
        disk. Raises :class:`OSError`; none of the places are then being written to any more.
        """
        with self._lock:
            failed_syncs = self._failed_syncs
        for record, view in pages:
            assert view.nbytes == record.nbytes, (
                f"page {record.serial}: {view.nbytes} of {record.nbytes} bytes"
            )
            if record.place == INLINE:
                record.checksum = xxhash.xxh3_64_intdigest(view)
        outside = [page for page in pages if page[0].place != INLINE]
        self._payloads.write(outside)
        with self._lock:
            for record, _ in outside:
                self._written[record.place] = failed_syncs

    def read(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> list[bool]:
        """Fill the views. For each page: True when it is byte for byte what was saved.

        A disk that fails looks like a page that is not there: nothing is raised for it.
        """
        good = [False] * len(pages)
        outside = [index for index, (record, _) in enumerate(pages) if record.place != INLINE]
        for index, ok in zip(outside, self._payloads.read([pages[index] for index in outside]), strict=True):
            good[index] = ok
        for index, (record, view) in enumerate(pages):
            if record.place == INLINE:
                good[index] = self._read_inline(record, view)
        with self._lock:
            self._counts["read_pages"] += sum(good)
            self._counts["bad_pages"] += len(good) - sum(good)
            self._counts["read_bytes"] += sum(
                record.nbytes for (record, _), ok in zip(pages, good, strict=True) if ok
            )
        return good

    def _read_inline(self, record: PageRecord, view: memoryview) -> bool:
        try:
            found = self._catalog.read_payload(record, view)
        except OSError:
            return False
        return found and xxhash.xxh3_64_intdigest(view) == record.checksum

    # -- commits -------------------------------------------------------------------------------------

    def commit(
        self,
        added: Sequence[tuple[PageRecord, memoryview | None]],
        removed: Sequence[PageRecord],
        used: Mapping[int, tuple[float, int]],
    ) -> None:
        """Make written pages, removals and use times (serial → wall clock, hits) durable, all together.

        On return ``added`` are on disk for good and the places of ``removed`` are free. An inline page's view
        is its payload. Removals happen before additions: a page may leave and come back under its serial.
        Raises :class:`OSError`: then nothing was added, and the same removals are to be handed in again.
        """
        with self._commit_lock:
            self._sync()
            self._require_written(added)
            with self._lock:
                next_serial = self._next_serial
            self._catalog.apply(Change(added, removed, used, next_serial))
            records = [record for record, _ in added]
            self._space.settle(records, removed, index=self._catalog.usage)
            with self._lock:
                for record in records:
                    self._written.pop(record.place, None)
                self._pages = len(self._catalog)
                self._counts["commits"] += 1
                self._counts["written_pages"] += len(records)
                self._counts["written_bytes"] += sum(record.nbytes for record in records)

    def _sync(self) -> None:
        try:
            self._extents.sync()
        except OSError:
            # The kernel reports a lost write once. Whatever was written before now may be gone, though the
            # next sync will say it succeeded.
            with self._lock:
                self._failed_syncs += 1
            raise

    def _require_written(self, added: Sequence[tuple[PageRecord, memoryview | None]]) -> None:
        with self._lock:
            for record, _ in added:
                if record.place == INLINE:
                    continue
                assert record.place in self._written, f"page {record.serial} was never written"
                if self._written[record.place] != self._failed_syncs:
                    raise OSError(errno.EIO, "the disk failed after this page was written")

    # -- seeing --------------------------------------------------------------------------------------

    def stats(self) -> DiskStats:
        """A snapshot; does no I/O."""
        mode = self._payloads.read_mode
        index_used = self._space.index_used_bytes
        extent_used = self._space.slots_used_bytes
        with self._lock:
            counts = Counter(self._counts)
        return DiskStats(
            capacity_bytes=self._layout.capacity_bytes,
            used_bytes=index_used + extent_used,
            file_bytes=self._extents.allocated_bytes,
            index_used_bytes=index_used,
            index_bytes=self._layout.index_bytes,
            extent_used_bytes=extent_used,
            extent_bytes=self._layout.extent_bytes,
            pages=self._pages,
            direct_io=self._extents.direct,
            read_direct=mode.direct,
            read_streams=mode.streams,
            written_pages=counts["written_pages"],
            written_bytes=counts["written_bytes"],
            read_pages=counts["read_pages"],
            read_bytes=counts["read_bytes"],
            bad_pages=counts["bad_pages"],
            commits=counts["commits"],
        )

    def check(self) -> None:
        """Assert that the index, the free space and the files agree. For idle moments: reads every record."""
        with self._commit_lock:
            held = []
            serials = {0}
            for serial, record in self._catalog.scan():
                assert record is not None, f"the record of page {serial} is damaged"
                assert record.parent in serials, f"page {serial} has lost its parent {record.parent}"
                serials.add(serial)
                held.append(record)
            self._space.check(held)
            assert len(held) == self._pages, f"{len(held)} records, {self._pages} counted"
            taken = self._directory.allocated_bytes()
            assert taken <= self._layout.capacity_bytes, f"{taken} bytes on disk, over {self._layout}"

    def close(self) -> None:
        """Give everything back. What was committed stays. Idempotent; no other call may be running."""
        if self._closed:
            return
        self._closed = True
        self._payloads.close()
        self._extents.close()
        self._catalog.close()
        self._directory.release()


def _parents_first(records: Sequence[PageRecord]) -> list[PageRecord]:
    depth = {0: 0}
    for record in records:  # in order of serials
        depth[record.serial] = depth[record.parent] + 1
    return sorted(records, key=lambda record: (depth[record.serial], record.used_s))
