"""Attention over pages that are copied from the host to a GPU for this purpose, one layer at a time.

The host attends to a page once for each query. With the many queries of a prompt's chunk, this takes much
longer than a copy of the page. The pages therefore pass through two staging buffers on the device, where its
kernels read them::

    copies           batch 0 up │ batch 1 up           │ batch 2 up
    compute stream              │ attend to 0, merge   │ attend to 1, merge

A batch is copied when its buffer is free, and computed after its copy. Pages in a file are read ahead into
staging memory of the host first (:mod:`tierstore.tiers.overflow`). A later read overwrites a batch in that
memory, so the host first waits for the copy of the batch.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.tiers.beyond import Numbers, batches
from tierstore.tiers.device import Event
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.device_pool import merge_neighbours
from tierstore.tiers.overflow import PageStream
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.attention.cuda import KernelAttention

_BUFFERS = 2


def worth_lifting(queries: Sequence[int], pages: Sequence[int], break_even: float) -> bool:
    """Return whether the pages of a step that are not on the device should be copied to it. Otherwise the
    host computes the attention over them. Span ``i`` has ``queries[i]`` new tokens and ``pages[i]`` pages
    that are not on the device::

        time of the host    sum of queries × pages × page bytes ÷ host rate
        time of the copies  sum of pages × page bytes ÷ link rate

    The host rate is that of attention for one query. ``break_even`` is the host rate over the link rate.

    >>> worth_lifting([1, 1], [100, 50], break_even=2.0), worth_lifting([1000, 1], [100, 50], 2.0)
    (False, True)
    """
    return sum(new * count for new, count in zip(queries, pages, strict=True)) > break_even * sum(pages)


@dataclass(frozen=True, slots=True)
class LiftedSpan:
    """The rows of a span, and its pages that are not on the device."""

    rows: slice
    pages: Numbers

    @property
    def tokens(self) -> int:
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class _LiftedBatch:
    """Pages of a span, and the layout of its queries over these pages in a buffer."""

    pages: Numbers
    layout: BatchLayout
    in_file: bool


class _StagingBuffer:
    """Memory on the device for one layer of some pages, and attention over it."""

    def __init__(self, device: KernelAttention, memory: torch.Tensor, computed: Event) -> None:
        self.attention = device.over_layers(memory)
        self.address = memory.data_ptr()
        self.computed = computed  # the event at the end of the last computation with this memory


class Lift:
    """Attention of a step's queries over pages of ``pool`` that are not on the device. ``tensors`` is torch's
    device. Used by one thread.

    Each layer reads the same *batches* of pages in the same order: for each span, first the pages in host
    memory, then the pages in the file.
    """

    def __init__(self, pool: DeviceOverflowPool, device: KernelAttention, tensors: torch.device) -> None:
        self._pool, self._tensors = pool, tensors
        self._runtime, self._compute = pool.hbm.runtime, pool.hbm.compute
        self._staged = pool.below.staged_pages
        shape = self._staged, pool.below.file.stride
        self._buffers = [
            _StagingBuffer(
                device,
                torch.empty(shape, dtype=torch.uint8, device=tensors),
                self._runtime.record(self._compute),
            )
            for _ in range(_BUFFERS)
        ]
        self._next = 0
        self._stream = self._runtime.stream()
        weakref.finalize(self, self._runtime.release, self._stream).atexit = False
        self._copied: Event | None = None  # after the last copy
        self._reading = ExitStack()
        self._file: PageStream | None = None
        self._batches: list[list[_LiftedBatch]] = []  # for each span, the list of its batches

    def prepare(self, spans: Sequence[LiftedSpan]) -> None:
        """Start to read the spans' pages that are in the file, after :meth:`close`. Raises the errors of
        :meth:`BeyondPool.prepare <tierstore.tiers.beyond.BeyondPool.prepare>`."""
        below = self._pool.below
        below.prepare((), np.concatenate([span.pages for span in spans]))
        self._batches = []
        for span in spans:
            away = below.is_beyond(span.pages)
            self._batches.append(
                [
                    _LiftedBatch(pages, self._layout(len(pages), span.tokens), in_file)
                    for in_file in (False, True)
                    for pages in batches(span.pages[away == in_file], self._staged)
                ]
            )
        read = [each.pages for found in self._batches for each in found if each.in_file]
        if read:
            self._file = self._reading.enter_context(below.streaming(read))

    def _layout(self, pages: int, tokens: int) -> BatchLayout:
        """Return the layout of ``tokens`` queries over the first pages of a buffer."""
        nothing = torch.empty(0, dtype=torch.int64, device=self._tensors)
        stop = pages * self._pool.spec.chunk_tokens
        return BatchLayout((Span((range(pages),), stop - tokens, stop),), (), nothing, nothing)

    def close(self) -> None:
        """Wait for the copies, so that pages in host memory may change, and stop reading."""
        if self._copied is not None:
            self._runtime.synchronize(self._copied)
        self._file = None
        self._reading.close()

    def parts(
        self, layer: int, queries: torch.Tensor, number: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield outputs and LSEs, in float32, of the queries of span ``number`` over each batch of its pages.
        The caller takes all parts of all spans of a layer, in order. Raises
        :class:`~tierstore.tiers.beyond.LostPagesError`."""
        for batch in self._batches[number]:
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % _BUFFERS
            self._runtime.wait(self._stream, buffer.computed)
            if batch.in_file:
                assert self._file is not None
                copied = self._copy_up(self._file.take() + self._in_a_row(len(batch.pages)), buffer)
                self._runtime.synchronize(copied)  # the next read overwrites the memory that this copy reads
            else:
                copied = self._copy_up(self._places(layer, batch.pages), buffer)
            self._runtime.wait(self._compute, copied)
            part = buffer.attention.partial(layer, queries, batch.layout)
            buffer.computed = self._runtime.record(self._compute)
            yield part

    def copy_seconds(self, layer: int, pages: Numbers) -> float:
        """Return the seconds of a copy of one layer of these pages, which are in host memory, to a buffer."""
        begun = time.perf_counter()
        self._runtime.synchronize(self._copy_up(self._places(layer, pages), self._buffers[0]))
        return time.perf_counter() - begun

    def _places(self, layer: int, pages: Numbers) -> Numbers:
        """Return the addresses of one layer of pages in host memory."""
        below = self._pool.below
        return below.address + pages * below.stride + below.spec.layer(layer).start

    def _in_a_row(self, count: int) -> Numbers:
        """Return the offsets of pages in a staging buffer, the same on the host and on the device."""
        return np.arange(count) * self._pool.below.file.stride

    def _copy_up(self, sources: Numbers, buffer: _StagingBuffer) -> Event:
        """Queue a copy of one layer of pages from host addresses to ``buffer``. Return the event that follows
        the copy."""
        to = (buffer.address + self._in_a_row(len(sources))).astype(np.uint64)
        nbytes = self._pool.below.file.slice_bytes
        self._runtime.copy_each(self._stream, *merge_neighbours(to, sources.astype(np.uint64), nbytes))
        self._copied = self._runtime.record(self._stream)
        return self._copied
