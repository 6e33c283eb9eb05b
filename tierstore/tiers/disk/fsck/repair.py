"""Making an index agree with itself: what is lost is removed, what is missing is made again from the records.

Where only payloads in extents were damaged, the pages are removed in small durable transactions, any of
which may be the last. An index with damage of its own is written anew from its good pages: LMDB's list of
free pages is as likely to be damaged as the rest, cannot be checked, and would have an edit overwrite what is
in use. The new file takes the old one's place in one step, and needs as much room until then (room.py); where
there is none, the old one is edited all the same if its trees are in order.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import asdict, replace

import msgspec

from tierstore.tiers.disk.catalog import Catalog
from tierstore.tiers.disk.change import Change
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.fsck.examination import Examination
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.opening import STORE
from tierstore.tiers.disk.rebuild import remove_leftovers
from tierstore.tiers.disk.records import INLINE, PageRecord, decode, encode_facts
from tierstore.tiers.disk.trees import NEXT_SERIAL, TICK, link_of
from tierstore.units import MIB

_BATCH_PAGES = 4096
_BATCH_BYTES = 32 * MIB

_Batch = list[tuple[PageRecord, memoryview | None]]


def mend_index(
    directory: StoreDirectory, map_bytes: int, found: Examination, io: FileIO, *, anew: bool
) -> None:
    """Do it; ``anew`` says whether the cap has room for a new index, if one is needed. Raises
    :class:`OSError`; the index is then as good as it was, or better."""
    if found.index_damaged and anew:
        try:
            _write_anew(directory, map_bytes, found, io)
            return
        except OSError as error:
            remove_leftovers(directory, io)
            if error.errno != errno.ENOSPC or found.inventory.misfiled:
                raise
    try:
        with Catalog(directory.index, map_bytes=map_bytes) as catalog:
            _edit(catalog, found)
    except OSError:  # so full that not even removals fit, or damaged where reading does not come by
        if found.index_damaged:
            raise
        _write_anew(directory, map_bytes, found, io)


def _edit(catalog: Catalog, found: Examination) -> None:
    inventory = found.inventory
    lost = found.lost()
    catalog.forget(lost)
    edits: list[tuple[bytes, bytes, bytes | None]] = [(tree, key, None) for tree, key in found.stray]
    for record in catalog.records(sorted((found.unlinked | found.unstated).difference(lost))):
        if record is None:
            continue
        if record.serial in found.unlinked:
            edits.append((b"children", link_of(record), b""))
        if record.serial in found.unstated:
            use = found.use(record.serial, record.created_s)
            edits.append((b"facts", record.serial.to_bytes(8, "big"), encode_facts(record, use)))
    if inventory.next_serial != catalog.next_serial:
        edits.append((b"meta", NEXT_SERIAL, inventory.next_serial.to_bytes(8, "big")))
    if inventory.tick != catalog.tick:
        edits.append((b"meta", TICK, inventory.tick.to_bytes(8, "big")))
    catalog.mend(edits)


def _write_anew(directory: StoreDirectory, map_bytes: int, found: Examination, io: FileIO) -> None:
    remove_leftovers(directory, io)
    inventory = found.inventory
    roots = {serial: msgspec.json.encode(asdict(identity)) for serial, identity in inventory.roots.items()}
    start = Change(roots=roots, next_serial=inventory.next_serial, tick=inventory.tick)
    with (
        Catalog(directory.index, map_bytes=0, read_only=True) as old,
        Catalog(directory.new_index, map_bytes=map_bytes) as new,
    ):
        store = old.get_meta(STORE)
        assert store is not None, "a store without an identity was examined"
        new.put_meta({STORE: store})
        new.apply(start)
        for batch in _batches(old, found):
            used = {record.serial: found.use(record.serial, record.created_s) for record, _ in batch}
            new.apply(replace(start, roots={}, added=batch, used=used))
    directory.new_index.replace(directory.index)
    io.sync_directory(directory.path)
    remove_leftovers(directory, io)


def _batches(old: Catalog, found: Examination) -> Iterator[_Batch]:
    """The good pages. They are read as they lie there: looking them up is what may not work."""
    wanted = set(found.inventory.rows["serial"][found.good].tolist())
    batch: _Batch = []
    room = _BATCH_BYTES
    for key, value in old.entries(b"pages"):
        serial = int.from_bytes(key, "big")
        if serial not in wanted:
            continue
        record = decode(serial, bytes(value))
        payload = None
        if record is not None and record.place == INLINE:
            payload = memoryview(bytearray(record.nbytes))
            room -= record.nbytes
            if not old.read_payload(record, payload):
                continue
        if record is not None:
            wanted.remove(serial)
            batch.append((record, payload))
        if len(batch) == _BATCH_PAGES or room < 0:
            yield batch
            batch, room = [], _BATCH_BYTES
    yield batch
