"""Rotation and writing of keys and values into pages: bit for bit what the unfused formula gives."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.engine.kernels.attention import Executed
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.problem import LAYER, Problem, Shape, guarded_tensor, int32
from tierstore_engine.config import RopeConfig
from tierstore_engine.kernels.operations import Slots
from tierstore_engine.rope import Rope, rotate

pytestmark = pytest.mark.usefixtures("executor")

SHAPES = {
    "gqa": Shape(heads=6),
    "odd": Shape(dtype="bfloat16", heads=3, kv_heads=1, head_dim=96),
    "wide": Shape(dtype="bfloat16", heads=8, kv_heads=4, head_dim=256),
    "narrow": Shape(heads=4, head_dim=16, page_tokens=16),
}
executed = cache(Executed)


class NewTokens:
    """Projections of ``tokens`` new tokens as the model has them, and an empty pool to write them to."""

    def __init__(self, shape: Shape, *, tokens: int = 37, pages: int = 5) -> None:
        generator = torch.Generator().manual_seed(3)
        heads = shape.heads + 2 * shape.kv_heads
        projected = torch.randn((tokens, heads, shape.head_dim), generator=generator).to(shape.torch_dtype)
        # Views into one array, as the projection leaves them: not contiguous from token to token.
        parts = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.queries, self.keys, self.values = torch.split(guarded_tensor(projected), parts, dim=1)
        self.positions = torch.randint(0, 100_000, (tokens,), generator=generator)
        places = torch.randperm(pages * shape.page_tokens, generator=generator)[:tokens]
        self.pages, self.offsets = places // shape.page_tokens, places % shape.page_tokens
        # A problem of the right number of empty pages: its pool holds one page that belongs to nobody.
        self.problem = Problem(shape, [(0, 1)] * (pages - 1))
        self.problem.pool.fill_(torch.nan)

    @property
    def slots(self) -> Slots:
        return Slots(int32(self.pages.numpy()), int32(self.offsets.numpy()))

    def expected_pool(self, keys: torch.Tensor) -> torch.Tensor:
        pool = torch.full_like(self.problem.pool, torch.nan)
        pool[self.pages, LAYER, 0, :, self.offsets] = keys
        pool[self.pages, LAYER, 1, :, self.offsets] = self.values
        return pool


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_rotate_and_write(shape: Shape, seed: int) -> None:
    new = NewTokens(shape)
    kernels = executed(shape)
    kernels.launcher.seed = seed
    cosines, sines = Rope(RopeConfig(), shape.head_dim, device="cpu").rotations(
        new.positions, shape.torch_dtype
    )
    rotated = guarded_tensor(
        torch.full((37, shape.heads, shape.head_dim), torch.nan, dtype=shape.torch_dtype)
    )
    angles = [guarded_tensor(part.squeeze(1)) for part in (cosines, sines)]
    parts = (new.queries, new.keys, new.values)
    kernels.kernels.rope_write(new.problem.layer, *parts, *angles, new.slots, rotated)
    assert same_bits(rotated, rotate(new.queries, cosines, sines))
    assert same_bits(new.problem.pool, new.expected_pool(rotate(new.keys, cosines, sines)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_write(shape: Shape, seed: int) -> None:
    new = NewTokens(shape)
    kernels = executed(shape)
    kernels.launcher.seed = seed
    kernels.kernels.write(new.problem.layer, new.keys, new.values, new.slots)
    assert same_bits(new.problem.pool, new.expected_pool(new.keys))


def test_tokens_without_a_page_are_left_out() -> None:
    shape = SHAPES["gqa"]
    new = NewTokens(shape)
    kept = torch.arange(37) % 3 != 0
    slots = Slots(int32(torch.where(kept, new.pages, -1).numpy()), int32(new.offsets.numpy()))
    executed(shape).kernels.write(new.problem.layer, new.keys, new.values, slots)
    new.keys, new.values = new.keys[kept], new.values[kept]
    new.pages, new.offsets = new.pages[kept], new.offsets[kept]
    assert same_bits(new.problem.pool, new.expected_pool(new.keys))


def test_numbers_that_are_hard_to_round() -> None:
    """Large, tiny, infinite: whatever torch makes of them, the pages get."""
    shape = SHAPES["gqa"]
    new = NewTokens(shape)
    for power in range(-24, 16):
        new.keys[(power + 24) % 37] *= 2.0**power
    new.keys[0, 0, 0], new.keys[1, 1, 1] = torch.inf, -torch.inf
    cosines, sines = Rope(RopeConfig(), shape.head_dim, device="cpu").rotations(
        new.positions, shape.torch_dtype
    )
    rotated = torch.empty((37, shape.heads, shape.head_dim), dtype=shape.torch_dtype)
    parts = (new.queries, new.keys, new.values, cosines.squeeze(1), sines.squeeze(1))
    executed(shape).kernels.rope_write(new.problem.layer, *parts, new.slots, rotated)
    written = new.problem.pool[new.pages, LAYER, 0, :, new.offsets]
    torch.testing.assert_close(written, rotate(new.keys, cosines, sines), rtol=0, atol=0, equal_nan=True)
