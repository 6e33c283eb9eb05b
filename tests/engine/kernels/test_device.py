"""Running the tests on a device: with copies in other memory, as far as that can be seen without one."""

from __future__ import annotations

from tests.engine.kernels.attention import Executed, one_token_each
from tests.engine.kernels.device import ABOUT_THE_EXECUTOR, MirrorLauncher
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.kernels.problem import Problem, Shape

pytestmark = ABOUT_THE_EXECUTOR


def test_tensors_go_and_come_back() -> None:
    mirrored = Executed(Shape(), launcher=MirrorLauncher(ExecutorLauncher(), "cpu"))
    mirrored.prefill(Problem(mirrored.shape, [(10, 20)])).check()
    mirrored.decode(Problem(mirrored.shape, one_token_each([100, 30]))).check()
