"""Codecs, which store a page in fewer bytes on disk.

A codec encodes a page into bytes and decodes the page from them. A disk record has the size and the checksum
of the page, not of the encoded bytes. So a page that differs from the saved page is always a miss, even if
only its encoded bytes were damaged.

``lossless``
    For numbers in bfloat16, float16 and float32, from any engine. The compiled part splits each number into
    exponent, sign and mantissa, codes the exponents and stores all other bits as they are (the format is
    described in ``native/codec.c``). It detects the type of the numbers in each block of 8 KiB. So the layout
    of opaque pages need not be declared, and a page with several types (a state in float32 beside keys in
    bfloat16) is coded well. A wrongly detected type costs bytes, but never changes a bit.
``zstd``
    Splits numbers in the same way, and compresses the exponents with Zstandard: 3 % smaller pages than with
    ``lossless``, and several times slower. It needs the package ``zstandard`` (tierstore[codecs]). Without
    the compiled part, it replaces ``lossless``.

In a page, head_dim is the innermost dimension, so numbers of similar size are already adjacent. Coding
exponents relative to those of their channel saved 1 % more on real KV, but would need the layout of opaque
pages.

>>> lossless = by_name("lossless")
>>> page = memoryview(np.arange(4096, dtype=np.float32)).cast("B")
>>> room = memoryview(bytearray(lossless.bound(len(page))))
>>> stored = lossless.encode(page, room, layout="")
>>> back = memoryview(bytearray(len(page)))
>>> lossless.decode(room[:stored], back) and back == page
True
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore import native
from tierstore.errors import SpecError, UsageError
from tierstore.extras import install
from tierstore.memory import address_of
from tierstore.spec import DTYPE_BITS, KVSpec

NONE = "none"  # value of the setting for pages that are not encoded
RAW = 0  # codec number in the record of a page that is not encoded
BLOCK_BYTES = 8192
_WORTH = 15 / 16  # an encoded page larger than this share of the page is not used

Plane = npt.NDArray[np.uint8]


class Codec(Protocol):
    """One method to encode pages. Thread-safe and stateless."""

    name: str
    number: int
    """The codec's number in the record of a page. No other codec ever gets this number."""

    def bound(self, nbytes: int) -> int:
        """Return the bytes of ``room`` that :meth:`encode` needs for a page of ``nbytes``."""

    def encode(self, page: memoryview, room: memoryview, layout: str) -> int:
        """Write the encoded page to the beginning of ``room``. Return its size, or 0 if the codec does not
        make the page smaller by at least 1/16 or cannot encode it. ``layout`` is the layout of the page's
        identity."""

    def decode(self, encoded: memoryview, page: memoryview) -> bool:
        """Decode ``encoded`` into ``page``. Return False if it does not decode to a page of this size. Even
        damaged input never makes the codec read or write other memory."""


# -- by the compiled part ------------------------------------------------------------------------------


class Lossless:
    """The codec ``lossless``; see the module. On a core of an EPYC, it decodes 4.6 GB/s and encodes 1.0 GB/s,
    measured in bytes of pages."""

    name = "lossless"
    number = 1

    def bound(self, nbytes: int) -> int:
        return nbytes + nbytes // BLOCK_BYTES + 32

    def encode(self, page: memoryview, room: memoryview, layout: str) -> int:
        if native.CODEC is None or room.nbytes < self.bound(page.nbytes):
            return 0
        of = address_of(page, writable=False)
        size = int(
            native.CODEC.tierstore_encode(address_of(room, writable=True), room.nbytes, of, page.nbytes)
        )
        return size if size <= page.nbytes * _WORTH else 0

    def decode(self, encoded: memoryview, page: memoryview) -> bool:
        if native.CODEC is None or not (encoded.nbytes and page.nbytes):
            return _decode_lossless(encoded, page)
        of = address_of(encoded, writable=False)
        return bool(
            native.CODEC.tierstore_decode(address_of(page, writable=True), page.nbytes, of, encoded.nbytes)
        )


_GROUP = 256
_SAME = 1
_KINDS: Mapping[int, tuple[int, int]] = {
    2: (2, 0),
    3: (2, 3),
    4: (4, 0),
}  # by kind of block: bytes of a number, and bits of its highest byte that are stored without coding


def _decode_lossless(encoded: memoryview, page: memoryview) -> bool:
    """Decode without the compiled part, 100 times slower than with it. Used if a store directory was moved to
    a machine without the compiled part."""
    of, to = np.frombuffer(encoded, np.uint8), np.frombuffer(page, np.uint8)
    at = 0
    for start in range(0, len(to), BLOCK_BYTES):
        taken = _decode_block(of[at:], to[start : start + BLOCK_BYTES])
        if not taken:
            return False
        at += taken
    return at == len(of)


def _decode_block(of: Plane, to: Plane) -> int:
    """Decode one block. Return the number of bytes of ``of`` that the block takes, or 0 for invalid bytes."""
    kind, width = (int(of[0]) & 15, int(of[0]) >> 4) if len(of) else (-1, 0)
    if kind in (RAW, _SAME):
        kept = len(to) if kind == RAW else 1
        if width or len(of) < 1 + kept:
            return 0
        to[:] = of[1 : 1 + kept]
        return 1 + kept
    if kind not in _KINDS or width > 4 or len(of) < 3:
        return 0
    size, kept = _KINDS[kind]
    groups = len(to) // (_GROUP * size)
    tail = len(to) - groups * _GROUP * size
    escapes = int(of[1]) | int(of[2]) << 8
    table = of[3 : 3 + max((1 << width) - 1, 1)]
    group_bytes = _GROUP * (size - 1) + 32 * (kept + width)
    at = 3 + len(table)
    total = 3 + max((1 << width) - 1, 1) + groups * group_bytes + escapes + tail
    if len(of) < total:
        return 0
    body = of[at : at + groups * group_bytes].reshape(groups, group_bytes)
    at += groups * group_bytes
    lower = body[:, : _GROUP * (size - 1)].reshape(groups, size - 1, _GROUP)
    codes = _unpacked(body[:, _GROUP * (size - 1) + 32 * kept :], width)
    symbols = np.append(table, np.uint8(0))[codes]
    if width:
        escaped = codes == (1 << width) - 1
        if np.count_nonzero(escaped) != escapes:
            return 0
        symbols[escaped] = of[at : at + escapes]
    elif escapes:
        return 0
    if kept:
        kept_bits = body[:, _GROUP * (size - 1) : _GROUP * (size - 1) + 32 * kept]
        symbols = (symbols << 3) | _unpacked(kept_bits, kept)
    planes = [symbols.reshape(-1), *(lower[:, plane].reshape(-1) for plane in range(size - 1))]
    to[: len(to) - tail] = _joined(planes)
    to[len(to) - tail :] = of[at + escapes : total]
    return total


def _unpacked(bits: Plane, width: int) -> Plane:
    """Return values of ``width`` bits, 256 in each row of ``bits``."""
    if width == 0:
        return np.zeros((len(bits), _GROUP), np.uint8)
    if width == 3:
        upper = _unpacked(bits[:, 64:], 1) << 2
        values: Plane = np.bitwise_or(_unpacked(bits[:, :64], 2), upper, dtype=np.uint8)
        return values
    parts = [bits >> shift & ((1 << width) - 1) for shift in range(0, 8, width)]
    return np.concatenate(parts, axis=1).astype(np.uint8)


# -- planes of numbers ---------------------------------------------------------------------------------


def _split(numbers: Plane, size: int) -> list[Plane]:
    """Return the bytes of numbers of ``size`` bytes, rotated left by one bit. The first array has the highest
    bytes (exponents) of all numbers, and the last array has the lowest bytes."""
    word = np.dtype(f"<u{size}")
    value = numbers.view(word)
    turned = (value << word.type(1)) | (value >> word.type(8 * size - 1))
    return [(turned >> word.type(8 * at)).astype(np.uint8) for at in range(size - 1, -1, -1)]


def _joined(planes: list[Plane]) -> Plane:
    """Undo :func:`_split`."""
    size = len(planes)
    word = np.dtype(f"<u{size}")
    turned = np.zeros(len(planes[0]), word)
    for at, plane in enumerate(reversed(planes)):
        turned |= plane.astype(word) << word.type(8 * at)
    numbers: Plane = ((turned >> word.type(1)) | (turned << word.type(8 * size - 1))).view(np.uint8)
    return numbers


# -- with Zstandard ------------------------------------------------------------------------------------


class Zstd:
    """The codec ``zstd``, which compresses exponents with Zstandard. Raise :class:`UsageError` if the package
    ``zstandard`` is not installed."""

    name = "zstd"
    number = 2

    def __init__(self) -> None:
        try:
            self._zstandard: Any = importlib.import_module("zstandard")
        except ImportError as error:
            raise UsageError(f"the codec zstd needs the package zstandard: {install('codecs')}") from error
        self._own = threading.local()  # one context per thread

    def bound(self, nbytes: int) -> int:
        return nbytes + nbytes // 128 + 1024

    def encode(self, page: memoryview, room: memoryview, layout: str) -> int:
        size = number_bytes(layout)
        whole = page.nbytes // size * size
        upper, *lower = _split(np.frombuffer(page, np.uint8)[:whole], size)
        if not hasattr(self._own, "compressor"):
            self._own.compressor = self._zstandard.ZstdCompressor(level=1)
        frame = self._own.compressor.compress(upper)
        parts = [bytes([size]), len(frame).to_bytes(4, "little"), frame, *lower, page[whole:]]
        stored = sum(memoryview(part).nbytes for part in parts)
        if stored > page.nbytes * _WORTH:
            return 0
        at = 0
        for part in parts:
            view = memoryview(part).cast("B")
            room[at : at + view.nbytes] = view
            at += view.nbytes
        return stored

    def decode(self, encoded: memoryview, page: memoryview) -> bool:
        if encoded.nbytes < 5 or encoded[0] not in (2, 4):
            return False
        size, frame_bytes = encoded[0], int.from_bytes(encoded[1:5], "little")
        count, tail = divmod(page.nbytes, size)
        if encoded.nbytes != 5 + frame_bytes + count * (size - 1) + tail:
            return False
        frame = encoded[5 : 5 + frame_bytes]
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = self._zstandard.ZstdDecompressor()
        try:
            if self._zstandard.get_frame_parameters(frame).content_size != count:
                return False
            upper = np.frombuffer(self._own.decompressor.decompress(frame), np.uint8)
        except self._zstandard.ZstdError:
            return False
        if len(upper) != count:
            return False
        at = 5 + frame_bytes
        lower = np.frombuffer(encoded[at : at + count * (size - 1)], np.uint8).reshape(size - 1, count)
        to = np.frombuffer(page, np.uint8)
        to[: count * size] = _joined([upper, *lower])
        page[count * size :] = encoded[at + count * (size - 1) :]
        return True


@lru_cache(maxsize=1024)
def number_bytes(layout: str) -> int:
    """Return the size in bytes of the numbers in pages of this layout; 2 for opaque pages, because most KV
    has numbers of 2 bytes."""
    try:
        bits = DTYPE_BITS[KVSpec.parse(layout).dtype]
    except SpecError:
        return 2
    return 4 if bits == 32 else 2


# -- by name, by number --------------------------------------------------------------------------------

NAMES = (NONE, "lossless", "zstd")
REMOVED = {"fp8": 3, "int8": 4, "int4": 5}
"""Codecs of earlier versions and their numbers, which no other codec may get. They did not preserve every bit
of a page."""


def by_name(name: str) -> Codec | None:
    """Return the codec that a setting names; None for "none". Raise :class:`UsageError` for an unknown name,
    and for a codec that is not available on this machine."""
    if name not in NAMES:
        raise UsageError(f"no codec {name!r} (there are: {', '.join(NAMES)})")
    if name == NONE:
        return None
    if name == "lossless" and native.CODEC is None:
        try:
            return _of_number(Zstd.number)
        except UsageError as error:
            raise UsageError(
                "the codec lossless needs tierstore's compiled part (a C compiler at installation), or "
                f"zstandard instead: {install('codecs')}"
            ) from error
    return _of_number(1 + NAMES[1:].index(name))


def by_number(number: int) -> Codec | None:
    """Return the codec with the number in a record; None if this version does not know the number or cannot
    use the codec."""
    try:
        return _of_number(number)
    except (KeyError, UsageError):
        return None


@lru_cache(maxsize=16)
def _of_number(number: int) -> Codec:
    makers: Mapping[int, Callable[[], Codec]] = {Lossless.number: Lossless, Zstd.number: Zstd}
    return makers[number]()
