"""What the PTX manual says each lane gets from ldmatrix, mma and the shuffle, written down in numpy.

On the executor this checks that it does what the manual says. On a GPU (``TIERSTORE_KERNEL_DEVICE=cuda``) it
checks that the manual was read correctly, and with it everything that the executor has ever said.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.kernels.device import DEVICE, MirrorLauncher
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import guarded_tensor
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.launcher import Launcher

COMPLETED = Path(__file__).parent
LANE = np.arange(32)

pytestmark = pytest.mark.usefixtures("executor")


def launcher() -> Launcher:
    if DEVICE == "executor":
        return ExecutorLauncher(folder=COMPLETED)
    from tierstore_engine.kernels.cubins import CubinCache
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher

    return MirrorLauncher(CupyLauncher(DEVICE, CubinCache(sources=COMPLETED)), DEVICE)


@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, "__half"), (torch.bfloat16, "__nv_bfloat16")])
def test_layouts(dtype: torch.dtype, number: str) -> None:
    tiles = torch.randn(8, 8, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    seen = guarded_tensor(torch.zeros(32, 16, dtype=torch.int32))
    kernel = launcher().load(Instance("golden.cu", f"golden<{number}>", 32, 1024))
    kernel((1,), (guarded_tensor(tiles), seen))

    bits = tiles.view(torch.int16).numpy().view(np.uint16)
    pairs = np.ascontiguousarray(seen.numpy()[:, :8]).view(np.uint16).reshape(32, 8, 2)
    plain, transposed = pairs[:, :4], pairs[:, 4:]
    for matrix in range(4):
        for i in range(2):
            assert np.array_equal(plain[:, matrix, i], bits[matrix, LANE // 4, LANE % 4 * 2 + i])
            assert np.array_equal(transposed[:, matrix, i], bits[4 + matrix, LANE % 4 * 2 + i, LANE // 4])

    # A's quarters are matrices 0 (upper left), 1 (lower left), 2, 3; B is matrix 4 on top of matrix 5.
    wide = tiles.double()
    a = torch.cat([torch.cat([wide[0], wide[1]]), torch.cat([wide[2], wide[3]])], dim=1)
    product = (a @ torch.cat([wide[4], wide[5]])).numpy()
    sums = np.ascontiguousarray(seen.numpy()[:, 8:12]).view(np.float32)
    for i in range(4):
        np.testing.assert_allclose(
            sums[:, i], product[LANE // 4 + i // 2 * 8, LANE % 4 * 2 + i % 2], atol=1e-4
        )

    words = seen.numpy()
    for i in range(4):
        assert np.array_equal(words[:, 12 + i], words[LANE ^ (1 << i), 0])
