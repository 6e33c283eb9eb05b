"""How a kernel is loaded and launched: the seam between the attention backend and a device.

On a GPU that is CuPy (``cupy_launcher.py``). The tests put an executor there that runs the kernels' text on
the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from tierstore_engine.kernels.catalog import Instance

Argument: TypeAlias = "torch.Tensor | np.generic[Any] | None"
"""What a kernel is given: a tensor (its address), a number in exactly the parameter's type, or None
(null)."""

Kernel: TypeAlias = Callable[[Sequence[int], Sequence[Argument]], None]
"""``kernel(grid, arguments)``: launch it on the device's current stream. Does not wait for it."""


class Launcher(ABC):
    """Kernels of one device."""

    @abstractmethod
    def load(self, instance: Instance) -> Kernel:
        """The kernel, ready to launch; compiles it if need be. Raises
        :class:`~tierstore_engine.kernels.errors.KernelError`."""
