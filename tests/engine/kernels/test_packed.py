"""Quantised weights on a GPU: the CPU's numbers bit for bit, and products up to the rounding of float32."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.device import DEVICE, kernel_launcher
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import guarded_tensor
from tests.engine.test_packed import FORMATS, SCALED, assert_same_bits, finite, random_matrix
from tests.portions import chosen, portion
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.packed import PackedKernels
from tierstore_engine.quantised import PackedMatrix, QuantisedMatrix
from tierstore_engine.weight_formats import UINT4, WeightFormat

pytestmark = pytest.mark.usefixtures("executor")

DTYPES = ["float16", "bfloat16", "float32"]
DTYPE_OF = {form: DTYPES[len(form) % 3] for form in FORMATS}
MOST = PackedKernels.most_rows


def guarded_matrix(matrix: PackedMatrix) -> PackedMatrix:
    """The same in memory that ends where the codes end, but for the last block of 16 bytes."""
    return replace(matrix, codes=guarded_tensor(matrix.codes))


def kernels_in(
    dtype: str, matrix: PackedMatrix, launcher: ExecutorLauncher | None = None, seed: int = 0
) -> PackedKernels:
    launcher = launcher or kernel_launcher()
    launcher.seed = seed
    kernels = PackedKernels(launcher, dtype=dtype, device="cpu")  # a mirror brings tensors to a device
    kernels.prepare(matrix)
    return kernels


def check_numbers(kernels: PackedKernels, matrix: PackedMatrix, dtype: str) -> None:
    rows = torch.arange(matrix.shape[0]).flip(0)
    right = matrix.dense(rows).to(getattr(torch, dtype))
    assert_same_bits(kernels.rows(matrix, guarded_tensor(rows)), right)
    assert_same_bits(kernels.range(matrix, 1, len(rows) - 1), right.flip(0)[1:])


def check_product(kernels: PackedKernels, matrix: PackedMatrix, dtype: str, tokens: int) -> None:
    """All rows but the first, to the middle of a larger result."""
    number = getattr(torch, dtype)
    total, columns = matrix.shape
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(number)
    out = guarded_tensor(torch.full((tokens, total + 3), torch.nan, dtype=number))
    kernels.multiply(matrix, guarded_tensor(x), 1, total - 1, out[:, 2 : total + 1])
    assert out[:, :2].isnan().all()
    assert out[:, total + 1 :].isnan().all()
    weight = matrix.expanded().to(number).double()[1:]
    exact, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    error = (out[:, 2 : total + 1].double() - exact).abs()
    assert (error <= unit * exact.abs() + 2.0**-20 * size + 2.0**-24).all()


@pytest.mark.parametrize(("form", "dtype"), chosen(product(FORMATS, DTYPES), *DTYPE_OF.items()))
def test_numbers(form: str, dtype: str) -> None:
    matrix = random_matrix(FORMATS[form], 5, 512 // FORMATS[form].block, 7, zeros=True, special=True)
    check_numbers(kernels_in(dtype, matrix), guarded_matrix(matrix), dtype)


@pytest.mark.parametrize("form", FORMATS)
def test_products(form: str) -> None:
    dtype = DTYPE_OF[form]
    matrix = guarded_matrix(finite(FORMATS[form], 20, 768))
    for tokens, seed in zip((1, 3, MOST), SCHEDULES, strict=False):
        check_product(kernels_in(dtype, matrix, seed=seed), matrix, dtype, tokens)


@pytest.mark.parametrize("cases", portion(10, 300))
def test_any_shape(cases: int) -> None:
    @settings(max_examples=cases)
    @given(
        form=st.sampled_from(SCALED),
        dtype=st.sampled_from(DTYPES),
        rows=st.integers(2, 40),
        blocks=st.integers(1, 320),
        group=st.sampled_from([1, 8, 12, 128, 1000]),
        block_rows=st.sampled_from([1, 3, 64]),
        flags=st.tuples(*(st.booleans(),) * 2),
        tokens=st.integers(1, MOST),
        seed=st.integers(0, 99),
    )
    def check(
        form: WeightFormat,
        dtype: str,
        rows: int,
        blocks: int,
        group: int,
        block_rows: int,
        flags: tuple[bool, bool],
        tokens: int,
        seed: int,
    ) -> None:
        zeros, ordered = flags
        shape = {"group": group, "block_rows": block_rows, "zeros": zeros, "ordered": ordered}
        matrix = guarded_matrix(random_matrix(form, rows, blocks, seed, **shape))
        kernels = kernels_in(dtype, matrix, seed=seed)
        check_numbers(kernels, matrix, dtype)
        if form.name not in ("fp8_e4m3", "fp8_e5m2") and dtype != "float16":  # NaN, or too large
            check_product(kernels, matrix, dtype, tokens)

    check()


def test_a_rows_product_does_not_depend_on_the_others() -> None:
    matrix = finite(UINT4, 33, 520)
    kernels = kernels_in("bfloat16", matrix)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), 33, dtype=torch.bfloat16)
        kernels.multiply(matrix, x, 0, 33, out)
        return out

    x = torch.randn(MOST, 520).bfloat16()
    assert torch.equal(multiply(x), torch.cat([multiply(row[None]) for row in x]))


@pytest.mark.parametrize("tokens", [1, MOST, MOST + 1])
def test_a_matrix_of_parts_on_a_device(tokens: int) -> None:
    """As the engine multiplies: a part in each format, one that is not quantised, and views of both."""
    parts = [finite(FORMATS[form], 12, 512) for form in ("Q4_1", "Q6_K", "F16")]
    kernels = PackedKernels(kernel_launcher(), dtype="float16", device="cpu")
    whole = QuantisedMatrix(36, 512, dtype=torch.float16, kernels=kernels)
    for number, part in enumerate(parts):
        whole[12 * number : 12 * number + 12].put(part)
    weight = torch.cat([part.expanded() for part in parts]).half()
    x = torch.randn(tokens, 512).half()
    right = (x.double() @ weight.double().T).half()
    close = {"atol": 2e-2, "rtol": 2e-3}
    torch.testing.assert_close(whole.multiply(x), right, **close)
    torch.testing.assert_close(whole[6:30].multiply(x), right[:, 6:30], **close)
    assert torch.equal(whole[12:24].gather(torch.tensor([3, 0, 11])), weight[[15, 12, 23]])


def test_matrices_of_experts() -> None:
    matrix = finite(FORMATS["mxfp4"], 24, 64)
    kernels = PackedKernels(kernel_launcher(), dtype="bfloat16", device="cpu")
    experts = QuantisedMatrix(3, 8, 64, dtype=torch.bfloat16, kernels=kernels)
    experts.put(matrix)
    x = torch.randn(2, 64).bfloat16()
    right = x.double() @ matrix.expanded().double()[8:16].T
    torch.testing.assert_close(experts[1].multiply(x).double(), right, atol=0.3, rtol=2e-2)


def test_other_dtypes() -> None:
    kernels = PackedKernels(kernel_launcher(), dtype="float64", device="cpu")
    with pytest.raises(KernelError, match="no products with quantised weights in float64"):
        kernels.prepare(finite(UINT4, 2, 64))


@pytest.mark.skipif(DEVICE == "executor", reason="needs a device")
def test_products_in_a_captured_graph() -> None:
    """Nothing waits: a capture would raise."""
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher

    kernels = PackedKernels(CupyLauncher(DEVICE), dtype="float16", device=DEVICE)
    whole = QuantisedMatrix(64, 512, dtype=torch.float16, kernels=kernels)
    whole.put(finite(FORMATS["Q4_K"], 64, 512))
    x, rows = torch.randn(4, 512, device=DEVICE).half(), torch.tensor([5, 0], device=DEVICE)
    right = whole.multiply(x), whole.gather(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = whole.multiply(x), whole.gather(rows)
    graph.replay()
    assert torch.equal(found[0], right[0])
    assert torch.equal(found[1], right[1])
