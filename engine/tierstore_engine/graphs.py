"""Decode by replaying captured steps. Without a capture, launching a step's hundreds of kernels often takes
longer than running them.

A *bucket* is a step captured for a maximum number of sequences and of pages, with fixed buffers. To decode,
the step's numbers (tokens, positions, lengths, block tables) are copied into the buffers of the smallest
sufficient bucket, and its capture is replayed. Unused entries have length 0 and no page, and the kernels skip
them.

An attention kernel launches a thread block for every split of the longest sequence that the bucket allows. So
there are buckets for short sequences and buckets for any length. The split of a sequence depends only on its
length, so attention computes the same bits as without a capture. A matrix product with more rows may round
differently, so the results of a step may depend on the bucket, as they may depend on the batch size.

A step that no bucket can compute runs without a capture.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from tierstore_engine.attention.base import BatchLayout
from tierstore_engine.kernels.operations import Sequences, Slots
from tierstore_engine.model import Model
from tierstore_engine.step import Step, StepInput

SHORT_PAGES = 128
"""The most pages of a sequence in the buckets for short sequences: 8,192 tokens in 16 splits. A bucket for
longer sequences launches 64 splits for every sequence. For short sequences, which need one or two splits,
these would be thousands of thread blocks without work (an estimate, not a measurement)."""

_ROWS = ("tokens", "positions", "offsets", "lengths", "counts", "rows")
_NOTHING = {"tokens": 0, "positions": 0, "offsets": 0, "lengths": 0, "counts": 1}
_NO_PAGE = -1
"""The page number of an unused entry."""


class Recorder(Protocol):
    """An interface that captures steps on a device, and allocates the memory for their numbers."""

    def buffers(self, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``numbers`` int32 in host memory, and as many on the device."""

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run and capture ``step``. The returned function replays the capture, and returns the same tensor
        with new values.

        A capture has only addresses. So the caller keeps ``step``, and with it everything that ``step``
        reads, as long as it calls the function.
        """


class Captured(Protocol):
    """The memory of a layer group for which decoding can be captured."""

    @property
    def chunk_tokens(self) -> int: ...

    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        """Fix a batch; see :meth:`~tierstore_engine.attention.cuda.CudaAttention.fix`."""


class DecodeGraphs:
    """Captured decode steps of up to ``max_sequences`` sequences with block tables of up to ``width`` pages.

    The constructor captures all buckets. Call it before anything else computes or copies on the device.
    ``replayed`` counts the replayed steps, and ``eager`` the steps computed without a capture, by reason. Not
    thread-safe.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        memories: Sequence[Captured],
        recorder: Recorder,
        *,
        max_sequences: int,
        width: int,
    ) -> None:
        """``memories`` has one memory for each layer group of the model."""
        self.replayed = 0
        self.eager: Counter[str] = Counter()
        self._buckets: list[_Bucket] = []
        self._width = width
        self._experts = model.config.experts is not None
        if self._experts:
            return
        with _collected():
            self._buckets += [
                _Bucket(model, memories, recorder, size, pages)
                for size in bucket_sizes(max_sequences)
                for pages in sorted({min(SHORT_PAGES, width), width})
            ]

    @torch.inference_mode()
    def compute(self, step: Step) -> torch.Tensor | None:
        """Return the logits of a decode step, new for each call; None for any other step."""
        reason = self._reason(step)
        if reason is not None:
            self.eager[reason] += 1
            return None
        self.replayed += 1
        longest = _longest_table(step)
        fitting = (b for b in self._buckets if b.size >= len(step.spans) and b.width >= longest)
        return next(fitting).replay(step)

    def _reason(self, step: Step) -> str | None:
        """Return why a step cannot be replayed; None if it can."""
        spans = step.spans
        if self._experts:
            return "experts"  # the host reads how many tokens go to each expert
        if any(span.tokens != 1 for span in spans) or len(step.logit_rows) != len(spans):
            return "prefill"
        if any(span.drafted for span in spans):
            return "drafts"  # a capture would also keep the states after a draft
        if any(step.adapters):
            return "adapters"
        if step.images is not None and step.images.rows:
            return "images"
        if step.arrivals.pending:
            return "pages on their way"
        if len(spans) > self._buckets[-1].size:
            return "too many sequences"
        if _longest_table(step) > self._width:
            return "too many pages"
        return None


class _Bucket:
    """One captured step for up to ``size`` sequences of up to ``width`` pages, and its buffers."""

    def __init__(
        self, model: Model, memories: Sequence[Captured], recorder: Recorder, size: int, width: int
    ) -> None:
        self.size, self.width = size, width
        self._states = model.config.states  # groups whose tables have one page without slots for tokens
        groups = len(memories)
        # First the rows that all groups share, then the page that each group writes to, then the tables.
        shapes = ((len(_ROWS), size), (groups, size), (groups, size, width))
        host, self._numbers = recorder.buffers(sum(prod(shape) for shape in shapes))
        self._host = host
        rows, self._pages, self._tables = _parts(host.numpy(), shapes)
        self._rows = dict(zip(_ROWS, rows, strict=True))
        # The contents of each row of the first group's tables.
        self._known: list[tuple[Sequence[int], int]] = [((), 0)] * size
        for name, values in _NOTHING.items():
            self._rows[name][:] = values
        self._pages[:] = _NO_PAGE
        self._rows["rows"][:] = np.arange(size)
        self._numbers.copy_(host)
        numbers, pages, tables = _parts(self._numbers, shapes)
        on_device = dict(zip(_ROWS, numbers, strict=True))
        layouts = tuple(
            memory.fix(
                Slots(pages[group], on_device["offsets"]),
                Sequences(
                    on_device["rows"],
                    on_device["counts"],
                    on_device["lengths"],
                    tables=tables[group],
                    max_count=1,
                    max_length=width * memory.chunk_tokens,
                ),
            )
            for group, memory in enumerate(memories)
        )
        everything = torch.arange(size, device=self._numbers.device)

        def step() -> torch.Tensor:
            tokens, positions = on_device["tokens"].long(), on_device["positions"].long()
            return model.forward(StepInput(tokens, positions, layouts, everything))

        # ``step`` also keeps everything that the capture reads. It must not refer to this bucket: in a
        # reference cycle, only the garbage collector would free the device's memory.
        self._step = step
        self._replay = recorder.record(step)

    def replay(self, step: Step) -> torch.Tensor:
        self._put(step)
        self._numbers.copy_(self._host, non_blocking=True)
        return self._replay()[: len(step.spans)].clone()

    def _put(self, step: Step) -> None:
        """Write the step's numbers into host memory. The device must have ended the previous step."""
        rows, used = self._rows, len(step.spans)
        starts = np.array([span.start for span in step.spans], np.int32)
        rows["tokens"][:used] = step.tokens
        placed = step.images.positions if step.images is not None else None
        # A generated token has the same position on all three axes.
        rows["positions"][:used] = starts if placed is None else placed[:, 0].numpy()
        rows["lengths"][:used] = starts + 1
        rows["offsets"][:used] = starts % step.chunk_tokens
        for name, values in _NOTHING.items():
            rows[name][used:] = values
        self._pages[:, used:] = _NO_PAGE
        for row, span in enumerate(step.spans):
            self._put_table(row, span.block_table)
            for group, table in enumerate(span.tables):
                written = span.start // step.chunk_tokens
                self._pages[group, row] = _NO_PAGE if group in self._states else table[written]
            for tables, table in zip(self._tables[1:], span.tables[1:], strict=True):
                tables[row, : len(table)] = table  # the kernels do not read the entries of released pages

    def _put_table(self, row: int, table: Sequence[int]) -> None:
        """Update a row of the first group's tables. A sequence's table only grows, so mostly a few new
        entries are written."""
        known, count = self._known[row]
        first = count if known is table else 0
        self._tables[0, row, first : len(table)] = table[first:]
        self._known[row] = (table, len(table))


def _parts(numbers: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return consecutive views of an array or a tensor."""
    ends = list(accumulate(prod(shape) for shape in shapes))
    starts = [0, *ends[:-1]]
    return [numbers[start:end].reshape(shape) for start, end, shape in zip(starts, ends, shapes, strict=True)]


def _longest_table(step: Step) -> int:
    return max(len(span.block_table) for span in step.spans)


@contextmanager
def _collected() -> Iterator[None]:
    """Collect garbage, then run without the garbage collector. Freeing device memory during a capture would
    end the capture with an error."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bucket_sizes(max_sequences: int) -> list[int]:
    """Return powers of two up to the first that is at least ``max_sequences``."""
    sizes = [1]
    while sizes[-1] < max_sequences:
        sizes.append(2 * sizes[-1])
    return sizes
