"""Codecs that keep a page's numbers in 8 or 4 bits: ``fp8``, ``int8``, ``int4``.

What comes back is close to it.

A vector (head_dim numbers in a row) has a scale, the least bfloat16 that puts all of it in the code's range,
as in the bundled engine's pool (docs/kv-dtypes.md). So a number is off by half a step at most, plus the
rounding of the page's own dtype, and a NaN or an infinity makes its vector one. That is for floats of a
known layout: of an opaque page, or of a state, nothing says which numbers share a scale.

In numpy: nobody waits for a tier this cold, and these are asked for where bytes are dear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tierstore.errors import SpecError
from tierstore.spec import SCALE_BYTES, KVSpec, has_whole_pages

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # numpy has none
}


@dataclass(frozen=True)
class _Shape:
    """A page as rows of vectors: (vectors, numbers of each), group by group."""

    dtype: str
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, encoded: memoryview) -> _Shape | None:
        """Of encoded bytes; None for those that no shape is in front of."""
        if encoded.nbytes < 2 or encoded[0] >= len(_DTYPES):
            return None
        sizes = np.frombuffer(encoded[2 : 2 + 8 * encoded[1]], np.uint8)
        if len(sizes) != 8 * encoded[1]:
            return None
        groups = sizes.view("<u4").reshape(-1, 2).tolist()
        if any(numbers % 2 for _, numbers in groups):
            return None
        return cls(list(_DTYPES)[encoded[0]], tuple((count, numbers) for count, numbers in groups))

    @property
    def head(self) -> bytes:
        """What stands before encoded bytes, so that they can be decoded without knowing whose they are."""
        sizes = np.array(self.groups, "<u4").tobytes()
        return bytes([list(_DTYPES).index(self.dtype), len(self.groups)]) + sizes

    @property
    def page_bytes(self) -> int:
        return sum(count * numbers for count, numbers in self.groups) * _DTYPES[self.dtype].itemsize

    def stored_bytes(self, bits: int) -> int:
        vectors = (count * (SCALE_BYTES + numbers * bits // 8) for count, numbers in self.groups)
        return 2 + 8 * len(self.groups) + sum(vectors)


@lru_cache(maxsize=1024)
def _shape(layout: str) -> _Shape | None:
    """None for pages that are not kept like that."""
    try:
        spec = KVSpec.parse(layout)
    except SpecError:
        return None
    if has_whole_pages(layout) or spec.dtype not in _DTYPES or spec.value_dtype or spec.scaled:
        return None
    groups = tuple(
        (len(group.layers) * group.planes * group.kv_heads * spec.chunk_tokens, group.head_dim)
        for group in spec.groups
    )
    even = all(numbers % 2 == 0 for _, numbers in groups)
    return _Shape(spec.dtype, groups) if even and len(groups) < 256 else None


class Quantised:
    """``bits`` a number, in codes up to ``largest``."""

    lossy = True

    def __init__(self, name: str, number: int, *, bits: int, largest: float) -> None:
        self.name = name
        self.number = number
        self._bits = bits
        self._largest = np.float32(largest)

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, page: memoryview, room: memoryview, layout: str) -> int:
        shape = _shape(layout)
        if shape is None or shape.page_bytes != page.nbytes:
            return 0
        size = shape.stored_bytes(self._bits)
        if size >= page.nbytes or room.nbytes < size:
            return 0
        room[: len(shape.head)] = shape.head
        to = np.frombuffer(room[:size], np.uint8)[len(shape.head) :]
        numbers = _floats(np.frombuffer(page, np.uint8), shape.dtype)
        for count, width in shape.groups:
            vectors, numbers = numbers[: count * width].reshape(count, width), numbers[count * width :]
            scales = self._scales(vectors)
            safe = np.where(np.isfinite(scales) & (scales > 0), scales, np.float32(1))
            with np.errstate(invalid="ignore", over="ignore"):
                codes = self._codes(np.nan_to_num(vectors / safe[:, None], nan=0.0))
            to[: count * SCALE_BYTES] = _bfloat16(scales).view(np.uint8)
            to = to[count * SCALE_BYTES :]
            to[: codes.size] = codes.reshape(-1)
            to = to[codes.size :]
        return size

    def decode(self, encoded: memoryview, page: memoryview) -> bool:
        shape = _Shape.read(encoded)
        if shape is None or encoded.nbytes != shape.stored_bytes(self._bits):
            return False
        if page.nbytes != shape.page_bytes:
            return False
        of, to = np.frombuffer(encoded, np.uint8)[len(shape.head) :], np.frombuffer(page, np.uint8)
        for count, width in shape.groups:
            scales = _floats(of[: count * SCALE_BYTES], "bfloat16")
            of = of[count * SCALE_BYTES :]
            nbytes = count * width * self._bits // 8
            with np.errstate(invalid="ignore", over="ignore"):
                numbers = self._numbers(of[:nbytes]).reshape(count, width) * scales[:, None]
                stored = _stored(numbers.reshape(-1), shape.dtype)
            of = of[nbytes:]
            to[: stored.size] = stored
            to = to[stored.size :]
        return True

    def _scales(self, vectors: Floats) -> Floats:
        """The least bfloat16 that puts each vector in range, as float32; not finite where a number is not."""
        with np.errstate(invalid="ignore", over="ignore"):
            least = np.abs(vectors).max(axis=1) / self._largest
        bits = least.view(np.uint32)
        up = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        kept = bits & np.uint32(0xFFFF0000) | np.uint32(0x10000)
        scales: Floats = np.where(np.isfinite(least), up, kept).view(np.float32)
        return scales

    def _codes(self, scaled: Floats) -> Bytes:
        scaled = np.clip(scaled, -self._largest, self._largest)
        if self._bits == 4:
            nibbles = (np.rint(scaled) + 8).astype(np.uint8)
            pairs: Bytes = np.bitwise_or(nibbles[:, ::2], nibbles[:, 1::2] << 4, dtype=np.uint8)
            return pairs
        if self.name == "int8":
            return np.rint(scaled).astype(np.int8).view(np.uint8)
        return _fp8(scaled)

    def _numbers(self, codes: Bytes) -> Floats:
        if self._bits == 4:
            both = np.stack([codes & 15, codes >> 4], axis=-1)
            nibbles: Floats = both.reshape(-1).astype(np.float32) - np.float32(8)
            return nibbles
        if self.name == "int8":
            return codes.view(np.int8).astype(np.float32)
        numbers: Floats = _FP8[codes]
        return numbers


QUANTISED = (
    Quantised("fp8", 3, bits=8, largest=448),
    Quantised("int8", 4, bits=8, largest=127),
    Quantised("int4", 5, bits=4, largest=7),
)


# -- numbers -------------------------------------------------------------------------------------------


def _floats(data: Bytes, dtype: str) -> Floats:
    stored = np.ascontiguousarray(data).view(_DTYPES[dtype])
    if dtype == "bfloat16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    numbers: Floats = stored.astype(np.float32, copy=False)
    return numbers


def _stored(numbers: Floats, dtype: str) -> Bytes:
    if dtype == "bfloat16":
        return _bfloat16(numbers).view(np.uint8)
    return numbers.astype(_DTYPES[dtype]).view(np.uint8)


def _bfloat16(numbers: Floats) -> npt.NDArray[np.uint16]:
    """The nearest ones, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    rounded = np.where(np.isnan(numbers), bits | np.uint32(0x400000), rounded) >> np.uint32(16)
    halves: npt.NDArray[np.uint16] = rounded.astype("<u2")
    return halves


def _fp8(scaled: Floats) -> Bytes:
    """e4m3: the codes nearest to numbers of up to 448, ties to even."""
    size = np.abs(scaled)
    bits = size.view(np.uint32)
    rounded = bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))
    normal = (rounded >> np.uint32(20)) - np.uint32((127 - 7) << 3)
    small = np.rint(size * np.float32(512)).astype(np.uint32)  # below 2**-6 steps are 2**-9 wide
    code = np.where(size < np.float32(2**-6), small, normal)
    codes: Bytes = (code | np.signbit(scaled).astype(np.uint32) << np.uint32(7)).astype(np.uint8)
    return codes


def _fp8_table() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 512, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return np.where(code & 128, -size, size).astype(np.float32)


_FP8 = _fp8_table()  # no code of a finite number is 0x7f or 0xff (NaN)
