"""Matrices that stay quantised in memory. A product dequantises some rows at a time.

A format (:class:`WeightFormat`) says how bytes become numbers. All rows of a matrix are packed alike, each in
whole bytes. Formats of safetensors files have scales beside the bytes; those of GGUF files have them among
the bytes. Numbers are computed in float32 and then converted to the model's dtype. Activations are never
quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import torch

from tierstore_engine import products

_TILE_NUMBERS = 1 << 15  # dequantised at a time by each thread: its temporaries stay in the core's cache


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to pack numbers. ``block`` numbers take ``block_bytes`` bytes. ``decode`` turns uint8
    ``[rows, bytes]`` into numbers ``[rows, columns]``; with scales these are codes, and ``zero`` is the code
    of 0 unless a matrix has zeros of its own."""

    name: str
    block: int
    block_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]
    zero: float = 0.0


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Rows in a format. ``codes`` are uint8 ``[rows, bytes]``.

    ``scales`` and ``zeros`` are ``[row blocks, column groups]``, in any dtype: one row of them for each
    ``block_rows`` rows. A column group is ``group`` neighbours, unless ``groups`` has the group of each
    column (int64). Scales are None if the bytes say everything, zeros if the format's ``zero`` is that of all
    groups.
    """

    format: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    group: int = 1
    block_rows: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        rows, nbytes = self.codes.shape
        return rows, nbytes // self.format.block_bytes * self.format.block

    def tensors(self) -> list[torch.Tensor]:
        """Return everything that takes memory."""
        values = (getattr(self, each.name) for each in fields(self))
        return [each for each in values if isinstance(each, torch.Tensor)]

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers (int64) as float32."""
        values = self.format.decode(self.codes[rows])
        if self.scales is None:
            return values
        blocks = rows // self.block_rows
        if self.zeros is not None:
            values.sub_(self._spread(self.zeros, blocks))
        elif self.format.zero:
            values.sub_(self.format.zero)
        return values.mul_(self._spread(self.scales, blocks))

    def expanded(self) -> torch.Tensor:
        """Return all rows as float32."""
        return self.dense(torch.arange(self.shape[0], device=self.codes.device))

    def _spread(self, table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return one number for each column."""
        chosen = table[blocks].float()
        if self.groups is not None:
            return chosen[:, self.groups]
        return chosen.unsqueeze(-1).expand(-1, -1, self.group).flatten(1)[:, : self.shape[1]]


class QuantisedMatrix:
    """A matrix ``[rows, columns]``, or one for each expert, whose rows are packed matrices one after the
    other. ``dtype`` is that of results. Parts of it are views."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype
        self._parts: list[tuple[int, PackedMatrix]] = []  # with the first row of each, in order
        self._first = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantisedMatrix]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, chosen: int | slice) -> QuantisedMatrix:
        """Return an expert's matrix, or some rows of this one."""
        start, stop, _ = (slice(chosen, chosen + 1) if isinstance(chosen, int) else chosen).indices(len(self))
        shape = self.shape[1:] if isinstance(chosen, int) else (stop - start, *self.shape[1:])
        view = QuantisedMatrix(*shape, dtype=self.dtype)
        view._parts = self._parts
        view._first = self._first + start * (self.rows // max(len(self), 1))
        return view

    @property
    def rows(self) -> int:
        """Return the number of rows of all experts."""
        rows = 1
        for each in self.shape[:-1]:
            rows *= each
        return rows

    def put(self, packed: PackedMatrix) -> None:
        """Fill all rows. The shape was checked by the reader."""
        assert packed.shape == (self.rows, self.shape[-1])
        self._parts.append((self._first, packed))
        self._parts.sort(key=lambda part: part[0])

    def parts(self) -> Iterator[tuple[int, int, int, PackedMatrix]]:
        """Yield the packed matrices of these rows: (first row here, first row there, rows, matrix)."""
        for first, packed in self._parts:
            start = max(first, self._first)
            stop = min(first + packed.shape[0], self._first + self.rows)
            if start < stop:
                yield start - self._first, start - first, stop - start, packed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers (int64, one dimension)."""
        out = torch.empty(len(rows), self.shape[-1], dtype=self.dtype, device=rows.device)
        for first, inner, count, packed in self.parts():
            chosen = (rows >= first) & (rows < first + count)
            out[chosen] = packed.dense(rows[chosen] - first + inner).to(self.dtype)
        return out

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [tokens, columns]`` times the transposed matrix."""
        step = max(_TILE_NUMBERS * torch.get_num_threads() // self.shape[-1], 1)
        out = torch.empty(len(x), self.rows, dtype=x.dtype, device=x.device)
        for first, inner, count, packed in self.parts():
            for start in range(0, count, step):
                rows = torch.arange(inner + start, inner + min(start + step, count), device=x.device)
                tile = packed.dense(rows).to(x.dtype)
                out[:, first + start : first + start + len(rows)] = products.multiply(x, tile)
        return out


Matrix: TypeAlias = torch.Tensor | QuantisedMatrix


@dataclass(frozen=True, slots=True)
class LowRank:
    """The part of a LoRA adapter in a matrix: ``up [rows, rank]`` times ``down [rank, columns]`` is added to
    the rows from ``first`` on."""

    first: int
    down: torch.Tensor
    up: torch.Tensor

    def on(self, device: str) -> LowRank:
        return LowRank(self.first, self.down.to(device), self.up.to(device))


@dataclass(slots=True)
class AdapterRows:
    """The rows of the current step (int64) that each adapter computes, by its digest. The model sets them."""

    of: Mapping[str, torch.Tensor] = field(default_factory=dict)


class AdaptedMatrix:
    """A matrix with LoRA adapters. An adapter changes the products of its own rows only."""

    def __init__(self, base: Matrix, changes: Mapping[str, Sequence[LowRank]], rows: AdapterRows) -> None:
        self.base = base
        self._changes = changes
        self._rows = rows

    def adapt(self, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts to ``product``, which is that of ``x`` and the base."""
        for adapter, rows in self._rows.of.items():
            for change in self._changes.get(adapter, ()):
                inner = products.multiply(x[rows], change.down)
                product[rows, change.first : change.first + len(change.up)] += products.multiply(
                    inner, change.up
                )
        return product


def linear(x: torch.Tensor, weight: Matrix | AdaptedMatrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x [tokens, columns]`` times the transposed ``weight [rows, columns]``, plus the bias."""
    if isinstance(weight, AdaptedMatrix):
        return weight.adapt(x, linear(x, weight.base, bias))
    if isinstance(weight, torch.Tensor):
        return products.multiply(x, weight, bias)
    product = weight.multiply(x)
    return product if bias is None else product + bias


def embedded(tokens: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Return the rows ``tokens`` of an embedding."""
    return weight[tokens] if isinstance(weight, torch.Tensor) else weight.gather(tokens)


# -- how bytes become numbers --------------------------------------------------------------------------


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the lower half of each byte before its upper half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below 0


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor([*_FP4, *(-each for each in _FP4)], device=packed.device)
    return numbers[_nibbles(packed).long()]


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def decode(packed: torch.Tensor) -> torch.Tensor:
        return packed.contiguous().view(dtype).float()

    return decode


def dense_format(dtype: torch.dtype) -> WeightFormat:
    """Return the format of numbers that are not quantised."""
    return WeightFormat(str(dtype).removeprefix("torch."), 1, dtype.itemsize, _as(dtype))


FP8_E4M3 = WeightFormat("fp8_e4m3", 1, 1, _as(torch.float8_e4m3fn))
FP8_E5M2 = WeightFormat("fp8_e5m2", 1, 1, _as(torch.float8_e5m2))
INT8 = WeightFormat("int8", 1, 1, _as(torch.int8))
UINT8 = WeightFormat("uint8", 1, 1, torch.Tensor.float, zero=128.0)
UINT4 = WeightFormat("uint4", 2, 1, lambda packed: _nibbles(packed).float(), zero=8.0)
FP4 = WeightFormat("mxfp4", 2, 1, _fp4)

# GGUF's blocks. A decoder takes uint8 [blocks, bytes] and returns float32 [blocks, numbers].


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return the lower halves of all bytes, and then their upper halves."""
    return torch.cat((packed & 15, packed >> 4), dim=-1).float()


def _bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Return the fields of ``width`` bits of all bytes: first the lowest of every byte."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> shifts.unsqueeze(-1) & (1 << width) - 1


def _f16(packed: torch.Tensor) -> torch.Tensor:
    return packed.contiguous().view(torch.float16).float()


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return 16 for each bit that is set in four bytes, in order."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(-2).float()


def _q4_0(block: torch.Tensor) -> torch.Tensor:
    return _halves(block[:, 2:]).sub_(8).mul_(_f16(block[:, :2]))


def _q4_1(block: torch.Tensor) -> torch.Tensor:
    return _halves(block[:, 4:]).mul_(_f16(block[:, :2])).add_(_f16(block[:, 2:4]))


def _q5_0(block: torch.Tensor) -> torch.Tensor:
    values = _halves(block[:, 6:]).add_(_fifth_bits(block[:, 2:6])).sub_(16)
    return values.mul_(_f16(block[:, :2]))


def _q5_1(block: torch.Tensor) -> torch.Tensor:
    values = _halves(block[:, 8:]).add_(_fifth_bits(block[:, 4:8]))
    return values.mul_(_f16(block[:, :2])).add_(_f16(block[:, 2:4]))


def _q8_0(block: torch.Tensor) -> torch.Tensor:
    return block[:, 2:].contiguous().view(torch.int8).float().mul_(_f16(block[:, :2]))


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eight scales and the eight minima, of 6 bits each, in 12 bytes. The last four of both have
    their two upper bits in the bytes of the first four."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), dim=-1)
    return scales.float(), minima.float()


def _scaled_k(values: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return ``values [blocks, 8, 32]`` with the scales and minima in a block's first 16 bytes."""
    scales, minima = _k_scales(block[:, 4:16])
    scales, minima = scales * _f16(block[:, :2]), minima * _f16(block[:, 2:4])
    return values.mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1)).flatten(1)


def _q4_k(block: torch.Tensor) -> torch.Tensor:
    return _scaled_k(_halves(block[:, 16:].view(-1, 4, 32)).view(-1, 8, 32), block)


def _q5_k(block: torch.Tensor) -> torch.Tensor:
    upper = _bits(block[:, 16:48], 1).float() * 16
    return _scaled_k(_halves(block[:, 48:].view(-1, 4, 32)).view(-1, 8, 32) + upper, block)


def _q6_k(block: torch.Tensor) -> torch.Tensor:
    lower = _halves(block[:, :128].view(-1, 2, 64))
    upper = _bits(block[:, 128:192].view(-1, 2, 32), 2).flatten(-2).float() * 16
    scales = block[:, 192:208].contiguous().view(torch.int8).float() * _f16(block[:, 208:])
    return lower.add_(upper).sub_(32).view(-1, 16, 16).mul_(scales.unsqueeze(-1)).flatten(1)


def _blocks(
    name: str, block: int, block_bytes: int, decode: Callable[[torch.Tensor], torch.Tensor]
) -> WeightFormat:
    def rows(packed: torch.Tensor) -> torch.Tensor:
        return decode(packed.reshape(-1, block_bytes)).view(len(packed), -1)

    return WeightFormat(name, block, block_bytes, rows)


GGUF_FORMATS = {
    each.name: each
    for each in (
        WeightFormat("F32", 1, 4, _as(torch.float32)),
        WeightFormat("F16", 1, 2, _as(torch.float16)),
        WeightFormat("BF16", 1, 2, _as(torch.bfloat16)),
        _blocks("Q4_0", 32, 18, _q4_0),
        _blocks("Q4_1", 32, 20, _q4_1),
        _blocks("Q5_0", 32, 22, _q5_0),
        _blocks("Q5_1", 32, 24, _q5_1),
        _blocks("Q8_0", 32, 34, _q8_0),
        _blocks("Q4_K", 256, 144, _q4_k),
        _blocks("Q5_K", 256, 176, _q5_k),
        _blocks("Q6_K", 256, 210, _q6_k),
    )
}
