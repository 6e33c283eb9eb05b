"""The kernels for quantised weights as operations on tensors, like those in
:mod:`~tierstore_engine.kernels.operations`."""

from __future__ import annotations

import numpy as np
import torch

from tierstore import native
from tierstore_engine.kernels.catalog import MOST_PACKED, PACKED_ROWS, packed_set
from tierstore_engine.kernels.launcher import Argument, Kernel, Launcher
from tierstore_engine.quantised import MatrixKernels, PackedMatrix

_TABLE_KINDS = {getattr(torch, name): number for name, number in native.TABLE_FORMATS.items()}


class PackedKernels(MatrixKernels):
    """The kernels for packed matrices and results in ``dtype`` on ``device``. :meth:`prepare` loads them, and
    raises :class:`~tierstore_engine.errors.KernelError` for another dtype."""

    most_rows = MOST_PACKED

    def __init__(self, launcher: Launcher, *, dtype: str, device: str) -> None:
        self.device = device
        self._launcher = launcher
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._kernels: dict[str, tuple[Kernel, Kernel]] = {}
        self._name = dtype

    def prepare(self, packed: PackedMatrix) -> None:
        name = packed.format.name
        if name not in self._kernels:
            kernels = packed_set(self._name, name)
            self._kernels[name] = self._launcher.load(kernels.unpack), self._launcher.load(kernels.multiply)

    def rows(self, packed: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
        return self._unpacked(packed, rows, 0, len(rows))

    def range(self, packed: PackedMatrix, first: int, count: int) -> torch.Tensor:
        return self._unpacked(packed, None, first, count)

    def _unpacked(
        self, packed: PackedMatrix, rows: torch.Tensor | None, first: int, count: int
    ) -> torch.Tensor:
        columns = packed.shape[1]
        out = torch.empty(count, columns, dtype=self._dtype, device=packed.codes.device)
        if count:
            unpack, _ = self._kernels[packed.format.name]
            chosen = None if rows is None else rows.contiguous()
            unpack((count,), (*_arguments(packed), chosen, np.int32(first), out, np.int32(columns)))
        return out

    def multiply(
        self, packed: PackedMatrix, x: torch.Tensor, first: int, count: int, out: torch.Tensor
    ) -> None:
        assert len(x) <= MOST_PACKED
        assert x.dtype == out.dtype == self._dtype
        if not len(x):
            return
        _, multiply = self._kernels[packed.format.name]
        numbers = (np.int32(first), np.int32(count))
        activations = (x.contiguous(), np.int32(len(x)), np.int32(x.shape[1]))
        arguments = (*_arguments(packed), *numbers, *activations, out, np.int64(out.stride(0)))
        multiply((-(-count // PACKED_ROWS),), arguments)


def _arguments(packed: PackedMatrix) -> tuple[Argument, ...]:
    """Return the kernels' arguments for a matrix."""
    scales, zeros = packed.scales, packed.zeros
    return (
        *(packed.codes, np.int64(packed.codes.stride(0)), scales, zeros, packed.groups),
        *(np.int32(0 if scales is None else scales.shape[1]), np.int32(packed.group)),
        np.int32(packed.block_rows),
        np.int32(0 if scales is None else _TABLE_KINDS[scales.dtype]),
        np.int32(0 if zeros is None else _TABLE_KINDS[zeros.dtype]),
        np.float32(packed.format.zero),
    )
