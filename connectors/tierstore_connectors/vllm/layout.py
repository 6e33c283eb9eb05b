"""The addresses of a KV block's bytes, derived from the shapes and strides of the tensors that vLLM
registers.

vLLM versions have many layouts: ``[blocks, …]``, ``[2, blocks, …]`` with K and V apart, heads outside of
blocks, all layers of a block next to each other, latent vectors of MLA. In every layout one dimension counts
blocks. The other dimensions determine which bytes belong to a block: one or several contiguous runs. A
*plane* consists of the same run in all blocks: the run of block ``i`` begins at
``address + i * block_stride``.

A page holds the runs of its blocks, plane by plane. A block is never divided by tokens, because some
attention backends transpose or repack numbers inside a block.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

_MOST_RUNS = 4096  # the most runs of a block in a tensor


class UnsupportedError(Exception):
    """The KV of a model cannot be stored. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A registered tensor: its address, and its shape and strides (in bytes)."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Plane:
    """A run of ``run_bytes`` bytes in every block, which begins at ``address + i * block_stride`` in block
    ``i``."""

    address: int
    block_stride: int
    run_bytes: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The planes of a KV cache group, in page order, for pages of ``blocks`` blocks. The tensors have
    ``num_blocks`` blocks.

    ``digest`` hashes the names, dtypes and shapes of the tensors, which determine the meaning of a page's
    bytes.
    """

    planes: tuple[Plane, ...]
    blocks: int
    num_blocks: int
    digest: str

    @property
    def block_bytes(self) -> int:
        return sum(plane.run_bytes for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        return self.block_bytes * self.blocks

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the offset of each plane within a page."""
        sizes = (plane.run_bytes * self.blocks for plane in self.planes[:-1])
        return tuple(itertools.accumulate(sizes, initial=0))


def page_layout(tensors: Sequence[TensorShape], *, num_blocks: int, blocks: int) -> PageLayout:
    """Return the layout of a group's pages, with ``blocks`` blocks each. Raise :class:`UnsupportedError` for
    tensors in an unknown layout."""
    if not tensors:
        raise UnsupportedError("a KV cache group has no tensors")
    planes: list[Plane] = []
    meaning: list[object] = []
    for tensor in tensors:
        dims = _dimensions(tensor, num_blocks)
        planes += _planes(tensor, dims, num_blocks)
        order = sorted(range(1, len(dims)), key=lambda i: dims[i][1])
        meaning.append([tensor.name, tensor.dtype, [size for size, _ in dims[1:]], order])
    merged = _merged(planes)
    meaning.append([plane.run_bytes for plane in merged])
    digest = hashlib.sha256(msgspec.json.encode(meaning)).hexdigest()[:32]
    return PageLayout(tuple(merged), blocks, num_blocks, digest)


def _dimensions(tensor: TensorShape, num_blocks: int) -> list[tuple[int, int]]:
    """Return (size, stride) of each dimension; the dimension that counts blocks comes first."""
    dims = list(zip(tensor.shape, tensor.strides, strict=True))
    if num_blocks <= 2:
        raise UnsupportedError(f"{num_blocks} blocks: which dimension counts them is ambiguous")
    for at, (size, stride) in enumerate(dims[:2]):
        if at == 1 and dims[0][0] != 2:
            break  # the only dimension allowed before the blocks is the one of K and V
        if size >= num_blocks and size % num_blocks == 0:
            # vLLM may have divided its blocks into smaller blocks for a kernel.
            ratio = size // num_blocks
            inner = [(ratio, stride)] if ratio > 1 else []
            return [(num_blocks, stride * ratio), *dims[:at], *inner, *dims[at + 1 :]]
    raise UnsupportedError(
        f"{tensor.name} has shape {tensor.shape}, in which no dimension counts {num_blocks} blocks"
    )


def _planes(tensor: TensorShape, dims: Sequence[tuple[int, int]], num_blocks: int) -> list[Plane]:
    extent = tensor.itemsize
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride < extent:
            raise UnsupportedError(
                f"{tensor.name}: shape {tensor.shape} with strides {tensor.strides} (bytes) overlaps itself"
            )
        extent = stride * (size - 1) + extent
    run = tensor.itemsize
    outer: list[range] = []
    for size, stride in sorted(dims[1:], key=lambda dim: dim[1]):
        if size == 1:
            continue
        if stride == run and not outer:
            run *= size
        else:
            outer.append(range(0, size * stride, stride))
    offsets = [sum(each) for each in itertools.product(*reversed(outer))]
    if len(offsets) > _MOST_RUNS:
        raise UnsupportedError(f"{tensor.name}: a block lies in {len(offsets)} pieces")
    return [Plane(tensor.address + offset, dims[0][1], run) for offset in offsets]


def _merged(planes: Sequence[Plane]) -> list[Plane]:
    """Merge planes whose runs are adjacent in every block."""
    merged: list[Plane] = []
    for plane in planes:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.block_stride == plane.block_stride
            and (last.address + last.run_bytes == plane.address)
        ):
            merged[-1] = Plane(last.address, last.block_stride, last.run_bytes + plane.run_bytes)
        else:
            merged.append(plane)
    return merged
