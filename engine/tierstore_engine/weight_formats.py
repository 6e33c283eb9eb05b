"""The formats of quantised weights: how torch converts the bytes of a matrix to numbers.

Formats of safetensors files have scales in a tensor of their own. Formats of GGUF files have the scales among
the bytes. The compiled part (``tierstore/native/decode.c``) and the CUDA kernels (``kernels/weights.cuh``)
know the same formats, by :attr:`WeightFormat.name`, and compute the same numbers bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to pack numbers. ``block`` numbers take ``block_bytes`` bytes. ``decode`` turns uint8
    ``[rows, bytes]`` into numbers ``[rows, columns]``; if there are scales, the results are codes, and
    ``zero`` is the code of 0 unless a matrix has its own zeros. ``dtype`` is the dtype of numbers that are
    not packed."""

    name: str
    block: int
    block_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]
    zero: float = 0.0
    dtype: torch.dtype | None = None


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the lower half of each byte before its upper half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same numbers below 0


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor([*_FP4, *(-each for each in _FP4)], device=packed.device)
    return numbers[_nibbles(packed).long()]


def _as(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    def decode(packed: torch.Tensor) -> torch.Tensor:
        return packed.contiguous().view(dtype).float()

    return decode


def dense_format(dtype: torch.dtype) -> WeightFormat:
    """Return the format of numbers that are not quantised."""
    return _plain(str(dtype).removeprefix("torch."), dtype)


def _plain(name: str, dtype: torch.dtype) -> WeightFormat:
    return WeightFormat(name, 1, dtype.itemsize, _as(dtype), dtype=dtype)


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
    """Return the fields of ``width`` bits of all bytes: first the lowest field of every byte."""
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
    """Return the eight scales and the eight minima, of 6 bits each, in 12 bytes. The two upper bits of the
    last four scales and minima are in the bytes of the first four."""
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
        _plain("F32", torch.float32),
        _plain("F16", torch.float16),
        _plain("BF16", torch.bfloat16),
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
