"""Measure products with quantised weights: packed bytes per second beside the device's own copy, and the time
beside torch's product with the expanded weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.packed import PackedKernels
from tierstore_engine.quantised import PackedMatrix, QuantisedMatrix
from tierstore_engine.weight_formats import FP8_E4M3, GGUF_FORMATS, UINT4, WeightFormat
from tierstore_tools.gpu.decode import COPY_BYTES, Timer, copy_rate

_DTYPE = torch.bfloat16
_GROUP = 128
FORMATS = {each.name: each for each in (*GGUF_FORMATS.values(), FP8_E4M3, UINT4)}


@dataclass(frozen=True, slots=True)
class WeightCase:
    """A product of ``tokens`` rows with a matrix in the format of this name."""

    form: str
    tokens: int


CASES = tuple(
    WeightCase(form, tokens)
    for form in ("Q4_K", "Q6_K", "Q8_0", "uint4", "fp8_e4m3")
    for tokens in (1, 16, 512)
)
LARGE = (14336, 4096)
"""The rows and columns of Llama-3-8B's gate."""


@dataclass(frozen=True, slots=True)
class WeightRow:
    """One case. ``nbytes`` is the size of the packed matrix, and ``fraction`` the rate of reading it divided
    by the copy's rate. ``torch_s`` is the time of torch's product with the expanded matrix."""

    form: str
    tokens: int
    nbytes: int
    kernel_s: float
    torch_s: float
    gb_per_s: float
    copy_gb_per_s: float
    fraction: float


def run(
    launcher: Launcher,
    device: str,
    timer: Timer,
    *,
    cases: Sequence[WeightCase] = CASES,
    shape: tuple[int, int] = LARGE,
    copy_nbytes: int = COPY_BYTES,
) -> Iterator[WeightRow]:
    """Yield one row per case."""
    kernels = PackedKernels(launcher, dtype=str(_DTYPE).removeprefix("torch."), device=device)
    dense = torch.randn(shape, device=device).to(_DTYPE)
    for case in cases:
        # the copy is measured for each case, because the device's clock rates change
        copied = copy_rate(device, timer, copy_nbytes)
        packed = random_matrix(FORMATS[case.form], *shape)
        matrix = QuantisedMatrix(*shape, dtype=_DTYPE, kernels=kernels)
        matrix.put(packed)
        x = torch.randn(case.tokens, shape[1], device=device).to(_DTYPE)
        seconds = timer(partial(matrix.multiply, x))
        torch_s = timer(partial(torch.nn.functional.linear, x, dense))
        nbytes = sum(each.nbytes for each in packed.tensors())
        rate = nbytes / seconds
        yield WeightRow(
            case.form, case.tokens, nbytes, seconds, torch_s, rate / 1e9, copied / 1e9, rate / copied
        )


def random_matrix(form: WeightFormat, rows: int, columns: int) -> PackedMatrix:
    """Return random packed weights, with a scale for each 128 columns if the format itself has no scales."""
    codes = torch.randint(256, (rows, columns // form.block * form.block_bytes), dtype=torch.uint8)
    if form not in (FP8_E4M3, UINT4):
        return PackedMatrix(form, codes)
    scales = torch.rand(rows, -(-columns // _GROUP)).to(_DTYPE)
    return PackedMatrix(form, codes, scales, group=_GROUP)
