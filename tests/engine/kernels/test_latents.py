"""Attention over latents against plain float64, under every schedule; and writing them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.latent_problem import ExecutedLatents, LatentProblem, LatentShape
from tests.engine.kernels.problem import LAYER, guarded_tensor, slots_of
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.catalog import latent_set

pytestmark = pytest.mark.usefixtures("executor")

SHAPES = {
    "tiny": LatentShape(),
    "deepseek": LatentShape(dtype="bfloat16", heads=16, width=576, rank=512),
    "many-heads": LatentShape(heads=20, width=96, rank=80, page_tokens=16),
    "odd-pages": LatentShape(dtype="bfloat16", heads=3, width=72, rank=64, page_tokens=48),
}
executed = cache(ExecutedLatents)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_edges(shape: LatentShape) -> None:
    """Decoding in splits; each token of a chunk in one."""
    for seed in SCHEDULES:
        decoding = LatentProblem(shape, [1, 64, 65, 170], seed=seed)
        executed(shape).attend(decoding, split=True, seed=seed).check()
        chunk = LatentProblem(shape, [3, 66], chunk=3, seed=seed)
        executed(shape).attend(chunk, split=False, seed=seed).check()


@given(
    shape=st.sampled_from([SHAPES["tiny"], SHAPES["many-heads"], SHAPES["odd-pages"]]),
    lengths=st.lists(st.integers(5, 300), min_size=1, max_size=3),
    chunk=st.integers(1, 5),
    split=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=30, deadline=None)
def test_any_batch(shape: LatentShape, lengths: list[int], chunk: int, split: bool, seed: int) -> None:
    problem = LatentProblem(shape, lengths, chunk=chunk, seed=seed)
    executed(shape).attend(problem, split=split, seed=seed).check()


def test_schedules_and_neighbours_change_no_bits() -> None:
    shape = SHAPES["tiny"]
    alone = executed(shape).attend(LatentProblem(shape, [200]), split=True)
    row = alone.first_row(0)
    for seed in SCHEDULES:
        again = executed(shape).attend(LatentProblem(shape, [200]), split=True, seed=seed)
        assert torch.equal(alone.out[row], again.out[row])
    beside = LatentProblem(shape, [250, 200], seed=5)
    theirs = beside.first_row(1)
    beside.queries[theirs] = alone.queries[row]
    for page, other in zip(alone.tables[0], beside.tables[1], strict=True):
        beside.pool[other] = alone.pool[page]
    assert torch.equal(executed(shape).attend(beside, split=True).out[theirs], alone.out[row])


def test_entries_of_length_zero_are_left_alone() -> None:
    """A captured graph is padded with them."""
    shape = SHAPES["tiny"]
    problem, entries = LatentProblem(shape, [100, 70]), None
    entries = problem.entries()
    entries.lengths[1] = 0
    kernels = executed(shape).kernels
    kernels.attend(problem.layer, problem.queries, entries, problem.out, problem.lse, split=True)
    assert problem.out[problem.first_row(1)].isnan().all()
    assert not problem.out[problem.first_row(0)].isnan().any()


@pytest.mark.parametrize("shape", [SHAPES["tiny"], SHAPES["odd-pages"]], ids=["tiny", "odd-pages"])
def test_writing(shape: LatentShape) -> None:
    """To their tokens' places in the layer, and nowhere else; not that of a page of -1."""
    for seed in SCHEDULES[:2]:
        problem = LatentProblem(shape, [100])
        new = guarded_tensor(torch.randn(3, shape.width).to(shape.torch_dtype))
        kernels = executed(shape)
        kernels.launcher.seed = seed
        expected = problem.pool.clone()
        expected[1, LAYER, 15], expected[0, LAYER, 0] = new[0], new[2]
        kernels.kernels.write(problem.layer, new, slots_of([1, -1, 0], [15, 3, 0]))
        assert torch.equal(problem.pool.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("width", "rank"), [(640, 512), (40, 24), (44, 32)])
def test_latents_that_the_kernels_do_not_know(width: int, rank: int) -> None:
    with pytest.raises(KernelError, match="no kernels for latents"):
        latent_set(dtype="float16", width=width, rank=rank, page_tokens=64)
