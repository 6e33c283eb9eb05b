"""The copy kernel moves exactly the fragments that it is given."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.device import DEVICE
from tests.engine.kernels.executor import SCHEDULES
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import guarded_tensor
from tierstore_engine.kernels.operations import PageCopy

pytestmark = [
    pytest.mark.usefixtures("executor"),
    pytest.mark.skipif(DEVICE != "executor", reason="the addresses are those of host memory"),
]


@pytest.mark.parametrize("seed", SCHEDULES)
@pytest.mark.parametrize(
    ("fragments", "nbytes"), [(1, 16), (300, 16), (37, 4096), (5, 272), (64, 28672), (3, 2064)]
)
def test_copy(fragments: int, nbytes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = guarded_tensor(
        torch.randint(255, (2 * fragments, nbytes), dtype=torch.uint8, generator=generator)
    )
    target = guarded_tensor(torch.zeros((2 * fragments, nbytes), dtype=torch.uint8))
    taken, given = (torch.randperm(2 * fragments, generator=generator)[:fragments] for _ in range(2))
    addresses = [guarded_tensor(array.data_ptr() + places * nbytes) for array, places in
                 ((target, given), (source, taken))]  # fmt: skip
    PageCopy(ExecutorLauncher(seed)).copy(*addresses, nbytes)
    expected = torch.zeros_like(target)
    expected[given] = source[taken]
    assert torch.equal(target, expected)


def test_nothing_to_copy_and_odd_sizes() -> None:
    copy = PageCopy(ExecutorLauncher())
    nothing = torch.empty(0, dtype=torch.int64)
    copy.copy(nothing, nothing, 16)
    with pytest.raises(ValueError, match="multiples of 16 bytes, got 24"):
        copy.copy(nothing, nothing, 24)
