"""A smaller index: for a life whose share for the index is below the size the file has grown to.

LMDB's file never shrinks, so the records that are worth keeping are copied to a new file, which then takes
the old one's name: a crash leaves the old index or the new one. While both exist they count against the
larger of the new capacity and what the directory took before, so the new one may have to start small. What
does not fit beside the old one waits in memory, within limits, and is added when the old one is gone.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.catalog import Catalog, Change
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.records import INLINE, PageRecord
from tierstore.tiers.disk.space import index_cost, index_room
from tierstore.units import KIB, MIB

_BATCH_PAGES = 64
_BATCH_FRACTION = 32  # of the new index
_STAGED_BYTES = 256 * MIB
_LEAST_MAP = 128 * KIB

Loaded = tuple[PageRecord, "memoryview | None"]  # with its payload, if that is in the index


def rebuild(
    directory: StoreDirectory,
    old: Catalog,
    records: Sequence[PageRecord],
    *,
    map_bytes: int,
    beside_bytes: int,
    meta: dict[bytes, bytes],
    io: FileIO,
) -> None:
    """Replace the index by one of at most ``map_bytes`` that holds as many of ``records`` as fit, the most
    recently used first, and their ancestors. While the old one exists it takes up to ``beside_bytes``.

    Closes ``old``. Raises :class:`OSError`.
    """
    remove_leftovers(directory, io)
    beside_bytes = max(min(map_bytes, beside_bytes) // ALIGNMENT * ALIGNMENT, _LEAST_MAP)
    next_serial = old.next_serial
    with old:
        batches = _batches(old, _latest_first(records), map_bytes // _BATCH_FRACTION)
        with Catalog(directory.new_index, map_bytes=beside_bytes) as new:
            new.put_meta(meta)
            left = _fill(new, batches, next_serial)
        staged = list(_stage(left, batches))
    directory.new_index.replace(directory.index)
    io.sync_directory(directory.path)
    remove_leftovers(directory, io)
    with Catalog(directory.index, map_bytes=map_bytes) as new:
        _fill(new, iter(staged), next_serial)


def remove_leftovers(directory: StoreDirectory, io: FileIO) -> None:
    """Delete what a rebuild left behind, finished or not."""
    for path in (directory.new_index, directory.path / f"{directory.new_index.name}-lock"):
        if path.exists():
            io.unlink(path)


def _fill(new: Catalog, batches: Iterator[list[Loaded]], next_serial: int) -> list[Loaded]:
    """Add batches while they fit. Returns the first that did not."""
    new.apply(Change(next_serial=next_serial))
    for batch in batches:
        if _cost(batch) > index_room(new.map_bytes, new.usage):
            return batch
        try:
            new.apply(Change(added=batch, next_serial=next_serial))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return batch
    return []


def _stage(first: list[Loaded], batches: Iterable[list[Loaded]]) -> Iterator[list[Loaded]]:
    """The batches from ``first`` on that may wait in memory."""
    yield first
    room = _STAGED_BYTES
    for batch in batches:
        room -= _cost(batch)
        if room < 0:
            return
        yield batch


def _batches(old: Catalog, records: Iterable[PageRecord], nbytes: int) -> Iterator[list[Loaded]]:
    batch: list[Loaded] = []
    for record in records:
        payload = memoryview(bytearray(record.nbytes)) if record.place == INLINE else None
        if payload is None or old.read_payload(record, payload):
            batch.append((record, payload))
        if len(batch) == _BATCH_PAGES or _cost(batch) >= nbytes:
            yield batch
            batch = []
    yield batch


def _cost(batch: Iterable[Loaded]) -> int:
    return sum(index_cost(record.nbytes, record.place) for record, _ in batch)


def _latest_first(records: Sequence[PageRecord]) -> Iterator[PageRecord]:
    """Newest use first, each record preceded by the ancestors that have not been yielded yet."""
    by_serial = {record.serial: record for record in records}
    yielded: set[int] = set()
    for record in sorted(records, key=lambda record: -record.used_s):
        line = []
        node: PageRecord | None = record
        while node is not None and node.serial not in yielded:
            line.append(node)
            yielded.add(node.serial)
            node = by_serial.get(node.parent)
        yield from reversed(line)
