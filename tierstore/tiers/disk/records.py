"""The stored form of a page's description: its record, its facts and the keys of the index.

The *record* describes the page and never changes while the page exists. It has its own checksum, seeded with
its serial. A damaged or misplaced record is detected when it is read, before its tokens or its place are
used. The *facts* are the few numbers that decide the order of eviction and the free space. All of them are
read at every open, so they are small and stored separately.
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

_HEAD = struct.Struct(
    "<Qq16s32sQQBdI"
)  # parent, place, key, identity, nbytes, checksum, codec, created_s, len(tokens)
_CODEC_AT = 80
_KEPT = struct.Struct("<Q")  # after the tokens of an encoded page
_PLACE = struct.Struct("<8xq")
_CREATED = struct.Struct("<81xd")
_CHECKSUM = struct.Struct("<Q")
_SERIAL_BYTES = 8
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
    """One page on disk. (It refers to no other objects, so it is hidden from Python's garbage collector.)

    ``serial`` is unique within the directory and greater than ``parent``. ``parent`` is the serial of the
    page before it in the prompt, or of the root for a first chunk. A page is valid only as long as its
    parent's record is.
    """

    serial: int
    parent: int
    key: bytes  # 16 bytes
    identity: bytes  # the 32-byte digest of the page's identity
    tokens: bytes  # the chunk's token ids, little-endian uint32; they prove the page's identity
    nbytes: int  # bytes of the page
    place: int  # byte offset in the extent space, or INLINE
    checksum: int = 0  # XXH3-64 of the page; set by DiskTier.write if it is not encoded
    codec: int = 0  # number of the codec (tierstore/codec.py); 0: not encoded
    created_s: float = 0.0  # wall clock
    encoded_bytes: int = 0  # payload bytes of an encoded page
    seal: bytes = b""  # opens the payload of an encrypted page (sealing.py); empty in the stored form

    @property
    def payload_bytes(self) -> int:
        """Size of the payload on disk."""
        return self.encoded_bytes if self.codec else self.nbytes

    @property
    def room(self) -> int:
        """Reserved space. Encoded sizes differ by a few bytes each; they are rounded up to share size
        classes."""
        return room_for(self.encoded_bytes, self.nbytes) if self.codec else self.nbytes


def room_for(encoded_bytes: int, nbytes: int) -> int:
    """Return the space for an encoded page: a multiple of 1/64 of the page, and at least four of these. So
    pages of one size use at most sixty classes (real ones use two), at a cost of 1 %."""
    step = max(nbytes // _STEPS // ALIGNMENT * ALIGNMENT, ALIGNMENT)
    return max(round_up(encoded_bytes, step), _LEAST_STEPS * step)


SEALED_BYTES = 129  # a sealed record has these bytes beside its tokens (sealing.py)


def token_count(nbytes: int, *, sealed: bool) -> int:
    """Return the number of tokens of a stored record that has ``nbytes`` in their place. ``sealed`` says
    whether the directory is encrypted."""
    return max(nbytes - SEALED_BYTES * sealed, 0) // TOKEN_BYTES


KEY_NUMBER_BYTES = 8


def key_number(tokens: bytes) -> int:
    """Return the id of the key that seals a stored record, from what it has in place of its tokens, as a
    signed number."""
    return int.from_bytes(tokens[BEGINNING : BEGINNING + KEY_NUMBER_BYTES], "little", signed=True)


def stored_key_number(data: bytes) -> bytes:
    """Return the bytes of :func:`key_number` of a stored record of an encrypted directory, without checking
    the rest of it; fewer if it is cut short."""
    start = _HEAD.size + BEGINNING
    return data[start : start + KEY_NUMBER_BYTES]


_STEPS = 64
_LEAST_STEPS = 4


class PageUse(Struct, frozen=True, gc=False):
    """When a page was last used, and how often it was found. This is a struct because one is created for
    every written page, and creating a named tuple takes three times as long."""

    tick: int  # the store's logical clock, which continues after a restart
    used_s: float  # wall clock
    hits: int


def first_use(record: PageRecord, used: Mapping[int, PageUse]) -> PageUse:
    """Return the use of a page that is being added: the noted use of its serial, if there is one."""
    return used.get(record.serial) or PageUse(0, record.created_s, 0)


class Removal(NamedTuple):
    """A page to be removed, with what is needed to find its record and to free its place."""

    serial: int
    parent: int
    place: int
    nbytes: int
    done: bool = False
    """Whether the page was finished: its session has ended, or its time to live is over."""
    expired: bool = False
    cause: int = 0
    """Why it leaves, for the memory of departures; 0 if that is noted already."""
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
    """Return the record stored under ``serial``, or None if it is damaged."""
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
    """Return the place in a stored record, without checking the rest of it."""
    return int(_PLACE.unpack_from(data)[0]) if len(data) >= _PLACE.size else None


def stored_names(data: bytes) -> tuple[int, bytes, bytes] | None:
    """Return (parent, key, tokens) of a stored record, without checking the rest of it."""
    if len(data) < _HEAD.size:
        return None
    head = _HEAD.unpack_from(data)
    return head[0], head[2], data[_HEAD.size : _HEAD.size + stored_tokens(data)]


def stored_tokens(data: bytes | memoryview) -> int:
    """Return the number of bytes of tokens in a stored record, from its length."""
    kept = _KEPT.size if len(data) > _CODEC_AT and data[_CODEC_AT] else 0
    return max(len(data) - _HEAD.size - kept - _CHECKSUM.size, 0)


def stored_created_s(data: bytes | memoryview) -> float:
    """Return when a page was created (wall clock), without checking its record; 0 if it is cut short."""
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
    """Return a stored record as a row of ``FACTS_DTYPE`` without a use; None if the record is damaged. Faster
    than :func:`decode`, because an opening needs it for every page."""
    end = len(data) - _CHECKSUM.size
    if len(key) != _SERIAL_BYTES or end < _HEAD.size:
        return None
    serial = int.from_bytes(key, "big")
    if _CHECKSUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:end], serial):
        return None
    parent, place, _, _, nbytes, _, codec, created_s, _ = _HEAD.unpack_from(data)
    room = room_for(_KEPT.unpack_from(data, end - _KEPT.size)[0], nbytes) if codec else nbytes
    return key + _FACTS.pack(parent, place, room, 0, created_s, 0)


def decode_facts(keys_and_values: bytearray) -> npt.NDArray[np.void]:
    """Return any number of adjacent (serial, facts) as an array of ``FACTS_DTYPE``."""
    return np.frombuffer(keys_and_values, FACTS_DTYPE)


# -- the index's trees, and the keys in them -----------------------------------------------------------


META = b"meta"
TREES = (META, b"roots", b"pages", b"facts", b"children", b"payload")
FORMAT_KEY = b"format"
NEXT_SERIAL = b"next_serial"
TICK = b"tick"
PIECE_BYTES = 4096 - 16  # bytes in one LMDB overflow page
BEGINNING = 16  # bytes of a chunk (four tokens) by which siblings are sorted


def page_key(serial: int) -> bytes:
    """Return the key of a page's record and facts, or of a root."""
    return serial.to_bytes(8, "big")


def payload_key(serial: int, piece: int) -> bytes:
    """Return the key of one piece of an inline payload."""
    return serial.to_bytes(8, "big") + piece.to_bytes(4, "big")


def child_prefix(parent: int, tokens: bytes) -> bytes:
    """Return the common prefix of the links to all children of ``parent`` that begin like ``tokens``."""
    return parent.to_bytes(8, "big") + tokens[:BEGINNING].ljust(BEGINNING, b"\0")


def beginnings(tokens: bytes) -> list[bytes]:
    """Return the beginnings under which the index may list a page that begins like ``tokens``: the first four
    tokens, and fewer for shorter pages."""
    return [tokens[:nbytes] for nbytes in range(min(len(tokens), BEGINNING), 0, -4)]


def link_of(record: PageRecord) -> bytes:
    """Return the key in ``children`` that leads to a page."""
    return child_prefix(record.parent, record.tokens) + record.key + page_key(record.serial)
