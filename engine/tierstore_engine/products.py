"""Products of activations with a weight matrix.

A decode step has few rows. Then the time of a product is that of reading the matrix once, which torch's
libraries reach for one row only: on the CPU they take twice that time for four rows. The compiled part
(``tierstore/native/decode.c``) takes about as long for four rows as for one. A row's result is the same for
any number of rows that it computes. It computes up to :data:`MOST_ROWS`, and without AVX-512 any number in
bfloat16: torch has a quarter of its speed there (docs/benchmarks.md).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tierstore import native

MOST_ROWS = 64
"""With more rows torch computes the product: it is no longer bound by memory."""

_THREADED_BYTES = 1 << 20  # fewer are read before further threads have started (about 30 µs)
_FORMATS = {getattr(torch, name): native.DECODE_FORMATS[name] for name in ("float32", "bfloat16")}
_SLOW = {torch.bfloat16} if torch.backends.cpu.get_cpu_capability() == "AVX2" else set()  # in torch


def threads_for(nbytes: int) -> int:
    """Return how many threads the compiled part takes to read ``nbytes``."""
    return torch.get_num_threads() if nbytes > _THREADED_BYTES else 1


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x [rows, columns]`` times the transposed ``weight [products, columns]``, plus the bias.

    >>> multiply(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 7.]])
    """
    if not _compiled(x, weight):
        return functional.linear(x, weight, bias)
    assert native.DECODE is not None
    rows, wide = len(x), x.float().contiguous()
    out = torch.empty(rows, len(weight))
    native.DECODE.tierstore_multiply(
        wide.data_ptr(),
        rows,
        weight.data_ptr(),
        *weight.shape,
        _FORMATS[weight.dtype],
        out.data_ptr(),
        threads_for(weight.nbytes),
    )
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _compiled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        native.DECODE is not None
        and weight.device.type == "cpu"
        and weight.dtype in _FORMATS
        and x.dtype == weight.dtype
        and x.dim() == 2
        and (len(x) <= MOST_ROWS or x.dtype in _SLOW)
        and weight.is_contiguous()
    )
