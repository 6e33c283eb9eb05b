"""Products on a GPU in which a row's bits do not depend on other rows (``--deterministic``). They are
operations on tensors, like those in :mod:`~tierstore_engine.kernels.operations`.

A library chooses its kernel by the number of rows, and kernels differ in the order of their sums. In these
kernels the order of a sum depends on the columns only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from tierstore_engine.kernels.catalog import product_set
from tierstore_engine.kernels.launcher import Kernel, Launcher
from tierstore_engine.kernels.packed import PackedKernels
from tierstore_engine.quantised import PackedMatrix
from tierstore_engine.weight_formats import GGUF_FORMATS

_VECTOR = 8  # columns that a thread reads with one instruction


class ProductKernels:
    """The kernels for ``dtype``, which is ``float16`` or ``bfloat16``. For float32 matrices (DeepSeek's
    routers), the kernels for packed matrices compute the products, a few rows at a time."""

    def __init__(self, launcher: Launcher, *, dtype: str) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._kernels = product_set(dtype)
        self._few: Kernel = launcher.load(self._kernels.few.instance)
        self._many: Kernel = launcher.load(self._kernels.many.instance)
        self._packed = PackedKernels(launcher, dtype="float32", device="")

    def multiply(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``x [rows, columns]`` times the transposed ``weight [products, columns]``. Both have the
        kernels' dtype, or float32."""
        out = x.new_empty(len(x), len(weight))
        self.multiply_into(x, weight, out)
        return out

    def multiply_into(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Write the product that :meth:`multiply` returns to a contiguous ``out``."""
        assert x.dtype == weight.dtype == out.dtype
        if weight.dtype is torch.float32:
            self._multiply_wide(x, weight, out)
            return
        assert x.dtype == self._dtype
        if extra := -x.shape[1] % _VECTOR:
            x, weight = pad(x, (0, extra)), pad(weight, (0, extra))
        rows, products = len(x), len(weight)
        if rows and products:
            few = rows <= self._kernels.few.rows
            shape, kernel = (self._kernels.few, self._few) if few else (self._kernels.many, self._many)
            grid = -(-products // shape.products), -(-rows // shape.rows)
            numbers = np.int32(products), np.int32(x.shape[1])
            kernel(grid, (x.contiguous(), np.int32(rows), weight.contiguous(), *numbers, out))

    def _multiply_wide(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        packed = PackedMatrix(GGUF_FORMATS["F32"], weight.contiguous().view(torch.uint8))
        self._packed.prepare(packed)
        for start in range(0, len(x), self._packed.most_rows):
            rows = slice(start, start + self._packed.most_rows)
            self._packed.multiply(packed, x[rows], 0, len(weight), out[rows])
