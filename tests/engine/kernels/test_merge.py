"""Merging attention over two parts of the keys gives attention over all of them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.engine.kernels.attention import Executed
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.problem import Problem, Shape, guarded_tensor
from tierstore_engine.kernels.operations import Sequences

pytestmark = pytest.mark.usefixtures("executor")

executed = cache(Executed)


@pytest.mark.parametrize("shape", [Shape(heads=2), Shape(dtype="bfloat16", heads=8, head_dim=128)], ids=str)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_two_halves(shape: Shape, seed: int) -> None:
    """The first two pages and the rest, as if one of them were kept elsewhere."""
    problem = Problem(shape, [(190, 1), (300, 1)])
    kernels, whole = executed(shape).kernels, problem.sequences()
    executed(shape).launcher.seed = seed
    parts = []
    for first_page, pages in ((0, 2), (2, whole.tables.shape[1] - 2)):
        tables = guarded_tensor(whole.tables[:, first_page : first_page + pages].contiguous())
        lengths = (whole.lengths - first_page * 64).clamp(max=pages * 64)
        part = Sequences(whole.rows, whole.counts, guarded_tensor(lengths), tables, 1, int(lengths.max()))
        out, lse = guarded_tensor(problem.out.float()), guarded_tensor(problem.lse)
        kernels.decode(problem.layer, problem.queries, part, out, lse)
        parts.append((out, lse))
    rows = problem.first_rows
    dense = [(guarded_tensor(out[rows]), guarded_tensor(lse[rows])) for out, lse in parts]
    out, lse = guarded_tensor(problem.out[rows]), guarded_tensor(dense[0][1])
    kernels.merge(dense[0], dense[1], out, lse)
    problem.out[rows], problem.lse[rows] = out, lse
    for index, row in enumerate(rows):
        exact, exact_lse, tolerance = problem._exact(index, problem.queries[row : row + 1])
        assert ((problem.out[row].double() - exact[0]).abs() <= tolerance[0]).all()
        assert (problem.lse[row].double() - exact_lse[0]).abs().max() < 5e-5


def test_parts_that_saw_nothing() -> None:
    shape = Shape(heads=2)
    kernels = executed(shape).kernels
    some = guarded_tensor(torch.randn(3, 2, 64)), guarded_tensor(torch.randn(3, 2))
    nothing = (
        guarded_tensor(torch.full_like(some[0], torch.nan)),
        guarded_tensor(torch.full((3, 2), -torch.inf)),
    )
    out, lse = (
        guarded_tensor(torch.full_like(some[0], torch.nan).half()),
        guarded_tensor(torch.full((3, 2), torch.nan)),
    )
    for parts in ((some, nothing), (nothing, some)):
        kernels.merge(*parts, out, lse)
        assert torch.equal(out, some[0].half())
        torch.testing.assert_close(lse, some[1])
    kernels.merge(nothing, nothing, out, lse)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
