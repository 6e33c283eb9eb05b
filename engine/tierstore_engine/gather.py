"""Copy small fragments with a kernel, for loads whose layers are too small for the copy engines.

A GPU's copy engine takes about as long for 4 KiB as for 20 KiB, so thousands of small copies are slow. The
kernel reads pinned host memory directly, with few thread blocks, while the model computes. A measurement at
start decides up to which size fragments are copied by the kernel.
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
"""Copy engines always copy larger fragments, without a measurement."""

OnStream = Callable[[Stream, Callable[[], None]], None]
"""Call a function while the given stream is torch's current stream."""


class KernelGather:
    """A :class:`tierstore.tiers.device_pool.Gather`. ``below_bytes`` is 0 until a measurement sets it."""

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
    """Return ``below_bytes`` for a pool whose layers have ``nbytes``, from the times that the copy engines
    and the kernel took for equal copies."""
    return nbytes + 1 if kernel_s < engines_s else 0
