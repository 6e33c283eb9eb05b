"""Where the kernel tests launch: on the executor, or on a GPU with ``TIERSTORE_KERNEL_DEVICE=cuda``.

The tests keep their tensors in host memory either way. For a GPU every tensor that a kernel is given goes
there before the launch and comes back after it, so that the very same tests run on both.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.launcher import Argument, Kernel, Launcher

DEVICE = os.environ.get("TIERSTORE_KERNEL_DEVICE", "executor")

ABOUT_THE_EXECUTOR = [
    pytest.mark.usefixtures("executor"),
    pytest.mark.skipif(DEVICE != "executor", reason="says nothing about a device"),
]
"""Marks for tests that run on the executor wherever the others run."""


class MirrorLauncher(Launcher):
    """Launches of ``inner`` on copies, on ``device``, of the host tensors that it is given."""

    def __init__(self, inner: Launcher, device: str) -> None:
        self.seed = 0  # devices have schedules of their own
        self.launches: list[str] = []
        self._inner = inner
        self._device = device

    def load(self, instance: Instance) -> Kernel:
        kernel = self._inner.load(instance)

        def launch(grid: Sequence[int], arguments: Sequence[Argument]) -> None:
            self.launches.append(instance.name)
            copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            kernel(grid, [self._mirrored(argument, copies) for argument in arguments])
            for host, copy in copies.values():
                host.copy_(copy)  # waits for the kernel

        return launch

    def _mirrored(self, argument: Argument, copies: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Argument:
        if not isinstance(argument, torch.Tensor):
            return argument
        # The whole memory that the tensor is a view of: others may be views of it as well.
        storage = argument.untyped_storage()
        if storage.data_ptr() not in copies:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            copies[storage.data_ptr()] = host, host.to(self._device, copy=True)
        _, copy = copies[storage.data_ptr()]
        return np.uintp(copy.data_ptr() + argument.data_ptr() - storage.data_ptr())


def kernel_launcher(*, fused: bool = False) -> ExecutorLauncher | MirrorLauncher:
    """A launcher for the package's own kernels, with a ``seed`` that chooses the executor's schedule.
    ``fused`` as for :class:`ExecutorLauncher`."""
    if DEVICE == "executor":
        return ExecutorLauncher(fused=fused)
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher

    return MirrorLauncher(CupyLauncher(DEVICE), DEVICE)
