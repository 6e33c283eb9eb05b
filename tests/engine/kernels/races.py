"""Kernels under ThreadSanitizer: ``python -m tests.engine.kernels.races FOLDER KERNEL:SHAPE …``.

``FOLDER`` holds the kernels. A process of its own, because TSan must be loaded before anything else (see
test_races.py). TSan writes what it finds to stderr, and makes the exit code what it was told to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from tests.engine.kernels.attention import Executed, one_token_each
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.latent_problem import ExecutedLatents, LatentProblem, LatentShape
from tests.engine.kernels.problem import Problem, Shape, guarded_tensor, int32
from tests.engine.kernels.state_problem import DeltaShape, ExecutedStates, Mamba2Shape, StateShape
from tests.engine.test_packed import FORMATS, finite
from tierstore_connectors.vllm import pieces
from tierstore_engine.kernels import KERNEL_DIR
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.operations import EVERYTHING, PageCopy, PointwiseKernels, Sight, Slots
from tierstore_engine.kernels.packed import PackedKernels
from tierstore_engine.kernels.products import ProductKernels

SHAPES = {
    "plain": Shape(heads=2, kv_heads=1),
    "other": Shape(dtype="bfloat16", heads=4, kv_heads=1, head_dim=96),
    "single": Shape(dtype="bfloat16", heads=1, kv_heads=1, head_dim=128),
    "wide": Shape(heads=5, kv_heads=1, head_dim=32),
    "codes": Shape(heads=2, kv_heads=1, head_dim=32, kv="fp8_e4m3"),
    "other codes": Shape(dtype="bfloat16", heads=4, kv_heads=1, head_dim=16, kv="k8v4"),
}
PACKED_FORMATS = {"float16": "uint4", "bfloat16": "Q4_K"}


def prefill(shape: Shape, folder: Path) -> None:
    for seed, sight in ((0, EVERYTHING), (1, Sight(window=40))):
        for splits in (None, (1, 3)):
            problem = Problem(shape, [(0, 70), (129, 3)], sight=sight)
            executed = Executed(shape, launcher=ExecutorLauncher(folder=folder, races=True))
            executed.prefill(problem, splits=splits, seed=seed)


def decode(shape: Shape, folder: Path) -> None:
    for seed, sight in ((0, EVERYTHING), (1, Sight(window=40))):
        problem = Problem(shape, one_token_each([200, 65]), sight=sight)
        Executed(shape, launcher=ExecutorLauncher(folder=folder, races=True)).decode(problem, seed=seed)


def latents(shape: Shape, folder: Path) -> None:
    """Of a width that is no multiple of an mma step's."""
    of = LatentShape(shape.dtype, shape.heads, 2 * shape.head_dim + 8, shape.head_dim)
    executed = ExecutedLatents(of, launcher=ExecutorLauncher(folder=folder, races=True))
    executed.attend(LatentProblem(of, [100, 65]), split=True)
    executed.attend(LatentProblem(of, [70], chunk=2), split=False, seed=1)
    problem = LatentProblem(of, [3])
    new = torch.ones(2, of.width, dtype=of.torch_dtype)
    executed.kernels.write(problem.layer, new, Slots(int32([0, 0]), int32([0, 1])))


def delta(shape: Shape, folder: Path) -> None:
    states(DeltaShape(shape.dtype, key_dim=shape.head_dim // 4, value_dim=shape.head_dim // 2), folder)


def mamba2(shape: Shape, folder: Path) -> None:
    """More tokens than a tile has, and a second block of columns."""
    states(Mamba2Shape(shape.dtype, heads=2, head_dim=40, state_dim=shape.head_dim // 4), folder)


def states(shape: StateShape, folder: Path) -> None:
    executed = ExecutedStates(shape, launcher=ExecutorLauncher(folder=folder, races=True))
    for seed in (0, 1):
        executed.solve([(0, 10), (7, 1)], seed=seed)


def write(shape: Shape, folder: Path) -> None:
    kernels = Executed(shape, launcher=ExecutorLauncher(folder=folder, races=True)).kernels
    problem = Problem(shape, [(0, 3)])
    keys = guarded_tensor(problem.keys[0])
    slots = Slots(int32([0, 0, 0]), int32([0, 1, 2]))
    angles = torch.ones(3, shape.head_dim, dtype=shape.torch_dtype)
    rotated = torch.empty(3, shape.heads, shape.head_dim, dtype=shape.torch_dtype)
    kernels.write(problem.layer, keys, keys, slots)
    if kernels.rotates:
        kernels.rope_write(problem.layer, problem.queries[:3], keys, keys, angles, angles, slots, rotated)


def merge(shape: Shape, folder: Path) -> None:
    kernels = Executed(shape, launcher=ExecutorLauncher(folder=folder, races=True)).kernels
    part = torch.ones(2, 2, shape.head_dim), torch.zeros(2, 2)
    kernels.merge(part, part, part[0].to(shape.torch_dtype), torch.empty_like(part[1]))


def copy(shape: Shape, folder: Path) -> None:
    memory = torch.zeros(2, 10, 64 * shape.head_dim, dtype=torch.uint8)
    to, source = memory.data_ptr() + torch.arange(20).view(2, 10) * memory.shape[2]
    PageCopy(ExecutorLauncher(1, folder=folder, races=True)).copy(
        to.contiguous(), source.contiguous(), memory.shape[2]
    )


def pointwise(shape: Shape, folder: Path) -> None:
    launcher = ExecutorLauncher(folder=folder, races=True)
    kernels = PointwiseKernels(launcher, dtype=shape.dtype, epsilon=1e-5)
    rows, weight = torch.ones(2, 2 * 264, dtype=shape.torch_dtype), torch.ones(528, dtype=shape.torch_dtype)
    kernels.add_norm(rows, rows, weight)
    kernels.silu_mul(rows)


def packed(shape: Shape, folder: Path) -> None:
    """More columns than are handled at a time."""
    matrix = finite(FORMATS[PACKED_FORMATS[shape.dtype]], 3, 512)
    launcher = ExecutorLauncher(folder=folder, races=True)
    kernels = PackedKernels(launcher, dtype=shape.dtype, device="cpu")
    kernels.prepare(matrix)
    x = torch.ones(2, 512, dtype=shape.torch_dtype)
    kernels.multiply(matrix, x, 0, 3, torch.empty(2, 3, dtype=shape.torch_dtype))
    kernels.range(matrix, 0, 3)


def product(shape: Shape, folder: Path) -> None:
    """More tiles of columns than stages, by the kernel for few rows and by that for many."""
    kernels = ProductKernels(ExecutorLauncher(folder=folder, races=True), dtype=shape.dtype)
    weight = torch.ones(33, 64 * 5, dtype=shape.torch_dtype)
    for rows in (2, 33):
        kernels.multiply(torch.ones(rows, 64 * 5, dtype=shape.torch_dtype), weight)


def blocks(shape: Shape, folder: Path) -> None:
    """The vLLM connector's, which lies elsewhere."""
    source = pieces.SOURCE if folder == KERNEL_DIR else folder / pieces.SOURCE.name
    kernel = ExecutorLauncher(1, folder=source.parent, races=True).load(
        Instance(source.name, pieces.KERNEL, pieces.THREADS)
    )
    memory = torch.zeros(2, 8, 16 * shape.head_dim, dtype=torch.uint8)
    run = memory.shape[2]
    planes = torch.tensor([[part.data_ptr(), run, run, at * 3 * run] for at, part in enumerate(memory)])
    page = torch.zeros(2 * 3 * run, dtype=torch.uint8)
    for into_page in (1, 0):
        numbers = (np.int32(len(memory)), np.int32(3), np.int32(into_page))
        kernel((2,), (planes, int32([5, 0, 2]), page, *numbers))


KERNELS: Mapping[str, Callable[[Shape, Path], None]] = {
    "prefill": prefill,
    "decode": decode,
    "latents": latents,
    "delta": delta,
    "mamba2": mamba2,
    "write": write,
    "merge": merge,
    "copy": copy,
    "pointwise": pointwise,
    "blocks": blocks,
    "packed": packed,
    "product": product,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for job in sys.argv[2:]:
        kernel, shape = job.split(":")
        KERNELS[kernel](SHAPES[shape], folder)
