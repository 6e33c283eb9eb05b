"""The disk tier: reserves places, writes payloads, commits records, reads pages back and removes them.

The tier makes no decisions: the store decides which pages are written and evicted.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from tierstore.codec import NONE, by_name
from tierstore.keys import Identity
from tierstore.policy import DEFAULT_POLICY, POLICIES
from tierstore.tiers.disk.calibration import Presence, try_out
from tierstore.tiers.disk.child_filter import ChildFilter
from tierstore.tiers.disk.encoding import PageEncoder
from tierstore.tiers.disk.extents import VOLUME_FULL
from tierstore.tiers.disk.forgets import ForgetNotes
from tierstore.tiers.disk.index_db import Change
from tierstore.tiers.disk.io import FileIO, InFlightCalls, QueuedIO, TrackedIO
from tierstore.tiers.disk.io_threads import IOThreads
from tierstore.tiers.disk.keyring import Keyring
from tierstore.tiers.disk.opening import OpenedParts, open_parts
from tierstore.tiers.disk.page_table import PageTable
from tierstore.tiers.disk.payloads import PageRead, ReadBatch
from tierstore.tiers.disk.records import INLINE, PageRecord, PageUse, Removal, beginnings
from tierstore.tiers.disk.roots import identity_of
from tierstore.tiers.disk.sealing import SealedPayloads, Sealing, SessionKeys
from tierstore.tiers.disk.space import split
from tierstore.units import KIB


@dataclass(frozen=True, slots=True)
class DiskStats:
    """A snapshot of the disk tier's counters, which start at open."""

    capacity_bytes: int  # the limit on the size of all files in the directory
    used_bytes: int  # slots and index pages in use or reserved
    file_bytes: int  # disk space of the extent files, used or not
    index_used_bytes: int
    index_bytes: int  # the part of capacity_bytes for the index
    extent_used_bytes: int
    extent_bytes: int  # the part of capacity_bytes for the extents
    pages: int  # durable
    direct_io: bool  # False: the file system has no O_DIRECT, and pages go through the page cache
    read_direct: bool  # whether pages are read with O_DIRECT
    read_streams: int  # parallel requests of one read
    written_pages: int
    written_bytes: int
    read_pages: int
    read_bytes: int
    bad_pages: int  # reads that returned other bytes than were saved
    failed_pages: int  # reads that failed with an error of the disk
    commits: int


class Unsynced:
    """Tracks written payloads that are not committed yet, and whether the disk may have lost them.
    Thread-safe.

    The kernel reports a lost write only once. Everything written before a failed sync may be lost, even if
    the next sync succeeds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[int, int] = {}  # place → number of failed syncs before the write
        self._failed_syncs = 0

    def begin(self) -> int:
        """Return a number that the caller passes to :meth:`written` after writing payloads."""
        return self._failed_syncs

    def written(self, places: Iterable[int], begun: int) -> None:
        with self._lock:
            for place in places:
                self._written[place] = begun

    def sync_failed(self) -> None:
        with self._lock:
            self._failed_syncs += 1

    def require(self, records: Iterable[PageRecord]) -> None:
        """Raise :class:`OSError` if one of these pages was written before a failed sync."""
        with self._lock:
            for record in records:
                if record.place == INLINE:
                    continue
                assert record.place in self._written, f"page {record.serial} was never written"
                if self._written[record.place] != self._failed_syncs:
                    raise OSError(errno.EIO, "the disk failed after this page was written")

    def forget(self, places: Iterable[int]) -> None:
        """Stop tracking places whose payloads are durable now, or that were freed."""
        with self._lock:
            for place in places:
                self._written.pop(place, None)


_log = logging.getLogger(__name__)

_DEPARTURES = b"departures "
_LOOKERS = 4  # threads that read the index for lookups

T = TypeVar("T")


class DiskTier:
    """One open store directory. Thread-safe.

    A page's life: :meth:`reserve`, :meth:`write`, :meth:`commit` as added, any number of :meth:`read`,
    :meth:`commit` as removed. The caller ensures that no page is removed while it is being read.
    """

    def __init__(
        self,
        parts: OpenedParts,
        in_flight: InFlightCalls,
        encoder: PageEncoder | None,
        keyring: Keyring | None,
        io: FileIO,
    ) -> None:
        self._io = io
        self.encoder = encoder  # encodes pages before they are written; None: pages are not encoded
        self.in_flight = in_flight  # the running I/O calls, which show whether the disk still responds
        self._layout = parts.layout
        self._directory = parts.directory
        self._presence = Presence(parts.directory.path, in_flight)
        self._lookers = IOThreads(_LOOKERS, name="tierstore-disk-look")
        self._index_db = parts.index_db
        self._extents = parts.extents
        self._payloads = parts.payloads
        self.space = parts.space  # the free space, in which the store makes room
        self._scan = parts.scan
        # tells which pages need not be looked up in the index
        self.child_filter = ChildFilter(parts.index_db, in_flight)
        self.serials = parts.serials
        self.fitted = parts.fitted  # pages evicted and moved at open because the capacity had changed
        self.keyring = keyring
        self._sealing: Sealing | None = None
        self._sealed_payloads: SealedPayloads | None = None
        if keyring is not None:
            self._sealing = Sealing(keyring, parts.serials.identity)
            self._sealed_payloads = SealedPayloads(self._sealing, parts.payloads)
            parts.index_db.sealing = self._sealing
            parts.payloads.unseal = self._sealing.open_payload
        self.session_keys = SessionKeys(self._sealing)
        self._unsynced = Unsynced()
        self._commit_lock = threading.Lock()
        self.forgets = ForgetNotes(parts.index_db, self._changing, io)
        self._closed = False
        # Guarded by _lock.
        self._lock = threading.Lock()
        self.pages = len(parts.index_db)  # number of durable pages
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
        codec: str = NONE,
        policy: str = DEFAULT_POLICY,
        io: FileIO | None = None,
        keyring: Keyring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> DiskTier:
        """Open ``directory``; create it if it does not exist.

        ``capacity_bytes`` limits everything in it. ``page_bytes`` is the usual size of new pages. Pages of
        ``inline_bytes`` or less are stored in the index. ``io_threads`` is the number of requests in flight
        per batch. ``codec`` (a name of :mod:`tierstore.codec`) is used for pages passed to :attr:`encoder`.
        Each of these settings may differ between two openings. If the pages do not fit any more, those that
        ``policy`` (a name of :data:`tierstore.policy.POLICIES`) ranks worst are evicted, and others are
        moved; :attr:`fitted` has the numbers. With a ``keyring``, the pages are encrypted
        (:mod:`tierstore.tiers.disk.sealing`); :meth:`close` also closes the keyring.

        Raise :class:`~tierstore.errors.UsageError` for a capacity below one page or an unknown codec, and
        :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
        """
        in_flight = InFlightCalls(clock)
        watched = TrackedIO(io or QueuedIO(), in_flight)
        with ExitStack() as opened:
            if keyring is not None:
                opened.callback(keyring.close)
            chosen = by_name(codec)
            layout = split(
                capacity_bytes, page_bytes=page_bytes, inline_bytes=inline_bytes, sealed=keyring is not None
            )
            parts = open_parts(
                directory,
                layout,
                inline_bytes=inline_bytes,
                io_threads=io_threads,
                io=watched,
                policy=POLICIES[policy](),
                codec=chosen,
                keyring=keyring,
            )
            opened.pop_all()
        encoder = PageEncoder(chosen, inline_bytes=inline_bytes) if chosen is not None else None
        return cls(parts, in_flight, encoder, keyring, watched)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DiskTier({self._directory.path}, {self.pages} pages, {self.space})"

    # -- contents ------------------------------------------------------------------------------------

    @property
    def page_table(self) -> PageTable | None:
        """The facts of all durable pages; None until the scan of the index has read them, which takes a
        second for a million pages. Until then, pages can be found and read, but not written or evicted.
        :meth:`commit` adds pages to it, and the caller removes them."""
        return self._scan.page_table

    def wait_scanned(self, timeout: float | None = None) -> bool:
        """Wait for :attr:`page_table`. Return False if it is not available within ``timeout`` seconds."""
        return self._scan.wait(timeout) and self._scan.page_table is not None

    @property
    def tick(self) -> int:
        """The store's logical clock at the last commit."""
        return self._index_db.tick

    def identities(self) -> list[Identity]:
        """Return all identities that ever had a page here, except damaged identities. Raise
        :class:`OSError` if the disk fails."""
        with self.in_flight.call():
            roots = self._index_db.roots().values()
        return [identity for root in roots if (identity := identity_of(root)) is not None]

    def find(self, parent: int, identity: bytes, chunks: Iterable[tuple[bytes, bytes]]) -> list[PageRecord]:
        """Follow ``chunks`` (key and tokens of each) down from the page or root ``parent``. Return the pages
        that hold them, up to the first chunk without a page. Raise :class:`OSError` if the disk fails."""
        with self.in_flight.call():
            return self._index_db.find(parent, identity, chunks)

    def find_similar(self, parent: int, identity: bytes, tokens: bytes) -> list[PageRecord]:
        """Return some of the pages right below ``parent`` that begin with the same four tokens as ``tokens``.
        Raise :class:`OSError` if the disk fails."""
        with self.in_flight.call():
            return self._index_db.find_similar(parent, identity, tokens)

    def within(self, seconds: float, look: Callable[[], T]) -> T:
        """Run ``look``, which reads the index, on one of the tier's threads, and return its result. The index
        is mapped memory, so a disk that does not respond would block the caller for ever.

        Raise the errors of ``look``, and :class:`TimeoutError` after ``seconds``; ``look`` then continues in
        the background.
        """
        return self._lookers.ask(look, seconds)

    def scan(self) -> Iterator[tuple[int, PageRecord | None]]:
        """Yield (serial, record) of every page on disk. The record is None if it is damaged, or its
        encryption key was dropped. Reads the whole index."""
        return ((serial, self._opened(record)) for serial, record in self._index_db.scan())

    def records_from(self, serial: int, count: int) -> list[tuple[int, PageRecord | None]]:
        """Return up to ``count`` pages of :meth:`scan`, from ``serial`` on. Raise :class:`OSError` if the
        disk fails."""
        return [(number, self._opened(record)) for number, record in self.stored_from(serial, count)]

    def stored_from(self, serial: int, count: int) -> list[tuple[int, PageRecord | None]]:
        """Return :meth:`records_from` in the stored form, which includes pages whose key was dropped."""
        with self.in_flight.call():
            return self._index_db.records_from(serial, count)

    def records(self, serials: Iterable[int]) -> list[PageRecord | None]:
        """Return the record of each serial; None if it is missing or damaged, or its encryption key was
        dropped. Raise :class:`OSError` if the disk fails."""
        return [self._opened(record) for record in self.stored_records(serials)]

    def may_lead(
        self, parent: int, identity: bytes, key: bytes | None, tokens: bytes, *, whole: bool
    ) -> bool:
        """Return whether the disk may have a page right below ``parent`` that has this ``key`` or, if not
        only ``whole`` pages count, begins with the first four of ``tokens``. Does no I/O."""
        if self._sealing is None:
            return self.child_filter.may_lead(parent, *((key, ()) if whole else (None, beginnings(tokens))))
        return self.child_filter.may_lead(
            parent, *self._sealing.links(parent, identity, key, tokens, whole=whole)
        )

    def root_serials(self) -> set[int]:
        """Return the serials of all roots, which are the parents of prompts' first pages. Raise
        :class:`OSError` if the disk fails."""
        with self.in_flight.call():
            return set(self._index_db.roots())

    def stored_records(self, serials: Iterable[int]) -> list[PageRecord | None]:
        """Return the stored form of each record, for :meth:`read` and :meth:`write` with ``stored`` and for
        :meth:`relocate`; None if the record is missing or damaged. Raise :class:`OSError` if the disk
        fails."""
        with self.in_flight.call():
            return list(self._index_db.records(serials))

    # -- places --------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int | None:
        """Reserve a place for a payload of ``nbytes``. Return None if there is no room. Does no I/O."""
        return self.space.reserve(nbytes)

    def reserve_many(self, nbytes: int, count: int) -> list[int]:
        """Reserve up to ``count`` places for ``nbytes`` each. Return fewer if there is no more room."""
        return self.space.reserve_many(nbytes, count)

    def moment(self, session: bytes = b"") -> bytes:
        """Return the value of :attr:`PageRecord.seal` for a page that is about to be written. The key of
        ``session`` (empty: of the tenant) will encrypt it. If that tenant or session is forgotten between
        this call and the write, the page can never be decrypted."""
        return self._sealing.moment(session) if self._sealing is not None else b""

    def unreserve(self, place: int, nbytes: int) -> None:
        """Free a place that :meth:`reserve` returned, if no :meth:`commit` has added its page."""
        self._unsynced.forget([place])
        self.space.unreserve(place, nbytes)

    # -- bytes ---------------------------------------------------------------------------------------

    def write(self, pages: Sequence[tuple[PageRecord, memoryview]], *, stored: bool = False) -> None:
        """Write payloads to their reserved places. For unencoded pages, also set ``record.checksum``. For
        encoded pages, the payload is the codec's output, and the record is already complete. In an encrypted
        directory, also encrypt the payloads and set ``record.seal``, except with ``stored``: then the records
        are in the stored form, and the payloads are encrypted already.

        Nothing is durable before :meth:`commit`. Views at addresses that are multiples of 4096 are written
        with O_DIRECT. Raise :class:`OSError` if the disk fails; no write to the places is running then.
        """
        begun = self._unsynced.begin()
        for record, view in pages:
            assert view.nbytes == record.payload_bytes, (
                f"page {record.serial}: {view.nbytes} of {record.payload_bytes} bytes"
            )
            if record.place == INLINE:
                record.checksum = xxhash.xxh3_64_intdigest(view)
        outside = [page for page in pages if page[0].place != INLINE]
        try:
            if self._sealed_payloads is None or stored:
                self._payloads.write(outside)
            else:
                self._sealed_payloads.write(pages)
        except OSError as error:
            if error.errno in VOLUME_FULL:  # from now on, new pages get the places of evicted pages
                self.space.limit(self._extents.allocated_bytes)
            raise
        self._unsynced.written([record.place for record, _ in outside], begun)

    def read(self, pages: Sequence[tuple[PageRecord, memoryview]], *, stored: bool = False) -> ReadBatch:
        """Fill the views, and return for each page whether it is byte for byte as it was saved. With
        ``stored``, the records are in the stored form, and the views get the payloads as they are on disk,
        for :meth:`write` to another place.

        A failing disk raises no error. Failed and damaged pages are different outcomes.
        """
        outcomes = [PageRead.FAILED] * len(pages)
        outside = [index for index, (record, _) in enumerate(pages) if record.place != INLINE]
        read = self._payloads.read([pages[index] for index in outside], encoded=stored)
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
                record.payload_bytes
                for (record, _), outcome in zip(pages, outcomes, strict=True)
                if outcome is PageRead.GOOD
            )
        return batch

    def _read_inline(self, record: PageRecord, view: memoryview) -> PageRead:
        payload = memoryview(bytearray(record.nbytes)) if record.seal else view
        with self.in_flight.call():
            found = self._index_db.read_payload(record, payload)
        if self._sealing is not None and record.seal:
            whole = found and self._sealing.open_payload(record, payload, view)
        else:
            whole = found and xxhash.xxh3_64_intdigest(view) == record.checksum
        return PageRead.GOOD if whole else PageRead.DAMAGED

    def _opened(self, record: PageRecord | None) -> PageRecord | None:
        return record if self._sealing is None or record is None else self._sealing.opened(record)

    # -- commits -------------------------------------------------------------------------------------

    def commit(
        self,
        added: Sequence[tuple[PageRecord, memoryview | None]],
        removed: Sequence[Removal],
        used: Mapping[int, PageUse],
        tick: int = 0,
    ) -> Mapping[int, PageRecord]:
        """Make written pages, removals and uses (including those of added pages) durable in one transaction.
        ``tick`` is the store's logical clock. The view beside an added record is the payload of an inline
        page, and is not used for other pages.

        On return, the ``added`` pages are durable and the places of the ``removed`` pages are free. Removals
        happen before additions, so a page may be removed and added again under its serial. Return the removed
        records, by serial, without damaged records. Raise :class:`OSError` if the disk fails; then nothing
        was added, and the caller must pass the same removals again.
        """
        with self._commit_lock:
            self._presence.require()
            self._payloads.erase([each for each in removed if each.erased and each.place != INLINE])
            self._sync()
            if self._sealing is not None:
                added = [self._sealing.addition(record) for record, _ in added]
            records = [record for record, _ in added]
            self._unsynced.require(records)
            new = self.serials.unwritten()
            change = Change(added, removed, used, new.roots, new.next_serial, tick)
            with self.in_flight.call():
                self._index_db.apply(change)
            self.child_filter.add(records)
            self.space.settle(records, removed, index=self._index_db.usage)
            if self.page_table is not None:
                self.page_table.add(records, used)
            self.serials.written(new.roots)
            self._unsynced.forget([record.place for record in records])
            with self._lock:
                self.pages = len(self._index_db)
                self._counts["commits"] += 1
                self._counts["written_pages"] += len(records)
                self._counts["written_bytes"] += sum(record.payload_bytes for record in records)
        if self._sealing is None:
            return change.left
        return {serial: opened for serial, left in change.left.items() if (opened := self._opened(left))}

    def forget_roots(self, serials: Sequence[int]) -> None:
        """Delete roots that :attr:`serials` has forgotten. From now on, no lookup finds the pages below these
        roots, even after a restart. The pages stay until they are removed. Raise :class:`OSError` if the disk
        fails."""
        with self._changing():
            self._index_db.forget_roots(serials)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Exclude commits while the caller changes the index in this block. Raise :class:`OSError` if the
        directory is gone."""
        with self._commit_lock:
            self._presence.require()
            with self.in_flight.call():
                yield

    def relocate(self, moved: Sequence[tuple[PageRecord, int]]) -> None:
        """Replace the records of pages that :meth:`write` has copied to new places, durably. Each new record
        comes with the page's old place. The old places stay in use until ``space.vacate``, because reads of
        the old places may still be running.

        The caller must also change the page table. Raise :class:`OSError` if the disk fails; then all pages
        are still at their old places.
        """
        with self._commit_lock:
            self._presence.require()
            self._sync()
            self._unsynced.require([record for record, _ in moved])
            with self.in_flight.call():
                self._index_db.relocate(moved)
            self.space.settle_moved(moved, index=self._index_db.usage)
            self._unsynced.forget([record.place for record, _ in moved])
            with self._lock:
                self._counts["commits"] += 1

    def _sync(self) -> None:
        try:
            self._extents.sync()
        except OSError:
            self._unsynced.sync_failed()
            raise

    def departures(self) -> bytes:
        """Return the value stored by :meth:`keep_departures`; empty if there is none, or it cannot be
        read."""
        try:
            return self._index_db.get_extra(_DEPARTURES)
        except OSError as error:
            _log.warning("disk tier: the memory of evicted pages cannot be read: %s", error)
            return b""

    def keep_departures(self, dump: bytes) -> None:
        """Store the list of evicted pages, for the next opening. An encrypted directory does not store it,
        because it would reveal whether a guessed prompt was saved. Raise :class:`OSError` if there is no room
        for the list, or the disk fails."""
        if self._sealing is not None:
            return
        with self._commit_lock:
            self._presence.require()
            self._index_db.put_extra(_DEPARTURES, dump)

    def probe(self, tick: int) -> None:
        """Write, commit and read a test page that leaves no trace. Raise :class:`OSError` if one of these
        steps fails."""
        self._presence.require()
        try_out(self.space, self._payloads, lambda: self.commit([], [], {}, tick))

    # -- statistics and checks -----------------------------------------------------------------------

    def stats(self) -> DiskStats:
        """Return a snapshot. Does no I/O."""
        mode = self._payloads.read_mode
        index_used = self.space.index_used_bytes
        extent_used = self.space.slots_used_bytes
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
            pages=self.pages,
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
        """Assert that the index, the page table, the free space and the files agree. No other call may be
        running. Reads every record. Ignores damaged records, because they are the disk's fault."""
        if not self.wait_scanned():
            return
        page_table = self.page_table
        assert page_table is not None
        with self._commit_lock:
            page_table.check()
            places = page_table.places()
            held: list[tuple[int, int]] = []  # (place, bytes) of all pages, also of those being removed
            serials = {*self._index_db.roots(), *self.serials.roots()}
            for serial, record in self._index_db.scan():
                serials.add(serial)
                if record is None:
                    held += [places[serial]] if serial in places else []
                    continue
                place = (record.place, record.room)
                lead = self.child_filter.may_lead(record.parent, record.key, ())
                assert lead, f"page {serial} is missing in the filter"
                # A parent that was removed as damaged has no record, but has a row while it has children.
                rooted = record.parent in serials or page_table.children(record.parent)
                assert rooted, f"page {serial} has lost its parent {record.parent}"
                assert places.get(serial, place) == place, f"page {serial} is misplaced"
                held.append(place)
            assert places.keys() <= serials, f"{len(places.keys() - serials)} pages are in no index"
            assert len(held) == self.pages, f"{len(held)} records, {self.pages} counted"
            self.space.check(held)
            taken = self._directory.allocated_bytes()
            assert taken <= self._layout.capacity_bytes, f"{taken} bytes on disk, over {self._layout}"

    def close(self) -> None:
        """Close and release everything, even if a step fails. Committed pages stay. Repeated calls do
        nothing. No other call may be running. Raise :class:`OSError` if the files cannot be closed
        cleanly."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:  # runs the callbacks in reverse order
            closing.callback(self._directory.release)
            if self.keyring is not None:
                closing.callback(self.keyring.close)
            closing.callback(self._index_db.close)
            closing.callback(self._extents.close)
            closing.callback(self._payloads.close)
            closing.callback(self._lookers.close)
            if self.encoder is not None:
                closing.callback(self.encoder.close)
            self._scan.wait()
            self.child_filter.close()
