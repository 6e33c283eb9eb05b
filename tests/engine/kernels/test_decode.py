"""Paged decode, split and combined, against attention written down plainly in float64, under every
schedule."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.attention import SIGHTS, SOAKED, Executed, one_token_each, sights_of, some_schedules
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.problem import Problem, Shape
from tests.portions import diagonal, portion
from tierstore_engine.kernels.operations import EVERYTHING, Sight, SplitRule

pytestmark = pytest.mark.usefixtures("executor")

SHAPES = {
    "mha": Shape(heads=2, kv_heads=2),
    "mha-wide": Shape(dtype="bfloat16", heads=2, kv_heads=2, head_dim=256),
    "pairs": Shape(dtype="bfloat16", heads=4, kv_heads=2, head_dim=128),
    "pairs-odd": Shape(heads=4, kv_heads=2, head_dim=96),
    "gqa-wide": Shape(dtype="bfloat16", heads=8, head_dim=128),
    "gqa-odd": Shape(heads=6, head_dim=96),
    "widest": Shape(dtype="bfloat16", heads=4, kv_heads=1, head_dim=256),
    "mqa-narrow": Shape(heads=16, kv_heads=1, head_dim=16),
    "pairs-narrow": Shape(heads=2, kv_heads=1, head_dim=16),
    "small-pages": Shape(dtype="bfloat16", heads=6, page_tokens=16),
    "odd-pages": Shape(heads=6, page_tokens=48),
    "fp8": Shape(dtype="bfloat16", heads=6, kv="fp8_e4m3"),
    "mixed": Shape(heads=4, head_dim=96, page_tokens=48, kv="k8v4"),
    "capped": Shape(dtype="bfloat16", heads=6, head_dim=256, score_cap=3.0, score_scale=0.1),
    "capped-pairs": Shape(heads=4, head_dim=128, score_cap=2.0),
    "capped-fp8": Shape(heads=6, kv="fp8_e4m3", score_cap=2.0),
}
ALL_SHAPES = [
    Shape(dtype, heads, kv_heads, head_dim)
    for dtype in ("float16", "bfloat16")
    for head_dim in (16, 32, 64, 96, 128, 256)
    for heads, kv_heads in ((1, 1), (4, 2), (6, 2), (16, 1))
]

executed = cache(Executed)
lengths = st.lists(st.integers(1, 300) | st.sampled_from([63, 64, 65, 128, 900]), min_size=1, max_size=4)
sights = sights_of(300)


@pytest.mark.parametrize("schedules", portion(2, 4))
@pytest.mark.parametrize(*diagonal(name=SHAPES, sight=SIGHTS), ids=str)
def test_edges(name: str, sight: Sight, schedules: int) -> None:
    shape = SHAPES[name]
    for seed in some_schedules(schedules, name, SHAPES):
        problem = Problem(shape, one_token_each([1, 64, 65, 250, 900]), sight=sight, seed=seed)
        executed(shape).decode(problem, seed=seed).check()


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    lengths=lengths,
    sight=sights,
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_any_batch(shape: Shape, lengths: list[int], sight: Sight, seed: int) -> None:
    problem = Problem(shape, one_token_each(lengths), sight=sight, seed=seed)
    executed(shape).decode(problem, seed=seed).check()


@given(group=st.integers(1, 16), lengths=lengths, sight=sights, seed=st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
def test_any_group(group: int, lengths: list[int], sight: Sight, seed: int) -> None:
    shape = Shape(heads=group, kv_heads=1)
    problem = Problem(shape, one_token_each(lengths), sight=sight, seed=seed)
    executed(shape).decode(problem, seed=seed).check()


@pytest.mark.parametrize("max_splits", [1, 7, 8, 9, 64])
def test_any_number_of_splits(max_splits: int) -> None:
    """They are combined eight at a time: less than that, just that, one more, almost twice."""
    problem = Problem(SHAPES["pairs"], one_token_each([1, 448, 512, 513, 900]))
    rule = SplitRule(min_pages=1, max_splits=max_splits)
    Executed(problem.shape, split_rule=rule).decode(problem, seed=max_splits).check()


@given(
    length=st.integers(1, 5000),
    sight=sights_of(5000),
    min_pages=st.integers(1, 9),
    max_splits=st.integers(1, 70),
)
def test_the_launch_has_a_block_for_every_split(
    length: int, sight: Sight, min_pages: int, max_splits: int
) -> None:
    """What the host takes as the bound for a batch is one for each of its sequences."""
    rule = SplitRule(min_pages, max_splits)
    bound = rule.splits(sight.most(length, 64), 64, EVERYTHING)
    assert all(rule.splits(shorter, 64, sight) <= bound for shorter in range(1, length + 1, 37))
    assert rule.splits(length, 64, sight) <= bound


@pytest.mark.parametrize("name", ["pairs", "gqa-wide"])
def test_schedules_and_neighbours_change_no_bits(name: str) -> None:
    shape = SHAPES[name]
    alone = executed(shape).decode(Problem(shape, [(200, 1)]))
    row = alone.first_rows[0]
    for seed in SCHEDULES:
        again = executed(shape).decode(Problem(shape, [(200, 1)]), seed=seed)
        assert torch.equal(alone.out[row], again.out[row])
    # Behind a much longer sequence, which makes the launch larger.
    beside = Problem(shape, [(900, 1), (200, 1)], seed=5)
    theirs = beside.first_rows[1]
    beside.queries[theirs] = alone.queries[row]
    for page, other in zip(alone.tables[0], beside.tables[1], strict=True):
        beside.pool[other] = alone.pool[page]
    assert torch.equal(executed(shape).decode(beside).out[theirs], alone.out[row])


@pytest.mark.parametrize("name", ["pairs", "gqa-wide"])
def test_sequences_of_length_zero_are_left_alone(name: str) -> None:
    """A captured graph is padded with them."""
    problem = Problem(SHAPES[name], one_token_each([100, 70]))
    sequences = problem.sequences()
    sequences.lengths[1] = 0
    kernels = executed(problem.shape).kernels
    kernels.decode(problem.layer, problem.queries, sequences, problem.out, problem.lse)
    assert problem.out[problem.first_rows[1]].isnan().all()
    problem.spans, problem.first_rows = problem.spans[:1], problem.first_rows[:1]
    problem.check()


@pytest.mark.soak
@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_every_shape(shape: Shape) -> None:
    for seed in range(8):
        for sight in SOAKED:
            problem = Problem(shape, one_token_each([1, 63, 64, 65, 200, 1000]), sight=sight, seed=seed)
            executed(shape).decode(problem, seed=seed).check()


@pytest.mark.soak
@given(
    shape=st.sampled_from(ALL_SHAPES),
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    sight=sights_of(3000),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=1000, deadline=None)
def test_many_batches(shape: Shape, lengths: list[int], sight: Sight, seed: int) -> None:
    problem = Problem(shape, one_token_each(lengths), sight=sight, seed=seed)
    executed(shape).decode(problem, seed=seed).check()
