"""Copies between a chunk's blocks and one page in GPU memory, for layouts with small pieces.

If CuPy can launch a kernel and all pieces are multiples of 16 bytes, ``copy_blocks.cu`` copies all pieces of
a page in one launch. Otherwise torch copies plane by plane, with two or more launches per layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from tierstore.spec import KVSpec
from tierstore_connectors.common.shared_pages import EngineBlocks, PartSource
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.orders import NULL_BLOCK

SOURCE = Path(__file__).with_name("copy_blocks.cu")
KERNEL = "copy_blocks"
THREADS = 512  # per CUDA block

_GRID = (16,)  # enough to saturate PCIe; a larger grid would take SMs from the model
_VECTOR = 16  # bytes that a lane copies with one instruction

Launch: TypeAlias = "Callable[[Sequence[int], Sequence[Any]], None]"
"""``launch(grid, arguments)`` launches the kernel on torch's current stream. Tensors in ``arguments`` are
passed as their addresses."""

log = logging.getLogger(__name__)


class Pieces(Protocol):
    """Copies of a chunk's blocks, on torch's current stream."""

    def gather(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        """Copy the blocks to ``page``, plane by plane."""

    def scatter(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        """Copy ``page`` to the blocks, except block 0."""


class KernelPieces:
    """Copies with one launch of ``copy_blocks.cu`` per page. :func:`fits_kernel` must accept the layout."""

    def __init__(self, layout: PageLayout, launch: Launch, device: torch.device) -> None:
        self._launch = launch
        rows = [
            (plane.address, plane.block_stride, plane.run_bytes, offset)
            for plane, offset in zip(layout.planes, layout.offsets, strict=True)
        ]
        self._planes = torch.from_numpy(np.array(rows, np.uint64).view(np.int64)).to(device)

    def gather(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        self._copy(chunk, page, into_page=1)

    def scatter(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        self._copy(chunk, page, into_page=0)

    def _copy(self, chunk: Sequence[int], page: torch.Tensor, *, into_page: int) -> None:
        blocks = torch.tensor(chunk, dtype=torch.int32, device=page.device)
        numbers = (np.int32(len(self._planes)), np.int32(len(chunk)), np.int32(into_page))
        self._launch(_GRID, (self._planes, blocks, page, *numbers))


class TorchPieces:
    """Copies with torch, plane by plane. ``planes`` are ``[blocks, run_bytes]`` views of the KV tensors, in
    the layout's order."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = planes

    def gather(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        blocks = torch.tensor(chunk, dtype=torch.int64, device=page.device)
        at = 0
        for plane in self._planes:
            nbytes = len(chunk) * plane.shape[1]
            torch.index_select(plane, 0, blocks, out=page[at : at + nbytes].view(len(chunk), -1))
            at += nbytes

    def scatter(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        wanted = [at for at, block in enumerate(chunk) if block != NULL_BLOCK]
        places = torch.tensor(wanted, dtype=torch.int64, device=page.device)
        blocks = torch.tensor([chunk[at] for at in wanted], dtype=torch.int64, device=page.device)
        at = 0
        for plane in self._planes:
            nbytes = len(chunk) * plane.shape[1]
            page_of_plane = page[at : at + nbytes].view(len(chunk), -1)
            plane.index_copy_(0, blocks, page_of_plane.index_select(0, places))
            at += nbytes


class SharedPieces:
    """Conversions between blocks and pages that engines share, with two or more launches per layer.
    ``tensors`` are the KV tensors by layer. The other arguments are described in
    :class:`~tierstore_connectors.common.shared_pages.BlockConverter`."""

    def __init__(
        self, layout: str, blocks: EngineBlocks, source: PartSource, tensors: Mapping[int, torch.Tensor]
    ) -> None:
        spec = KVSpec.parse(layout)
        [group] = spec.groups
        self._pieces, self._tables = blocks.pieces, max(len(blocks.tables), 1)
        self._shape = (group.kv_heads, spec.chunk_tokens // blocks.block_tokens, blocks.block_tokens, -1)
        self._page_heads = slice(source.page_heads.start, source.page_heads.stop)
        own = slice(source.own_heads.start, source.own_heads.stop)
        # For K and V of each layer: the block table, the bytes in a page, and a view of the blocks.
        self._places: list[tuple[int, slice, torch.Tensor]] = []
        for table, layer, plane, vectors in blocks.planes(group.layers):
            tensor, item = tensors[layer], blocks.item_bytes
            view = tensor.as_strided(
                (tensor.shape[0], tensor.shape[1], blocks.block_tokens, group.head_dim),
                [stride // item for stride in (vectors.block, vectors.head, vectors.token, vectors.item)],
                tensor.storage_offset() + (vectors.address - tensor.data_ptr()) // item,
            )
            first, last = spec.tile(layer, plane, 0), spec.tile(layer, plane, group.kv_heads - 1)
            self._places.append((table, slice(first.start, last.stop), view[:, own]))

    def gather(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        tables = self._blocks(chunk, page.device)
        for table, place, view in self._places:
            blocks, _ = tables[table]
            self._in_page(page, place, view.dtype).copy_(view.index_select(0, blocks).transpose(0, 1))

    def scatter(self, chunk: Sequence[int], page: torch.Tensor) -> None:
        tables = self._blocks(chunk, page.device)
        for table, place, view in self._places:
            blocks, wanted = tables[table]
            here = self._in_page(page, place, view.dtype).index_select(1, wanted)
            view.index_copy_(0, blocks.index_select(0, wanted), here.transpose(0, 1))

    def _blocks(self, chunk: Sequence[int], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each block table, the block numbers in memory, and the indices of blocks to load."""
        found = []
        for own in np.array(chunk, np.int64).reshape(self._tables, -1):
            numbers = (own[:, None] * self._pieces + np.arange(self._pieces)).ravel()
            wanted = np.flatnonzero(np.repeat(own != NULL_BLOCK, self._pieces))
            found.append((torch.from_numpy(numbers).to(device), torch.from_numpy(wanted).to(device)))
        return found

    def _in_page(self, page: torch.Tensor, place: slice, dtype: torch.dtype) -> torch.Tensor:
        """Return the heads to copy in a page as ``[head, block, token, dim]``."""
        return page[place].view(dtype).view(self._shape)[self._page_heads]


def fits_kernel(layout: PageLayout) -> bool:
    """Return whether every piece begins and ends at a multiple of 16 bytes, as the kernel requires."""
    return all(
        number % _VECTOR == 0
        for plane in layout.planes
        for number in (plane.address, plane.block_stride, plane.run_bytes)
    )


@dataclass(frozen=True, slots=True)
class _CopyStream:
    """A stream for CuPy's launch, which reads only the handle ``ptr``."""

    ptr: int


def cupy_launch(device: torch.device) -> Launch | None:
    """Compile ``copy_blocks.cu`` with CuPy for a GPU. Return None if this fails; torch is then used."""
    try:
        import cupy
    except ImportError:
        return None
    index = device.index or 0
    try:
        with cupy.cuda.Device(index):
            module = cupy.RawModule(
                code=SOURCE.read_text(), options=("--std=c++17",), name_expressions=(KERNEL,)
            )
            function = module.get_function(KERNEL)
    except Exception as error:  # noqa: BLE001  # errors of CuPy, NVRTC or the driver
        log.warning("pages are collected by torch, which is slower: CuPy cannot load a kernel (%s)", error)
        return None

    def launch(grid: Sequence[int], arguments: Sequence[Any]) -> None:
        values = tuple(
            np.uintp(each.data_ptr()) if isinstance(each, torch.Tensor) else each for each in arguments
        )
        stream = _CopyStream(torch.cuda.current_stream(device).cuda_stream)
        with cupy.cuda.Device(index):
            function(tuple(grid), (THREADS,), values, stream=stream)

    return launch
