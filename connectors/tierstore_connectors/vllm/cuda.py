"""KV blocks in a GPU's memory, copied through pinned host memory on streams of their own.

**This file has not run on a GPU yet.** It is written after torch's documentation, and the one test it has
runs its bookkeeping over tensors in host memory.

A save must not read a block before the step that fills it has run, and a load must not write to one that its
last owner's step still uses. So at the end of each step with either an event is recorded on the stream that
computes, and the copies wait for it on theirs. The other way round needs no event: a copy returns when its
bytes are in place, and vLLM computes with a loaded block only in a later step.

For each chunk the blocks of all layers are gathered into one page in GPU memory, which then goes over in one
copy: thousands of small copies would each cost as much as a large one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.work import NULL_BLOCK


@dataclass(slots=True)
class _Staging:
    """What one thread copies with."""

    device: torch.Tensor  # a page in GPU memory
    pinned: torch.Tensor  # a page in host memory
    stream: torch.cuda.Stream


class _PerThread(threading.local):
    staging: _Staging | None = None


@dataclass(slots=True)
class _Computed:
    """The last event recorded on the stream that computes; replaced in one piece."""

    event: torch.cuda.Event | None = None


@dataclass(slots=True)
class CudaBlocks:
    """KV tensors in GPU memory. ``tensors`` are those that the layout was made from."""

    layout: PageLayout
    tensors: Sequence[torch.Tensor]
    _planes: list[torch.Tensor] = field(init=False)
    _threads: _PerThread = field(default_factory=_PerThread)
    _computed: _Computed = field(default_factory=_Computed)

    def __post_init__(self) -> None:
        self._planes = [
            plane_view(
                self.tensors, plane.address, plane.block_stride, plane.run_bytes, self.layout.num_blocks
            )
            for plane in self.layout.planes
        ]

    def computed(self) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.tensors[0].device))
        self._computed = _Computed(event)

    def gather(self, chunk: Sequence[int], address: int) -> None:
        staging = self._staging()
        event = self._computed.event
        with torch.cuda.device(staging.device.device), torch.cuda.stream(staging.stream):
            if event is not None:
                staging.stream.wait_event(event)
            gather_page(self._planes, chunk, staging.device)
            staging.pinned.copy_(staging.device, non_blocking=True)
            staging.stream.synchronize()
        ctypes.memmove(address, staging.pinned.data_ptr(), self.layout.page_bytes)

    def scatter(self, chunk: Sequence[int], address: int) -> None:
        staging = self._staging()
        ctypes.memmove(staging.pinned.data_ptr(), address, self.layout.page_bytes)
        event = self._computed.event
        with torch.cuda.device(staging.device.device), torch.cuda.stream(staging.stream):
            if event is not None:
                staging.stream.wait_event(event)
            staging.device.copy_(staging.pinned, non_blocking=True)
            scatter_page(self._planes, chunk, staging.device)
            staging.stream.synchronize()

    def _staging(self) -> _Staging:
        staging = self._threads.staging
        if staging is None:
            device = self.tensors[0].device
            nbytes = self.layout.page_bytes
            staging = self._threads.staging = _Staging(
                torch.empty(nbytes, dtype=torch.uint8, device=device),
                torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
                torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            )
        return staging


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


def gather_page(planes: Sequence[torch.Tensor], chunk: Sequence[int], page: torch.Tensor) -> None:
    """Collect a chunk's blocks, plane by plane, in ``page``."""
    blocks = torch.tensor(chunk, dtype=torch.int64, device=page.device)
    at = 0
    for plane in planes:
        nbytes = len(chunk) * plane.shape[1]
        torch.index_select(plane, 0, blocks, out=page[at : at + nbytes].view(len(chunk), -1))
        at += nbytes


def scatter_page(planes: Sequence[torch.Tensor], chunk: Sequence[int], page: torch.Tensor) -> None:
    """The other way round; blocks that are 0 are left alone."""
    wanted = [at for at, block in enumerate(chunk) if block != NULL_BLOCK]
    places = torch.tensor(wanted, dtype=torch.int64, device=page.device)
    blocks = torch.tensor([chunk[at] for at in wanted], dtype=torch.int64, device=page.device)
    at = 0
    for plane in planes:
        nbytes = len(chunk) * plane.shape[1]
        page_of_plane = page[at : at + nbytes].view(len(chunk), -1)
        plane.index_copy_(0, blocks, page_of_plane.index_select(0, places))
        at += nbytes
