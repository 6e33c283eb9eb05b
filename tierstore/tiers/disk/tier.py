"""The disk tier: reserve a place, write the payload, commit the record; read it back, remove it.

It decides nothing: what is written and what leaves is the store's business.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import xxhash

from tierstore.keys import Identity
from tierstore.tiers.disk.change import Change
from tierstore.tiers.disk.crew import Crew
from tierstore.tiers.disk.io import FileIO, QueuedIO
from tierstore.tiers.disk.layout import Layout, split
from tierstore.tiers.disk.ledger import Ledger
from tierstore.tiers.disk.links import Links
from tierstore.tiers.disk.opening import OpenedParts, open_parts
from tierstore.tiers.disk.probe import Presence, try_out
from tierstore.tiers.disk.reads import PageRead, ReadBatch
from tierstore.tiers.disk.records import INLINE, PageRecord, PageUse, Removal
from tierstore.tiers.disk.serials import Serials, identity_of
from tierstore.tiers.disk.space import Space
from tierstore.tiers.disk.stats import DiskStats
from tierstore.tiers.disk.unsynced import Unsynced
from tierstore.tiers.disk.watch import Watch, WatchedIO
from tierstore.units import KIB

_LOOKERS = 4  # threads that read the index for lookups

T = TypeVar("T")


class DiskTier:
    """One open store directory. Thread-safe.

    A page's life: :meth:`reserve`, :meth:`write`, :meth:`commit` as added, any number of :meth:`read`,
    :meth:`commit` as removed. Whoever calls sees to it that a page is not removed while it is being read.
    """

    def __init__(self, parts: OpenedParts, layout: Layout, watch: Watch) -> None:
        self.watch = watch  # what is under way, for whoever wants to know whether the disk still answers
        self._layout = layout
        self._directory = parts.directory
        self._presence = Presence(parts.directory.path, watch)
        self._lookers = Crew(_LOOKERS, name="tierstore-disk-look")
        self._catalog = parts.catalog
        self._extents = parts.extents
        self._payloads = parts.payloads
        self._space = parts.space
        self._survey = parts.survey
        self.links = Links(parts.catalog, watch)  # what need not be looked for in the index
        self.serials = Serials(parts.catalog.next_serial, parts.catalog.roots())
        self._unsynced = Unsynced()
        self._commit_lock = threading.Lock()
        self._closed = False
        # Guarded by _lock.
        self._lock = threading.Lock()
        self._pages = len(parts.catalog)
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
        clock: Callable[[], float] = time.monotonic,
    ) -> DiskTier:
        """Open ``directory``, which is made if it is not there.

        ``capacity_bytes`` caps everything under it. ``page_bytes`` is the size this life will mostly write;
        pages of ``inline_bytes`` and less live in the index. ``io_threads`` requests are in flight per batch.
        Any of these may differ from life to life: pages that no longer fit are dropped.

        Raises :class:`~tierstore.errors.UsageError` for a capacity below one page and
        :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
        """
        layout = split(capacity_bytes, page_bytes=page_bytes, inline_bytes=inline_bytes)
        watch = Watch(clock)
        watched = WatchedIO(io or QueuedIO(), watch)
        parts = open_parts(directory, layout, inline_bytes=inline_bytes, io_threads=io_threads, io=watched)
        return cls(parts, layout, watch)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DiskTier({self._directory.path}, {self._pages} pages, {self._space})"

    # -- what is there -------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger | None:
        """The facts of all durable pages; None until they have been read (a second for a million), during
        which pages are found and read, but none is written or leaves. The caller adds to it and removes from
        it as it decides."""
        return self._survey.ledger

    def wait_surveyed(self, timeout: float | None = None) -> bool:
        """Wait for :attr:`ledger`. False when it did not come in ``timeout`` seconds, or cannot be had."""
        return self._survey.wait(timeout) and self._survey.ledger is not None

    @property
    def space(self) -> Space:
        """The free space, for whoever makes room in it."""
        return self._space

    @property
    def pages(self) -> int:
        """Durable pages."""
        return self._pages

    @property
    def tick(self) -> int:
        """The store's logical clock at the last commit."""
        return self._catalog.tick

    def identities(self) -> list[Identity]:
        """Of everything that ever had a page here, except damaged ones. Raises :class:`OSError`."""
        with self.watch.call():
            roots = self._catalog.roots().values()
        return [identity for root in roots if (identity := identity_of(root)) is not None]

    def find(self, parent: int, identity: bytes, chunks: Iterable[tuple[bytes, bytes]]) -> list[PageRecord]:
        """The pages that hold ``chunks`` (key and tokens), one after the other below the page or root
        ``parent``, as far as they are there. Raises :class:`OSError`."""
        with self.watch.call():
            return self._catalog.find(parent, identity, chunks)

    def find_similar(self, parent: int, identity: bytes, tokens: bytes) -> list[PageRecord]:
        """Some of the pages right below ``parent`` that begin with the same four tokens as ``tokens``.

        Raises :class:`OSError`.
        """
        with self.watch.call():
            return self._catalog.find_similar(parent, identity, tokens)

    def within(self, seconds: float, look: Callable[[], T]) -> T:
        """The outcome of ``look``, which reads the index, on a thread of the tier's own: the index is mapped
        memory, and a disk that does not answer would hold whoever touches it for good.

        Raises :class:`OSError`; a :class:`TimeoutError` after ``seconds``, and then ``look`` goes on alone.
        """
        return self._lookers.ask(look, seconds)

    def scan(self) -> Iterator[tuple[int, PageRecord | None]]:
        """Every page on disk by serial; None for a record that is damaged. Reads the whole index."""
        return self._catalog.scan()

    def records(self, serials: Iterable[int]) -> list[PageRecord | None]:
        """The record of each page; None for one that is not there or damaged. Raises :class:`OSError`."""
        with self.watch.call():
            return list(self._catalog.records(serials))

    # -- places --------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int | None:
        """A place for a payload of ``nbytes``, or None when there is no room. Does no I/O."""
        return self._space.reserve(nbytes)

    def reserve_many(self, nbytes: int, count: int) -> list[int]:
        """Up to ``count`` of them: fewer when there is no more room."""
        return self._space.reserve_many(nbytes, count)

    def unreserve(self, place: int, nbytes: int) -> None:
        """Give back a place that :meth:`reserve` gave and no :meth:`commit` has added."""
        self._unsynced.forget([place])
        self._space.unreserve(place, nbytes)

    # -- bytes ---------------------------------------------------------------------------------------

    def write(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> None:
        """Write payloads to their reserved places, and fill in ``record.checksum``.

        Nothing is durable before :meth:`commit`. Views at addresses that are multiples of 4096 go straight to
        disk. Raises :class:`OSError`; none of the places are then being written to any more.
        """
        begun = self._unsynced.begin()
        for record, view in pages:
            assert view.nbytes == record.nbytes, (
                f"page {record.serial}: {view.nbytes} of {record.nbytes} bytes"
            )
            if record.place == INLINE:
                record.checksum = xxhash.xxh3_64_intdigest(view)
        outside = [page for page in pages if page[0].place != INLINE]
        self._payloads.write(outside)
        self._unsynced.written([record.place for record, _ in outside], begun)

    def read(self, pages: Sequence[tuple[PageRecord, memoryview]]) -> ReadBatch:
        """Fill the views, and say of each page whether it is byte for byte what was saved.

        Raises nothing for a disk that fails: a page that could not be read is one outcome, a page that is
        damaged is another.
        """
        outcomes = [PageRead.FAILED] * len(pages)
        outside = [index for index, (record, _) in enumerate(pages) if record.place != INLINE]
        read = self._payloads.read([pages[index] for index in outside])
        error = read.error
        for index, outcome in zip(outside, read.outcomes, strict=True):
            outcomes[index] = outcome
        for index, (record, view) in enumerate(pages):
            if record.place == INLINE:
                try:
                    outcomes[index] = self._read_inline(record, view)
                except OSError as failure:
                    error = failure
        batch = ReadBatch(outcomes, error)
        with self._lock:
            self._counts["read_pages"] += batch.good
            self._counts["bad_pages"] += sum(outcome is PageRead.DAMAGED for outcome in outcomes)
            self._counts["failed_pages"] += sum(outcome is PageRead.FAILED for outcome in outcomes)
            self._counts["read_bytes"] += sum(
                record.nbytes
                for (record, _), outcome in zip(pages, outcomes, strict=True)
                if outcome is PageRead.GOOD
            )
        return batch

    def _read_inline(self, record: PageRecord, view: memoryview) -> PageRead:
        with self.watch.call():
            found = self._catalog.read_payload(record, view)
        whole = found and xxhash.xxh3_64_intdigest(view) == record.checksum
        return PageRead.GOOD if whole else PageRead.DAMAGED

    # -- commits -------------------------------------------------------------------------------------

    def commit(
        self,
        added: Sequence[tuple[PageRecord, memoryview | None]],
        removed: Sequence[Removal],
        used: Mapping[int, PageUse],
        tick: int = 0,
    ) -> None:
        """Make written pages, removals and uses (of added pages too) durable, all together. ``tick`` is the
        store's logical clock.

        On return ``added`` are on disk for good and the places of ``removed`` are free. An inline page's view
        is its payload. Removals happen before additions: a page may leave and come back under its serial.
        Raises :class:`OSError`: then nothing was added, and the same removals are to be handed in again.
        """
        with self._commit_lock:
            self._presence.require()
            self._sync()
            records = [record for record, _ in added]
            self._unsynced.require(records)
            new = self.serials.unwritten()
            with self.watch.call():
                self._catalog.apply(Change(added, removed, used, new.roots, new.next_serial, tick))
            self.links.add(records)
            self._space.settle(records, removed, index=self._catalog.usage)
            if self.ledger is not None:
                self.ledger.add(records, used)
            self.serials.written(new.roots)
            self._unsynced.forget([record.place for record in records])
            with self._lock:
                self._pages = len(self._catalog)
                self._counts["commits"] += 1
                self._counts["written_pages"] += len(records)
                self._counts["written_bytes"] += sum(record.nbytes for record in records)

    def relocate(self, moved: Sequence[tuple[PageRecord, int]]) -> None:
        """Make durable that pages are where :meth:`write` has put copies of them: each new record, and the
        place that it had before. The old places stay as they are until ``space.vacate``, for those who are
        still reading there, and so that a crash finds one of the two.

        The ledger is for the caller to change. Raises :class:`OSError`: then nothing has moved.
        """
        with self._commit_lock:
            self._presence.require()
            self._sync()
            self._unsynced.require([record for record, _ in moved])
            with self.watch.call():
                self._catalog.relocate(moved)
            self._space.settle_moved(moved, index=self._catalog.usage)
            self._unsynced.forget([record.place for record, _ in moved])
            with self._lock:
                self._counts["commits"] += 1

    def _sync(self) -> None:
        try:
            self._extents.sync()
        except OSError:
            self._unsynced.sync_failed()
            raise

    def probe(self, tick: int) -> None:
        """Do everything that a batch of pages needs, without leaving one. Raises :class:`OSError` when the
        disk cannot do it."""
        self._presence.require()
        try_out(self._space, self._payloads, lambda: self.commit([], [], {}, tick))

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
            failed_pages=counts["failed_pages"],
            commits=counts["commits"],
        )

    def check(self) -> None:
        """Assert that the index, the ledger, the free space and the files agree. For idle moments: reads
        every record (but says nothing of damaged ones: those are the disk's doing)."""
        if not self.wait_surveyed():
            return
        ledger = self.ledger
        assert ledger is not None
        with self._commit_lock:
            ledger.check()
            places = ledger.places()
            held: list[tuple[int, int]] = []  # also by pages that are about to leave
            serials = {*self._catalog.roots(), *self.serials.roots()}
            for serial, record in self._catalog.scan():
                serials.add(serial)
                if record is None:
                    held += [places[serial]] if serial in places else []
                    continue
                place = (record.place, record.nbytes)
                lead = self.links.may_lead(record.parent, record.key, record.tokens, whole=True)
                assert lead, f"page {serial} is said not to be there"
                # Holes have no record, but they have a row in the ledger as long as there are pages below.
                rooted = record.parent in serials or ledger.children(record.parent)
                assert rooted, f"page {serial} has lost its parent {record.parent}"
                assert places.get(serial, place) == place, f"page {serial} is misplaced"
                held.append(place)
            assert places.keys() <= serials, f"{len(places.keys() - serials)} pages are in no index"
            assert len(held) == self._pages, f"{len(held)} records, {self._pages} counted"
            self._space.check(held)
            taken = self._directory.allocated_bytes()
            assert taken <= self._layout.capacity_bytes, f"{taken} bytes on disk, over {self._layout}"

    def close(self) -> None:
        """Give everything back, even where parts of it fail. What was committed stays. Idempotent; no other
        call may be running. Raises :class:`OSError` when the files cannot be closed in order."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:  # the last one first
            closing.callback(self._directory.release)
            closing.callback(self._catalog.close)
            closing.callback(self._extents.close)
            closing.callback(self._payloads.close)
            closing.callback(self._lookers.close)
            self._survey.wait()
            self.links.close()
