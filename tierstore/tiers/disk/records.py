"""What the disk tier knows of a page, and how that is written down.

A record carries its own checksum, seeded with its serial: a damaged or misplaced one is found out when it is
read, before its tokens are believed or its place is looked at.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

INLINE = -1  # as a place: the payload is in the index itself

_HEAD = struct.Struct(
    "<Qq16s32sQQBdI"
)  # parent, place, key, identity, nbytes, checksum, codec, created_s, len(tokens)
_PLACE = struct.Struct("<8xq")
_CHECKSUM = struct.Struct("<Q")
_USE = struct.Struct("<dQ")


@dataclass(slots=True)
class PageRecord:
    """One page on disk.

    ``serial`` is unique within the directory and greater than ``parent``, the serial of the page before it in
    the prompt (0 for a first chunk). A page is valid only as long as its parent's record is.
    """

    serial: int
    parent: int
    key: bytes  # 16 bytes
    identity: bytes  # the 32-byte digest of the page's identity
    tokens: bytes  # the chunk's token ids, little-endian uint32: the proof that this is the page
    nbytes: int  # of the payload
    place: int  # byte offset in the extent space, or INLINE
    checksum: int = 0  # XXH3-64 of the payload; filled in by DiskTier.write
    codec: int = 0  # 0: raw
    created_s: float = 0.0  # wall clock, like used_s
    used_s: float = 0.0
    hits: int = 0


def encode(record: PageRecord) -> bytes:
    """The record as it is stored under its serial. Use times and hits are stored apart: they change often."""
    head = _HEAD.pack(
        record.parent,
        record.place,
        record.key,
        record.identity,
        record.nbytes,
        record.checksum,
        record.codec,
        record.created_s,
        len(record.tokens),
    )
    body = head + record.tokens
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, record.serial))


def decode(serial: int, data: bytes) -> PageRecord | None:
    """The record stored under ``serial``, or None when it is damaged."""
    body = data[: -_CHECKSUM.size]
    if len(body) < _HEAD.size:
        return None
    if _CHECKSUM.unpack_from(data, len(body))[0] != xxhash.xxh3_64_intdigest(body, serial):
        return None
    parent, place, key, identity, nbytes, checksum, codec, created_s, length = _HEAD.unpack_from(body)
    tokens = body[_HEAD.size :]
    if len(tokens) != length:
        return None
    return PageRecord(
        serial, parent, key, identity, tokens, nbytes, place, checksum, codec, created_s, created_s
    )


def stored_place(data: bytes) -> int | None:
    """The place named by a stored record, without checking the rest of it."""
    return int(_PLACE.unpack_from(data)[0]) if len(data) >= _PLACE.size else None


def encode_use(used_s: float, hits: int) -> bytes:
    return _USE.pack(used_s, hits)


def decode_use(data: bytes) -> tuple[float, int]:
    """(wall-clock time of the last use, hits)."""
    used_s, hits = _USE.unpack(data)
    return used_s, hits
