"""Kernels on a GPU: compiled by NVRTC, loaded and launched through CuPy, on torch's current stream.

CuPy is imported when a launcher is made and not before: nothing else of the engine needs it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.cubins import CubinCache
from tierstore_engine.kernels.errors import KernelError
from tierstore_engine.kernels.launcher import Argument, Kernel, Launcher

_DEFAULT_SHARED_BYTES = 48 * 1024  # what a block may have without asking


class CupyLauncher(Launcher):
    """The launcher of the CUDA device ``device`` (such as ``cuda`` or ``cuda:1``).

    Raises :class:`KernelError` where CuPy or the device is missing.
    """

    def __init__(self, device: str, cubins: CubinCache | None = None) -> None:
        self._cupy = _import_cupy()
        if not torch.cuda.is_available():
            raise KernelError(
                f"torch sees no CUDA device for {device!r}: check the driver and torch's CUDA build"
            )
        self._device = torch.device(device)
        self._index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(self._index)
        self._arch = f"sm_{major}{minor}"
        driver = self._cupy.cuda.runtime.driverGetVersion() // 1000
        self._cubins = cubins or CubinCache(newest=driver)
        # CuPy loads images from files only, and may come back to them.
        self._folder = tempfile.TemporaryDirectory(prefix="tierstore-kernels-")

    def load(self, instance: Instance) -> Kernel:
        cubin = self._cubins.get(instance, self._arch)
        file = Path(self._folder.name) / f"{cubin.symbol}.cubin"
        file.write_bytes(cubin.image)
        with self._cupy.cuda.Device(self._index):
            function = self._cupy.RawModule(path=str(file)).get_function(cubin.symbol)
            if instance.shared_bytes > _DEFAULT_SHARED_BYTES:
                function.max_dynamic_shared_size_bytes = instance.shared_bytes
        block = (instance.threads,)

        def launch(grid: Sequence[int], arguments: Sequence[Argument]) -> None:
            stream = torch.cuda.current_stream(self._index).cuda_stream
            with self._cupy.cuda.Device(self._index), self._cupy.cuda.ExternalStream(stream):
                values = tuple(_value(argument) for argument in arguments)
                function(tuple(grid), block, values, shared_mem=instance.shared_bytes)

        return launch


def _value(argument: Argument) -> Any:
    if argument is None:
        return np.uintp(0)
    if isinstance(argument, torch.Tensor):
        return np.uintp(argument.data_ptr())
    return argument


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise KernelError(
            "CuPy, which launches the CUDA kernels, is not installed: pip install 'tierstore[cuda13]' "
            "(or 'tierstore[cuda12]' for drivers before 580)"
        ) from error
    return cupy
