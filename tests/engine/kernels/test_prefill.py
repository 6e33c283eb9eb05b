"""Paged prefill against attention written down plainly in float64, under every schedule."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.attention import SIGHTS, SOAKED, Executed, sights_of, some_schedules
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.problem import Problem, Shape
from tests.portions import diagonal, portion
from tierstore_engine.kernels.operations import Sight, SplitRule

pytestmark = pytest.mark.usefixtures("executor")

SHAPES = {
    "mha": Shape(heads=2, kv_heads=2),
    "gqa-wide": Shape(dtype="bfloat16", heads=8, head_dim=128),
    "gqa-odd": Shape(heads=6, head_dim=96),
    "widest": Shape(dtype="bfloat16", heads=4, kv_heads=1, head_dim=256),
    "mqa-narrow": Shape(heads=16, kv_heads=1, head_dim=16),
    "small-pages": Shape(dtype="bfloat16", page_tokens=16),
    "odd-pages": Shape(page_tokens=48),
    "fp8": Shape(dtype="bfloat16", heads=6, kv="fp8_e4m3"),
    "mixed": Shape(heads=4, head_dim=96, page_tokens=48, kv="k8v4"),
    "capped": Shape(dtype="bfloat16", heads=4, head_dim=256, score_cap=3.0, score_scale=0.1),
    "capped-fp8": Shape(heads=6, kv="fp8_e4m3", score_cap=2.0),
}
ALL_SHAPES = [
    Shape(dtype, heads, kv_heads, head_dim)
    for dtype in ("float16", "bfloat16")
    for head_dim in (16, 32, 64, 96, 128, 256)
    for heads, kv_heads in ((1, 1), (4, 2), (5, 1), (16, 1))
]

# Splits by new tokens and those before them.
SPLIT_OF_LLAMA = {
    (64, 100_000): 16,
    (2, 100_000): 32,
    (64, 0): 1,
    (64, 800): 1,
    (64, 1000): 2,
    (512, 100_000): 2,
    (600, 100_000): 1,
    (2048, 100_000): 1,
}

executed = cache(Executed)
spans = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), min_size=1, max_size=3)
sights = sights_of(150)


@pytest.mark.parametrize("schedules", portion(2, 4))
@pytest.mark.parametrize(*diagonal(name=SHAPES, sight=SIGHTS), ids=str)
def test_edges(name: str, sight: Sight, schedules: int) -> None:
    """A cold prompt, a chunk after exactly one page, one that crosses a boundary, a single token."""
    shape = SHAPES[name]
    for seed in some_schedules(schedules, name, SHAPES):
        problem = Problem(shape, [(0, 70), (64, 33), (50, 30), (129, 1)], sight=sight, seed=seed)
        executed(shape).prefill(problem, seed=seed).check()


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    spans=spans,
    sight=sights,
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_any_batch(shape: Shape, spans: list[tuple[int, int]], sight: Sight, seed: int) -> None:
    executed(shape).prefill(Problem(shape, spans, sight=sight, seed=seed), seed=seed).check()


@given(group=st.sampled_from([3, 4, 7, 16]), spans=spans, sight=sights, seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None)
def test_any_group(group: int, spans: list[tuple[int, int]], sight: Sight, seed: int) -> None:
    shape = Shape(heads=group, kv_heads=1)
    executed(shape).prefill(Problem(shape, spans, sight=sight, seed=seed), seed=seed).check()


def test_schedules_and_neighbours_change_no_bits() -> None:
    shape = SHAPES["gqa-wide"]
    alone = executed(shape).prefill(Problem(shape, [(90, 40)]))
    rows = slice(alone.first_rows[0], alone.first_rows[0] + 40)
    for seed in SCHEDULES:
        again = executed(shape).prefill(Problem(shape, [(90, 40)]), seed=seed)
        assert torch.equal(alone.out[rows], again.out[rows])
    # The same sequence behind another one: only its place in the batch differs.
    beside = Problem(shape, [(3, 9), (90, 40)], seed=5)
    theirs = slice(beside.first_rows[1], beside.first_rows[1] + 40)
    beside.queries[theirs] = alone.queries[rows]
    for page, other in zip(alone.tables[0], beside.tables[1], strict=True):
        beside.pool[other] = alone.pool[page]
    assert torch.equal(executed(shape).prefill(beside).out[theirs], alone.out[rows])


@pytest.mark.parametrize("schedules", portion(2, 4))
@pytest.mark.parametrize(*diagonal(name=SHAPES, sight=SIGHTS), ids=str)
def test_splits(name: str, sight: Sight, schedules: int) -> None:
    """Each sequence in parts of its own number: one that is not split, parts that are empty, and parts that
    see nothing of some rows' windows."""
    shape = SHAPES[name]
    for seed in some_schedules(schedules, name, SHAPES):
        problem = Problem(shape, [(0, 70), (64, 33), (350, 30), (10, 2)], sight=sight, seed=seed)
        executed(shape).prefill(problem, splits=[2, 1, 5, 3], seed=seed).check()


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    spans=spans,
    splits=st.lists(st.integers(1, 6), min_size=3, max_size=3),
    sight=sights,
    seed=st.integers(0, 1000),
)
@settings(max_examples=10, deadline=None)
def test_any_batch_in_splits(
    shape: Shape, spans: list[tuple[int, int]], splits: list[int], sight: Sight, seed: int
) -> None:
    problem = Problem(shape, spans, sight=sight, seed=seed)
    executed(shape).prefill(problem, splits=splits[: len(spans)], seed=seed).check()


def test_neighbours_and_schedules_change_no_bits_of_splits() -> None:
    """Neither its place among the parts nor how many its neighbour has."""
    shape = SHAPES["gqa-wide"]
    alone = executed(shape).prefill(Problem(shape, [(190, 40)]), splits=[3])
    rows = slice(alone.first_rows[0], alone.first_rows[0] + 40)
    for seed in SCHEDULES:
        again = executed(shape).prefill(Problem(shape, [(190, 40)]), splits=[3], seed=seed)
        assert torch.equal(alone.out[rows], again.out[rows])
    beside = Problem(shape, [(300, 9), (190, 40)], seed=5)
    theirs = slice(beside.first_rows[1], beside.first_rows[1] + 40)
    beside.queries[theirs] = alone.queries[rows]
    for page, other in zip(alone.tables[0], beside.tables[1], strict=True):
        beside.pool[other] = alone.pool[page]
    assert torch.equal(executed(shape).prefill(beside, splits=[5, 3]).out[theirs], alone.out[rows])
    assert torch.equal(executed(shape).prefill(beside, splits=[2, 3]).lse[theirs], alone.lse[rows])


def test_a_short_chunk_behind_a_long_past_fills_a_device() -> None:
    """Llama-3-8B's heads: 64 tokens are 16 blocks, and in splits 256; what has enough is left whole."""
    kernels = Executed(
        Shape(dtype="bfloat16", heads=32, kv_heads=8, head_dim=128), split_rule=SplitRule()
    ).kernels
    splits = {(count, past): kernels.chunk_splits(count, past + count) for count, past in SPLIT_OF_LLAMA}
    assert splits == SPLIT_OF_LLAMA
    assert kernels.chunk_splits(64, 100_000, Sight(window=4096)) == 8
    assert kernels.chunk_splits(64, 100_000, Sight(chunk=100)) == 1


@pytest.mark.soak
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_every_shape(shape: Shape) -> None:
    for seed in range(8):
        for sight in SOAKED:
            problem = Problem(shape, [(0, 130), (191, 65), (64, 64), (333, 2)], sight=sight, seed=seed)
            executed(shape).prefill(problem, seed=seed).check()


@pytest.mark.soak
@given(
    shape=st.sampled_from(ALL_SHAPES),
    spans=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300)), min_size=1, max_size=5),
    sight=sights_of(800),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=1000, deadline=None)
def test_many_batches(shape: Shape, spans: list[tuple[int, int]], sight: Sight, seed: int) -> None:
    executed(shape).prefill(Problem(shape, spans, sight=sight, seed=seed), seed=seed).check()
