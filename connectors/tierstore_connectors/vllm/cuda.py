"""KV blocks in a GPU's memory, copied to and from the daemon's arena on separate streams.

**This module has not run on a GPU yet.** Tests check the order of the queued operations with a simulated
driver that delays, reorders and corrupts copies as far as CUDA allows.

A save must not read a block before the step that fills the block has run. A load must not write a block while
a step of the block's previous request still uses it. So each step with loads or saves records an event on the
model's stream, and the copies wait for this event on their own streams. The model's stream need not wait for
copies: a copy call returns when its bytes are in place, and vLLM uses a loaded block only in a later step.

A piece is a contiguous part of a block. If the pieces are large, as in vLLM's layouts with all layers of a
block side by side, the GPU's copy engines move them directly between blocks and arena, in one call per page.
The copy engines are slow with small pieces. So a kernel collects small pieces in a page in GPU memory
(``pieces.py``), and this page is copied as a whole.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from tierstore.spec import KVSpec
from tierstore.tiers.cuda import CudaDevice
from tierstore.tiers.device import Addresses, Device, Event, SourceOrder, Stream
from tierstore.tiers.pinned import Pin, Reach
from tierstore_connectors.common.shared_pages import EngineBlocks, PartSource
from tierstore_connectors.vllm.copies import Pages
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.orders import NULL_BLOCK
from tierstore_connectors.vllm.pieces import (
    KernelPieces,
    Launch,
    Pieces,
    SharedPieces,
    TorchPieces,
    cupy_launch,
    fits_kernel,
)

LEAST_PIECE = 64 << 10
"""Bytes. Smaller pieces are collected by a kernel. On an H100, batched copies to the device reached 39-52
GB/s with pieces of 64 KiB, 27-44 GB/s with 28 KiB and 4-7 GB/s below 24 KiB (vllm-project/vllm, pull request
42212)."""

OnStream = Callable[[Stream, Callable[[], None]], None]
"""Call a function while a stream is torch's current stream."""


class CopyMethod(Protocol):
    """Queues copies between a chunk's blocks and the page at ``address`` in host memory on a stream. Only one
    thread at a time uses a stream."""

    def down(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        """Copy from the blocks to the page."""

    def up(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        """Copy from the page to the blocks, except block 0."""


class DeviceBlocks:
    """The KV blocks of a group in device memory. ``computing`` returns the stream that the model runs on.

    :meth:`gather` and :meth:`scatter` raise :class:`~tierstore.tiers.device.DeviceError` after all queued
    copies have ended.
    """

    def __init__(self, reach: Reach, method: CopyMethod, computing: Callable[[], Stream]) -> None:
        self._reach = reach
        self._device = reach.device
        self._method = method
        self._computing = computing
        self._computed: Event | None = None  # the last step's; replaced atomically
        self._idle: queue.SimpleQueue[Stream] = queue.SimpleQueue()  # one per copying thread

    def computed(self) -> None:
        self._computed = self._device.record(self._computing())

    def share(self, pin: Pin) -> None:
        self._reach.share(pin)

    def gather(self, pages: Pages) -> None:
        self._copy(self._method.down, pages)

    def scatter(self, pages: Pages) -> None:
        self._copy(self._method.up, pages)

    def _copy(self, put: Callable[[Stream, Sequence[int], int], None], pages: Pages) -> None:
        try:
            stream = self._idle.get_nowait()
        except queue.Empty:
            stream = self._device.stream()
        try:
            if (computed := self._computed) is not None:
                self._device.wait(stream, computed)
            for chunk, address in pages:
                put(stream, chunk, address)
        finally:  # also after an error: no slot may be reused while a copy writes it
            self._device.synchronize(self._device.record(stream))
            self._idle.put(stream)


class DirectCopy:
    """Copies each piece separately between its block and its offset in the page."""

    def __init__(self, layout: PageLayout, reach: Reach) -> None:
        self._reach = reach
        self._last = layout.page_bytes - 1
        planes = layout.planes
        self._starts, self._strides, self._sizes, self._offsets = (
            np.array(column, np.uint64)[:, None]
            for column in (
                [plane.address for plane in planes],
                [plane.block_stride for plane in planes],
                [plane.run_bytes for plane in planes],
                layout.offsets,
            )
        )

    def down(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        pieces, places, sizes = self._ends(chunk, address)
        self._copy(stream, places, pieces, sizes, SourceOrder.STREAM, address)

    def up(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        pieces, places, sizes = self._ends(chunk, address)
        self._copy(stream, pieces, places, sizes, SourceOrder.ANY, address)

    def _ends(self, chunk: Sequence[int], address: int) -> tuple[Addresses, Addresses, Addresses]:
        """Return for each piece its address in device memory, its address in the page, and its size."""
        blocks = np.array(chunk, np.uint64)
        there = blocks != NULL_BLOCK
        at = np.arange(len(chunk), dtype=np.uint64)[there]
        pieces = self._starts + blocks[there] * self._strides
        places = np.uint64(address) + self._offsets + at * self._sizes
        return pieces.ravel(), places.ravel(), np.broadcast_to(self._sizes, pieces.shape).ravel()

    def _copy(
        self,
        stream: Stream,
        to: Addresses,
        sources: Addresses,
        sizes: Addresses,
        order: SourceOrder,
        address: int,
    ) -> None:
        device = self._reach.device
        if len(to) and self._reach.covers(address, address + self._last):
            device.copy_many(stream, to, sources, sizes, order)
        else:
            device.copy_each(stream, to, sources, sizes)


class StagedCopy:
    """Copies through a page in device memory, one page per stream, which ``pieces`` fills and distributes.
    The KV tensors are on ``torch_device``."""

    def __init__(
        self,
        page_bytes: int,
        device: Device,
        pieces: Pieces,
        on_stream: OnStream,
        torch_device: torch.device,
    ) -> None:
        self._nbytes = page_bytes
        self._device = device
        self._pieces = pieces
        self._torch_device = torch_device
        self._on_stream = on_stream
        self._pages: dict[Stream, tuple[int, torch.Tensor]] = {}

    def down(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        start, page = self._page(stream)
        self._on_stream(stream, lambda: self._pieces.gather(chunk, page))
        self._device.copy(stream, address, start, self._nbytes)

    def up(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        start, page = self._page(stream)
        self._device.copy(stream, start, address, self._nbytes)
        self._on_stream(stream, lambda: self._pieces.scatter(chunk, page))

    def _page(self, stream: Stream) -> tuple[int, torch.Tensor]:
        if stream not in self._pages:
            # torch's allocator could hand the page out again while another stream still uses it.
            start = self._device.allocate(self._nbytes)
            view = self._device.view(start, (self._nbytes,))
            # At the interpreter's exit the driver may be unloaded already, so the page is not freed then.
            weakref.finalize(self, self._device.free, start).atexit = False
            self._pages[stream] = start, torch.as_tensor(view, device=self._torch_device)
        return self._pages[stream]


def make_blocks(
    layout: PageLayout,
    tensors: Sequence[torch.Tensor],
    reach: Reach,
    *,
    computing: Callable[[], Stream],
    on_stream: OnStream,
    launch: Launch | None = None,
) -> DeviceBlocks:
    """Return the blocks of ``tensors``, which ``layout`` describes, with the copy method for their piece
    size. ``launch`` launches ``copy_blocks.cu``; None if the kernel cannot be launched."""
    method: CopyMethod = DirectCopy(layout, reach)
    if min(plane.run_bytes for plane in layout.planes) < LEAST_PIECE:
        on = tensors[0].device
        pieces: Pieces
        if launch is not None and fits_kernel(layout):
            pieces = KernelPieces(layout, launch, on)
        else:
            pieces = TorchPieces(
                [
                    plane_view(tensors, plane.address, plane.block_stride, plane.run_bytes, layout.num_blocks)
                    for plane in layout.planes
                ]
            )
        method = StagedCopy(layout.page_bytes, reach.device, pieces, on_stream, on)
    return DeviceBlocks(reach, method, computing)


def make_shared_blocks(
    layout: str,
    blocks: EngineBlocks,
    source: PartSource,
    tensors: Mapping[int, torch.Tensor],
    reach: Reach,
    *,
    computing: Callable[[], Stream],
    on_stream: OnStream,
) -> DeviceBlocks:
    """Return the blocks of ``tensors`` (by layer) for pages that engines share, which torch converts on the
    device. The arguments are described in
    :class:`~tierstore_connectors.common.shared_pages.BlockConverter`."""
    pieces = SharedPieces(layout, blocks, source, tensors)
    on = next(iter(tensors.values())).device
    page_bytes = KVSpec.parse(layout).page_bytes
    return DeviceBlocks(reach, StagedCopy(page_bytes, reach.device, pieces, on_stream, on), computing)


class CudaBlocks:
    """Makes the :class:`DeviceBlocks` of KV tensors on one CUDA device. Raises
    :class:`~tierstore.tiers.device.DeviceError` if the CUDA driver cannot be used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reach = Reach(CudaDevice(device.index or 0))
        self._launch = cupy_launch(device)

    def blocks(self, layout: PageLayout, tensors: Sequence[torch.Tensor]) -> DeviceBlocks:
        """Return the blocks of a group for vLLM's own pages."""
        return make_blocks(
            layout,
            tensors,
            self._reach,
            computing=self._computing,
            on_stream=self._on_stream,
            launch=self._launch,
        )

    def shared_blocks(
        self, layout: str, blocks: EngineBlocks, source: PartSource, tensors: Mapping[int, torch.Tensor]
    ) -> DeviceBlocks:
        """Return the blocks of a group for pages that engines share."""
        return make_shared_blocks(
            layout,
            blocks,
            source,
            tensors,
            self._reach,
            computing=self._computing,
            on_stream=self._on_stream,
        )

    def _computing(self) -> Stream:
        return Stream(torch.cuda.current_stream(self._device).cuda_stream)

    def _on_stream(self, stream: Stream, work: Callable[[], None]) -> None:
        external = torch.cuda.ExternalStream(stream, device=self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(external):
            work()


def plane_view(
    tensors: Sequence[torch.Tensor], address: int, block_stride: int, run_bytes: int, num_blocks: int
) -> torch.Tensor:
    """Return a plane as a ``[blocks, run_bytes]`` view of the tensor that contains it."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = address - storage.data_ptr()
        if start >= 0 and start + (num_blocks - 1) * block_stride + run_bytes <= storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return flat.set_(storage, start, (num_blocks, run_bytes), (block_stride, 1))
    raise ValueError("a plane lies outside of all KV tensors")
