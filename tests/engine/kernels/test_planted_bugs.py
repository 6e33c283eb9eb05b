"""The tests' own test: every planted bug is caught by them, by plain runs under the four schedules."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine.kernels import bugs
from tests.engine.kernels.attention import Executed, one_token_each
from tests.engine.kernels.bugs import Bug
from tests.engine.kernels.executor import SCHEDULES, ExecutionError
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import Problem, Shape
from tierstore_engine.kernels import KERNEL_DIR

pytestmark = pytest.mark.usefixtures("executor")

PREFILLS = [([(0, 70), (129, 3)], None), ([(100, 40)], 40), ([(64, 90)], 70)]
# Long enough for every warp's ring to be filled more than once.
DECODES = [([900, 65, 1], None), ([300, 130], 70)]


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


def assert_prefill_caught(kernels: Path) -> None:
    executed = Executed(Shape(heads=3, kv_heads=1), launcher=ExecutorLauncher(folder=kernels))
    for spans, window in PREFILLS:
        for seed in SCHEDULES:
            try:
                executed.prefill(Problem(executed.shape, spans, window=window), seed=seed).check()
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def assert_decode_caught(kernels: Path, group: int) -> None:
    executed = Executed(Shape(heads=2 * group, kv_heads=2), launcher=ExecutorLauncher(folder=kernels))
    for lengths, window in DECODES:
        for seed in SCHEDULES:
            try:
                problem = Problem(executed.shape, one_token_each(lengths), window=window)
                executed.decode(problem, seed=seed).check()
            except (AssertionError, ExecutionError):
                return
    pytest.fail("not caught")


def named(found: list[Bug]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bug", found, ids=lambda bug: f"{bug.file}: {bug.name}")


@named(bugs.PREFILL + bugs.TILES + bugs.PAGES)
def test_prefill(bug: Bug, tmp_path: Path) -> None:
    assert_prefill_caught(planted(bug, tmp_path))


@named(bugs.DECODE_MMA + bugs.SPLITS)
def test_decode_on_tensor_cores(bug: Bug, tmp_path: Path) -> None:
    assert_decode_caught(planted(bug, tmp_path), group=5)


@named(bugs.DECODE_SIMT)
def test_decode_on_cuda_cores(bug: Bug, tmp_path: Path) -> None:
    assert_decode_caught(planted(bug, tmp_path), group=2)


def test_without_a_bug_nothing_is_caught() -> None:
    with pytest.raises(pytest.fail.Exception):
        assert_prefill_caught(KERNEL_DIR)
    for group in (2, 5):
        with pytest.raises(pytest.fail.Exception):
            assert_decode_caught(KERNEL_DIR, group)
