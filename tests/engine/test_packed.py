"""Packed weights by the compiled part: torch's numbers bit for bit, and products of each row alone."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore import native
from tierstore_engine.products import FEW_ROWS, same_bits
from tierstore_engine.quantised import PackedMatrix, QuantisedMatrix
from tierstore_engine.weight_formats import (
    FP4,
    FP8_E4M3,
    FP8_E5M2,
    GGUF_FORMATS,
    INT8,
    UINT4,
    UINT8,
    WeightFormat,
    dense_format,
)

from .test_decode import EACH, library, portable, threads

__all__ = ["library", "portable", "threads"]

SCALED = [FP8_E4M3, FP8_E5M2, INT8, UINT8, UINT4, FP4]
FORMATS = {each.name: each for each in (*GGUF_FORMATS.values(), *SCALED, dense_format(torch.float16))}
TABLES = [torch.float32, torch.bfloat16, torch.float16]
ZEROS = [torch.int8, torch.uint8, torch.int16, torch.float16]
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 6e-8, -60000.0])


def random_matrix(
    form: WeightFormat,
    rows: int,
    blocks: int,
    seed: int,
    *,
    group: int = 32,
    block_rows: int = 1,
    zeros: bool = False,
    ordered: bool = True,
    special: bool = False,
) -> PackedMatrix:
    """Any bytes, and any scales with the formats that have them beside the bytes."""
    generator = torch.Generator().manual_seed(seed)

    def random(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator)

    codes = random(256, rows, blocks * form.block_bytes).to(torch.uint8)
    if form not in SCALED:
        return PackedMatrix(form, codes)
    columns = blocks * form.block
    shape = -(-rows // block_rows), -(-columns // group)
    scales = torch.randn(shape, generator=generator)
    if special:
        scales[random(2, *shape) == 0] = SPECIAL[random(len(SPECIAL), 1)]
    table = random(100, *shape).to(ZEROS[seed % len(ZEROS)]) if zeros else None
    groups = None if ordered else random(shape[1], columns)
    return PackedMatrix(form, codes, scales.to(TABLES[seed % len(TABLES)]), table, groups, group, block_rows)


def by_torch(matrix: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
    kept, native.DECODE = native.DECODE, None
    try:
        return matrix.dense(rows)
    finally:
        native.DECODE = kept


def assert_same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """All but NaNs, of which there are many."""
    bits = torch.int32 if ours.dtype is torch.float32 else torch.int16
    same = (ours.view(bits) == theirs.view(bits)) | (ours.isnan() & theirs.isnan())
    assert same.all()


matrices = st.builds(
    random_matrix,
    st.sampled_from(list(FORMATS.values())),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 5) | st.integers(1, 1300),
    seed=st.integers(0, 999),
    group=st.sampled_from([1, 8, 32, 40, 128, 2000]),
    block_rows=st.sampled_from([1, 3, 64]),
    zeros=st.booleans(),
    ordered=st.booleans(),
    special=st.booleans(),
).filter(lambda matrix: matrix.shape[1] <= 3000)


@EACH
@given(matrix=matrices, chosen=st.lists(st.integers(0, 39), min_size=1, max_size=20))
def test_numbers_are_those_of_torch(library: str, matrix: PackedMatrix, chosen: list[int]) -> None:
    rows = torch.tensor([row % matrix.shape[0] for row in chosen])
    assert_same_bits(matrix.dense(rows), by_torch(matrix, rows))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("special", [False, True])
def test_all_formats(library: str, form: str, special: bool) -> None:
    """Each of them over more than a tile, with every code of 8 bits."""
    matrix = random_matrix(FORMATS[form], 16, 1024 // FORMATS[form].block, 3, zeros=True, special=special)
    assert_same_bits(matrix.expanded(), by_torch(matrix, torch.arange(16)))


def quantised(matrix: PackedMatrix, dtype: torch.dtype) -> QuantisedMatrix:
    whole = QuantisedMatrix(*matrix.shape, dtype=dtype)
    whole.put(matrix)
    return whole


def finite(form: WeightFormat, rows: int, columns: int, seed: int = 0) -> PackedMatrix:
    """Random numbers of about one size: where a block has its own scale it is 2^-6."""
    matrix = random_matrix(form, rows, columns // form.block, seed)
    if form.dtype is not None:
        numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
        return PackedMatrix(form, numbers.to(form.dtype).view(torch.uint8))
    blocks = matrix.codes.view(-1, form.block_bytes)
    small = torch.tensor([2.0**-6], dtype=torch.float16).view(torch.uint8)
    if form.name == "Q6_K":
        blocks[:, -2:] = small
    elif form not in SCALED:
        blocks[:, :2] = small
        if form.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            blocks[:, 2:4] = small
    elif form in (FP8_E4M3, FP8_E5M2):
        matrix.codes.bitwise_and_(0x87)  # small exponents
    return matrix


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7, FEW_ROWS + 1])
def test_products(library: str, form: str, dtype: torch.dtype, tokens: int) -> None:
    matrix = finite(FORMATS[form], 37, 1280)
    x = torch.randn(tokens, 1280, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = matrix.expanded().to(dtype).double()
    exact = x.double() @ weight.T
    size = x.double().abs() @ weight.abs().T
    error = (quantised(matrix, dtype).multiply(x).double() - exact).abs()
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert (error <= unit * exact.abs() + 2.0**-20 * size).all()


@pytest.mark.parametrize("form", ["Q4_1", "Q6_K", "uint4", "fp8_e4m3", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same_as_with_expanded_weights(form: str, dtype: torch.dtype) -> None:
    """Bit for bit: tiles change no order of sums."""
    if native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    chosen = FORMATS[form] if form in FORMATS else dense_format(torch.bfloat16)
    matrix = finite(chosen, 70, 1280)
    x = torch.randn(5, 1280).to(dtype)
    dense = QuantisedMatrix(70, 1280, dtype=dtype)
    dense.put(PackedMatrix(dense_format(dtype), matrix.expanded().to(dtype).view(torch.uint8)))
    many = torch.cat([torch.randn(FEW_ROWS + 3, 1280).to(dtype), x])
    with same_bits():
        assert torch.equal(quantised(matrix, dtype).multiply(x), dense.multiply(x))
        found = quantised(matrix, dtype).multiply(many)
        assert torch.equal(found, dense.multiply(many))
    assert torch.equal(found[-len(x) :], quantised(matrix, dtype).multiply(x))


def test_a_rows_product_does_not_depend_on_the_others_or_the_threads(threads: None) -> None:
    if native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    whole = quantised(finite(UINT4, 600, 1536), torch.float32)  # large enough for several threads
    x = torch.randn(FEW_ROWS, 1536)
    found = whole.multiply(x)
    assert torch.equal(found, torch.cat([whole.multiply(row[None]) for row in x]))
    assert torch.equal(found[:, 100:350], whole[100:350].multiply(x))
    torch.set_num_threads(1)
    assert torch.equal(found, whole.multiply(x))


def test_rows_that_are_not_there(library: str) -> None:
    matrix = finite(UINT4, 4, 64)
    for rows in ([4], [-5], [0, 1 << 40]):
        with pytest.raises(IndexError):
            matrix.dense(torch.tensor(rows))


def test_every_format_has_a_number() -> None:
    assert set(FORMATS) | {"float32", "bfloat16"} == set(native.PACKED_FORMATS)
    assert ctypes.sizeof(native.Packed) == 4 * 8 + 5 * 8 + 4 * 4
