"""Everything an index holds, as arrays: one pass over each tree, believing nothing.

A page takes about 250 bytes here: its record's numbers, its facts and its link. What does not even have the
right size is *odd*, and kept by name.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.keys import TOKEN_BYTES, Identity
from tierstore.tiers.disk.catalog import Catalog
from tierstore.tiers.disk.records import (
    FACTS_BYTES,
    INLINE,
    PageRecord,
    decode,
    decode_facts,
    stored_tokens,
)
from tierstore.tiers.disk.trees import TREES, link_of

_ROW = struct.Struct("<qqqqQiId48s")
ROW_DTYPE = np.dtype(
    [
        ("serial", "<i8"),
        ("parent", "<i8"),
        ("place", "<i8"),
        ("nbytes", "<i8"),
        ("checksum", "<u8"),
        ("identity", "<i4"),  # a number in Inventory.digests
        ("tokens", "<u4"),  # how many
        ("created_s", "<f8"),
        ("link", "V48"),
    ]
)
LINK_DTYPE = np.dtype([("parent", ">u8"), ("names", "V32"), ("serial", ">u8")])
PIECE_DTYPE = np.dtype([("serial", ">u8"), ("piece", ">u4")])
_SERIAL_BYTES = 8
_LARGEST = 1 << 62  # no serial, size or place of a real page is beyond


@dataclass(frozen=True, slots=True)
class Records:
    """What lies in the tree of records; see :class:`Inventory`."""

    rows: npt.NDArray[np.void]
    digests: list[bytes]
    damaged: dict[int, int]
    odd: list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Inventory:
    """What lies in each tree. ``rows`` and ``facts`` are in order of serials, each serial once."""

    rows: npt.NDArray[np.void]  # of every record that decodes (ROW_DTYPE)
    digests: list[bytes]  # of the identities that records name
    damaged: dict[int, int]  # serial → tokens, by its length, of every record that does not decode
    facts: npt.NDArray[np.void]  # FACTS_DTYPE
    links: npt.NDArray[np.void]  # LINK_DTYPE
    pieces: npt.NDArray[np.void]  # PIECE_DTYPE
    roots: dict[int, Identity]  # those that decode
    bad_roots: list[int]
    next_serial: int
    tick: int
    odd: list[tuple[bytes, bytes]] = field(default_factory=list)  # (tree, key)
    misfiled: dict[bytes, int] = field(default_factory=dict)  # tree → entries that lookups miss

    @property
    def pages(self) -> int:
        return len(self.rows) + len(self.damaged)


def take_inventory(catalog: Catalog, records: Records) -> Inventory:
    """Read all of the index but the payloads in it, and the records, which have been read. Raises
    :class:`OSError`."""
    odd = list(records.odd)
    roots, bad_roots = _roots(catalog, odd)
    return Inventory(
        rows=records.rows,
        digests=records.digests,
        damaged=records.damaged,
        facts=_facts(catalog, odd),
        links=_links(catalog, odd),
        pieces=_pieces(catalog, odd),
        roots=roots,
        bad_roots=bad_roots,
        next_serial=catalog.next_serial,
        tick=catalog.tick,
        odd=odd,
        misfiled={tree: count for tree in TREES if (count := catalog.misfiled(tree))},
    )


def read_records(catalog: Catalog) -> Records:
    """Read what lies in the tree of records. Raises :class:`OSError`."""
    odd: list[tuple[bytes, bytes]] = []
    packed = bytearray()
    numbers: dict[bytes, int] = {}
    damaged: dict[int, int] = {}
    for key, value in catalog.entries(b"pages"):
        if len(key) != _SERIAL_BYTES:
            odd.append((b"pages", key))
            continue
        serial = int.from_bytes(key, "big")
        data = bytes(value)
        record = decode(serial, data)
        if record is None or not _is_possible(record):
            damaged[serial] = stored_tokens(data) // TOKEN_BYTES
            continue
        packed += _ROW.pack(
            serial,
            record.parent,
            record.place,
            record.nbytes,
            record.checksum,
            numbers.setdefault(record.identity, len(numbers)),
            len(record.tokens) // TOKEN_BYTES,
            record.created_s,
            link_of(record),
        )
    return Records(_by_serial(np.frombuffer(packed, ROW_DTYPE)), list(numbers), damaged, odd)


def _is_possible(record: PageRecord) -> bool:
    return (
        record.serial < _LARGEST
        and record.parent < _LARGEST
        and 0 < record.nbytes < _LARGEST
        and INLINE <= record.place < _LARGEST
    )


def _facts(catalog: Catalog, odd: list[tuple[bytes, bytes]]) -> npt.NDArray[np.void]:
    packed = bytearray()
    for key, value in catalog.entries(b"facts"):
        if len(key) == _SERIAL_BYTES and len(value) == FACTS_BYTES:
            packed += key
            packed += value
        else:
            odd.append((b"facts", key))
    return _by_serial(decode_facts(packed))


def _links(catalog: Catalog, odd: list[tuple[bytes, bytes]]) -> npt.NDArray[np.void]:
    packed = bytearray()
    for key, value in catalog.entries(b"children"):
        if len(key) == LINK_DTYPE.itemsize and not len(value):
            packed += key
        else:
            odd.append((b"children", key))
    return np.frombuffer(packed, LINK_DTYPE)


def _pieces(catalog: Catalog, odd: list[tuple[bytes, bytes]]) -> npt.NDArray[np.void]:
    packed = bytearray()
    for key, _ in catalog.entries(b"payload"):
        if len(key) == PIECE_DTYPE.itemsize:
            packed += key
        else:
            odd.append((b"payload", key))
    return np.frombuffer(packed, PIECE_DTYPE)


def _roots(catalog: Catalog, odd: list[tuple[bytes, bytes]]) -> tuple[dict[int, Identity], list[int]]:
    """The identities, and the serials of those that cannot be one or are there twice."""
    roots: dict[int, Identity] = {}
    bad: list[int] = []
    last: dict[bytes, int] = {}
    for key, value in catalog.entries(b"roots"):
        serial = int.from_bytes(key, "big")
        if len(key) != _SERIAL_BYTES:
            odd.append((b"roots", key))
            continue
        try:
            roots[serial] = msgspec.json.decode(bytes(value), type=Identity)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            bad.append(serial)
            continue
        before = last.get(roots[serial].digest)
        if before is not None:  # lookups begin at the last one
            del roots[before]
            bad.append(before)
        last[roots[serial].digest] = serial
    return roots, bad


def _by_serial(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    if len(rows) < 2 or bool((rows["serial"][1:] > rows["serial"][:-1]).all()):
        return rows
    return rows[np.unique(rows["serial"], return_index=True)[1]]
