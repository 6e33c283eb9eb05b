"""Copy small fragments with a kernel, for loads whose layers are too small for the copy engines.

A copy engine takes about as long for 4 KiB as for 20 KiB, so thousands of such pieces are slow. The kernel
reads pinned host memory directly, with few blocks, and shares the device with the model. A measurement at
start decides where it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tierstore.tiers.device import Addresses, Stream
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import PageCopy
from tierstore_engine.moving import to_device

LARGEST_BYTES = 64 << 10
"""Larger fragments are always left to the copy engines, without a measurement."""

OnStream = Callable[[Stream, Callable[[], None]], None]
"""Call a function with a stream as torch's current one."""


class KernelGather:
    """Implement :class:`tierstore.tiers.device_pool.Gather`. ``below_bytes`` is 0 until it is set."""

    def __init__(self, launcher: Launcher, on_stream: OnStream, *, device: str) -> None:
        self.below_bytes = 0
        self._kernel = PageCopy(launcher)
        self._on_stream = on_stream
        self._device = torch.device(device)

    def copy(self, stream: Stream, to: Addresses, sources: Addresses, nbytes: int) -> None:
        host = torch.from_numpy(np.stack([to, sources]).view(np.int64))

        def launch() -> None:
            targets, origins = to_device(host, self._device)
            self._kernel.copy(targets, origins, nbytes)

        self._on_stream(stream, launch)


def crossover(engines_s: float, kernel_s: float, nbytes: int) -> int:
    """Return ``below_bytes`` for a pool whose layers have ``nbytes``, from the time of the same copies by
    engines and by kernel."""
    return nbytes + 1 if kernel_s < engines_s else 0
