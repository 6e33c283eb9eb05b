"""Data races, by ThreadSanitizer: in the executor every CUDA thread is a thread to it, so that a race is
found on its first run, whatever the order was."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.engine.kernels import bugs
from tests.engine.kernels.bugs import Bug
from tests.engine.kernels.device import ABOUT_THE_EXECUTOR
from tests.engine.kernels.executor.toolchain import compiler
from tests.engine.kernels.races import PACKED_FORMATS, SHAPES
from tests.engine.kernels.test_planted_bugs import planted
from tests.portions import chosen
from tierstore_connectors.vllm import pieces
from tierstore_engine.kernels import KERNEL_DIR
from tierstore_engine.kernels.catalog import (
    PAGE_COPY,
    Instance,
    delta_set,
    kernel_set,
    latent_set,
    mamba2_set,
    packed_set,
    pointwise_set,
    product_set,
)

FOUND = 66
COPY_BLOCKS = Instance(pieces.SOURCE.name, pieces.KERNEL, pieces.THREADS)

pytestmark = [*ABOUT_THE_EXECUTOR, pytest.mark.usefixtures("tsan")]


@cache
def tsan_library() -> Path | None:
    """GCC's TSan, where it is installed and this kernel lets it map its memory."""
    question = [compiler(), "-print-file-name=libtsan.so"]
    library = Path(subprocess.run(question, capture_output=True, text=True, check=True).stdout.strip())
    if not library.is_absolute():
        return None
    trial = subprocess.run(["true"], env={"LD_PRELOAD": str(library)}, capture_output=True)
    return library if trial.returncode == 0 else None


@pytest.fixture(scope="module")
def tsan() -> None:
    if tsan_library() is None:
        pytest.skip("ThreadSanitizer cannot run here: install libtsan (it comes with g++)")


def under_tsan(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(tsan_library()),
        # Each CUDA thread has a history. The smallest takes half the time, and finds the same.
        "TSAN_OPTIONS": f"exitcode={FOUND}:history_size=0",
        # Their worker threads would be watched as well.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", f"tests.engine.kernels.{program}", *arguments]
    root = Path(__file__).parents[3]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)


# Two shapes of each kernel. Which of the decode kernels it is goes by the heads per KV head.
JOBS = {
    "first": (
        *("prefill:plain", "decode:plain", "decode:other", "write:plain", "merge:plain", "copy:plain"),
        *("pointwise:plain", "blocks:plain", "prefill:codes", "write:codes", "latents:plain"),
        *("delta:plain", "mamba2:plain", "packed:plain", "product:plain"),
    ),
    "second": (
        *("prefill:other", "decode:single", "decode:wide", "write:other", "merge:other", "copy:other"),
        *("pointwise:other", "blocks:other", "latents:wide", "delta:other", "mamba2:other"),
        *("decode:other codes", "write:other codes", "packed:other", "product:other"),
    ),
}


@pytest.mark.parametrize("shapes", chosen(JOBS, "first"))
def test_no_races(shapes: str) -> None:
    done = under_tsan("races", str(KERNEL_DIR), *JOBS[shapes])
    assert done.returncode == 0, done.stderr[-8000:]


def test_both_shapes_of_every_kernel_are_raced() -> None:
    """Each set of jobs launches every kernel, and no instance of the attention kernels is in both."""
    launched = [
        {instance for job in jobs for instance in launched_by(*job.split(":"))} for jobs in JOBS.values()
    ]
    names = [{instance.name.split("<")[0] for instance in instances} for instances in launched]
    sources = [*KERNEL_DIR.glob("*.cu"), pieces.SOURCE]
    kernels = re.findall(r"__launch_bounds__\([^)]*\)\s+(\w+)\(", "".join(f.read_text() for f in sources))
    assert names == [set(kernels)] * 2
    # These have no template arguments: other fragments.
    assert launched[0] & launched[1] == {PAGE_COPY, COPY_BLOCKS}


def launched_by(job: str, shape: str) -> list[Instance]:
    """The kernels of one job of races.py."""
    if job in ("copy", "blocks"):
        return [PAGE_COPY if job == "copy" else COPY_BLOCKS]
    of = SHAPES[shape]
    if job == "pointwise":
        decoding = pointwise_set(of.dtype)
        return [decoding.add_norm, decoding.silu_mul]
    if job == "packed":
        weights = packed_set(of.dtype, PACKED_FORMATS[of.dtype])
        return [weights.unpack, weights.multiply]
    if job == "product":
        products = product_set(of.dtype)
        return [products.few.instance, products.many.instance]
    if job in ("delta", "mamba2"):
        rows = of.head_dim // 4
        states = (
            delta_set(dtype=of.dtype, key_dim=rows, value_dim=of.head_dim // 2, conv_width=4)
            if job == "delta"
            else mamba2_set(dtype=of.dtype, state_dim=rows, conv_width=4)
        )
        return [states.convolve, states.rule]
    if job == "latents":
        rank = of.head_dim
        return list(
            latent_set(dtype=of.dtype, width=2 * rank + 8, rank=rank, page_tokens=of.page_tokens).instances()
        )
    found = kernel_set(
        dtype=of.dtype,
        head_dim=of.head_dim,
        group=of.heads // of.kv_heads,
        page_tokens=of.page_tokens,
        kv=of.format,
    )
    launched = {
        "prefill": [found.prefill, found.split_prefill, found.combine_chunks],
        "decode": [found.decode, found.combine],
        "write": [found.write, *([found.rope_write] if found.rope_write else [])],
        "merge": [found.merge],
    }
    return launched[job]


def test_races_are_found() -> None:
    """The test above must be able to fail. Shuffles wait for other lanes, but order no memory."""
    done = under_tsan("faulty", "barrier_missing", "shuffle_for_barrier")
    assert done.returncode == FOUND, done.stderr[-8000:]
    first, second = done.stderr.split("running shuffle_for_barrier")
    assert "data race" in first, first[-8000:]
    assert "data race" in second, second[-8000:]


RACES = [
    (bug, job)
    for found, job in (
        (bugs.PREFILL, "prefill:plain"),
        (bugs.DECODE_MMA, "decode:other"),
        (bugs.DECODE_SIMT, "decode:plain"),
        (bugs.POINTWISE, "pointwise:plain"),
        (bugs.LATENTS, "latents:plain"),
        (bugs.DELTA, "delta:plain"),
        (bugs.MAMBA2, "mamba2:plain"),
        (bugs.PACKED, "packed:plain"),
        (bugs.PRODUCTS, "product:plain"),
    )
    for bug in found
    if bug.name in bugs.RACES
]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("bug", "job"), RACES, ids=lambda value: value.name if isinstance(value, Bug) else value
)
def test_planted_races_are_found(bug: Bug, job: str, tmp_path: Path) -> None:
    done = under_tsan("races", str(planted(bug, tmp_path)), job)
    assert done.returncode == FOUND, done.stderr[-8000:]
    assert "data race" in done.stderr
