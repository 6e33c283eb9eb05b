"""The formats of the index: a page's record, its facts, and the keys of the index's trees.

The *record* describes a page, and changes only if the page moves. A record has a checksum of its own, seeded
with the page's serial. So a damaged record, or one stored under a wrong serial, is detected before its tokens
or its place are used. The *facts* are the few numbers that decide the order of eviction and the free space.
Facts are stored apart from records, because every opening reads the facts of all pages.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from tierstore.keys import TOKEN_BYTES
from tierstore.memory import ALIGNMENT
from tierstore.units import round_up

INLINE = -1  # the place of a payload in the index itself

# parent, place, key, identity, nbytes, checksum, codec, created_s, len(tokens)
_HEAD = struct.Struct("<Qq16s32sQQBdI")
_CODEC_AT = 80
_KEPT = struct.Struct("<Q")  # encoded_bytes, after the tokens of an encoded page
_PLACE = struct.Struct("<8xq")
_CREATED = struct.Struct("<81xd")
_CHECKSUM = struct.Struct("<Q")
SERIAL_BYTES = 8
_FACTS = struct.Struct("<QqQQdQ")  # parent, place, room, tick, used_s, hits
FACTS_BYTES = _FACTS.size
FACTS_DTYPE = np.dtype(
    [
        ("serial", ">u8"),
        ("parent", "<u8"),
        ("place", "<i8"),
        ("nbytes", "<u8"),
        ("tick", "<u8"),
        ("used_s", "<f8"),
        ("hits", "<u8"),
    ]
)


class PageRecord(Struct, gc=False):
    """The description of one page on disk. (``gc=False``: it refers to no objects that could form a cycle.)

    ``serial`` is unique within the directory and greater than ``parent``, which is the serial of the page
    before this page in the prompt, or of the root for a first chunk. A page is valid only while its parent's
    record is valid.
    """

    serial: int
    parent: int
    key: bytes  # 16 bytes
    identity: bytes  # the 32-byte digest of the page's identity
    tokens: bytes  # the chunk's token ids, little-endian uint32; lookups compare them
    nbytes: int  # bytes of the page
    place: int  # byte offset in the extent space, or INLINE
    checksum: int = 0  # XXH3-64 of the page; DiskTier.write sets it if the page is not encoded
    codec: int = 0  # number of the codec (tierstore/codec.py); 0: not encoded
    created_s: float = 0.0  # wall clock
    encoded_bytes: int = 0  # payload bytes of an encoded page
    seal: bytes = b""  # needed to decrypt an encrypted page (sealing.py); empty in the stored form

    @property
    def payload_bytes(self) -> int:
        """Size of the payload on disk."""
        return self.encoded_bytes if self.codec else self.nbytes

    @property
    def room(self) -> int:
        """The bytes reserved for the payload: the size of a page, or the rounded size of an encoded page
        (:func:`room_for`)."""
        return room_for(self.encoded_bytes, self.nbytes) if self.codec else self.nbytes


def room_for(encoded_bytes: int, nbytes: int) -> int:
    """Return the bytes to reserve for an encoded page: a multiple of 1/64 of the page's size, and at least
    4/64. So encoded pages of one original size have at most sixty size classes (in practice two). Rounding
    costs 1 % of the space."""
    step = max(nbytes // _STEPS // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    return max(round_up(encoded_bytes, step), _LEAST_STEPS * step)


SEALED_BYTES = 129  # additional bytes of a sealed record, in its field for the tokens (sealing.py)


def token_count(nbytes: int, *, sealed: bool) -> int:
    """Return the number of tokens of a stored record whose field for the tokens has ``nbytes`` bytes.
    ``sealed`` says whether the directory is encrypted."""
    return max(nbytes - SEALED_BYTES * sealed, 0) // TOKEN_BYTES


KEY_NUMBER_BYTES = 8


def key_number(tokens: bytes) -> int:
    """Return the id of the encryption key of a stored record, as a signed number. ``tokens`` is the record's
    field for the tokens."""
    return int.from_bytes(tokens[BEGINNING : BEGINNING + KEY_NUMBER_BYTES], "little", signed=True)


def stored_key_number(data: bytes) -> bytes:
    """Return the id of the encryption key of a stored record, without checking the record. A record that is
    too short gives fewer bytes."""
    start = _HEAD.size + BEGINNING
    return data[start : start + KEY_NUMBER_BYTES]


_STEPS = 64
_LEAST_STEPS = 4


class PageUse(Struct, frozen=True, gc=False):
    """When a page was last used, and how often it was found. The class is a struct because an object is
    created for every written page, and creating a named tuple takes three times as long."""

    tick: int  # the store's logical clock, which continues after a restart
    used_s: float  # wall clock
    hits: int


def first_use(record: PageRecord, used: Mapping[int, PageUse]) -> PageUse:
    """Return the use of a page that is being added: the one in ``used``, or its creation."""
    return used.get(record.serial) or PageUse(0, record.created_s, 0)


class Removal(NamedTuple):
    """A page to be removed, with the facts for finding its record and freeing its place."""

    serial: int
    parent: int
    place: int
    nbytes: int
    done: bool = False
    """Whether the page is finished: its session has ended, or its time to live is over."""
    expired: bool = False
    """Whether its time to live is over."""
    cause: int = 0
    """Why the page is removed, for the list of evicted pages; 0 if it is in the list already."""
    erased: bool = False
    """Whether the payload must be overwritten: the page was forgotten, but its key was not dropped."""


def encode(record: PageRecord) -> bytes:
    """Return the record in its stored form."""
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
    body = head + record.tokens + (_KEPT.pack(record.encoded_bytes) if record.codec else b"")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body, record.serial))


def decode(serial: int, data: bytes) -> PageRecord | None:
    """Decode the record stored under ``serial``. Return None if it is damaged."""
    body = data[: -_CHECKSUM.size]
    if len(body) < _HEAD.size:
        return None
    if _CHECKSUM.unpack_from(data, len(body))[0] != xxhash.xxh3_64_intdigest(body, serial):
        return None
    parent, place, key, identity, nbytes, checksum, codec, created_s, length = _HEAD.unpack_from(body)
    end = _HEAD.size + length
    if len(body) != end + (_KEPT.size if codec else 0):
        return None
    tokens = body[_HEAD.size : end]
    kept = _KEPT.unpack_from(body, end)[0] if codec else 0
    if codec and not 0 < kept <= nbytes:
        return None
    return PageRecord(serial, parent, key, identity, tokens, nbytes, place, checksum, codec, created_s, kept)


def stored_place(data: bytes) -> int | None:
    """Return the place in a stored record, without checking the record; None if it is too short."""
    return int(_PLACE.unpack_from(data)[0]) if len(data) >= _PLACE.size else None


def stored_names(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Return (parent, key, tokens) of a stored record, without checking the record; None if it is too
    short."""
    if len(data) < _HEAD.size:
        return None
    head = _HEAD.unpack_from(data)
    return head[0], head[2], data[_HEAD.size : _HEAD.size + stored_tokens(data)]


def stored_tokens(data: bytes | memoryview) -> int:
    """Return the size in bytes of a stored record's field for the tokens, from the record's length."""
    kept = _KEPT.size if len(data) > _CODEC_AT and data[_CODEC_AT] else 0
    return max(len(data) - _HEAD.size - kept - _CHECKSUM.size, 0)


def stored_created_s(data: bytes | memoryview) -> float:
    """Return when a page was created (wall clock), without checking its stored record; 0 if the record is too
    short."""
    return float(_CREATED.unpack_from(data)[0]) if len(data) >= _HEAD.size else 0.0


def encode_facts(record: PageRecord, use: PageUse) -> bytes:
    return _FACTS.pack(record.parent, record.place, record.room, use.tick, use.used_s, use.hits)


def with_use(facts: bytes, use: PageUse) -> bytes:
    """Return stored facts with another use."""
    return facts[: _FACTS.size - 24] + _FACTS.pack(0, 0, 0, use.tick, use.used_s, use.hits)[-24:]


def with_place(facts: bytes, place: int) -> bytes:
    """Return stored facts with another place."""
    return facts[:8] + struct.pack("<q", place) + facts[16:]


def described(key: bytes, data: bytes) -> bytes | None:
    """Return a stored record as a row of ``FACTS_DTYPE`` with the creation as its only use; None if the
    record is damaged. Faster than :func:`decode`, because an opening calls it for every page."""
    end = len(data) - _CHECKSUM.size
    if len(key) != SERIAL_BYTES or end < _HEAD.size:
        return None
    serial = int.from_bytes(key, "big")
    if _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:end], serial):
        return None
    parent, place, _, _, nbytes, _, codec, created_s, _ = _HEAD.unpack_from(data)
    room = room_for(_KEPT.unpack_from(data, end - _KEPT.size)[0], nbytes) if codec else nbytes
    return key + _FACTS.pack(parent, place, room, 0, created_s, 0)


def decode_facts(keys_and_values: bytearray) -> npt.NDArray[np.void]:
    """Return a sequence of (serial, facts) in stored form as an array of ``FACTS_DTYPE``."""
    return np.frombuffer(keys_and_values, FACTS_DTYPE)


# -- the index's trees, and the keys in them -----------------------------------------------------------


META = b"meta"
TREES = (META, b"roots", b"pages", b"facts", b"children", b"payload")
FORMAT_KEY = b"format"
NEXT_SERIAL = b"next_serial"
TICK = b"tick"
PIECE_BYTES = 4096 - 16  # bytes in one LMDB overflow page
BEGINNING = 16  # bytes of a chunk's first four tokens, by which the links of a parent are sorted


def page_key(serial: int) -> bytes:
    """Return the key under which the index has a page's record and facts, or a root."""
    return serial.to_bytes(8, "big")


def payload_key(serial: int, piece: int) -> bytes:
    """Return the key under which the index has one piece of an inline payload."""
    return serial.to_bytes(8, "big") + piece.to_bytes(4, "big")


def child_prefix(parent: int, tokens: bytes) -> bytes:
    """Return the common prefix of the links to all children of ``parent`` that begin with the first four of
    ``tokens``."""
    return parent.to_bytes(8, "big") + tokens[:BEGINNING].ljust(BEGINNING, b"\0")


def beginnings(tokens: bytes) -> list[bytes]:
    """Return the beginnings under which the index may have pages that share their first tokens with
    ``tokens``: the first four tokens, and fewer for pages with fewer tokens."""
    return [tokens[:nbytes] for nbytes in range(min(len(tokens), BEGINNING), 0, -4)]


def link_of(record: PageRecord) -> bytes:
    """Return a page's link: its key in the tree ``children``."""
    return child_prefix(record.parent, record.tokens) + record.key + page_key(record.serial)
