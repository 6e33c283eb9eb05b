"""Every kernel compiles for every architecture, without spills and within its register ceiling. Needs no GPU.

Registers decide how many blocks share an SM, and a spill in an inner loop is traffic to memory that no
profile would excuse. The ceilings are what the compiler reaches today; who raises one should know why.
Reports are kept between runs, by content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
import xxhash

from tests.compiled import cache_dir
from tests.portions import chosen
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels import KERNEL_DIR
from tierstore_engine.kernels.catalog import (
    ARCHITECTURES,
    HEAD_DIMS,
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
from tierstore_engine.kernels.cubins import source_digest
from tierstore_engine.kernels.nvrtc import Nvrtc
from tierstore_engine.kernels.toolkit import find_toolkit
from tierstore_engine.kv_format import KVFormat

WIDEST = 255  # what a thread can have at all

# Registers per thread by kernel and head_dim (16, 32, 64, 96, 128, 256).
CEILINGS = {
    "rope_write": (64, 64, 64, 64, 64, 64),
    "combine_splits": (72, 72, 64, 40, 48, 48),
    "combine_chunks": (72, 72, 64, 48, 40, 40),
    "merge_states": (24, 24, 24, 24, 24, 24),
    "decode_simt 1": (64, 64, 64, 104, 96, 128),
    "decode_simt 2": (72, 80, 96, 168, 128, 168),
    "decode_mma": (64, 80, 128, 160, 208, 248),
    "prefill": (168, 168, 240, 232, WIDEST, WIDEST),
}
PAGE_COPY_CEILING = 48
POINTWISE_CEILING = 48
CONVOLVE_CEILING = 48
DELTA_CEILING = 128
# By rows, of which Granite 4.0-H and Nemotron-H have 128: room for the blocks per SM of the launch bounds.
MAMBA2_CEILINGS = {64: 128, 128: 128, 256: 254}
PRODUCT_CEILINGS = {"few": 64, "many": 128}
PACKED_CEILINGS = {"unpack": 48, "multiply": 128}
PACKED_FORMS = ("Q4_1", "Q5_K", "Q6_K", "fp8_e4m3", "uint4", "mxfp4")
LATENT_CEILINGS = {"write": 64, "decode": 160, "combine": 64}
BLACKWELL = ("sm_100", "sm_120")
BLOCK_BYTES = 99 * 1024  # of shared memory on sm_86 and sm_89, the smallest


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    """The compiler that is used here."""
    return compiler_of(None)


@pytest.fixture(scope="module")
def cuda12() -> Nvrtc:
    """CUDA 12's, where that is another one."""
    compiler = compiler_of(12)
    if compiler.version == compiler_of(None).version:
        pytest.skip("that is the compiler which the other tests use")
    return compiler


@pytest.fixture(params=["nvrtc", "cuda12"])
def either(request: pytest.FixtureRequest) -> Nvrtc:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Nvrtc)
    return found


def compiler_of(newest: int | None) -> Nvrtc:
    try:
        return Nvrtc(find_toolkit(newest=newest))
    except KernelError as error:
        pytest.skip(f"kernels cannot be compiled: {error}")


def instances(dtype: str, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[tuple[Instance, int]]:
    """Every kernel for ``dtype``, with its register ceiling."""
    yield PAGE_COPY, PAGE_COPY_CEILING
    pointwise = pointwise_set(dtype)
    yield pointwise.add_norm, POINTWISE_CEILING
    yield pointwise.silu_mul, POINTWISE_CEILING
    latents = latent_set(dtype=dtype, width=576, rank=512, page_tokens=64)
    yield latents.write, LATENT_CEILINGS["write"]
    yield latents.decode, LATENT_CEILINGS["decode"]
    yield latents.combine, LATENT_CEILINGS["combine"]
    products = product_set(dtype)
    yield products.few.instance, PRODUCT_CEILINGS["few"]
    yield products.many.instance, PRODUCT_CEILINGS["many"]
    for form in PACKED_FORMS:
        packed = packed_set(dtype, form)
        yield packed.unpack, PACKED_CEILINGS["unpack"]
        yield packed.multiply, PACKED_CEILINGS["multiply"]
    delta = delta_set(dtype=dtype, key_dim=128, value_dim=128, conv_width=4)
    yield delta.convolve, CONVOLVE_CEILING
    yield delta.rule, DELTA_CEILING
    for state_dim, ceiling in MAMBA2_CEILINGS.items():
        yield mamba2_set(dtype=dtype, state_dim=state_dim, conv_width=4).rule, ceiling
    for head_dim in head_dims:
        kernels: dict[Instance, str] = {}
        for group in (1, 2, 16):
            for instance in kernel_set(
                dtype=dtype, head_dim=head_dim, group=group, page_tokens=64
            ).instances():
                kernel = instance.name.split("<")[0]
                kernels[instance] = f"{kernel} {group}" if kernel == "decode_simt" else kernel
        for instance, kernel in kernels.items():
            yield instance, CEILINGS[kernel][HEAD_DIMS.index(head_dim)]


def report(nvrtc: Nvrtc, instance: Instance, arch: str) -> dict[str, int]:
    """What the compiler says about a kernel, from before if nothing has changed."""
    key = xxhash.xxh3_128_hexdigest("\0".join([_sources(), instance.name, arch, str(nvrtc.version)]).encode())
    kept = cache_dir() / f"{key}.json"
    if not kept.exists():
        text = (KERNEL_DIR / instance.file).read_text()
        compiled = nvrtc.compile(text, instance.name, arch=arch, includes=[str(KERNEL_DIR)])
        found = {
            "registers": compiled.registers,
            "spill": compiled.spill_bytes,
            "stack": compiled.stack_bytes,
        }
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


_sources = cache(source_digest)


def spilled(instance: Instance, arch: str) -> int:
    """Bytes of a thread that may be spilled: none, but where the compiler does so to have a round number of
    registers, in a kernel for heads as small as no model in use has them."""
    return 8 if arch == "sm_100" and re.match(r"decode_simt<\w+, 16, 64, 2,", instance.name) else 0


def check(nvrtc: Nvrtc, jobs: list[tuple[Instance, int, str]]) -> None:
    """``jobs`` are kernels, their ceilings, and architectures."""
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda job: report(nvrtc, job[0], job[2]), jobs)
    wrong = [
        f"{instance.name} for {arch}: {found}, ceiling {ceiling}"
        for (instance, ceiling, arch), found in zip(jobs, reports, strict=True)
        if found["registers"] > ceiling or max(found["spill"], found["stack"]) > spilled(instance, arch)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)), ids=ARCHITECTURES)
def test_no_spills(nvrtc: Nvrtc, number: int) -> None:
    """Half of the kernels, each for one architecture. The types, of which an architecture has one here,
    differ in conversions only."""
    jobs = list(instances(("bfloat16", "float16")[number % 2]))
    check(nvrtc, [(*job, ARCHITECTURES[number]) for job in jobs[number :: 2 * len(ARCHITECTURES)]])


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_spills_in_either_type(nvrtc: Nvrtc, arch: str, dtype: str) -> None:
    check(nvrtc, [(*job, arch) for job in instances(dtype)])


def test_no_spills_by_cuda_12(cuda12: Nvrtc) -> None:
    """A third of the kernels for the newest architecture that CUDA 12.6 knows."""
    check(cuda12, [(*job, "sm_90") for job in list(instances("float16", (128,)))[::3]])


def of_codes(dtype: str, kv: str, head_dims: Sequence[int]) -> list[tuple[Instance, int]]:
    """The kernels that read and write codes, which may have all registers that there are."""
    found = set()
    for head_dim in head_dims:
        for group in (1, 2, 16):
            kernels = kernel_set(
                dtype=dtype, head_dim=head_dim, group=group, page_tokens=64, kv=KVFormat.parse(kv)
            )
            found |= {kernels.write, kernels.decode, kernels.prefill, kernels.split_prefill}
    return [(instance, WIDEST) for instance in sorted(found, key=str)]


@pytest.mark.parametrize(
    ("arch", "kv"),
    chosen([("sm_80", "fp8_e4m3"), ("sm_90", "k8v4"), ("sm_120", "fp8_e4m3")], ("sm_90", "k8v4")),
)
def test_codes_do_not_spill(nvrtc: Nvrtc, arch: str, kv: str) -> None:
    check(nvrtc, [(*job, arch) for job in of_codes("bfloat16", kv, (128,))])


@pytest.mark.parametrize(
    ("arch", "head_dim"), chosen([("sm_80", 256), ("sm_90", 128), ("sm_120", 256)], ("sm_90", 128))
)
def test_capped_scores_do_not_spill(nvrtc: Nvrtc, arch: str, head_dim: int) -> None:
    shape = {"dtype": "bfloat16", "head_dim": head_dim, "page_tokens": 64, "capped": True}
    found = set()
    for group in (2, 16):
        kernels = kernel_set(group=group, **shape)
        found |= {kernels.decode, kernels.prefill, kernels.split_prefill}
    check(nvrtc, [(instance, WIDEST, arch) for instance in sorted(found, key=str)])


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_e5m2", "int8", "int4", "k8v4"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_codes_of_every_shape_compile(nvrtc: Nvrtc, arch: str, kv: str, dtype: str) -> None:
    jobs = [instance for instance, _ in of_codes(dtype, kv, HEAD_DIMS)]
    assert all(report(nvrtc, instance, arch)["registers"] <= WIDEST for instance in jobs)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_spills_anywhere_by_cuda_12(cuda12: Nvrtc, dtype: str, arch: str) -> None:
    if arch in BLACKWELL and cuda12.version < (12, 8):
        pytest.skip("CUDA 12.8 is the first that knows it")
    check(cuda12, [(*job, arch) for job in instances(dtype)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shared_memory_fits_the_smallest_architecture(dtype: str) -> None:
    for instance, _ in instances(dtype):
        assert instance.shared_bytes <= BLOCK_BYTES, instance


def test_a_kernel_that_spills_is_reported(either: Nvrtc) -> None:
    """The test above must be able to fail."""
    text = """
    __global__ void __launch_bounds__(1024) crowded(float* numbers) {
      float held[200];
    #pragma unroll
      for (int i = 0; i < 200; i++) held[i] = numbers[i];
      __syncthreads();
    #pragma unroll
      for (int i = 0; i < 200; i++) numbers[i] = held[199 - i];
    }"""
    compiled = either.compile(text, "crowded", arch="sm_90", includes=[])
    assert compiled.spill_bytes > 0
    assert compiled.registers <= 64


def test_what_does_not_compile(either: Nvrtc) -> None:
    with pytest.raises(
        KernelError, match=r"cannot compile broken for sm_90 \(NVRTC_ERROR_COMPILATION\):\n.*unknown"
    ):
        either.compile("__global__ void broken() { unknown(); }", "broken", arch="sm_90", includes=[])
    with pytest.raises(KernelError, match="cannot compile kernel for sm_1"):
        either.compile("__global__ void kernel() {}", "kernel", arch="sm_1", includes=[])
