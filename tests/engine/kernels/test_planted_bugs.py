"""The tests' own test: every planted bug is caught by them, by plain runs under the four schedules."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from tests.engine.kernels import bugs
from tests.engine.kernels.attention import Executed, one_token_each
from tests.engine.kernels.bugs import Bug
from tests.engine.kernels.device import ABOUT_THE_EXECUTOR
from tests.engine.kernels.executor import SCHEDULES, ExecutionError
from tests.engine.kernels.executor.build import build_library
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.latent_problem import ExecutedLatents, LatentProblem, LatentShape
from tests.engine.kernels.problem import Problem, Shape, guarded_tensor
from tests.engine.kernels.state_problem import DeltaShape, ExecutedStates, Mamba2Shape, StateShape
from tests.engine.kernels.test_packed import check_numbers, check_product, guarded_matrix, kernels_in
from tests.engine.kernels.test_pointwise import EPSILON, check
from tests.engine.kernels.test_products import check as check_products
from tests.engine.kernels.test_products import kernels_in as product_kernels_in
from tests.engine.kernels.test_quantise_write import check_bytes
from tests.engine.test_packed import FORMATS, finite, random_matrix
from tests.portions import chosen
from tierstore_engine.kernels import KERNEL_DIR
from tierstore_engine.kernels.catalog import (
    Instance,
    kernel_set,
    latent_set,
    packed_set,
    pointwise_set,
    product_set,
)
from tierstore_engine.kernels.operations import EVERYTHING, PointwiseKernels, Sight
from tierstore_engine.pointwise import Pointwise

pytestmark = ABOUT_THE_EXECUTOR

Builds: TypeAlias = "dict[Bug, Future[None]]"

PREFILL_GROUP, MMA_GROUP, SIMT_GROUP = 3, 5, 2
CODES_SHAPE = Shape(heads=2 * SIMT_GROUP, kv_heads=2, kv="k8v4")
DELTA = DeltaShape(value_dim=24)  # three warps
MAMBA2 = Mamba2Shape(head_dim=40)  # two blocks of columns
LIMITED = replace(MAMBA2, limits=(0.3, 2.0))
LATENTS = LatentShape(heads=12, width=104, rank=80)
CAPPED_SHAPE = Shape(heads=2 * SIMT_GROUP, kv_heads=2, score_cap=2.0)
PREFILLS = [
    ([(0, 70), (129, 3)], EVERYTHING),
    ([(100, 40)], Sight(window=40)),
    ([(64, 90)], Sight(window=70)),
    ([(70, 90)], Sight(chunk=100)),
    ([(10, 70)], Sight(causal=False)),
]
SPLITS = ((3, 2), (3,), (4,), (2,), (2,))
PACKED_FORMS = ("uint4", "Q5_1", "Q5_K", "Q6_K")
# Long enough for every warp's ring to be filled more than once.
DECODES = [([900, 65, 1], EVERYTHING), ([300, 130], Sight(window=70)), ([300, 130], Sight(chunk=70))]


def planted(bug: Bug, folder: Path) -> Path:
    """A copy of the kernels with the bug in it."""
    kernels = folder / "kernels"
    shutil.copytree(KERNEL_DIR, kernels, ignore=shutil.ignore_patterns("*.py", "__pycache__", "ptx.cuh"))
    text = (kernels / bug.file).read_text()
    assert text.count(bug.old) == bug.times, (
        f"{bug.name}: the text to change is there {text.count(bug.old)} times"
    )
    (kernels / bug.file).write_text(text.replace(bug.old, bug.new))
    return kernels


@pytest.fixture(scope="module")
def builds(
    request: pytest.FixtureRequest, executor: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builds]:
    """The kernels of all bugs that are going to be tested, being built on all cores while the first are
    tested: one g++ at a time is most of what these tests take. They are kept by content, so the tests find
    them."""
    found = [
        item.callspec.params["bug"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and "bug" in item.fixturenames
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {bug: pool.submit(build_planted, bug, tmp_path_factory.mktemp("bug")) for bug in found}
        pool.shutdown(cancel_futures=True)


def build_planted(bug: Bug, folder: Path) -> None:
    """The kernels that the test of ``bug`` is going to launch."""
    kernels = planted(bug, folder)
    for instance in launched_by(bug):
        build_library(kernels / instance.file, [instance.name], races=False)


def launched_by(bug: Bug) -> list[Instance]:
    if bug in bugs.POINTWISE:
        found_pointwise = pointwise_set("float16")
        return [found_pointwise.add_norm, found_pointwise.silu_mul]
    if bug in bugs.CODES:
        shape = CODES_SHAPE
        codes = kernel_set(
            dtype=shape.dtype,
            head_dim=shape.head_dim,
            group=2,
            page_tokens=shape.page_tokens,
            kv=shape.format,
        )
        return [codes.decode, codes.combine, codes.write]
    if bug in bugs.PACKED:
        packed = [packed_set("float16", form) for form in PACKED_FORMS]
        return [each for kernels in packed for each in (kernels.multiply, kernels.unpack)]
    if bug in bugs.PRODUCTS:
        products = product_set("float16")
        return [products.few.instance, products.many.instance]
    prefilling = bug in bugs.PREFILL + bugs.SPLIT_PREFILL + bugs.CHUNKED + bugs.TILES + bugs.PAGES
    group = PREFILL_GROUP if prefilling else SIMT_GROUP if bug in bugs.DECODE_SIMT else MMA_GROUP
    if bug in bugs.CONVOLUTION + bugs.DELTA + bugs.MAMBA2:
        states = (DELTA if bug in bugs.DELTA else MAMBA2).kernels
        return [states.convolve, states.rule]
    if bug in bugs.LATENTS:
        latents = latent_set(dtype="float16", width=LATENTS.width, rank=LATENTS.rank, page_tokens=64)
        return [latents.decode, latents.combine]
    if bug in bugs.CAPPED:
        capped = CAPPED_SHAPE
        found = kernel_set(
            dtype=capped.dtype, head_dim=capped.head_dim, group=SIMT_GROUP, page_tokens=64, capped=True
        )
        return [found.decode, found.combine]
    shape = Shape()
    found = kernel_set(dtype=shape.dtype, head_dim=shape.head_dim, group=group, page_tokens=shape.page_tokens)
    if bug in bugs.SPLIT_PREFILL:
        return [found.split_prefill, found.combine_chunks]
    return [found.prefill] if prefilling else [found.decode, found.combine]


def assert_prefill_caught(kernels: Path, *, split: bool = False) -> None:
    executed = Executed(Shape(heads=PREFILL_GROUP, kv_heads=1), launcher=ExecutorLauncher(folder=kernels))
    for (spans, sight), splits in zip(PREFILLS, SPLITS, strict=True):
        for seed in SCHEDULES:
            try:
                problem = Problem(executed.shape, spans, sight=sight)
                executed.prefill(problem, splits=splits if split else None, seed=seed).check()
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def assert_decode_caught(kernels: Path, group: int) -> None:
    assert_shape_caught(kernels, Shape(heads=2 * group, kv_heads=2))


def assert_shape_caught(kernels: Path, shape: Shape) -> None:
    """Of decoding."""
    executed = Executed(shape, launcher=ExecutorLauncher(folder=kernels))
    for lengths, sight in DECODES:
        for seed in SCHEDULES:
            try:
                problem = Problem(executed.shape, one_token_each(lengths), sight=sight)
                executed.decode(problem, seed=seed).check()
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def assert_latents_caught(kernels: Path) -> None:
    executed = ExecutedLatents(LATENTS, launcher=ExecutorLauncher(folder=kernels))
    for lengths, chunk in (([1, 65, 170], 1), ([200, 66], 3)):
        for seed in SCHEDULES:
            try:
                problem = LatentProblem(LATENTS, lengths, chunk=chunk)
                executed.attend(problem, split=chunk == 1, seed=seed).check()
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def assert_states_caught(kernels: Path, *shapes: StateShape) -> None:
    for shape in shapes:
        executed = ExecutedStates(shape, launcher=ExecutorLauncher(folder=kernels))
        for seed in SCHEDULES:
            try:
                executed.solve([(0, 40), (33, 1), (64, 9)], drafted=[0, 0, 4], seed=seed).check()
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def assert_codes_caught(kernels: Path) -> None:
    """K in 8 bits and V in 4, decoded on CUDA cores, and written."""
    executed = Executed(CODES_SHAPE, launcher=ExecutorLauncher(folder=kernels))
    for lengths, sight in DECODES:
        try:
            problem = Problem(executed.shape, one_token_each(lengths), sight=sight)
            executed.decode(problem).check()
        except (AssertionError, ExecutionError):
            return
    try:
        check_bytes(executed, seed=0)
    except (AssertionError, ExecutionError):
        return
    pytest.fail("not caught")


def assert_pointwise_caught(kernels: Path) -> None:
    launcher = ExecutorLauncher(folder=kernels)
    own, right = PointwiseKernels(launcher, dtype="float16", epsilon=EPSILON), Pointwise(EPSILON)
    for width in (264, 4104):
        hidden, added, both = (
            guarded_tensor(torch.rand(2, each).half() / 64) for each in (width, width, 2 * width)
        )
        weight = guarded_tensor(torch.rand(width).half())
        for launcher.seed in SCHEDULES:
            try:
                totals, normed = own.add_norm(hidden, added, weight)
                right_totals, right_normed = right.add_norm(hidden, added, weight)
                assert torch.equal(totals, right_totals)
                check(normed, right_normed)
                check(own.silu_mul(both), right.silu_mul(both), apart=2)
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def assert_packed_caught(kernels: Path) -> None:
    launcher = ExecutorLauncher(folder=kernels)
    shape = {"group": 12, "block_rows": 3, "zeros": True}
    tables = [random_matrix(FORMATS["uint4"], 20, 2100, 4, **shape, ordered=each) for each in (True, False)]
    whole = [finite(FORMATS[form], 20, 768) for form in PACKED_FORMS]
    try:
        for matrix in map(guarded_matrix, [*tables, *whole]):
            check_numbers(kernels_in("float16", matrix, launcher), matrix, "float16")
        for matrix in map(guarded_matrix, [*whole, finite(FORMATS["uint4"], 20, 520)]):
            for seed in SCHEDULES:
                check_product(kernels_in("float16", matrix, launcher, seed), matrix, "float16", 3)
    except (AssertionError, ExecutionError):
        return
    pytest.fail("not caught")


def assert_products_caught(kernels: Path) -> None:
    launcher = ExecutorLauncher(folder=kernels)
    try:
        for seed in SCHEDULES:
            products = product_kernels_in("float16", launcher, seed)
            check_products(products, "float16", rows=35, products=140, columns=328)
    except (AssertionError, ExecutionError):
        return
    pytest.fail("not caught")


def named(found: list[Bug]) -> pytest.MarkDecorator:
    """Return the parameters: a quarter of the bugs, and the others for the soak. Each needs its own compiled
    kernels."""
    return pytest.mark.parametrize(
        "bug", chosen(found, *found[::4]), ids=lambda bug: f"{bug.file}: {bug.name}"
    )


def test_every_bug_can_be_planted() -> None:
    every = [bug for group in vars(bugs).values() if isinstance(group, list) for bug in group]
    assert len(every) > 150
    texts = {bug.file: (KERNEL_DIR / bug.file).read_text() for bug in every}
    for bug in every:
        assert texts[bug.file].count(bug.old) == bug.times, bug.name


@named(bugs.PREFILL + bugs.CHUNKED + bugs.TILES + bugs.PAGES)
def test_prefill(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_prefill_caught(planted(bug, tmp_path))


@named(bugs.SPLIT_PREFILL)
def test_split_prefill(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_prefill_caught(planted(bug, tmp_path), split=True)


@named(bugs.DECODE_MMA + bugs.SPLITS)
def test_decode_on_tensor_cores(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_decode_caught(planted(bug, tmp_path), group=MMA_GROUP)


@named(bugs.DECODE_SIMT)
def test_decode_on_cuda_cores(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_decode_caught(planted(bug, tmp_path), group=SIMT_GROUP)


@named(bugs.CAPPED)
def test_capped_scores(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_shape_caught(planted(bug, tmp_path), CAPPED_SHAPE)


@named(bugs.LATENTS)
def test_latents(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_latents_caught(planted(bug, tmp_path))


@named(bugs.DELTA)
def test_delta(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_states_caught(planted(bug, tmp_path), DELTA)


@named(bugs.CONVOLUTION + bugs.MAMBA2)
def test_mamba2(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_states_caught(planted(bug, tmp_path), MAMBA2, LIMITED)


@named(bugs.CODES)
def test_codes(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_codes_caught(planted(bug, tmp_path))


@named(bugs.POINTWISE)
def test_pointwise(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_pointwise_caught(planted(bug, tmp_path))


@named(bugs.PACKED)
def test_packed(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_packed_caught(planted(bug, tmp_path))


@named(bugs.PRODUCTS)
def test_products(bug: Bug, tmp_path: Path, builds: Builds) -> None:
    builds[bug].result()
    assert_products_caught(planted(bug, tmp_path))


def test_without_a_bug_nothing_is_caught() -> None:
    with pytest.raises(pytest.fail.Exception):
        assert_products_caught(KERNEL_DIR)
    with pytest.raises(pytest.fail.Exception):
        assert_packed_caught(KERNEL_DIR)
    with pytest.raises(pytest.fail.Exception):
        assert_pointwise_caught(KERNEL_DIR)
    with pytest.raises(pytest.fail.Exception):
        assert_codes_caught(KERNEL_DIR)
    with pytest.raises(pytest.fail.Exception):
        assert_states_caught(KERNEL_DIR, DELTA, MAMBA2, LIMITED)
    with pytest.raises(pytest.fail.Exception):
        assert_latents_caught(KERNEL_DIR)
    with pytest.raises(pytest.fail.Exception):
        assert_shape_caught(KERNEL_DIR, CAPPED_SHAPE)
    with pytest.raises(pytest.fail.Exception):
        assert_prefill_caught(KERNEL_DIR)
    with pytest.raises(pytest.fail.Exception):
        assert_prefill_caught(KERNEL_DIR, split=True)
    for group in (SIMT_GROUP, MMA_GROUP):
        with pytest.raises(pytest.fail.Exception):
            assert_decode_caught(KERNEL_DIR, group)
