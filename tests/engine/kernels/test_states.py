"""Recurrent states beside the CPU's, under every schedule: decoding and chunks in one launch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.state_problem import (
    DeltaShape,
    ExecutedStates,
    Mamba2Shape,
    StateShape,
    state_problem,
)
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.catalog import delta_set, mamba2_set

pytestmark = pytest.mark.usefixtures("executor")

SHAPES = {
    "tiny": DeltaShape(),
    "many-columns": DeltaShape(dtype="bfloat16", key_heads=1, value_heads=2, key_dim=24, value_dim=72),
    "short-convolution": DeltaShape(key_heads=2, value_heads=2, key_dim=32, value_dim=32, conv_width=2),
    "mamba2": Mamba2Shape(limits=(0.3, 2.0)),
    "mamba2-unbiased": Mamba2Shape(dtype="bfloat16", heads=2, head_dim=40, groups=1, biased=False),
    "mamba2-large": Mamba2Shape(
        heads=2, head_dim=64, state_dim=128, groups=1
    ),  # Granite 4.0-H's and Nemotron-H's
}
executed = cache(ExecutedStates)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_edges(shape: StateShape) -> None:
    """One that begins, one token, a chunk behind a past, fewer tokens than the convolution has inputs."""
    for seed in SCHEDULES:
        executed(shape).solve([(0, 70), (33, 1), (64, 20), (0, 1), (5, 2)], seed=seed).check()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts(shape: StateShape) -> None:
    """Behind one token, behind a chunk, across a tile, alone behind a past, and none beside them."""
    spans = [(0, 6), (33, 6), (64, 20), (7, 3), (5, 2)]
    for seed in SCHEDULES[:2]:
        problem = executed(shape).solve(spans, drafted=[5, 5, 4, 3], seed=seed)
        problem.check()
        assert problem.untouched(3)


@given(
    shape=st.sampled_from(list(SHAPES.values())),
    spans=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_any_batch(shape: StateShape, spans: list[tuple[int, int]], seed: int) -> None:
    executed(shape).solve(spans, seed=seed).check()


@pytest.mark.parametrize("name", ["tiny", "mamba2"])
def test_how_tokens_are_cut_changes_no_bits(name: str) -> None:
    shape = SHAPES[name]
    whole = executed(shape).solve([(0, 50)])
    for cuts in ([1] * 50, [20, 30], [49, 1]):
        parts, done = state_problem(shape, [(0, 50)]), 0
        for tokens in cuts:
            parts.spans, parts.rows = [(done, tokens)], [1 + done]
            executed(shape).advance(parts)
            done += tokens
        assert torch.equal(parts.out[1:51], whole.out[1:51])
        assert torch.equal(parts.pool, whole.pool)


@pytest.mark.parametrize("changes", [(160, 128, 4), (128, 160, 4), (128, 128, 9), (126, 128, 4)])
def test_states_that_the_kernels_do_not_know(changes: tuple[int, int, int]) -> None:
    key_dim, value_dim, conv_width = changes
    with pytest.raises(KernelError, match="no kernels for states"):
        delta_set(dtype="float16", key_dim=key_dim, value_dim=value_dim, conv_width=conv_width)


@pytest.mark.parametrize("state_dim", [260, 126])
def test_states_of_mamba2_that_they_do_not_know(state_dim: int) -> None:
    with pytest.raises(KernelError, match=f"no kernels for Mamba-2 states of {state_dim} rows"):
        mamba2_set(dtype="float16", state_dim=state_dim, conv_width=4)
