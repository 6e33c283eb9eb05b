"""Launching kernels on the executor, with the call shape of CuPy's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.engine.kernels.executor.build import build_library

Launch = Callable[..., None]


class ExecutionError(RuntimeError):
    """A kernel did what it must not: the message says what, in which block and thread, and at which line."""


class HostModule:
    """Instances of the kernels in one file, such as ``prefill<__half, 64, 64, 64, 4, 2>``, compiled.

    With ``races`` they are built for TSan, which only a process that preloads it can load (see races.py).
    With ``fused`` they have fused multiply-adds, as on a GPU: bits differ from those without.
    """

    def __init__(self, file: Path, names: Sequence[str], *, races: bool = False, fused: bool = False) -> None:
        self._library = ctypes.CDLL(str(build_library(file, names, races=races, fused=fused)))
        self._index = {name: index for index, name in enumerate(names)}

    def function(self, name: str) -> Launch:
        """``launch(grid, block, args, *, shared_mem=0, seed=0)``, which returns when the kernel is done.

        ``args`` are numpy arrays (their address) and numpy scalars (their bytes). Raises
        :class:`ExecutionError`.
        """
        entry = self._library[f"launch_{self._index[name]}"]

        def launch(
            grid: Sequence[int],
            block: Sequence[int],
            args: Sequence[object],
            *,
            shared_mem: int = 0,
            seed: int = 0,
        ) -> None:
            values = [_value(argument) for argument in args]
            pointers = (ctypes.c_void_p * max(len(values), 1))(*(value.ctypes.data for value in values))
            message = ctypes.create_string_buffer(2048)
            failed = entry(
                (ctypes.c_uint * 3)(*grid, *(1,) * (3 - len(grid))),
                (ctypes.c_uint * 3)(*block, *(1,) * (3 - len(block))),
                ctypes.c_uint(shared_mem),
                ctypes.c_ulonglong(seed),
                pointers,
                ctypes.c_int(len(values)),
                message,
                ctypes.c_size_t(len(message)),
            )
            if failed:
                raise ExecutionError(f"{name}: {message.value.decode()}")

        return launch


def _value(argument: object) -> np.ndarray:
    """The argument's value in memory of its own: an address for an array."""
    if isinstance(argument, np.ndarray):
        assert argument.flags.c_contiguous
        return np.array([argument.ctypes.data], np.uintp)
    assert isinstance(argument, np.generic), f"pass numpy values, not {type(argument).__name__}"
    return np.array([argument])
