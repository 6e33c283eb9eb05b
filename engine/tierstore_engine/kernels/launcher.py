"""The interface to load and launch kernels, between the attention backend and a device.

On a GPU CuPy implements it (``cupy_launcher.py``). The tests implement it with an executor that runs the
kernels' text on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from tierstore_engine.kernels.catalog import Instance

Argument: TypeAlias = "torch.Tensor | np.generic[Any] | None"
"""An argument of a kernel: a tensor (its address), a number in exactly the parameter's type, or None
(null)."""

Kernel: TypeAlias = Callable[[Sequence[int], Sequence[Argument]], None]
"""``kernel(grid, arguments)`` launches the kernel on the device's current stream, without waiting for it."""


class Launcher(ABC):
    """The kernels of one device."""

    @abstractmethod
    def load(self, instance: Instance) -> Kernel:
        """Return a kernel ready to launch, after compiling it if necessary. Raises
        :class:`~tierstore_engine.errors.KernelError`."""
