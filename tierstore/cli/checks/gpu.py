"""Checks of the GPU, through the NVIDIA driver. The checks need neither torch nor CuPy."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from tierstore.cli.checks.check import Check, fail, ok, warn
from tierstore.extras import install

_NAME_BYTES = 128
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


class _DriverError(Exception):
    """The driver is installed but does not work."""


def checks() -> Iterator[Check]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield ok("GPU", "no NVIDIA driver: everything runs on the CPU")
        return
    try:
        names = _devices(driver)
        major, minor = divmod(_asked(driver, "cuDriverGetVersion") // 10, 100)
    except _DriverError as error:
        advice = "look at nvidia-smi; start a container with --gpus all"
        yield fail("GPU", str(error), advice)
        return
    if not names:
        yield ok("GPU", "a driver but no device: everything runs on the CPU")
        return
    yield ok("GPU", f"{', '.join(names)}; driver for CUDA {major}.{minor}", devices=len(names))
    extra = f"cuda{min(max(major, 12), 13)}"
    yield _cupy(extra)
    yield _nvrtc(extra)


def _cupy(extra: str) -> Check:
    if importlib.util.find_spec("cupy") is None:
        return warn("CuPy", "not installed", f"the bundled engine's kernels need CuPy: {install(extra)}")
    return ok("CuPy", "installed")


def _nvrtc(extra: str) -> Check:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations if spec is not None else None) or ():
        found = sorted(Path(root).glob("*/lib/libnvrtc.so*"))
        if found:
            return ok("NVRTC", found[0].name)
    system = ctypes.util.find_library("nvrtc")
    if system is None:
        return warn("NVRTC", "not found", f"NVRTC compiles the bundled engine's kernels: {install(extra)}")
    return ok("NVRTC", system)


def _devices(driver: ctypes.CDLL) -> list[str]:
    error = driver.cuInit(0)
    if error == _NO_DEVICE:
        return []
    if error:
        raise _DriverError(f"the driver does not start (error {error})")
    names = []
    for number in range(_asked(driver, "cuDeviceGetCount")):
        name = ctypes.create_string_buffer(_NAME_BYTES)
        if driver.cuDeviceGetName(name, _NAME_BYTES, number):
            raise _DriverError(f"device {number} does not answer")
        names.append(name.value.decode(errors="replace"))
    return names


def _asked(driver: ctypes.CDLL, function: str) -> int:
    answer = ctypes.c_int()
    error = getattr(driver, function)(ctypes.byref(answer))
    if error:
        raise _DriverError(f"{function} fails (error {error})")
    return answer.value
