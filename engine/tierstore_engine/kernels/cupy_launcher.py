"""Kernels on a GPU. NVRTC compiles them. CuPy loads them, and launches them on torch's current stream.

CuPy is imported only when a launcher is made: the rest of the engine does not need it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tierstore.extras import install
from tierstore_engine.errors import KernelError
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.cubins import CubinCache
from tierstore_engine.kernels.launcher import Argument, Kernel, Launcher

_DEFAULT_SHARED_BYTES = 48 * 1024  # shared memory that a block may have without a special attribute
_OLDEST = (8, 0)  # the least compute capability that has cp.async and mma of bfloat16


class CupyLauncher(Launcher):
    """The launcher of the CUDA device ``device`` (such as ``cuda`` or ``cuda:1``).

    Raises :class:`KernelError` if CuPy or the device is missing, or the device is too old.
    """

    def __init__(self, device: str, cubins: CubinCache | None = None) -> None:
        self._cupy = import_cupy()
        if not torch.cuda.is_available():
            raise KernelError(
                f"torch sees no CUDA device for {device!r}: check the driver and torch's CUDA build"
            )
        self._device = torch.device(device)
        self._index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        self._arch = architecture(*torch.cuda.get_device_capability(self._index))
        driver = self._cupy.cuda.runtime.driverGetVersion() // 1000
        self._cubins = cubins or CubinCache(newest=driver)

    def load(self, instance: Instance) -> Kernel:
        cubin = self._cubins.get(instance, self._arch)
        with self._cupy.cuda.Device(self._index), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            # CuPy loads images from files only, and reads the file here, once per device.
            file.write(cubin.image)
            file.flush()
            function = self._cupy.RawModule(path=file.name).get_function(cubin.symbol)
            if instance.shared_bytes > _DEFAULT_SHARED_BYTES:
                function.max_dynamic_shared_size_bytes = instance.shared_bytes
        block = (instance.threads,)

        def launch(grid: Sequence[int], arguments: Sequence[Argument]) -> None:
            stream = _LauncherStream(torch.cuda.current_stream(self._index).cuda_stream)
            values = tuple(_value(argument) for argument in arguments)
            with self._cupy.cuda.Device(self._index):
                function(tuple(grid), block, values, shared_mem=instance.shared_bytes, stream=stream)

        return launch


@dataclass(frozen=True, slots=True)
class _LauncherStream:
    """A stream in the form that CuPy's launch takes: it reads only the handle. CuPy's class for foreign
    streams, ``ExternalStream``, warns at every use from CuPy 14 on, and its successor is not in CuPy 13."""

    ptr: int


def architecture(major: int, minor: int) -> str:
    """Return NVRTC's name of a compute capability. Raises :class:`KernelError` if it is too old."""
    if (major, minor) < _OLDEST:
        raise KernelError(
            f"the CUDA kernels need compute capability {_OLDEST[0]}.{_OLDEST[1]} (Ampere) or newer, and this "
            f"device has {major}.{minor}: use --device cpu"
        )
    return f"sm_{major}{minor}"


def _value(argument: Argument) -> Any:
    if argument is None:
        return np.uintp(0)
    if isinstance(argument, torch.Tensor):
        return np.uintp(argument.data_ptr())
    return argument


def import_cupy() -> Any:
    """Return the module CuPy. Raises :class:`KernelError` with the package to install if CuPy is missing."""
    try:
        import cupy
    except ImportError as error:
        raise KernelError(
            f"CuPy, which launches the CUDA kernels, is not installed: {install('cuda13')}. "
            "Drivers before 580 need the extra cuda12 instead"
        ) from error
    return cupy
