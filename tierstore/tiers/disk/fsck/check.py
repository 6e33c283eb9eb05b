"""The check itself: lock, look at the index, read every payload, say what is wrong, mend it if asked to."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk.catalog import Catalog, unreadable
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.fsck.examination import Examination
from tierstore.tiers.disk.fsck.files import ExtentFileSet, check_extent_files, check_files, mend_files
from tierstore.tiers.disk.fsck.findings import Category, Findings, FsckReport
from tierstore.tiers.disk.fsck.inventory import take_inventory
from tierstore.tiers.disk.fsck.places import impossible, misplaced
from tierstore.tiers.disk.fsck.repair import mend_index
from tierstore.tiers.disk.fsck.scrub import WHY, ExtentReader, Verdict, scrub_extents, scrub_inline
from tierstore.tiers.disk.inspection import stored_format, survives_reading
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.opening import STORE, StoreMeta, decode_meta, refuse_other_formats
from tierstore.tiers.disk.payloads import ReadMode
from tierstore.tiers.disk.rebuild import remove_leftovers

DEFAULT_LIMIT = 1000  # findings that are kept in words
_READERS = 8


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who is told how far a check is. Called from several threads, one at a time is not promised."""

    phase: Callable[[str], None] = lambda text: None
    expect: Callable[[int, int], None] = lambda pages, nbytes: None
    progress: Callable[[int, int], None] = lambda pages, nbytes: None


def fsck(
    path: Path,
    *,
    repair: bool = False,
    watcher: Watcher | None = None,
    limit: int = DEFAULT_LIMIT,
    io: FileIO | None = None,
) -> FsckReport:
    """Check the store in ``path``, which no process may own, and with ``repair`` mend it.

    Without ``repair`` not a byte of the directory changes. With it everything that is good stays, what is
    damaged or cannot be reached leaves, and a second check finds only what a person must see to. The first
    ``limit`` findings are kept in words.

    Raises :class:`~tierstore.errors.UsageError` when there is no store in ``path``, and
    :class:`~tierstore.errors.StoreUnavailableError` when it is in use, of another format, or its index is
    damaged so that it cannot be read at all.
    """
    started = time.perf_counter()
    watcher = watcher or Watcher()
    directory = StoreDirectory.visit(path, make_lock=repair)
    try:
        refuse_other_formats(directory)
        if repair:
            directory.sign()
        check = _Check(directory, repair, watcher, Findings(limit), io or FileIO())
        if stored_format(directory.index) is None:
            check.unfinished()
        else:
            watcher.phase("reading the index")
            if not survives_reading(directory.index):
                raise unreadable(directory.index, "its trees are broken")
            check.run()
        return check.report(started)
    except OSError as error:
        doing = "repair" if repair else "check"
        raise StoreUnavailableError(
            f"cannot {doing} the store in {path}: {error.strerror or error}"
        ) from error
    finally:
        directory.release()


class _Check:
    """One run."""

    def __init__(
        self, directory: StoreDirectory, repair: bool, watcher: Watcher, findings: Findings, io: FileIO
    ) -> None:
        self._directory = directory
        self._repair = repair
        self._watcher = watcher
        self._findings = findings
        self._io = io
        self._meta: StoreMeta | None = None
        self._found: Examination | None = None
        self._index_bytes = directory.index.stat().st_size
        self._payload_seconds = 0.0
        self._verified = (0, 0)

    def unfinished(self) -> None:
        """A directory whose first opening did not get as far as an index."""
        check_files(self._directory, self._findings)
        if self._repair:
            remove_leftovers(self._directory, self._io)

    def run(self) -> None:
        with Catalog(self._directory.index, map_bytes=0, read_only=True) as catalog:
            map_bytes = catalog.map_bytes
            stored = catalog.get_meta(STORE)
            if stored is None:
                raise unreadable(self._directory.index, "it does not say which store it is of")
            self._meta = decode_meta(stored, self._directory.path)
            inventory = take_inventory(catalog)
            self._found = found = Examination(inventory, self._findings)
            found.compare()
            check_files(self._directory, self._findings)
            files = ExtentFileSet.of(self._directory, self._meta.file_bytes)
            rows = inventory.rows
            check_extent_files(files, rows[~impossible(rows)], self._findings)
            found.condemn(
                np.flatnonzero(impossible(rows)),
                Category.MISPLACED,
                "place",
                "its record names a place that is not on a block's border",
            )
            self._verify_payloads(found, files, catalog)
        found.drop_unreachable()
        reachable = np.flatnonzero(found.good)
        found.condemn(
            reachable[misplaced(rows[reachable], self._meta.unit_bytes)],
            Category.MISPLACED,
            "place",
            "its place is no slot for a page of its size, or is another page's",
        )
        found.drop_unreachable()
        if self._repair:
            self._watcher.phase("repairing")
            if self._findings.total():
                mend_index(self._directory, map_bytes, found, self._io)
            mend_files(self._directory, files, rows[found.good], self._io)

    def _verify_payloads(self, found: Examination, files: ExtentFileSet, catalog: Catalog) -> None:
        assert self._meta is not None
        rows = found.inventory.rows
        chosen = np.flatnonzero(found.good)
        self._watcher.expect(len(chosen), int(rows["nbytes"][chosen].sum()))
        self._watcher.phase("verifying")
        calibration = self._meta.calibration
        mode = calibration.mode if calibration is not None else ReadMode(direct=True, streams=_READERS)
        started = time.perf_counter()
        with ExitStack() as stack:
            reader = stack.enter_context(ExtentReader(files.found, file_bytes=files.file_bytes, io=self._io))
            verdicts = scrub_extents(rows[chosen], reader, mode, self._watcher.progress)
            inline = scrub_inline(rows[chosen], catalog, self._watcher.progress)
            found.index_damaged |= bool(inline.any())
            verdicts |= inline
        self._payload_seconds = time.perf_counter() - started
        for verdict, why in WHY.items():
            found.condemn(chosen[verdicts == verdict], Category.DAMAGED, "payload", why)
        self._verified = _sizes(rows[chosen[verdicts == Verdict.GOOD]])

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
            seconds=time.perf_counter() - started,
            payload_seconds=self._payload_seconds,
        )


def _sizes(rows: npt.NDArray[np.void]) -> tuple[int, int]:
    return len(rows), int(rows["nbytes"].sum())
