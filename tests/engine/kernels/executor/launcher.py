"""The executor where the engine expects a device: kernels on torch's CPU tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from tests.engine.kernels.executor.module import HostModule
from tierstore_engine.kernels import KERNEL_DIR
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.launcher import Argument, Kernel, Launcher


class ExecutorLauncher(Launcher):
    """Launches under the schedule ``seed``, which may be changed at any time.

    ``folder`` holds the kernels, if not the package's own; ``races`` and ``fused`` as for
    :class:`HostModule`.
    """

    def __init__(
        self, seed: int = 0, *, folder: Path = KERNEL_DIR, races: bool = False, fused: bool = False
    ) -> None:
        self.seed = seed
        self.launches: list[str] = []
        """The names of the kernels launched so far."""
        self._folder = folder
        self._races, self._fused = races, fused

    def load(self, instance: Instance) -> Kernel:
        file = self._folder / instance.file

        def launch(grid: Sequence[int], arguments: Sequence[Argument]) -> None:
            self.launches.append(instance.name)
            values = [_value(argument) for argument in arguments]
            # Not compiled before it is needed: a test seldom launches all kernels of a model.
            module = _module(file, instance.name, self._races, self._fused)
            function = module.function(instance.name)
            function(grid, (instance.threads,), values, shared_mem=instance.shared_bytes, seed=self.seed)

        return launch


@cache
def _module(file: Path, name: str, races: bool, fused: bool) -> HostModule:
    return HostModule(file, [name], races=races, fused=fused)


def _value(argument: Argument) -> np.generic:
    if argument is None:
        return np.uintp(0)
    if isinstance(argument, torch.Tensor):
        assert argument.device.type == "cpu"
        return np.uintp(argument.data_ptr())
    return argument
