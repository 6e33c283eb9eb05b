"""The executor itself: it catches what it promises to, says where, and survives it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.engine.kernels.device import ABOUT_THE_EXECUTOR
from tests.engine.kernels.executor import SCHEDULES, ExecutionError, HostModule, guarded
from tests.engine.kernels.executor.build import BuildError, build_library

FAULTS = Path(__file__).parent / "faults.cu"
KERNELS = (
    "out_of_bounds",
    "barrier_missing",
    "second_barrier_missing",
    "shuffle_for_barrier",
    "no_fault",
    "barriers_diverge",
    "deadlock",
    "collectives_differ",
    "exited_lane",
    "shared_overflow",
    "uninitialised_shared",
    "misaligned",
    "integer_overflow",
    "bank_conflict",
    "copy_wait<true>",
    "copy_wait<false>",
    "copy_too_early",
)

pytestmark = ABOUT_THE_EXECUTOR


@cache
def faults() -> HostModule:
    return HostModule(FAULTS, KERNELS)


def run(kernel: str, *more: np.ndarray, threads: int = 128, seed: int = 0, shared: int = 0) -> np.ndarray:
    """What the kernel left in an array of one float per thread."""
    numbers = guarded(np.zeros(threads, np.float32))
    faults().function(kernel)((1,), (threads,), (numbers, *more), shared_mem=shared, seed=seed)
    return numbers


@pytest.mark.parametrize(
    ("kernel", "threads", "message"),
    [
        ("barriers_diverge", 128, r"divergent __syncthreads: .*faults.cu"),
        ("deadlock", 128, r"deadlock, waiting: .*__syncwarp block .*__syncthreads block"),
        ("collectives_differ", 32, r"lanes in different collectives: .*faults.cu"),
        ("exited_lane", 32, r"__shfl_xor_sync: the mask names a lane that has exited, .*faults.cu"),
        ("misaligned", 32, r"misaligned access"),
        ("integer_overflow", 32, r"integer overflow"),
    ],
)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_errors(kernel: str, threads: int, message: str, seed: int) -> None:
    with pytest.raises(ExecutionError, match=f"{kernel}: .*{message}"):
        run(kernel, threads=threads, seed=seed)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_out_of_bounds(seed: int) -> None:
    numbers = guarded(np.zeros(100, np.float32))
    launch = faults().function("out_of_bounds")
    launch((1,), (100,), (numbers,), seed=seed)
    with pytest.raises(ExecutionError, match=r"illegal address .*thread \(1[0-2][0-9],0,0\)"):
        launch((1,), (128,), (numbers,), seed=seed)


def test_shared_memory_overflow() -> None:
    with pytest.raises(ExecutionError, match="shared memory written past its 256 bytes, at offset 256"):
        run("shared_overflow", shared=256)
    assert (run("shared_overflow", shared=512) == 1).all()


def test_uninitialised_shared_memory_is_nan() -> None:
    assert np.isnan(run("uninitialised_shared", shared=512)).all()
    # Also in a second run of the same block.
    assert np.isnan(run("uninitialised_shared", shared=512)).all()


def test_bank_conflicts() -> None:
    with pytest.raises(ExecutionError, match="ldmatrix: bank conflict"):
        run("bank_conflict", threads=32, shared=32 * 128)


def reversed_right(kernel: str, seed: int, threads: int = 128) -> bool:
    return np.array_equal(
        run(kernel, threads=threads, seed=seed, shared=threads * 4), np.arange(threads)[::-1]
    )


def test_a_missing_barrier_shows_under_some_schedule() -> None:
    assert all(reversed_right("no_fault", seed) for seed in SCHEDULES)
    assert not any(reversed_right("barrier_missing", seed) for seed in SCHEDULES)
    assert not all(reversed_right("second_barrier_missing", seed) for seed in SCHEDULES)


def test_copies_land_late_or_early() -> None:
    source = guarded(np.arange(256, dtype=np.float32))
    ahead = np.arange(32) * 4
    for seed in SCHEDULES:
        waited = run("copy_wait<true>", source, threads=32, seed=seed, shared=512)
        assert np.array_equal(waited, ahead)
    late = [run("copy_wait<false>", source, threads=32, seed=seed, shared=512) for seed in SCHEDULES]
    assert not all(np.array_equal(numbers, ahead) for numbers in late)
    early = [run("copy_too_early", source, threads=32, seed=seed, shared=512) for seed in SCHEDULES]
    assert not all(np.array_equal(numbers, ahead) for numbers in early)


def test_schedules_can_be_repeated() -> None:
    for seed in range(8):
        once = run("second_barrier_missing", seed=seed, shared=512)
        again = run("second_barrier_missing", seed=seed, shared=512)
        assert np.array_equal(once, again)


def test_impossible_launches() -> None:
    launch = faults().function("no_fault")
    numbers = guarded(np.zeros(128, np.float32))
    for grid, block, shared in [
        ((0,), (32,), 0),
        ((1,), (1025,), 0),
        ((1,), (32,), 1 << 20),
        ((1, 70000), (32,), 0),
    ]:
        with pytest.raises(ExecutionError, match="invalid launch"):
            launch(grid, block, (numbers,), shared_mem=shared)
    with pytest.raises(ExecutionError, match="takes 1 arguments, not 2"):
        launch((1,), (32,), (numbers, np.int32(1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void k() { __shared__ float numbers[4]; }", "dynamic shared memory"),
        ('__global__ void k() { asm volatile("bar.sync 0;"); }', "belongs in ptx.cuh"),
        ("__global__ void k() { unknown(); }", "unknown"),
    ],
)
def test_what_is_not_built(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "kernel.cu"
    file.write_text(text)
    with pytest.raises(BuildError, match=message):
        build_library(file, ["k"], races=False)
