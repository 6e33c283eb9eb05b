"""Copies between pages and blocks, for saves and loads. Blocks in host memory are copied directly to and from
the daemon's arena; ``cuda.py`` copies blocks in a GPU's memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from tierstore import copying
from tierstore.store.buffers import copied_frames
from tierstore.tiers.pinned import Pin
from tierstore_connectors.vllm.layout import PageLayout
from tierstore_connectors.vllm.orders import NULL_BLOCK

Chunks = Sequence[Sequence[int]]
Pages = Sequence[tuple[Sequence[int], int]]  # for each page the blocks of its chunk, and its address
Problem = Callable[[str, Exception], None]


class GroupBlockCopies(Protocol):
    """Copies to and from the KV blocks of a group on one worker. Several mover threads copy at once."""

    def gather(self, pages: Pages) -> None:
        """Copy the blocks of chunks to pages. All copies are complete when the method returns."""

    def scatter(self, pages: Pages) -> None:
        """Copy pages to the blocks of chunks, except block 0. All copies are complete when the method
        returns."""

    def computed(self) -> None:
        """Make later copies wait until the model's kernels of this step have run. Called on the model's
        thread, in each step with loads or saves."""

    def share(self, pin: Pin) -> None:
        """Register a newly mapped arena with the device of the blocks, if they are in device memory."""


class InHostMemory:
    """The methods of :class:`GroupBlockCopies` that KV tensors in host memory do not need."""

    def computed(self) -> None:
        """Do nothing: the processor computes in order."""

    def share(self, pin: Pin) -> None:
        """Do nothing: the processor can address every arena."""


class HostBlocks(InHostMemory):
    """The KV blocks of a group in host memory."""

    def __init__(self, layout: PageLayout) -> None:
        # Planes with equal run size are copied in one call, which merges adjacent runs.
        places = zip(layout.planes, layout.offsets, strict=True)
        self._sized = [(run, list(each)) for run, each in itertools.groupby(places, lambda p: p[0].run_bytes)]

    def gather(self, pages: Pages) -> None:
        for run, planes in self._sized:
            copying.copy_all(
                (
                    (address + offset + at * run, plane.address + block * plane.block_stride)
                    for chunk, address in pages
                    for plane, offset in planes
                    for at, block in enumerate(chunk)
                ),
                run,
                read_next=True,  # the checksum reads the copied bytes
            )

    def scatter(self, pages: Pages) -> None:
        for run, planes in self._sized:
            copying.copy_all(
                (
                    (plane.address + block * plane.block_stride, address + offset + at * run)
                    for chunk, address in pages
                    for plane, offset in planes
                    for at, block in enumerate(chunk)
                    if block != NULL_BLOCK
                ),
                run,
            )


class SavedBlocks:
    """The source of a save: page ``i`` consists of the blocks of chunk ``i``. If a copy raises, its pages are
    not stored."""

    def __init__(self, blocks: GroupBlockCopies, chunks: Chunks, problem: Problem) -> None:
        self._blocks = blocks
        self._chunks = chunks
        self._problem = problem

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int | None]:
        """Copy all pages in one call, because each switch of the GIL delays the model's thread."""
        addresses = [address for _, address in pages]
        try:
            self._blocks.gather([(self._chunks[position], address) for position, address in pages])
        except Exception as error:  # noqa: BLE001  # a driver's error must not end the mover's task
            self._problem("copying from KV blocks", error)
            return [None] * len(pages)
        return list(copying.hash_all(addresses, page_bytes))

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)


class LoadedBlocks:
    """The target of a load: page ``first + i`` is copied to the blocks of chunk ``i``. ``failed`` is True
    after a copy raised; then none of the loaded pages may be used."""

    def __init__(self, blocks: GroupBlockCopies, chunks: Chunks, first: int, problem: Problem) -> None:
        self._blocks = blocks
        self._chunks = chunks
        self._first = first
        self._problem = problem
        self.failed = False

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        try:
            self._blocks.scatter([(self._chunks[at - self._first], address) for at, address in pages])
        except Exception as error:  # noqa: BLE001  # a driver's error must not end the mover's thread
            self.failed = True
            self._problem("copying to KV blocks", error)


def valid_blocks(chunks: Chunks, num_blocks: int, per_chunk: int) -> bool:
    """Return whether all block numbers are valid and each chunk has ``per_chunk`` of them."""
    return all(
        len(chunk) == per_chunk and all(NULL_BLOCK <= block < num_blocks for block in chunk)
        for chunk in chunks
    )
