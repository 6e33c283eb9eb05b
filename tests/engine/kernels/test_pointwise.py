"""Sums, norms and gates: torch's own, up to the last bit of a number here and there."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.engine.kernels.device import kernel_launcher
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.problem import guarded_tensor
from tierstore_engine.kernels.operations import PointwiseKernels
from tierstore_engine.pointwise import Pointwise

pytestmark = pytest.mark.usefixtures("executor")

EPSILON = 1e-5
WIDTHS = (8, 264, 2048, 4104)  # fewer vectors than threads, a part of a warp, all of them, once around
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS = 3


@cache
def kernels(dtype: str) -> tuple[PointwiseKernels, object]:
    launcher = kernel_launcher()
    return PointwiseKernels(launcher, dtype=dtype, epsilon=EPSILON), launcher


def scheduled(dtype: str, seed: int) -> PointwiseKernels:
    found, launcher = kernels(dtype)
    launcher.seed = seed  # type: ignore[attr-defined]
    return found


def numbers(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Of all sizes, and in guarded memory."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-6, 4, (*shape[:-1], 1), generator=generator).float())
    return guarded_tensor((torch.randn(shape, generator=generator) * sizes).to(dtype))


def check(found: torch.Tensor, expected: torch.Tensor, *, apart: int = 1) -> None:
    """At most so many numbers apart, and few of them at all."""
    bits, right = found.view(torch.int16).int(), expected.view(torch.int16).int()
    assert int((bits - right).abs().max()) <= apart
    assert float((bits != right).float().mean()) < 0.01 + 1 / bits.numel()


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm(width: int, dtype: str, seed: int) -> None:
    hidden, added = (numbers(DTYPES[dtype], ROWS, width, seed=each) for each in (1, 2))
    weight = numbers(DTYPES[dtype], width, seed=3)
    total, normed = scheduled(dtype, seed).add_norm(hidden, added, weight)
    right_total, right_normed = Pointwise(EPSILON).add_norm(hidden, added, weight)
    assert torch.equal(total, right_total)
    check(normed, right_normed)
    check(scheduled(dtype, seed).norm(hidden, weight), Pointwise(EPSILON).norm(hidden, weight))


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(width: int, dtype: str, seed: int) -> None:
    gate_up = numbers(DTYPES[dtype], ROWS, 2 * width)
    # Where the gate is its neighbour, the product with it may be two numbers off.
    check(scheduled(dtype, seed).silu_mul(gate_up), Pointwise(EPSILON).silu_mul(gate_up), apart=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_at_the_edges(dtype: str) -> None:
    """Gates that are shut or wide open, zeros, and what overflows the dtype."""
    edges = torch.tensor(
        [-torch.inf, torch.inf, torch.nan, -100.0, 100.0, 0.0, -0.0, 3e4, -3e4, 1e-7, 60.0, -60.0]
    )
    gates = torch.cat([edges, torch.zeros(4)]).to(DTYPES[dtype])
    gate_up = guarded_tensor(torch.cat([gates, gates.flip(0)])[None])
    found, right = kernels(dtype)[0].silu_mul(gate_up), Pointwise(EPSILON).silu_mul(gate_up)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    zeros = torch.zeros(1, 16, dtype=DTYPES[dtype])
    weight = torch.ones(16, dtype=DTYPES[dtype])
    assert torch.equal(kernels(dtype)[0].norm(zeros, weight), zeros)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_kernel_does_not_take_goes_the_way_of_torch(dtype: str) -> None:
    own, plain = kernels(dtype)[0], Pointwise(EPSILON)
    odd, weight = numbers(DTYPES[dtype], ROWS, 12), numbers(DTYPES[dtype], 12)
    assert torch.equal(own.norm(odd, weight), plain.norm(odd, weight))
    for found, right in zip(own.add_norm(odd, odd, weight), plain.add_norm(odd, odd, weight), strict=True):
        assert torch.equal(found, right)
    assert torch.equal(own.silu_mul(odd), plain.silu_mul(odd))
    part, weight = numbers(DTYPES[dtype], ROWS, 4, 16)[:, 1:3], numbers(DTYPES[dtype], 16)
    assert torch.equal(own.norm(part, weight), plain.norm(part, weight))
    nothing = torch.empty(0, 16, dtype=DTYPES[dtype])
    assert own.norm(nothing, weight).shape == nothing.shape
    assert own.silu_mul(nothing).shape == (0, 8)
