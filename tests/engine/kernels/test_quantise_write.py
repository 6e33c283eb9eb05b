"""Keys and values quantised into pages: bit for bit what kv_format.py says, under every schedule."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.engine.kernels.attention import Executed
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.problem import LAYER, Shape, guarded_tensor, slots_of, write_codes
from tierstore_engine.kernels.operations import LayerPages
from tierstore_engine.kv_format import quantise

pytestmark = pytest.mark.usefixtures("executor")

SHAPES = {
    "fp8_e4m3": Shape(dtype="bfloat16", heads=6, kv="fp8_e4m3"),
    "fp8_e5m2": Shape(heads=3, kv_heads=1, head_dim=96, kv="fp8_e5m2"),
    "int8": Shape(dtype="bfloat16", heads=8, kv_heads=4, head_dim=256, kv="int8"),
    "int4": Shape(heads=4, head_dim=16, page_tokens=16, kv="int4"),
    "k8v4": Shape(heads=3, kv_heads=3, head_dim=32, kv="k8v4"),
}
PAGES, TOKENS = 3, 29

executed = cache(Executed)


def vectors(shape: Shape, seed: int) -> torch.Tensor:
    """Of all magnitudes, from subnormal numbers to large ones; one of zeros, one with a single number."""
    generator = torch.Generator().manual_seed(seed)
    size = (TOKENS, 2 * shape.kv_heads, shape.head_dim)
    spread = 12.0 if shape.dtype == "float16" else 60.0
    exponents = torch.rand((TOKENS, 1, 1), generator=generator) * 2 * spread - spread
    numbers = (
        torch.randn(size, generator=generator) * torch.randn(size, generator=generator) * exponents.exp2()
    )
    numbers[3], numbers[4] = 0.0, 0.0
    numbers[4, :, 5] = -1.75
    return numbers.to(shape.torch_dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_the_bytes_are_those_of_the_cpu(shape: Shape, seed: int) -> None:
    check_bytes(executed(shape), seed=seed)


def check_bytes(ours: Executed, *, seed: int) -> None:
    """Write vectors, and compare the whole pool."""
    shape, spec = ours.shape, ours.shape.spec
    both = guarded_tensor(vectors(shape, seed))
    keys, values = both.split(shape.kv_heads, dim=1)  # not contiguous from token to token
    pool = guarded_tensor(torch.full((PAGES, spec.page_bytes), 255, dtype=torch.uint8))
    expected = pool.clone()
    order = torch.randperm(PAGES * shape.page_tokens, generator=torch.Generator().manual_seed(seed))
    pages, offsets = order[:TOKENS] // shape.page_tokens, order[:TOKENS] % shape.page_tokens
    pages[7] = -1  # a token that is none
    for plane, numbers in enumerate((keys, values)):
        codes, scales = quantise(numbers, shape.format.codes[plane])
        for token in range(TOKENS):
            if pages[token] >= 0:
                page, offset = expected[pages[token]], int(offsets[token])
                write_codes(page, spec, plane, offset, codes[token], scales[token])
    ours.launcher.seed = seed
    layer = LayerPages(pool, spec.page_bytes, spec.layer(LAYER).start)
    ours.kernels.write(layer, keys, values, slots_of(pages.tolist(), offsets.tolist()))
    assert torch.equal(pool, expected)
