"""Open a directory: check its contents, and evict pages that do not fit the configured capacity.

Then a background thread scans the index once, for the order of eviction and the free space. Writes and
evictions wait for the scan. Lookups do not, because they search the index itself.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace as replace_struct

from tierstore import codec as codecs
from tierstore.codec import Codec
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.memory import ALIGNMENT
from tierstore.policy import Policy
from tierstore.tiers.disk.calibration import DiskCalibration, calibrate
from tierstore.tiers.disk.directory import INDEX, StoreDirectory
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.fitting import Fitted, evict_down_to, fit
from tierstore.tiers.disk.forgets import discard_freed, forgotten_in, note_forgotten
from tierstore.tiers.disk.index_db import (
    ENCODED_FORMAT,
    FORMAT,
    MOST_COUNT,
    SEALED_FORMAT,
    Change,
    IndexDB,
)
from tierstore.tiers.disk.index_file import DamagedIndexError, IndexFile, check_index, stored_format
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.keyring import Keyring
from tierstore.tiers.disk.page_table import PageTable, parent_rows, reachable
from tierstore.tiers.disk.payloads import Payloads
from tierstore.tiers.disk.records import INLINE, Removal
from tierstore.tiers.disk.roots import Serials
from tierstore.tiers.disk.space import (
    Space,
    SpaceLayout,
    file_bytes,
    index_cost,
    index_room,
    needed_index_bytes,
    tree_headroom,
    unit_bytes,
)
from tierstore.tiers.slabs import SlabAllocator, slot_bytes
from tierstore.units import KIB, format_size

_log = logging.getLogger(__name__)

_SERIALS = 1 << 63


class _Facts(NamedTuple):
    """The facts of every page in the index, in order of serials."""

    facts: npt.NDArray[np.void]
    parents: npt.NDArray[np.int64]  # the row of each page's parent; -1 if the parent is a root
    good: npt.NDArray[np.bool_]  # whether a lookup can reach the page


def _read_facts(index_db: IndexDB) -> _Facts:
    """Read the facts. Raise :class:`OSError` if the disk fails."""
    facts = index_db.facts()
    facts = facts[facts["serial"] < _SERIALS]  # a greater serial is damage
    parents = parent_rows(facts)
    roots = np.fromiter(index_db.roots(), np.uint64)
    rooted = (parents >= 0) | np.isin(facts["parent"], roots)
    return _Facts(facts, parents, reachable(parents, rooted & (facts["parent"] < facts["serial"])))


class IndexScan:
    """A scan of the index on a thread of its own. ``page_table`` is None until the scan has succeeded."""

    def __init__(
        self,
        index_db: IndexDB,
        space: Space,
        worths: Mapping[int, int],
        *,
        keyed: bool,
        check: IndexFile | None,
        waited_for: bool,
    ) -> None:
        """Start the scan. The scan claims the places of all pages in ``space``. ``worths`` are those of the
        roots. With ``keyed`` (sessions may have keys), the scan also reads the number of each page's
        encryption key. ``check`` is the index's file if its payloads have not been checked yet; the scan
        checks them first, because no page may be removed before that. Damage is logged, unless the scan is
        ``waited_for``: then the caller reports :attr:`error`."""
        self.page_table: PageTable | None = None
        self.error: Exception | None = None
        self.lost_pages = 0
        self._index_db = index_db
        self._space = space
        self._worths = worths
        self._keyed = keyed
        self._check = check
        self._waited_for = waited_for
        self._thread = threading.Thread(target=self._run, name="tierstore-scan", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether the scan has ended within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self._check is not None:
                self._check.check_payloads()
            self.page_table = self._scan()
        except DamagedIndexError as error:
            self.error = error
            if not self._waited_for:
                _log.error("disk tier: nothing will be written: %s", error)
        except Exception as error:  # noqa: BLE001  # after any error, the store writes nothing to the index
            self.error = error
            _log.error("disk tier: the index could not be read, nothing will be written", exc_info=error)

    def _scan(self) -> PageTable:
        """Return the table of all pages, and delete lost pages from the index. A page is lost if one of its
        ancestors is missing, or if its place is outside of the extent space or belongs to another page. Raise
        :class:`OSError` if the disk fails."""
        facts, parents, good = _read_facts(self._index_db)
        rows = np.flatnonzero(good)
        good[rows] = self._space.claim(facts["place"][rows].tolist(), facts["nbytes"][rows].tolist())
        kept = reachable(parents, good)
        unclaimed = np.flatnonzero(good & ~kept)
        self._space.unclaim(facts["place"][unclaimed].tolist(), facts["nbytes"][unclaimed].tolist())
        page_table = PageTable(facts[kept], self._worths, keyed=self._keyed)
        if self._keyed:
            page_table.set_keys(*self._index_db.key_numbers())
        lost: list[int] = facts["serial"][~kept].tolist()
        self.lost_pages = len(lost)
        try:
            self._index_db.forget(lost)
        except OSError as error:  # the index is too full even to delete pages: the next opening tries again
            _log.warning("disk tier: %d lost pages remain in the index: %s", len(lost), error)
        return page_table


STORE = b"store"
_MOVING_FORMAT = 1000 + FORMAT  # of earlier versions: a part of the index was in another file
_EMPTY_MAP_BYTES = 1 << 20
_EMPTY_INDEX = 96 * KIB  # size of an index without pages, with its lock file
_BATCH_PAGES = 1024  # pages per transaction when the index is copied to a smaller file
_NEXT_TRY = 63 / 64  # if not all pages fitted into the smaller file, the next try has 1/64 less than fitted
_SPARE = 32 * KIB  # for LMDB's lists of free pages
_QUICKLY_SCANNED = 50_000  # up to this many pages, opening waits for the scan: it takes 0.1 s


class StoreMeta(msgspec.Struct, kw_only=True):
    """The metadata of a directory. New fields need no new format: older versions ignore them, and a missing
    field has the default value."""

    identity: str
    created_s: float
    unit_bytes: int
    file_bytes: int
    calibration: DiskCalibration | None = None
    capacity_bytes: int | None = None  # the capacity at the last opening
    extent_bytes: int | None = None  # size of the extent space: all pages are in its slots, unless ``moving``
    moving: bool = False  # True while an opening moves pages to the slots of an extent space of another size
    codecs: list[str] = []  # codecs that may have encoded pages: each must be available
    keyring: str = ""  # id of the keyring with the keys of the pages; empty: pages are not encrypted


@dataclass(slots=True)
class OpenedParts:
    """The components of an open disk tier."""

    directory: StoreDirectory
    layout: SpaceLayout
    index_db: IndexDB
    extents: ExtentFiles
    payloads: Payloads
    space: Space
    scan: IndexScan
    serials: Serials
    fitted: Fitted


def open_parts(
    path: Path,
    layout: SpaceLayout,
    *,
    inline_bytes: int,
    io_threads: int,
    io: FileIO,
    policy: Policy,
    codec: Codec | None = None,
    keyring: Keyring | None = None,
) -> OpenedParts:
    """Lock and open ``path``. The index is checked before LMDB opens it. ``policy`` decides which pages are
    evicted if there are too many for ``layout``. New pages will be encoded by ``codec``, and encrypted with
    the keys of the ``keyring`` (None: not encrypted).

    Raise :class:`StoreUnavailableError` for a directory that cannot be used; such a directory is not changed.
    """
    directory = StoreDirectory.acquire(path)
    try:
        refuse_other_formats(directory)
        index = check_index(directory.index) if stored_format(directory.index) is not None else None
        directory.sign()
        return _Opening(
            directory, layout, inline_bytes, io_threads, io, index, policy, codec, keyring
        ).parts()
    except OSError as error:
        directory.release()
        raise StoreUnavailableError(
            f"cannot open the store in {path}: {error.strerror or error}; make room or give another directory"
        ) from error
    except BaseException:
        directory.release()
        raise


def refuse_other_formats(directory: StoreDirectory) -> None:
    """Raise :class:`StoreUnavailableError` for an index that this version cannot read."""
    found = stored_format(directory.index)
    if found in (None, FORMAT, ENCODED_FORMAT, SEALED_FORMAT):
        return
    if found == _MOVING_FORMAT:
        raise StoreUnavailableError(
            f"the index in {directory.path} was being made smaller by an earlier tierstore when its process "
            "ended: open the store once with that version, or remove the directory"
        )
    assert found is not None
    if found > SEALED_FORMAT:
        raise StoreUnavailableError(
            f"{directory.path} was written by a newer tierstore (format {found}, this one knows "
            f"{SEALED_FORMAT}): upgrade tierstore, or give another directory"
        )
    raise StoreUnavailableError(
        f"{directory.path} was written by an older tierstore (format {found}, this one knows {FORMAT}): "
        "its pages cannot be used; remove the directory, or give another one"
    )


def make_index(directory: StoreDirectory, io: FileIO) -> None:
    """Create an empty index if the directory has none. Raise :class:`OSError` if the index cannot be written.

    The file is written under another name first, because LMDB does not sync its first pages, and a crash
    could leave an incomplete index."""
    if directory.index.exists() and directory.index.stat().st_size:
        return
    with IndexDB(directory.new_index, map_bytes=_EMPTY_MAP_BYTES) as new:
        new.put_meta({})
    io.rename(directory.new_index, directory.index)
    io.sync_directory(directory.path)
    directory.remove_leftovers(io)


@dataclass(slots=True)
class _Opening:
    """The opening of a locked directory whose format is known."""

    _directory: StoreDirectory
    _layout: SpaceLayout
    _inline_bytes: int
    _io_threads: int
    _io: FileIO
    _index: IndexFile | None  # None if its payloads have been checked already
    _policy: Policy
    _codec: Codec | None
    _keyring: Keyring | None
    _taken_before: int = 0
    _unit_before: int | None = None
    _fitted: Fitted | None = None  # None: nothing had to be evicted or moved

    def parts(self) -> OpenedParts:
        """Open the directory, as :func:`open_parts` does."""
        self._taken_before = self._directory.allocated_bytes()
        self._make_files()
        with ExitStack() as opened:
            index_db = self._open_index(opened)
            stored = index_db.get_meta(STORE)
            before = decode_meta(stored, self._directory.path) if stored else None
            if before is not None:
                require_keyring(before, self._keyring_id(), self._directory.path)
                if self._share_out(index_db, before):
                    index_db.close()
                    index_db = self._open_index(opened)
            meta = self._meta(before)
            serials = self._serials(index_db)
            extents, payloads = self._open_extents(opened, meta)
            self._drop_removed_codecs(index_db, meta)
            self._finish_forgets(index_db, payloads)
            if len(index_db) and self._is_resized(meta):
                index_db.close()
                self._fit(meta, extents, payloads, serials.worths)
                index_db = self._open_index(opened)
            extents.cut()
            space, scan = self._scan(index_db, meta, serials)
            if self._fitted is not None:
                scan.wait()
                self._fitted = replace(self._fitted, lost_pages=scan.lost_pages)
            if self._directory.index.stat().st_size > self._layout.index_bytes:
                scan.wait()
                if scan.page_table is None:
                    raise scan.error or OSError("the index could not be read")
                index_db.close()
                self._shrink_index(meta, scan.page_table)
                self._index = None
                index_db = self._open_index(opened)
                space, scan = self._scan(index_db, meta, serials)
            opened.callback(scan.wait)
            if meta.calibration is None and not len(index_db):
                meta.calibration = self._calibrate(payloads, extents)
            if meta.calibration is not None:
                payloads.read_mode = meta.calibration.mode
            self._store_meta(index_db, meta)
            opened.pop_all()
        fitted = self._fitted or Fitted()
        self._log_fitted(fitted)
        return OpenedParts(
            self._directory, self._layout, index_db, extents, payloads, space, scan, serials, fitted
        )

    def _keyring_id(self) -> str:
        return self._keyring.id if self._keyring is not None else ""

    def _make_files(self) -> None:
        """Create missing files, and remove files that are not needed any more."""
        self._directory.extents.mkdir(exist_ok=True, mode=0o700)
        self._directory.remove_leftovers(self._io)
        if self._directory.damaged_index.exists():  # fsck keeps a damaged index until the next opening
            self._io.unlink(self._directory.damaged_index)
        make_index(self._directory, self._io)

    def _check_payloads(self) -> None:
        """Finish the check of the index, which must be complete before any page is removed."""
        if self._index is not None:
            self._index.check_payloads()
            self._index = None

    def _open_index(self, opened: ExitStack) -> IndexDB:
        index_db = IndexDB(self._directory.index, map_bytes=self._layout.index_bytes)
        opened.callback(index_db.close)
        return index_db

    def _open_extents(self, opened: ExitStack, meta: StoreMeta) -> tuple[ExtentFiles, Payloads]:
        extents = ExtentFiles(
            self._directory.extents,
            capacity_bytes=self._layout.extent_bytes,
            file_bytes=meta.file_bytes,
            io=self._io,
            spare_bytes=self._layout.index_bytes,
        )
        opened.callback(extents.close)
        payloads = Payloads(extents, io_threads=self._io_threads)
        opened.callback(payloads.close)
        return extents, payloads

    def _store_meta(self, index_db: IndexDB, meta: StoreMeta) -> None:
        """Write the metadata of the opened store. All pages are in slots of its extent space now."""
        meta.capacity_bytes = self._layout.capacity_bytes
        meta.extent_bytes = self._layout.extent_bytes
        meta.moving = False
        if self._codec is not None and self._codec.name not in meta.codecs:
            meta.codecs.append(self._codec.name)
        _put_meta(index_db, meta)
        # The names of the files must also survive a power loss.
        self._io.sync_directory(self._directory.path)
        self._io.sync_directory(self._directory.path.parent)

    def _share_out(self, index_db: IndexDB, before: StoreMeta) -> bool:
        """Change the shares of the index and the extents in the capacity, if pages that were saved with other
        shares need it. Return whether the shares have changed. Raise :class:`OSError` if the index cannot be
        read."""
        layout = self._layout
        if before.extent_bytes == layout.extent_bytes:
            return False
        # Stored pages can claim up to half of the capacity for the extents, so a larger share needs no check.
        reads = layout.extent_bytes < layout.capacity_bytes // 2
        needed = needed_index_bytes(index_db.usage), _extents_end(index_db) if reads else 0
        share = min(layout.capacity_bytes / (before.capacity_bytes or layout.capacity_bytes), 1)
        index_bytes, extent_bytes = (int(nbytes * share) for nbytes in needed)
        self._layout = layout.keeping(index_bytes=index_bytes, extent_bytes=extent_bytes)
        return self._layout != layout

    def _meta(self, meta: StoreMeta | None) -> StoreMeta:
        """Return the metadata for this opening; ``meta`` is the stored metadata, if there is any."""
        unit = unit_bytes(self._layout.extent_bytes, meta.unit_bytes if meta else None)
        if meta is not None:
            require_codecs(meta, self._directory.path)
            self._unit_before = meta.unit_bytes
            meta.unit_bytes = unit
            meta.keyring = self._keyring_id()
            return meta
        return StoreMeta(
            identity=uuid.uuid4().hex,
            created_s=time.time(),
            unit_bytes=unit,
            file_bytes=file_bytes(self._layout.extent_bytes),
            keyring=self._keyring_id(),
        )

    def _serials(self, index_db: IndexDB) -> Serials:
        # The stored counter has no checksum. A serial must never be used twice.
        next_serial = max(index_db.next_serial, index_db.last_serial + 1)
        if max(next_serial, index_db.tick) >= MOST_COUNT:
            raise DamagedIndexError(self._directory.index, "its counters are impossible")
        return Serials(next_serial, index_db.roots())

    def _scan(self, index_db: IndexDB, meta: StoreMeta, serials: Serials) -> tuple[Space, IndexScan]:
        space = Space(
            self._layout,
            unit_bytes=meta.unit_bytes,
            inline_bytes=self._inline_bytes,
            index=index_db.usage,
        )
        quick = len(index_db) <= _QUICKLY_SCANNED
        scan = IndexScan(
            index_db,
            space,
            serials.worths,
            keyed=self._keyring is not None and self._keyring.keeps_sessions,
            check=self._index,
            waited_for=quick,
        )
        if quick:
            scan.wait()
            if isinstance(scan.error, DamagedIndexError):
                raise scan.error
        return space, scan

    def _drop_removed_codecs(self, index_db: IndexDB, meta: StoreMeta) -> None:
        """Delete pages that were encoded by codecs which tierstore no longer has. The scan later deletes the
        pages below them."""
        removed = [name for name in meta.codecs if name in codecs.REMOVED]
        if not removed:
            return
        self._check_payloads()
        numbers = set(codecs.REMOVED.values())
        serials = [serial for serial, record in index_db.scan() if record and record.codec in numbers]
        index_db.forget(serials)
        meta.codecs = [name for name in meta.codecs if name not in removed]
        _log.warning(
            "disk tier: removed %d pages from %s: earlier versions encoded them with a lossy disk codec (%s)",
            len(serials),
            self._directory.path,
            ", ".join(removed),
        )

    def _finish_forgets(self, index_db: IndexDB, payloads: Payloads) -> None:
        """Overwrite and delete pages that were forgotten, but are still in the index after a crash. The scan
        later deletes the pages below them."""
        noted = forgotten_in(index_db)
        if not noted:
            return
        self._check_payloads()
        found = index_db.records(sorted(noted))
        records = [
            record for record in found if record is not None and noted[record.serial] == record.created_s
        ]
        end = self._layout.extent_bytes  # everything behind this byte will be cut off
        payloads.erase(
            [
                Removal(record.serial, record.parent, record.place, record.room)
                for record in records
                if record.place != INLINE and record.place + record.room <= end
            ]
        )
        index_db.forget([record.serial for record in records])
        try:
            discard_freed(index_db, self._io)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            _log.warning("disk tier: removed records stay in free parts of the index: %s", error)
        note_forgotten(index_db, {})
        if records:
            _log.info("disk tier: removed %d forgotten pages from %s", len(records), self._directory.path)

    def _is_resized(self, meta: StoreMeta) -> bool:
        """Return whether the disk may still have pages that were written when the extent space had another
        size or unit."""
        slots = (meta.extent_bytes, self._unit_before)
        return meta.moving or slots != (self._layout.extent_bytes, meta.unit_bytes)

    def _fit(
        self, meta: StoreMeta, extents: ExtentFiles, payloads: Payloads, worths: Mapping[int, int]
    ) -> None:
        """Fit the pages into the extent space of this opening; see fitting.py. Raise :class:`OSError` and
        :class:`DamagedIndexError`."""
        self._check_payloads()
        # Open with the old map size: deletions need free pages, and a smaller map could be full.
        with IndexDB(self._directory.index, map_bytes=0) as index_db:
            found = _read_facts(index_db)
            # After a crash, ``moving`` makes the next opening check all places, also with equal capacity.
            _put_meta(index_db, replace_struct(meta, moving=True))
            room = self._layout.extent_bytes
            space = SlabAllocator(room, unit_bytes=meta.unit_bytes) if room >= slot_bytes(1) else None
            good = found.facts[found.good]
            self._fitted = fit(index_db, good, worths, extents, payloads, space, self._policy)

    def _log_fitted(self, fitted: Fitted) -> None:
        if fitted == Fitted():
            return
        _log.log(
            logging.WARNING if fitted.evicted_pages or fitted.lost_pages else logging.INFO,
            "disk tier: %s now has a capacity of %s: %d pages without room were evicted (policy %s), "
            "%d could not be read or moved, %d were moved",
            self._directory.path,
            format_size(self._layout.capacity_bytes),
            fitted.evicted_pages,
            self._policy.name,
            fitted.lost_pages,
            fitted.moved_pages,
        )

    def _shrink_index(self, meta: StoreMeta, page_table: PageTable) -> None:
        """Replace an index whose file is larger than its share of the capacity by a smaller file, because an
        LMDB file never shrinks.

        The new file gets the pages that the policy would evict last, as many as fit beside the old file. Both
        files together may take the capacity of the last or of this opening, whichever is larger. The old file
        remains the index until the new file is renamed to it, and loses only pages that must be evicted. The
        evicted pages are removed from ``page_table``. Raise :class:`OSError` if the disk fails.
        """
        most_bytes = max(meta.capacity_bytes or self._taken_before, self._layout.capacity_bytes)
        before = len(page_table)
        # Open with the old map size: deletions need free pages, and a smaller map could be full.
        with IndexDB(self._directory.index, map_bytes=0) as old:
            self._make_room_beside(old, meta, page_table, most_bytes)
            room = most_bytes - self._directory.allocated_bytes() >= _EMPTY_INDEX
            total = _index_cost(page_table)
            while room and (copied := self._write_index(old, meta, page_table, most_bytes)) < total:
                self._directory.remove_leftovers(self._io)
                total = evict_down_to(int(copied * _NEXT_TRY), total, page_table, self._policy)
        if room:
            self._io.rename(self._directory.new_index, self._directory.index)
            self._io.sync_directory(self._directory.path)
            self._directory.remove_leftovers(self._io)
            kept = len(page_table)
        else:
            self._io.unlink(self._directory.index)
            make_index(self._directory, self._io)
            kept = 0
        if kept < before:
            fitted = self._fitted or Fitted()
            self._fitted = replace(fitted, evicted_pages=fitted.evicted_pages + before - kept)

    def _make_room_beside(
        self, old: IndexDB, meta: StoreMeta, page_table: PageTable, most_bytes: int
    ) -> None:
        """If the old index file leaves too little room for the new file, delete the pages that the new file
        cannot hold, and return the old file's free pages to the file system. Raise :class:`OSError` if the
        disk fails."""
        taken, used = self._directory.index.stat().st_blocks * 512, old.usage.used_bytes
        room = most_bytes - (self._directory.allocated_bytes() - taken) - 2 * _SPARE
        if taken + min(used, self._layout.index_bytes) <= room:
            return
        total = _index_cost(page_table)
        # the share of the contents that can stay: at the end of the copy, both files hold all of it
        share = min(self._layout.index_bytes, room // 2) / used
        if share < 1:
            serials = set(page_table.places())
            evict_down_to(int(total * share), total, page_table, self._policy)
            old.forget(sorted(serials.difference(page_table.places())))
        # After a crash, LMDB may return to the state before the last commit. So commit once more, which makes
        # that state one without the deleted pages.
        _put_meta(old, meta)
        try:
            IndexFile(self._directory.index).give_back_free_pages(self._io)
        except OSError as error:  # some file systems cannot free parts of a file; then fewer pages fit
            _log.warning("disk tier: %s keeps its blocks for now: %s", self._directory.index, error)

    def _write_index(self, old: IndexDB, meta: StoreMeta, page_table: PageTable, most_bytes: int) -> int:
        """Write a new index with as many pages of ``page_table`` as there is room for. Return the sum of
        :func:`index_cost` of the written pages."""
        places = page_table.places()
        serials = sorted(
            places
        )  # ascending serials fill LMDB's leaves; in another order, leaves are half full
        ends = np.cumsum([index_cost(nbytes, place) for place, nbytes in map(places.__getitem__, serials)])
        done = copied = 0
        with IndexDB(self._directory.new_index, map_bytes=self._layout.index_bytes) as new:
            _put_meta(new, meta)
            new.apply(Change(roots=old.roots(), next_serial=old.next_serial, tick=old.tick))
            while copied < len(serials):
                free = most_bytes - self._directory.allocated_bytes() - _SPARE
                room = min(
                    free - tree_headroom(new.usage.tree_bytes + free // 4),
                    index_room(new.map_bytes, new.usage),
                )
                # Fill a quarter of the room at a time, because the real size of a page in the index is known
                # only after it was written.
                end = max(int(np.searchsorted(ends, done + room // 4, side="right")), copied + 1)
                batch = serials[copied : min(end, copied + _BATCH_PAGES)]
                cost = int(ends[copied + len(batch) - 1]) - done
                if cost > room:
                    break
                used = {serial: page_table.use(serial) for serial in batch}
                change = Change(added=old.pages(batch), used=used, next_serial=old.next_serial, tick=old.tick)
                new.apply(change)
                copied += len(batch)
                done += cost
        return done

    def _calibrate(self, payloads: Payloads, extents: ExtentFiles) -> DiskCalibration | None:
        try:
            return calibrate(payloads, extents, io_threads=self._io_threads)
        except OSError as error:  # the store opens even if the disk is full
            _log.warning("disk tier: could not measure the disk in %s: %s", self._directory.path, error)
            return None


def _extents_end(index_db: IndexDB) -> int:
    """Return the offset at which the last page in the extents ends. Raise :class:`OSError` if the index
    cannot be read."""
    facts = _read_facts(index_db).facts
    facts = facts[facts["place"] != INLINE]
    ends = facts["place"].astype(np.int64) + facts["nbytes"]
    return slot_bytes(int(ends.max(initial=0)))


def _index_cost(page_table: PageTable) -> int:
    return sum(index_cost(nbytes, place) for place, nbytes in page_table.places().values())


def decode_meta(stored: bytes, path: Path) -> StoreMeta:
    """Decode the metadata of the directory ``path``. Raise :class:`StoreUnavailableError` if it is
    damaged."""
    try:
        meta = msgspec.json.decode(stored, type=StoreMeta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedIndexError(path / INDEX, f"it does not name its store: {error}") from error
    if meta.file_bytes < ALIGNMENT or meta.unit_bytes < ALIGNMENT:
        raise DamagedIndexError(path / INDEX, "its geometry is impossible")
    return meta


def require_codecs(meta: StoreMeta, path: Path) -> None:
    """Raise :class:`StoreUnavailableError` if pages may be encoded by a codec that is not available here."""
    for name in meta.codecs:
        if name not in (*codecs.NAMES, *codecs.REMOVED):
            raise StoreUnavailableError(
                f"{path} has pages encoded by the codec {name!r}, which this tierstore does not know: "
                "upgrade it, or give another directory"
            )
        if name == "lossless" or name in codecs.REMOVED:
            continue  # "lossless" is always available, and pages of removed codecs are deleted
        try:
            codecs.by_name(name)
        except UsageError as error:
            raise StoreUnavailableError(f"{path} has pages encoded by a codec: {error}") from error


def require_keyring(meta: StoreMeta, keyring: str, path: Path) -> None:
    """Raise :class:`StoreUnavailableError` if the directory's pages are encrypted and ``keyring`` (an id) is
    empty, or the other way round. Log a warning if the pages were encrypted with another keyring."""
    if meta.keyring and not keyring:
        raise StoreUnavailableError(
            f"the pages in {path} are encrypted: give --disk-key (disk_key), or another directory"
        )
    if keyring and not meta.keyring:
        raise StoreUnavailableError(
            f"the pages in {path} are not encrypted, and would stay readable: remove the directory, give "
            "another one, or leave --disk-key out"
        )
    if keyring != meta.keyring:
        _log.warning(
            "disk tier: the pages in %s were encrypted with another keyring (%s, not %s): they are misses",
            path,
            meta.keyring,
            keyring,
        )


def _put_meta(index_db: IndexDB, meta: StoreMeta) -> None:
    plain = ENCODED_FORMAT if meta.codecs else FORMAT
    values = {STORE: msgspec.json.encode(meta)}
    index_db.put_meta(values, format=SEALED_FORMAT if meta.keyring else plain)
