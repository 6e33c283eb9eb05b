"""Opening a directory: what was found is checked, what does not fit this life's capacity is let go."""

from __future__ import annotations

import logging
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk.calibration import Calibration, calibrate
from tierstore.tiers.disk.catalog import FORMAT, MOVING_FORMAT, Catalog, unreadable
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.inspection import stored_format
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.layout import Layout, file_bytes, unit_bytes
from tierstore.tiers.disk.ledger import Ledger
from tierstore.tiers.disk.payloads import Payloads
from tierstore.tiers.disk.rebuild import rebuild, remove_leftovers, resume
from tierstore.tiers.disk.space import Space
from tierstore.tiers.disk.survey import SurveyThread

_log = logging.getLogger(__name__)

STORE = b"store"
_QUICKLY_SURVEYED = 50_000  # pages: a tenth of a second, which opening may take


class StoreMeta(msgspec.Struct, kw_only=True):
    """What a directory knows of itself, besides its pages. Fields may be added within a format: who does not
    know one passes over it, and one that is missing is as it is here."""

    identity: str
    created_s: float
    unit_bytes: int
    file_bytes: int
    calibration: Calibration | None = None
    capacity_bytes: int | None = None  # the cap of the last life


@dataclass(slots=True)
class OpenedParts:
    """Everything a disk tier is made of."""

    directory: StoreDirectory
    meta: StoreMeta
    catalog: Catalog
    extents: ExtentFiles
    payloads: Payloads
    space: Space
    survey: SurveyThread


def open_parts(path: Path, layout: Layout, *, inline_bytes: int, io_threads: int, io: FileIO) -> OpenedParts:
    """Lock and open ``path``.

    Raises :class:`StoreUnavailableError` for a directory that cannot be used; one that is refused stays as
    it is.
    """
    directory = StoreDirectory.acquire(path)
    try:
        if stored_format(directory.index) != MOVING_FORMAT:
            refuse_other_formats(directory)
        directory.sign()
        return _Opening(directory, layout, inline_bytes, io_threads, io).parts()
    except OSError as error:
        directory.release()
        raise StoreUnavailableError(
            f"cannot open the store in {path}: {error.strerror or error}; make room or give another directory"
        ) from error
    except BaseException:
        directory.release()
        raise


def refuse_other_formats(directory: StoreDirectory) -> None:
    """Raises :class:`StoreUnavailableError` for an index that this version cannot read."""
    found = stored_format(directory.index)
    if found is None or found == FORMAT:
        return
    if found == MOVING_FORMAT:
        raise StoreUnavailableError(
            f"the index in {directory.path} was being made smaller when its process ended: open the store "
            "once, which completes that"
        )
    if found > FORMAT:
        raise StoreUnavailableError(
            f"{directory.path} was written by a newer tierstore (format {found}, this one knows {FORMAT}): "
            "upgrade tierstore, or give another directory"
        )
    raise StoreUnavailableError(
        f"{directory.path} was written by an older tierstore (format {found}, this one knows {FORMAT}): "
        "its pages cannot be taken over; remove the directory, or give another one"
    )


class _Opening:
    """The steps of opening a locked directory of a known format."""

    def __init__(
        self, directory: StoreDirectory, layout: Layout, inline_bytes: int, io_threads: int, io: FileIO
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._inline_bytes = inline_bytes
        self._io_threads = io_threads
        self._io = io
        # While things are put in order, what there was before may still be there.
        self._most_bytes = max(directory.allocated_bytes(), layout.capacity_bytes)

    def parts(self) -> OpenedParts:
        self._directory.extents.mkdir(exist_ok=True, mode=0o700)
        if stored_format(self._directory.index) == MOVING_FORMAT:
            resume(self._directory, most_bytes=self._most_bytes, io=self._io)
        remove_leftovers(self._directory, self._io)
        self._make_index()
        with ExitStack() as opened:
            catalog = self._open_catalog(opened)
            meta = self._meta(catalog)
            extents = ExtentFiles(
                self._directory.extents,
                capacity_bytes=self._layout.extent_bytes,
                file_bytes=meta.file_bytes,
                io=self._io,
            )
            opened.callback(extents.close)
            payloads = Payloads(extents, io_threads=self._io_threads)
            opened.callback(payloads.close)
            space, survey = self._survey(catalog, meta)
            if self._too_large():
                survey.wait()
                if survey.ledger is None:
                    raise unreadable(self._directory.index, str(survey.error))
                self._rebuild(catalog, meta, survey.ledger)
                catalog = self._open_catalog(opened)
                space, survey = self._survey(catalog, meta)
            opened.callback(survey.wait)
            if meta.calibration is None and not len(catalog):
                meta.calibration = self._calibrate(payloads, extents)
            if meta.calibration is not None:
                payloads.read_mode = meta.calibration.mode
            meta.capacity_bytes = self._layout.capacity_bytes
            catalog.put_meta(_encoded(meta))
            # The files' names, too, must outlive a power loss.
            self._io.sync_directory(self._directory.path)
            self._io.sync_directory(self._directory.path.parent)
            opened.pop_all()
        return OpenedParts(self._directory, meta, catalog, extents, payloads, space, survey)

    def _make_index(self) -> None:
        """Make an empty index where there is none: under another name, since LMDB does not sync the first
        pages it writes, and half of them are no index."""
        if self._directory.index.exists() and self._directory.index.stat().st_size:
            return
        with Catalog(self._directory.new_index, map_bytes=self._layout.index_bytes) as new:
            new.put_meta({})
        self._io.rename(self._directory.new_index, self._directory.index)
        self._io.sync_directory(self._directory.path)
        remove_leftovers(self._directory, self._io)

    def _open_catalog(self, opened: ExitStack) -> Catalog:
        catalog = Catalog(self._directory.index, map_bytes=self._layout.index_bytes)
        opened.callback(catalog.close)
        return catalog

    def _meta(self, catalog: Catalog) -> StoreMeta:
        stored = catalog.get_meta(STORE)
        meta = decode_meta(stored, self._directory.path) if stored else None
        unit = unit_bytes(self._layout.extent_bytes, meta.unit_bytes if meta else None)
        if meta is not None:
            meta.unit_bytes = unit
            return meta
        return StoreMeta(
            identity=uuid.uuid4().hex,
            created_s=time.time(),
            unit_bytes=unit,
            file_bytes=file_bytes(self._layout.extent_bytes),
        )

    def _survey(self, catalog: Catalog, meta: StoreMeta) -> tuple[Space, SurveyThread]:
        space = Space(
            self._layout,
            unit_bytes=meta.unit_bytes,
            inline_bytes=self._inline_bytes,
            index=catalog.usage,
        )
        survey = SurveyThread(catalog, space)
        if len(catalog) <= _QUICKLY_SURVEYED:
            survey.wait()
        return space, survey

    def _too_large(self) -> bool:
        return self._directory.index.stat().st_size > self._layout.index_bytes

    def _rebuild(self, catalog: Catalog, meta: StoreMeta, ledger: Ledger) -> None:
        rebuild(
            self._directory,
            catalog,
            ledger.places(),
            map_bytes=self._layout.index_bytes,
            capacity_bytes=self._layout.capacity_bytes,
            most_bytes=self._most_bytes,
            meta=_encoded(meta),
            io=self._io,
        )

    def _calibrate(self, payloads: Payloads, extents: ExtentFiles) -> Calibration | None:
        try:
            return calibrate(payloads, extents, io_threads=self._io_threads)
        except OSError as error:  # a full disk is no reason not to start
            _log.warning("disk tier: could not measure the disk in %s: %s", self._directory.path, error)
            return None


def decode_meta(stored: bytes, path: Path) -> StoreMeta:
    """What is stored under :data:`STORE`. Raises :class:`StoreUnavailableError` when it is damaged."""
    try:
        return msgspec.json.decode(stored, type=StoreMeta)
    except msgspec.MsgspecError as error:
        raise StoreUnavailableError(
            f"the index in {path} is damaged ({error}): remove the directory to start afresh"
        ) from error


def _encoded(meta: StoreMeta) -> dict[bytes, bytes]:
    return {STORE: msgspec.json.encode(meta)}
