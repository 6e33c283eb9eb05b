"""The kernels' CUDA C++ executed on the CPU. The essay is at the top of ``executor.h``."""

from tests.engine.kernels.executor.memory import guarded
from tests.engine.kernels.executor.module import ExecutionError, HostModule
from tests.engine.kernels.executor.toolchain import SCHEDULES, missing_tools

__all__ = ["SCHEDULES", "ExecutionError", "HostModule", "guarded", "missing_tools"]
