"""Matrices that stay quantised in memory. A product dequantises some rows at a time.

A format (:class:`~tierstore_engine.weight_formats.WeightFormat`) says how bytes are converted to numbers. All
rows of a matrix are packed in the same way, each in whole bytes. Numbers are computed in float32 and then
converted to the model's dtype. Activations are never quantised.

On the CPU the compiled part (``tierstore/native/decode.c``) computes the numbers, and products of few rows of
activations without writing the numbers to memory. If there is no compiled part, torch computes both. On a
GPU, kernels compute both (:class:`MatrixKernels`).
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import torch

from tierstore import native
from tierstore_engine import products
from tierstore_engine.weight_formats import WeightFormat

# numbers that each thread dequantises at a time, so that torch's temporary tensors stay in the core's cache
_TILE_NUMBERS = 1 << 15
_UNPACKED_NUMBERS = 1 << 20  # the number for the compiled part, which has no temporary tensors
_KERNEL_NUMBERS = 1 << 24  # the number for a GPU, whose products need many rows


_TABLE_FORMATS = {getattr(torch, name): number for name, number in native.TABLE_FORMATS.items()}


def _address(table: torch.Tensor) -> tuple[int, int]:
    """Return the address of scales or zeros for the compiled part, and the number of their format."""
    assert table.is_contiguous()
    return table.data_ptr(), _TABLE_FORMATS[table.dtype]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Rows in a format. ``codes`` are uint8 ``[rows, bytes]``.

    ``scales`` and ``zeros`` are contiguous ``[row blocks, column groups]``, in dtypes that the compiled part
    reads: each row of these belongs to ``block_rows`` rows of the matrix. A column group is ``group``
    neighbours, unless ``groups`` has the group of each column (int64). Scales are None if the format needs
    none. Zeros are None if all groups have the format's ``zero``.
    """

    format: WeightFormat
    codes: torch.Tensor
    scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    group: int = 1
    block_rows: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        rows, nbytes = self.codes.shape
        return rows, nbytes // self.format.block_bytes * self.format.block

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the matrix that need memory."""
        values = (getattr(self, each.name) for each in fields(self))
        return [each for each in values if isinstance(each, torch.Tensor)]

    def to(self, device: str) -> PackedMatrix:
        """Return this matrix on a device."""

        def moved(table: torch.Tensor | None) -> torch.Tensor | None:
            return None if table is None else table.to(device)

        tables = moved(self.scales), moved(self.zeros), moved(self.groups)
        return PackedMatrix(self.format, self.codes.to(device), *tables, self.group, self.block_rows)

    def dense(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers (int64) as float32."""
        if self.compiled:
            return self._unpacked(rows)
        values = self.format.decode(self.codes[rows])
        if self.scales is None:
            return values
        blocks = rows // self.block_rows
        if self.zeros is not None:
            values.sub_(self._spread(self.zeros, blocks))
        elif self.format.zero:
            values.sub_(self.format.zero)
        return values.mul_(self._spread(self.scales, blocks))

    def plain(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return all rows as a view if they are not quantised and have this dtype, None otherwise."""
        if self.format.dtype is not dtype:
            return None
        return self.codes.view(dtype)

    def expanded(self) -> torch.Tensor:
        """Return all rows as float32."""
        return self.dense(torch.arange(self.shape[0], device=self.codes.device))

    @property
    def compiled(self) -> bool:
        """Return whether the compiled part computes the numbers."""
        return native.DECODE is not None and self.codes.device.type == "cpu"

    def multiply(self, x: torch.Tensor, first: int, rows: int) -> torch.Tensor:
        """Return ``x`` times some transposed rows of this matrix, as float32, by the compiled part. ``x`` has
        the dtype float32 or bfloat16, to which the matrix's numbers are rounded."""
        assert native.DECODE is not None
        wide, out = x.float().contiguous(), torch.empty(len(x), rows)
        native.DECODE.tierstore_multiply_packed(
            ctypes.byref(self._structure()),
            wide.data_ptr(),
            len(x),
            first,
            rows,
            out.data_ptr(),
            x.dtype == torch.bfloat16,
            products.threads_for(rows * self.shape[1] * 4),
        )
        return out

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        assert native.DECODE is not None
        total, columns = self.shape
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < total):
            raise IndexError(f"a matrix of {total} rows has rows 0 to {total - 1}, got {rows.tolist()}")
        rows, out = rows.contiguous(), torch.empty(len(rows), columns)
        native.DECODE.tierstore_unpack(
            ctypes.byref(self._structure()),
            rows.data_ptr(),
            len(rows),
            out.data_ptr(),
            products.threads_for(out.nbytes),
        )
        return out

    def _structure(self) -> native.Packed:
        """Return this matrix for the compiled part, with the addresses of its tensors."""
        assert self.codes.stride(1) == 1
        made = native.Packed(
            codes=self.codes.data_ptr(),
            columns=self.shape[1],
            row_bytes=self.codes.stride(0),
            group=self.group,
            block_rows=self.block_rows,
            format=native.PACKED_FORMATS[self.format.name],
            zero=self.format.zero,
        )
        if self.scales is not None:
            made.scales, made.scale_format = _address(self.scales)
            made.table_width = self.scales.shape[1]
        if self.zeros is not None:
            made.zeros, made.zero_format = _address(self.zeros)
        if self.groups is not None:
            made.groups = self.groups.data_ptr()
        return made

    def _spread(self, table: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return one number for each column."""
        chosen = table[blocks].float()
        if self.groups is not None:
            return chosen[:, self.groups]
        return chosen.unsqueeze(-1).expand(-1, -1, self.group).flatten(1)[:, : self.shape[1]]


class MatrixKernels(ABC):
    """Products with packed matrices on a GPU (``device``), and the matrices' numbers, in the model's dtype.
    Products have at most ``most_rows`` rows of activations. No method waits for the device."""

    device: str
    most_rows: int

    @abstractmethod
    def prepare(self, packed: PackedMatrix) -> None:
        """Load the kernels that this matrix needs. Call it before the other methods."""

    @abstractmethod
    def rows(self, packed: PackedMatrix, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers (int64), which are not checked."""

    @abstractmethod
    def range(self, packed: PackedMatrix, first: int, count: int) -> torch.Tensor:
        """Return ``count`` rows from ``first`` on."""

    @abstractmethod
    def multiply(
        self, packed: PackedMatrix, x: torch.Tensor, first: int, count: int, out: torch.Tensor
    ) -> None:
        """Write ``x`` times ``count`` transposed rows from ``first`` on to ``out``, whose rows may be parts
        of longer ones. A row's result does not depend on the other rows of ``x``."""


class QuantisedMatrix:
    """A matrix ``[rows, columns]``, or one for each expert, whose rows are packed matrices one after the
    other. ``dtype`` is the dtype of results. A part of the matrix is a view. If there are ``kernels``, the
    matrix is on their device."""

    def __init__(self, *shape: int, dtype: torch.dtype, kernels: MatrixKernels | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self._kernels = kernels
        # the packed matrices in order, with the first row of each
        self._parts: list[tuple[int, PackedMatrix]] = []
        self._first = 0

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[QuantisedMatrix]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, chosen: int | slice) -> QuantisedMatrix:
        """Return the matrix of one expert, or some rows of this matrix."""
        start, stop, _ = (slice(chosen, chosen + 1) if isinstance(chosen, int) else chosen).indices(len(self))
        shape = self.shape[1:] if isinstance(chosen, int) else (stop - start, *self.shape[1:])
        view = QuantisedMatrix(*shape, dtype=self.dtype, kernels=self._kernels)
        view._parts = self._parts
        view._first = self._first + start * (self.rows // max(len(self), 1))
        return view

    @property
    def rows(self) -> int:
        """Return the number of rows of all experts."""
        rows = 1
        for each in self.shape[:-1]:
            rows *= each
        return rows

    def put(self, packed: PackedMatrix) -> None:
        """Fill all rows. The shape was checked by the reader."""
        assert packed.shape == (self.rows, self.shape[-1])
        if self._kernels is not None:
            packed = packed.to(self._kernels.device)
            self._kernels.prepare(packed)
        self._parts.append((self._first, packed))
        self._parts.sort(key=lambda part: part[0])

    def parts(self) -> Iterator[tuple[int, int, int, PackedMatrix]]:
        """Yield the packed matrices of these rows, as (first of these rows, first row in the packed matrix,
        number of rows, packed matrix)."""
        for first, packed in self._parts:
            start = max(first, self._first)
            stop = min(first + packed.shape[0], self._first + self.rows)
            if start < stop:
                yield start - self._first, start - first, stop - start, packed

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers (int64, one dimension)."""
        if self._kernels is not None:
            [(_, inner, _, packed)] = self.parts()
            return self._kernels.rows(packed, rows + inner)
        out = torch.empty(len(rows), self.shape[-1], dtype=self.dtype, device=rows.device)
        for first, inner, count, packed in self.parts():
            chosen = (rows >= first) & (rows < first + count)
            out[chosen] = packed.dense(rows[chosen] - first + inner).to(self.dtype)
        return out

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [tokens, columns]`` times the transposed matrix."""
        out = torch.empty(len(x), self.rows, dtype=x.dtype, device=x.device)
        for first, inner, count, packed in self.parts():
            part = out[:, first : first + count]
            plain = packed.plain(x.dtype)
            if plain is not None:
                part.copy_(products.multiply(x, plain[inner : inner + count]))
            elif self._kernels is not None:
                _multiply_by_kernels(self._kernels, x, packed, inner, part)
            else:
                _multiply_on_the_cpu(x, packed, inner, part)
        return out


def _multiply_by_kernels(
    kernels: MatrixKernels, x: torch.Tensor, packed: PackedMatrix, inner: int, out: torch.Tensor
) -> None:
    """Write products with the rows from ``inner`` on to ``out``."""
    if len(x) <= kernels.most_rows:
        kernels.multiply(packed, x, inner, out.shape[1], out)
        return

    def unpacked(start: int, stop: int) -> torch.Tensor:
        return kernels.range(packed, inner + start, stop - start)

    _multiply_by_tiles(x, unpacked, _KERNEL_NUMBERS, out)


def _multiply_on_the_cpu(x: torch.Tensor, packed: PackedMatrix, inner: int, out: torch.Tensor) -> None:
    known = packed.compiled and x.dtype in (torch.float32, torch.bfloat16)
    # The compiled part is used for more rows, too, because torch would have to dequantise the matrix first.
    if known and (len(x) <= products.FEW_ROWS or products.compiled_takes(len(x), x.dtype)):
        out.copy_(packed.multiply(x, inner, out.shape[1]))
        return

    def unpacked(start: int, stop: int) -> torch.Tensor:
        return packed.dense(torch.arange(inner + start, inner + stop)).to(x.dtype)

    numbers = _UNPACKED_NUMBERS if packed.compiled else _TILE_NUMBERS * torch.get_num_threads()
    _multiply_by_tiles(x, unpacked, numbers, out)


def _multiply_by_tiles(
    x: torch.Tensor, unpacked: Callable[[int, int], torch.Tensor], numbers: int, out: torch.Tensor
) -> None:
    """Write products to ``out``. ``numbers`` is how many numbers of the matrix are dequantised at a time."""
    step, count = max(numbers // x.shape[1], 1), out.shape[1]
    for start in range(0, count, step):
        stop = min(start + step, count)
        out[:, start:stop] = products.multiply(x, unpacked(start, stop))


Matrix: TypeAlias = torch.Tensor | QuantisedMatrix


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of a matrix: ``up [rows, rank]`` times ``down [rank, columns]`` is added to the rows from
    ``first`` on."""

    first: int
    down: Matrix
    up: Matrix

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.up))

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x [tokens, columns]`` times the transposed change, ``[tokens, rows]``."""
        return linear(linear(x, self.down), self.up)

    def on(self, device: str) -> LowRank:
        assert isinstance(self.down, torch.Tensor)
        assert isinstance(self.up, torch.Tensor), "adapters are not quantised"
        return LowRank(self.first, self.down.to(device), self.up.to(device))


@dataclass(slots=True)
class AdapterRows:
    """The rows of the current step (int64) that each adapter computes, by its digest. The model sets them."""

    of: Mapping[str, torch.Tensor] = field(default_factory=dict)


class AdaptedMatrix:
    """A matrix with LoRA adapters. An adapter changes the products of its own rows only."""

    def __init__(self, base: Matrix, changes: Mapping[str, Sequence[LowRank]], rows: AdapterRows) -> None:
        self.base = base
        self._changes = changes
        self._rows = rows

    def adapt(self, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Add the adapters' products to ``product``, which is the product of ``x`` and the base matrix."""
        for adapter, rows in self._rows.of.items():
            for change in self._changes.get(adapter, ()):
                product[rows, change.rows] += change.multiply(x[rows])
        return product


class ChangedMatrix:
    """A matrix that several layers share, with the changes of one of them for all rows of activations."""

    def __init__(self, base: Matrix, changes: Sequence[LowRank]) -> None:
        self.base = base
        self._changes = changes

    def adapt(self, x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Add the changes to ``product``, which is the product of ``x`` and the base matrix."""
        for change in self._changes:
            product[:, change.rows] += change.multiply(x)
        return product


def linear(
    x: torch.Tensor, weight: Matrix | AdaptedMatrix | ChangedMatrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x [tokens, columns]`` times the transposed ``weight [rows, columns]``, plus the bias."""
    if isinstance(weight, AdaptedMatrix | ChangedMatrix):
        return weight.adapt(x, linear(x, weight.base, bias))
    if isinstance(weight, torch.Tensor):
        return products.multiply(x, weight, bias)
    product = weight.multiply(x)
    return product if bias is None else product + bias


def embedded(tokens: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """Return the rows ``tokens`` of an embedding."""
    return weight[tokens] if isinstance(weight, torch.Tensor) else weight.gather(tokens)
