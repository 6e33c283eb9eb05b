"""A smaller index: for a life whose share for the index is below the size the file has grown to.

LMDB's file never shrinks, so the records that are worth keeping are copied to a new file, which then takes
the old one's name. While both exist they count against the larger of the new capacity and what the directory
took before. A crash leaves the old index or the new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.catalog import Catalog, Change
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.records import INLINE, PageRecord

_BATCH = 64
_LEAST_MAP = 128 * 1024
_FULL = 3 / 4  # of the new map: leave the rest for working in it


def rebuild(
    directory: StoreDirectory,
    old: Catalog,
    records: Sequence[PageRecord],
    *,
    map_bytes: int,
    meta: dict[bytes, bytes],
    io: FileIO,
) -> None:
    """Replace the index by one of at most ``map_bytes`` that holds as many of ``records`` as fit, the most
    recently used first, and their ancestors. ``old`` is closed. Raises :class:`OSError`."""
    remove_leftovers(directory, io)
    map_bytes = max(map_bytes // ALIGNMENT * ALIGNMENT, _LEAST_MAP)
    with old, Catalog(directory.new_index, map_bytes=map_bytes) as new:
        new.put_meta(meta)
        batch: list[PageRecord] = []
        for record in _latest_first(records):
            batch.append(record)
            if len(batch) == _BATCH or record.place == INLINE:
                if not _fits(new, batch):
                    batch = []
                    break
                _copy(old, new, batch)
                batch = []
        if batch and _fits(new, batch):
            _copy(old, new, batch)
        new.apply(Change(next_serial=old.next_serial))
    directory.new_index.replace(directory.index)
    io.sync_directory(directory.path)
    remove_leftovers(directory, io)


def remove_leftovers(directory: StoreDirectory, io: FileIO) -> None:
    """Delete what a rebuild left behind, finished or not."""
    for path in (directory.new_index, directory.path / f"{directory.new_index.name}-lock"):
        if path.exists():
            io.unlink(path)


def _fits(new: Catalog, batch: Sequence[PageRecord]) -> bool:
    wanted = sum(2048 + len(r.tokens) + (2 * r.nbytes if r.place == INLINE else 0) for r in batch)
    return new.used_bytes + wanted <= new.map_bytes * _FULL


def _copy(old: Catalog, new: Catalog, batch: Sequence[PageRecord]) -> None:
    added: list[tuple[PageRecord, memoryview | None]] = []
    for record in batch:
        payload = memoryview(bytearray(record.nbytes)) if record.place == INLINE else None
        if payload is None or old.read_payload(record, payload):
            added.append((record, payload))
    new.apply(Change(added=added, next_serial=old.next_serial))


def _latest_first(records: Sequence[PageRecord]) -> Iterable[PageRecord]:
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
