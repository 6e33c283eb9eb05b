"""Products of activations with a weight matrix.

A decode step has few rows, and the time of a product is the time to read the matrix once. The compiled part
(``tierstore/native/decode.c``) takes about as long for four rows as for one, and MKL twice as long. The
compiled part therefore computes products of few rows, and of more rows where it is faster: with AVX2 in
bfloat16, for which torch has no instructions there, and up to 128 rows in float32. Where torch has AVX-512
instructions for a dtype, torch takes 0.3 to 0.8 of the compiled part's time for two rows or more, and the
compiled part computes single rows only.

With AVX2, and on AMD's processors, oneDNN computes the other products in float32. On an AMD EPYC, oneDNN
takes 0.9 of the time of MKL with AVX2, and half of it with AVX-512. Torch would use MKL.

In products of the compiled part, a row's bits do not depend on other rows. Within :func:`same_bits`, it
computes all products on the CPU; on a GPU, kernels with the same property do.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch.nn import functional

from tierstore import native

FEW_ROWS = 16
"""The time of a product of more rows is not limited by reading the matrix."""


def _made_by_amd() -> bool:
    try:
        with open("/proc/cpuinfo") as facts:
            return "AuthenticAMD" in next((line for line in facts if line.startswith("vendor_id")), "")
    except OSError:  # not Linux
        return False


_CAPABILITY = torch.backends.cpu.get_cpu_capability()
# Torch's compiler calls this operation, too. It does not need rearranged weights.
_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_ONEDNN = _LINEAR if _CAPABILITY == "AVX2" or _made_by_amd() else None


def _most_rows() -> dict[torch.dtype, int]:
    """Return the largest number of rows for which the compiled part is faster than torch
    (benchmarks/products.py)."""
    if _CAPABILITY == "AVX2":
        return {torch.float32: 128, torch.bfloat16: sys.maxsize}
    wide = _CAPABILITY == "AVX512"
    of_bfloat16 = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)
    return {
        torch.float32: 1 if wide and _ONEDNN is not None else FEW_ROWS,
        torch.bfloat16: 1 if wide and of_bfloat16() else FEW_ROWS,
    }


_MOST_ROWS = _most_rows()
_THREADED_BYTES = 1 << 20  # fewer bytes are read before more threads have begun
_FORMATS = {getattr(torch, name): native.DECODE_FORMATS[name] for name in ("float32", "bfloat16")}


Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function that returns the product of ``x [rows, columns]`` and a weight ``[products, columns]``, as
:func:`multiply` does."""


class _Rule(threading.local):
    threads = 0  # within same_bits the compiled part takes this number of threads; 0 outside of it
    product: Product | None = None  # the function that computes all products instead of the compiled part


_rule = _Rule()


@contextmanager
def same_bits(product: Product | None = None) -> Iterator[None]:
    """In this thread, compute every row with the same bits, independent of the other rows of the product.

    ``product`` computes all products meanwhile, for example with a GPU's kernels. By default the compiled
    part computes them, and if there is none, a product raises :class:`RuntimeError`. Torch works in one
    thread, because it cuts rows among its threads, and computes the numbers at the cuts by other
    instructions.
    """
    threads = torch.get_num_threads()
    _rule.threads, _rule.product = threads, product
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _rule.threads, _rule.product = 0, None


def bits_are_same() -> bool:
    """Return whether this thread is within :func:`same_bits`."""
    return _rule.threads > 0


def short_sum(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the sum over a short dimension. Torch may choose the order of a sum on a GPU by the number of
    rows. If rows on a GPU must have the same bits, the numbers are therefore added one by one, in float32."""
    if _rule.product is None:
        return x.sum(dim)
    first, *others = x.float().unbind(dim)
    return sum(others, first).to(x.dtype)


def threads_for(nbytes: int) -> int:
    """Return the number of threads with which the compiled part reads ``nbytes``."""
    return (_rule.threads or torch.get_num_threads()) if nbytes > _THREADED_BYTES else 1


def arithmetic() -> str:
    """Return the processor and libraries, which decide the bits of numbers within :func:`same_bits`."""
    assert native.DECODE is not None
    of_torch = f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}"
    return f"{of_torch}, decode {native.DECODE.tierstore_decode_arithmetic()}"


def compiled_takes(rows: int, dtype: torch.dtype) -> bool:
    """Return whether the compiled part exists and computes products of ``rows`` rows with a matrix of
    ``dtype``."""
    return rows <= _MOST_ROWS.get(dtype, FEW_ROWS) or bits_are_same()


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x [rows, columns]`` times the transposed ``weight [products, columns]``, plus the bias.

    >>> multiply(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 7.]])
    """
    if _rule.product is not None:
        product = _rule.product(x, weight)
        return product if bias is None else product + bias
    if not _compiled(x, weight):
        if bits_are_same():
            raise RuntimeError(f"no product of {x.dtype} has the same bits for any number of rows")
        return by_torch(x, weight, bias)
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


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if _ONEDNN is not None and x.dtype is torch.float32 and x.device.type == "cpu" and x.dim() == 2:
        whole = None if bias is None else bias.contiguous()  # oneDNN ignores a bias's stride
        product: torch.Tensor = _ONEDNN(x, weight, whole, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def _compiled(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        native.DECODE is not None
        and weight.device.type == "cpu"
        and weight.dtype in _FORMATS
        and x.dtype == weight.dtype
        and x.dim() == 2
        and compiled_takes(len(x), x.dtype)
        and weight.is_contiguous()
    )
