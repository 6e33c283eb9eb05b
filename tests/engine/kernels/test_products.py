"""Products on a GPU whose rows have the same bits in every product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.device import kernel_launcher
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import guarded_tensor
from tests.portions import portion
from tierstore_engine.kernels.products import ProductKernels

pytestmark = pytest.mark.usefixtures("executor")

DTYPES = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


def kernels_in(dtype: str, launcher: ExecutorLauncher | None = None, seed: int = 0) -> ProductKernels:
    launcher = launcher or kernel_launcher()
    launcher.seed = seed
    return ProductKernels(launcher, dtype="bfloat16" if dtype == "float32" else dtype)


def check(kernels: ProductKernels, dtype: str, rows: int, products: int, columns: int) -> None:
    """The whole product is as exact as its dtype, and some of its rows alone have the same bits. The second
    half of the columns nearly cancels the first, so that another order of a sum shows in its bits."""
    generator, number = torch.Generator().manual_seed(rows), getattr(torch, dtype)

    def cancelling(count: int, sign: int) -> torch.Tensor:
        first = torch.randn(count, columns, generator=generator)
        first[:, columns - columns // 2 :] = sign * first[:, : columns // 2]
        near = torch.randn(count, columns, generator=generator) / 256
        return guarded_tensor((first + near).to(number))

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = guarded_tensor(torch.full((len(x), products), torch.nan, dtype=number))
        kernels.multiply_into(x, weight, out)
        return out

    x, weight = cancelling(rows, 1), cancelling(products, -1)
    found = multiply(x)
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    error = (found.double() - exact).abs()
    assert (error <= DTYPES[dtype] * exact.abs() + 2.0**-20 * size + 2.0**-24).all()
    for some in (slice(rows // 2, None), slice(rows - 1, None), slice(0, 17)):
        assert torch.equal(multiply(guarded_tensor(x[some])), found[some])


@pytest.mark.parametrize(("dtype", "seed"), list(zip(DTYPES, SCHEDULES, strict=False)))
def test_a_row_has_the_same_bits_beside_any_others(dtype: str, seed: int) -> None:
    """Both kernels, more than one block of each, and columns that do not fill a tile."""
    check(kernels_in(dtype, seed=seed), dtype, rows=70, products=130, columns=200)


@pytest.mark.parametrize("cases", portion(6, 300))
def test_any_shape(cases: int) -> None:
    @settings(max_examples=cases)
    @given(
        dtype=st.sampled_from(list(DTYPES)),
        rows=st.integers(1, 90),
        products=st.integers(1, 150),
        columns=st.integers(1, 300),
        seed=st.integers(0, 99),
    )
    def any_shape(dtype: str, rows: int, products: int, columns: int, seed: int) -> None:
        check(kernels_in(dtype, seed=seed), dtype, rows, products, columns)

    any_shape()


def test_nothing_to_multiply() -> None:
    kernels = kernels_in("float16")
    empty, weight = torch.empty(0, 64).half(), torch.ones(32, 64).half()
    assert kernels.multiply(empty, weight).shape == (0, 32)
    assert kernels.multiply(weight, empty).shape == (32, 0)
    assert kernels.multiply(empty.float(), weight.float()).shape == (0, 32)
