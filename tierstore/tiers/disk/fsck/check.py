"""The steps of a check: lock the directory, examine the index, read every payload, repair, report."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.codec import REMOVED
from tierstore.errors import StoreUnavailableError
from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.directory import INDEX, StoreDirectory
from tierstore.tiers.disk.fsck.examination import (
    Examination,
    impossible,
    misplaced,
    read_records,
    refile,
    take_inventory,
)
from tierstore.tiers.disk.fsck.files import (
    ExtentFileSet,
    check_capacity,
    check_extent_files,
    check_files,
    mend_files,
)
from tierstore.tiers.disk.fsck.findings import Category, Finding, Findings, FsckReport
from tierstore.tiers.disk.fsck.scrub import WHY, ExtentReader, ExtentScrub, PageVerdict, scrub_inline
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.index_file import DamagedIndexError, check_index, stored_format
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.opening import (
    STORE,
    StoreMeta,
    decode_meta,
    make_index,
    refuse_other_formats,
    require_codecs,
)
from tierstore.tiers.disk.payloads import ReadMode

DEFAULT_LIMIT = 1000  # most findings that are kept with their text
_READERS = 8


@dataclass(frozen=True, slots=True)
class CheckWatcher:
    """Functions that a check calls to report its progress, on several threads, possibly at the same time."""

    phase: Callable[[str], None] = lambda text: None
    expect: Callable[[int, int], None] = lambda pages, nbytes: None
    progress: Callable[[int, int], None] = lambda pages, nbytes: None


def fsck(
    path: Path,
    *,
    repair: bool = False,
    watcher: CheckWatcher | None = None,
    limit: int = DEFAULT_LIMIT,
    io: FileIO | None = None,
) -> FsckReport:
    """Check the store in ``path``, which no process may have open. With ``repair``, repair it.

    Without ``repair``, nothing in the directory changes. A repair removes damaged and unreachable pages and
    keeps all other pages. A second check then finds only defects that a person must repair. The first
    ``limit`` findings are kept with their text.

    An index that LMDB cannot open safely is one finding. ``repair`` then renames it to
    ``index.lmdb.damaged``, which the next opening deletes, and creates an empty index. All pages are lost,
    because pages cannot be found without the index.

    Raise :class:`~tierstore.errors.UsageError` if there is no store in ``path``, and
    :class:`~tierstore.errors.StoreUnavailableError` if it is in use, has another format, or cannot be read.
    """
    started = time.perf_counter()
    watcher = watcher or CheckWatcher()
    directory = StoreDirectory.visit(path, make_lock=repair)
    try:
        index_bytes = directory.index.stat().st_size
        check = _Check(directory, repair, watcher, Findings(limit), io or FileIO(), index_bytes)
        try:
            refuse_other_formats(directory)
            if stored_format(directory.index) is None:
                check.unfinished()
            else:
                watcher.phase("reading the index")
                check_index(directory.index).check_payloads()
                check.run()
        except DamagedIndexError as damage:
            if not directory.extents.is_dir():  # otherwise the file may belong to another program
                raise
            check.damaged_index(damage)
        return check.report(started)
    except OSError as error:
        doing = "repair" if repair else "check"
        raise StoreUnavailableError(
            f"cannot {doing} the store in {path}: {error.strerror or error}"
        ) from error
    finally:
        directory.release()


@dataclass(slots=True)
class _Check:
    """One run of the check."""

    _directory: StoreDirectory
    _repair: bool
    _watcher: CheckWatcher
    _findings: Findings
    _io: FileIO
    _index_bytes: int
    _meta: StoreMeta | None = None
    _found: Examination | None = None
    _payload_seconds: float = 0.0
    _verified: tuple[int, int] = (0, 0)  # pages, bytes

    def unfinished(self) -> None:
        """Check a directory whose index has no metadata, because the first opening was interrupted."""
        check_files(self._directory, self._findings)
        if self._repair:
            self._directory.sign()
            self._directory.remove_leftovers(self._io)

    def damaged_index(self, damage: DamagedIndexError) -> None:
        """Report a damaged index. A repair renames it, and removes all pages."""
        self._findings.clear()
        self._found = None
        self._findings.add(Finding(Category.DAMAGED, "index", damage.why, name=INDEX))
        self.unfinished()
        if self._repair:
            self._io.rename(self._directory.index, self._directory.damaged_index)
            self._io.sync_directory(self._directory.path)
            for path in ExtentFileSet.of(self._directory, 0).found.values():
                self._io.unlink(path)
            make_index(self._directory, self._io)

    def run(self) -> None:
        if self._repair:
            self._directory.sign()
            with self._mending(map_bytes=0) as index_db:
                refile(index_db, self._findings)
        with IndexDB(self._directory.index, map_bytes=0, read_only=True) as index_db:
            map_bytes = index_db.map_bytes
            stored = index_db.get_meta(STORE)
            if stored is None and not len(index_db):
                self.unfinished()
                return
            if stored is None:
                raise DamagedIndexError(self._directory.index, "it does not name its store")
            self._meta = decode_meta(stored, self._directory.path)
            require_codecs(self._meta, self._directory.path)
            records = read_records(index_db, sealed=bool(self._meta.keyring))
            files = ExtentFileSet.of(self._directory, self._meta.file_bytes)
            removed = np.isin(records.rows["codec"], list(REMOVED.values()))
            possible = np.flatnonzero(~impossible(records.rows) & ~removed)
            with self._scrub(records.rows[possible], files) as scrub:
                self._found = found = Examination(take_inventory(index_db, records), self._findings)
                found.compare()
                check_files(self._directory, self._findings)
                check_extent_files(files, records.rows[possible], self._findings)
                found.condemn(
                    np.flatnonzero(impossible(records.rows)),
                    Category.MISPLACED,
                    "place",
                    "its record names a place that is not aligned to a block",
                )
                found.condemn(
                    np.flatnonzero(removed),
                    Category.ORPHANED,
                    "codec",
                    "it was encoded by a disk codec that tierstore no longer has",
                )
                self._take_verdicts(found, possible, scrub, index_db)
            rows = records.rows
        found.drop_unreachable()
        reachable = np.flatnonzero(found.good)
        found.condemn(
            reachable[misplaced(rows[reachable], ALIGNMENT if self._meta.moving else self._meta.unit_bytes)],
            Category.MISPLACED,
            "place",
            "its place is not a slot for a page of its size, or belongs to another page",
        )
        found.drop_unreachable()
        if self._repair:
            self._watcher.phase("repairing")
            if self._findings.total():
                with self._mending(map_bytes=map_bytes) as index_db:
                    found.mend(index_db)
            mend_files(self._directory, files, rows[found.good], self._io)
        if self._meta.capacity_bytes is not None:
            check_capacity(self._directory.allocated_bytes(), self._meta.capacity_bytes, self._findings)

    @contextmanager
    def _mending(self, *, map_bytes: int) -> Iterator[IndexDB]:
        try:
            with IndexDB(self._directory.index, map_bytes=map_bytes) as index_db:
                yield index_db
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DamagedIndexError(self._directory.index, "it is too full to be repaired") from error

    @contextmanager
    def _scrub(self, rows: npt.NDArray[np.void], files: ExtentFileSet) -> Iterator[ExtentScrub]:
        assert self._meta is not None
        self._watcher.expect(len(rows), int(rows["nbytes"].sum()))
        self._watcher.phase("verifying")
        calibration = self._meta.calibration
        mode = calibration.mode if calibration is not None else ReadMode(direct=True, streams=_READERS)
        with (
            ExtentReader(files.found, file_bytes=files.file_bytes, io=self._io) as reader,
            ExtentScrub(rows, reader, mode, self._watcher.progress) as scrub,
        ):
            yield scrub

    def _take_verdicts(
        self, found: Examination, chosen: npt.NDArray[np.intp], scrub: ExtentScrub, index_db: IndexDB
    ) -> None:
        rows = found.inventory.rows[chosen]
        started = time.perf_counter()
        inline = scrub_inline(rows, index_db, self._watcher.progress)
        inline_seconds = time.perf_counter() - started
        verdicts = scrub.verdicts() | inline
        self._payload_seconds = max(scrub.seconds, inline_seconds)
        for verdict, why in WHY.items():
            found.condemn(chosen[verdicts == verdict], Category.DAMAGED, "payload", why)
        good = rows[verdicts == PageVerdict.GOOD]
        self._verified = len(good), int(good["nbytes"].sum())

    def report(self, started: float) -> FsckReport:
        findings, found = self._findings, self._found
        counts: dict[Category, dict[str, int]] = {category: {} for category in Category}
        for (category, what), count in sorted(findings.counts.items()):
            counts[category][what] = count
        return FsckReport(
            directory=str(self._directory.path),
            store=self._meta.identity if self._meta is not None else "",
            pages=found.inventory.pages if found is not None else 0,
            good_pages=int(found.good.sum()) if found is not None else 0,
            findings=findings.kept,
            pages_named=found.names() if found is not None else {},
            counts=counts,
            repaired=self._repair,
            unmended=findings.unmendable if self._repair else findings.total(),
            verified_pages=self._verified[0],
            verified_bytes=self._verified[1],
            index_bytes=self._index_bytes,
            allocated_bytes=self._directory.allocated_bytes(),
            capacity_bytes=self._meta.capacity_bytes if self._meta is not None else None,
            seconds=time.perf_counter() - started,
            payload_seconds=self._payload_seconds,
        )
