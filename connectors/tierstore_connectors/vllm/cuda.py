"""KV blocks in a GPU's memory, to and from the daemon's arena on streams of their own.

**This has not run on a GPU yet.** The order of what it queues is tested with a driver that delays, reorders
and spoils copies as far as CUDA allows.

A save must not read a block before the step that fills it has run, and a load must not write to one that its
last owner's step still uses. So in each step with either an event is recorded on the stream that computes,
and the copies wait for it on theirs. The other way round needs no event: a copy returns when its bytes are in
place, and vLLM computes with a loaded block only in a later step.

Where a block's bytes lie in large pieces (vLLM's layouts with all layers of a block side by side) the copy
engines move them straight between blocks and arena, a page's in one call. Small pieces, with which the
engines are slow, are collected in a page in GPU memory by a kernel (``pieces.py``), and go over as one.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from tierstore.tiers.cuda import CudaDevice
from tierstore.tiers.device import Addresses, Device, Event, SourceOrder, Stream
from tierstore.tiers.pinned import Pin, Reach
from tierstore_connectors.vllm.copies import Pages
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.orders import NULL_BLOCK
from tierstore_connectors.vllm.pieces import (
    KernelPieces,
    Launch,
    Pieces,
    TorchPieces,
    cupy_launch,
    fits_kernel,
)

LEAST_PIECE = 64 << 10
"""Bytes; smaller ones are collected. On an H100 a batch of copies to the device reached 39-52 GB/s with
pieces of 64 KiB, 27-44 with 28 KiB and 4-7 below 24 KiB (vllm-project/vllm, pull request 42212)."""

OnStream = Callable[[Stream, Callable[[], None]], None]
"""Call something so that what it launches goes on a stream."""


class CopyMethod(Protocol):
    """How a page gets from a chunk's blocks to ``address`` in host memory and back: as the next thing on a
    stream. One thread at a time uses a stream."""

    def down(self, stream: Stream, chunk: Sequence[int], address: int) -> None: ...

    def up(self, stream: Stream, chunk: Sequence[int], address: int) -> None:
        """Blocks that are 0 are left alone."""


class DeviceBlocks:
    """KV tensors in the memory of a device; ``computing`` says on which stream the model runs. Copies raise
    :class:`~tierstore.tiers.device.DeviceError`, and none of theirs is under way then."""

    def __init__(self, reach: Reach, method: CopyMethod, computing: Callable[[], Stream]) -> None:
        self._reach = reach
        self._device = reach.device
        self._method = method
        self._computing = computing
        self._computed: Event | None = None  # the last one; replaced in one piece
        self._idle: queue.SimpleQueue[Stream] = queue.SimpleQueue()  # one for each thread that copies

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
        finally:  # even after an error: no slot may be reused while it is written to
            self._device.synchronize(self._device.record(stream))
            self._idle.put(stream)


class DirectCopy:
    """Each piece by itself, between its block and its place in the page."""

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
        """Where each piece is in its block and in the page, and its bytes."""
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
    """The pieces are collected in a page in the device's memory, one for each stream. The KV tensors are on
    ``torch_device``."""

    def __init__(
        self,
        layout: PageLayout,
        device: Device,
        pieces: Pieces,
        on_stream: OnStream,
        torch_device: torch.device,
    ) -> None:
        self._nbytes = layout.page_bytes
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
            # Not torch's memory: it may hand out what another stream still uses.
            start = self._device.allocate(self._nbytes)
            view = self._device.view(start, (self._nbytes,))
            # At the interpreter's end the driver may be gone first: no need to ask it.
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
    """The blocks of ``tensors``, which the layout was made from, and the copy method that suits them;
    ``launch`` is that of ``copy_blocks.cu``, where it can be launched."""
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
        method = StagedCopy(layout, reach.device, pieces, on_stream, on)
    return DeviceBlocks(reach, method, computing)


class CudaBlocks:
    """Makes the blocks of KV tensors on one CUDA device. Raises
    :class:`~tierstore.tiers.device.DeviceError` where its driver cannot be used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reach = Reach(CudaDevice(device.index or 0))
        self._launch = cupy_launch(device)

    def blocks(self, layout: PageLayout, tensors: Sequence[torch.Tensor]) -> DeviceBlocks:
        """Those of a group."""
        return make_blocks(
            layout,
            tensors,
            self._reach,
            computing=self._computing,
            on_stream=self._on_stream,
            launch=self._launch,
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
    """A plane as a ``[blocks, run_bytes]`` view of the memory that one of ``tensors`` lies in."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = address - storage.data_ptr()
        if start >= 0 and start + (num_blocks - 1) * block_stride + run_bytes <= storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return flat.set_(storage, start, (num_blocks, run_bytes), (block_stride, 1))
    raise ValueError("a plane lies outside of its tensors")
