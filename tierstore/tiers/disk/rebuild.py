"""A smaller index: for a life whose share for the index is below the size the file has grown to.

LMDB's file never shrinks, so the records that are worth keeping are copied to a new file, which then takes
the old one's name: a crash leaves the old index or the new one. While both exist they count against the
larger of the new capacity and what the directory took before, so the new one may have to start small. What
does not fit beside the old one waits in memory, within limits, and is added when the old one is gone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.catalog import Catalog, Change
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.ledger import Ledger
from tierstore.tiers.disk.records import INLINE, PageRecord, PageUse
from tierstore.tiers.disk.space import index_cost, index_room
from tierstore.units import KIB, MIB

_BATCH_PAGES = 64
_BATCH_FRACTION = 32  # of the new index
_STAGED_BYTES = 256 * MIB
_LEAST_MAP = 128 * KIB


class _Page(NamedTuple):
    record: PageRecord
    payload: memoryview | None  # if that is in the index
    use: PageUse


Batch = list[_Page]


def rebuild(
    directory: StoreDirectory,
    old: Catalog,
    ledger: Ledger,
    *,
    map_bytes: int,
    beside_bytes: int,
    meta: dict[bytes, bytes],
    io: FileIO,
) -> None:
    """Replace the index by one of at most ``map_bytes`` that holds as many of the pages in ``ledger`` as
    fit, the most recently used first. While the old one exists it takes up to ``beside_bytes``.

    Closes ``old``. Raises :class:`OSError`.
    """
    remove_leftovers(directory, io)
    beside_bytes = max(min(map_bytes, beside_bytes) // ALIGNMENT * ALIGNMENT, _LEAST_MAP)
    start = Change(roots=old.roots(), next_serial=old.next_serial, tick=old.tick)
    with old:
        batches = _batches(old, ledger, map_bytes // _BATCH_FRACTION)
        with Catalog(directory.new_index, map_bytes=beside_bytes) as new:
            new.put_meta(meta)
            new.apply(start)
            left = _fill(new, batches, start)
        staged = list(_stage(left, batches))
    io.rename(directory.new_index, directory.index)
    io.sync_directory(directory.path)
    remove_leftovers(directory, io)
    with Catalog(directory.index, map_bytes=map_bytes) as new:
        _fill(new, iter(staged), start)


def remove_leftovers(directory: StoreDirectory, io: FileIO) -> None:
    """Delete what a rebuild left behind, finished or not."""
    for path in (directory.new_index, directory.path / f"{directory.new_index.name}-lock"):
        if path.exists():
            io.unlink(path)


def _fill(new: Catalog, batches: Iterator[Batch], start: Change) -> Batch:
    """Add batches while they fit. Returns the first that did not."""
    for batch in batches:
        if _cost(batch) > index_room(new.map_bytes, new.usage):
            return batch
        added = [(page.record, page.payload) for page in batch]
        used = {page.record.serial: page.use for page in batch}
        try:
            new.apply(Change(added=added, used=used, next_serial=start.next_serial, tick=start.tick))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return batch
    return []


def _stage(first: Batch, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches from ``first`` on that may wait in memory."""
    yield first
    room = _STAGED_BYTES
    for batch in batches:
        room -= _cost(batch)
        if room < 0:
            return
        yield batch


def _batches(old: Catalog, ledger: Ledger, nbytes: int) -> Iterator[Batch]:
    batch: Batch = []
    for record in old.records(ledger.latest_first()):
        if record is None:
            continue
        payload = memoryview(bytearray(record.nbytes)) if record.place == INLINE else None
        if payload is None or old.read_payload(record, payload):
            batch.append(_Page(record, payload, ledger.use(record.serial)))
        if len(batch) == _BATCH_PAGES or _cost(batch) >= nbytes:
            yield batch
            batch = []
    yield batch


def _cost(batch: Iterable[_Page]) -> int:
    return sum(index_cost(page.record.nbytes, page.record.place) for page in batch)
