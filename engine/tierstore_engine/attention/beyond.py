"""Attention over pages that are partly in an overflow file (:mod:`tierstore.tiers.overflow`).

Pages in the overflow file are read layer by layer into staging memory, ahead of the computation. Attention
reads them there. Every layer of a step reads the same *batches* of pages, in the same order:

1. for all spans of a few tokens together: the pages of a window (a range of chunks), then the pages of the
   next window. A page that several sequences share is read once;
2. for each longer span: the pages before the span, block by block.

The order in which tokens are summed is that of attention over pages in memory, so the result has the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.tiers.beyond import Numbers
from tierstore.tiers.overflow import OverflowPool, PageStream, runs
from tierstore_engine.attention.base import BatchLayout
from tierstore_engine.attention.pages import KVPages, kv_pages
from tierstore_engine.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ChunkWindow:
    """Chunks ``first … stop`` of all short spans. ``pages`` are its pages that are in the file. Entry
    ``slots[i]`` of the spans' concatenated block tables is ``pages[which[i]]``."""

    first: int
    stop: int
    pages: Numbers
    slots: Numbers
    which: Numbers


class BeyondMemory:
    """The pages of one pool that a step attends to and that are not in memory. Used by one thread."""

    def __init__(self, pool: OverflowPool, config: ModelConfig) -> None:
        self.pool = pool
        self.chunk_tokens = pool.spec.chunk_tokens
        self._config = config
        self._stream: PageStream | None = None
        self._open = ExitStack()
        self._staged: dict[int, KVPages] = {}  # by the address of the staging buffer

    @property
    def active(self) -> bool:
        """Return whether a page of this step is not in memory."""
        return self._stream is not None

    def prepare(self, batch: BatchLayout) -> list[Numbers]:
        """Give memory to the pages that the batch writes. Return the used part of each span's block table.
        Raises the errors of :meth:`OverflowPool.prepare`."""
        self.close()
        tables = [
            table.numpy()[: -(-span.stop // self.chunk_tokens)]
            for span, table in zip(batch.spans, batch.block_tables, strict=True)
        ]
        self.pool.prepare(batch.pages.numpy(), np.concatenate(tables))
        return tables

    def read(self, batches: Sequence[Numbers]) -> None:
        """Start to read these batches, for every layer."""
        self._stream = self._open.enter_context(self.pool.streaming(batches))

    def close(self) -> None:
        """Stop reading."""
        self._stream = None
        self._open.close()

    def take(self) -> int:
        """Return the address of the next batch's pages; see :meth:`PageStream.take`."""
        assert self._stream is not None
        return self._stream.take()

    # -- longer spans ----------------------------------------------------------------------------------

    def batches(self, pages: Numbers) -> list[Numbers]:
        """Return the positions in ``pages`` of the pages that are in the file, in groups that fit into a
        staging buffer."""
        positions = np.flatnonzero(self.pool.is_beyond(pages))
        most = self.pool.staged_pages
        return [positions[first : first + most] for first in range(0, len(positions), most)]

    def gather(self, layer: int, pages: torch.Tensor, out: torch.Tensor, here: KVPages) -> None:
        """Read pages in a row into ``out`` as :meth:`KVPages.gather` does: those in memory from ``here``, the
        others from the stream."""
        numbers = pages.numpy()
        present = np.flatnonzero(~self.pool.is_beyond(numbers))
        for at, count in runs(present):
            first = int(present[at])
            here.gather(layer, pages[first : first + count], self._part(out, first, count))
        for positions in self.batches(numbers):
            staged = self._staged_at(self.take())
            for at, count in runs(positions):
                part = self._part(out, int(positions[at]), count)
                staged.gather(layer, torch.arange(at, at + count), part)

    def _part(self, out: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Return the part of ``out`` that belongs to ``count`` pages from page ``first`` on."""
        return out[:, :, first * self.chunk_tokens : (first + count) * self.chunk_tokens]

    def _staged_at(self, address: int) -> KVPages:
        if address not in self._staged:
            file, count = self.pool.file, self.pool.staged_pages
            memory = torch.from_numpy(self.pool.staging_array(address)).view(count, file.stride)
            self._staged[address] = kv_pages(
                memory, self.pool.spec, self._config, gathered=count, start_of=lambda layer: 0
            )
        return self._staged[address]

    # -- spans of a few tokens -------------------------------------------------------------------------

    def windows(self, tables: Sequence[Numbers]) -> list[ChunkWindow]:
        """Return windows that together have all chunks of ``tables``. The pages of each window fit into a
        staging buffer."""
        pages = np.concatenate(tables)
        chunks = np.concatenate([np.arange(len(table)) for table in tables])
        slots = np.flatnonzero(self.pool.is_beyond(pages))
        slots = slots[np.argsort(chunks[slots], kind="stable")]
        found, at = pages[slots], chunks[slots]
        # A page that several sequences share is the same chunk in all of them.
        new = np.zeros(len(found), bool)
        new[np.unique(found, return_index=True)[1]] = True
        per_chunk = np.bincount(at[new], minlength=1)
        windows, first, count = [], 0, 0
        for chunk, more in enumerate(per_chunk.tolist()):
            assert more <= self.pool.staged_pages, "a staging buffer has room for one page of each sequence"
            if count + more > self.pool.staged_pages:
                windows.append((first, chunk))
                first, count = chunk, 0
            count += more
        windows.append((first, max(map(len, tables))))
        return [self._window(first, stop, found, slots, at) for first, stop in windows]

    def _window(self, first: int, stop: int, found: Numbers, slots: Numbers, at: Numbers) -> ChunkWindow:
        own = slice(*np.searchsorted(at, [first, stop]).tolist())
        pages, which = np.unique(found[own], return_inverse=True)
        return ChunkWindow(first, stop, pages, slots[own], which)

    def places(self, pages: Numbers) -> Numbers:
        """Return the offsets of pages in memory, in bytes from the pool's first page."""
        return pages * self.pool.stride

    def staged_places(self, layer: int, window: ChunkWindow) -> Numbers:
        """Return the offsets that the window's pages *would* have, in bytes from the pool's first page, so
        that the layer in the staging buffer lies where the layer of such a page is expected."""
        start = self.take() - self.pool.address - self.pool.spec.layer(layer).start
        return start + window.which * self.pool.file.stride
