"""The format of keys and values in pages: as the model computes them, or quantised to 8 or 4 bits.

A quantised vector (one token's K or V of one head) is a row of codes and a scale: ``x ≈ scale × number``.
Scales are *dynamic* (one per vector, stored in its page), or *static* (one per layer and head for K, and one
for V, from the largest magnitude in a calibration). Values beyond the range of a static scale are clamped.

A dynamic scale for a whole page would have to change when tokens are added or a draft is rejected, and the
codes of earlier tokens would be rounded a second time. The bytes of a page would then depend on its history,
and the result of a hit would differ from that of a computed prefix. A scale per vector costs 2 bytes: 3 % of
64 codes of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import msgspec
import torch
import xxhash

from tierstore.errors import UsageError

AUTO = "auto"


@dataclass(frozen=True)
class Code:
    """A format of quantised numbers with ``bits`` each, for magnitudes up to ``largest`` times the scale.

    ``relative`` and ``absolute`` bound the error of a number: ``relative × |x| + absolute × scale``.
    """

    dtype: str  # the name in a page's layout
    bits: int
    largest: float
    relative: float
    absolute: float

    @property
    def epsilon(self) -> float:
        """Return the largest step between two numbers, relative to ``largest``."""
        return 2 * (self.relative + self.absolute / self.largest)

    @cached_property
    def table(self) -> torch.Tensor:
        """Return the numbers that each byte encodes, float32 ``[256, numbers in a byte]``."""
        every = torch.arange(256, dtype=torch.uint8)
        if self.bits == 4:
            return torch.stack([every & 15, every >> 4], dim=1).float() - 8
        return every.view(getattr(torch, self.dtype)).float().unsqueeze(1)

    def encode(self, scaled: torch.Tensor) -> torch.Tensor:
        """Return the codes nearest to ``scaled`` (float32, ``[…, numbers]``; ties to even), uint8 ``[…,
        bytes]``."""
        scaled = scaled.clamp(-self.largest, self.largest)
        if self.bits == 4:
            nibbles = (scaled.round() + 8).to(torch.uint8)
            return nibbles[..., ::2] | nibbles[..., 1::2] << 4
        exact = scaled.round() if self.dtype == "int8" else scaled
        return exact.to(getattr(torch, self.dtype)).view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the numbers of ``codes``, the inverse of :meth:`encode` up to rounding."""
        if self.dtype == "int8":  # for FP8 torch's own conversion is no faster than the table
            return codes.view(torch.int8).float()
        numbers = self.table.index_select(0, codes.reshape(-1).int())
        return numbers.view(*codes.shape[:-1], -1)


CODES: Mapping[str, Code] = {
    "fp8_e4m3": Code("float8_e4m3fn", 8, 448.0, 2.0**-4, 2.0**-10),
    "fp8_e5m2": Code("float8_e5m2", 8, 57344.0, 2.0**-3, 2.0**-17),
    "int8": Code("int8", 8, 127.0, 0.0, 0.5),
    "int4": Code("int4", 4, 7.0, 0.0, 0.5),
}
"""Codes by their names in options."""

SHORTHANDS = {"k8v4": "int8/int4"}

KV_DTYPES = (AUTO, *CODES, *SHORTHANDS)


Ranges: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]
"""The largest magnitudes that static scales can represent, ``[layer][plane][head]``. A layer has a plane of
keys and a plane of values, or one plane of latents with one head, or no plane if it has a recurrent state."""


@dataclass(frozen=True)
class KVFormat:
    """The formats of K and of V: names in ``CODES``, or both empty for the model's dtype. ``ranges`` belongs
    to static scales, and is empty for dynamic ones."""

    keys: str = ""
    values: str = ""
    ranges: Ranges = ()

    @classmethod
    def parse(cls, name: str) -> KVFormat:
        """Parse ``auto``, one of ``KV_DTYPES``, or two of them as ``K/V``. Raises :class:`UsageError`.

        >>> KVFormat.parse("k8v4")
        KVFormat(keys='int8', values='int4', ranges=())
        """
        if name == AUTO:
            return cls()
        parts = SHORTHANDS.get(name, name).split("/")
        if len(parts) > 2 or not all(part in CODES for part in parts):
            raise UsageError(f"unknown KV dtype {name!r} (known: {', '.join(KV_DTYPES)}, or two as K/V)")
        return cls(parts[0], parts[-1])

    @property
    def quantised(self) -> bool:
        return bool(self.keys)

    @property
    def dynamic(self) -> bool:
        """Return whether pages carry scales."""
        return self.quantised and not self.ranges

    @property
    def name(self) -> str:
        """Return the name for :meth:`parse`."""
        if not self.quantised:
            return AUTO
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"

    @property
    def epsilon(self) -> float:
        """Return the largest step between two numbers, relative to the largest of their vector; 0 for
        floats."""
        return max(code.epsilon for code in self.codes) if self.quantised else 0.0

    @property
    def codes(self) -> tuple[Code, Code]:
        """Return the codes of K and of V."""
        return CODES[self.keys], CODES[self.values]

    def describe(self) -> str:
        """Return one line, which is part of the identity of pages. Formats with equal lines encode equal
        numbers as equal bytes."""
        if self.ranges:
            return f"{self.name},scale={xxhash.xxh3_128_hexdigest(msgspec.json.encode(self.ranges))}"
        return f"{self.name},scale=vector" if self.quantised else "raw"

    def of_heads(self, heads: range) -> KVFormat:
        """Return the format of these KV heads of a page.

        >>> KVFormat("int8", "int8", (((1.0, 2.0), (3.0, 4.0)),)).of_heads(range(1, 2)).ranges
        (((2.0,), (4.0,)),)
        """
        chosen = slice(heads.start, heads.stop)
        layers = (tuple(plane[chosen] for plane in planes) for planes in self.ranges)
        return replace(self, ranges=tuple(layers))

    def static_scales(self, layer: int, plane: int) -> torch.Tensor:
        """Return the static scales, float32 ``[kv_heads]``."""
        return torch.tensor(self.ranges[layer][plane]) / self.codes[plane].largest


def vector_scales(vectors: torch.Tensor, code: Code) -> torch.Tensor:
    """Return the scale of each vector in ``vectors`` (float32, ``[…, numbers]``): the smallest bfloat16 that
    puts all its numbers in the code's range. A NaN or an infinity becomes the scale itself."""
    exact = vectors.abs().amax(-1) / code.largest
    # Round up to a bfloat16: keep half of a float32's bits, and add one if the dropped bits were not 0.
    up = (exact.view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32).where(~exact.isnan(), exact)
    return up.clamp(min=torch.finfo(torch.bfloat16).tiny).to(torch.bfloat16)


def quantise(vectors: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``vectors`` ``[…, numbers]``, each under its own scale, and the scales
    (bfloat16)."""
    vectors = vectors.float()
    scales = vector_scales(vectors, code)
    return code.encode(vectors / scales.float().unsqueeze(-1)), scales
