"""Pages of blocks: read by saves, written by loads. In host memory they go straight to and from the daemon's
arena; see ``cuda.py`` for those of a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from tierstore import copying
from tierstore.daemon.sources import copied_frames
from tierstore.tiers.pinned import Pin
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.work import NULL_BLOCK

Chunks = Sequence[Sequence[int]]
Problem = Callable[[str, Exception], None]


class Blocks(Protocol):
    """The KV blocks of a group on one worker. Called on mover threads, by several at once."""

    def gather(self, chunk: Sequence[int], address: int) -> None:
        """Copy a chunk's blocks to the page at ``address``. They are there when it returns."""

    def scatter(self, chunk: Sequence[int], address: int) -> None:
        """Copy the page at ``address`` to those of a chunk's blocks that are not 0. Likewise."""

    def computed(self) -> None:
        """Called on the model's thread in each step with loads or saves: what the step writes is to be
        waited for by the copies that follow."""

    def share(self, pin: Pin) -> None:
        """An arena has been mapped: ``pin`` prepares it for a device, if these are on one."""


class HostBlocks:
    """KV tensors in host memory."""

    def __init__(self, layout: PageLayout) -> None:
        # Planes of one run size are copied in one go: pieces that continue one another become one copy.
        places = zip(layout.planes, layout.offsets, strict=True)
        self._sized = [(run, list(each)) for run, each in itertools.groupby(places, lambda p: p[0].run_bytes)]

    def gather(self, chunk: Sequence[int], address: int) -> None:
        for run, planes in self._sized:
            copying.copy_all(
                (
                    (address + offset + at * run, plane.address + block * plane.block_stride)
                    for plane, offset in planes
                    for at, block in enumerate(chunk)
                ),
                run,
                read_next=True,  # for its checksum
            )

    def scatter(self, chunk: Sequence[int], address: int) -> None:
        for run, planes in self._sized:
            copying.copy_all(
                (
                    (plane.address + block * plane.block_stride, address + offset + at * run)
                    for plane, offset in planes
                    for at, block in enumerate(chunk)
                    if block != NULL_BLOCK
                ),
                run,
            )

    def computed(self) -> None:
        """The processor has computed what it has computed."""

    def share(self, pin: Pin) -> None:
        """The processor reaches it."""


class SavedBlocks:
    """What a save reads: page ``i`` is made of the blocks of chunk ``i``. A page whose copy has raised is not
    stored."""

    def __init__(self, blocks: Blocks, chunks: Chunks, problem: Problem) -> None:
        self._blocks = blocks
        self._chunks = chunks
        self._problem = problem

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int | None]:
        return [self._copy(self._chunks[position], address, page_bytes) for position, address in pages]

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)

    def _copy(self, chunk: Sequence[int], address: int, page_bytes: int) -> int | None:
        try:
            self._blocks.gather(chunk, address)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises must not end the mover's task
            self._problem("copying from KV blocks", error)
            return None
        return copying.hash_all([address], page_bytes)[0]


class LoadedBlocks:
    """What a load writes: page ``first + i`` goes to the blocks of chunk ``i``. ``failed`` once a copy has
    raised: then nothing that was loaded may be believed."""

    def __init__(self, blocks: Blocks, chunks: Chunks, first: int, problem: Problem) -> None:
        self._blocks = blocks
        self._chunks = chunks
        self._first = first
        self._problem = problem
        self.failed = False

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        try:
            for position, address in pages:
                self._blocks.scatter(self._chunks[position - self._first], address)
        except Exception as error:  # noqa: BLE001  # whatever a driver raises must not end the mover's thread
            self.failed = True
            self._problem("copying to KV blocks", error)


def sound(chunks: Chunks, num_blocks: int, per_chunk: int) -> bool:
    """Whether these are blocks there are: a wrong number must not become a wrong address."""
    return all(
        len(chunk) == per_chunk and all(NULL_BLOCK <= block < num_blocks for block in chunk)
        for chunk in chunks
    )


def whole(chunks: Chunks) -> bool:
    """Whether no block is missing."""
    return all(block != NULL_BLOCK for chunk in chunks for block in chunk)
