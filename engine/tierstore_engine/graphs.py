"""Decoding by replaying captured steps: launching a model's hundreds of kernels one by one takes longer than
many of them run.

A step is captured once for each *bucket*, a number of sequences and of pages, over buffers that stay where
they are. To decode, the step's numbers (tokens, positions, lengths, block tables) are put into the buffers of
the smallest bucket that holds it, in one copy, and the capture is replayed. Entries that are not used have
length 0 and no page, which the kernels leave out. The grid has a block for every split that the longest
sequence of a bucket could have, so there are buckets for short sequences and for those of any length; how a
sequence is split depends on its length on the device alone, so attention has the bits that it has when
launched kernel by kernel. (A matrix product of more rows may not: a step in a larger bucket may round
differently, as it may beside other sequences.)

Whatever is not plain decoding is computed without a capture, and counted with the reason.
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
"""Pages of the longest sequence in the smaller buckets: 8,192 tokens, 16 splits. With 64 for each, of which
short sequences need one or two, thousands of blocks would be launched in every layer to end at once, each for
as much shared memory as one that works. (Reasoned: it has not been measured.)"""

_ROWS = ("tokens", "positions", "offsets", "lengths", "counts", "rows")
_NOTHING = {"tokens": 0, "positions": 0, "offsets": 0, "lengths": 0, "counts": 1}
_NO_PAGE = -1
"""Of an entry that is not used."""


class Recorder(Protocol):
    """How a step is captured on a device. Also the place for its memory and copies."""

    def buffers(self, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``numbers`` int32 in host memory, and as many on the device."""

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run ``step`` and capture it. The result replays it and returns the same tensor, filled anew.

        A capture holds addresses and nothing else: whatever ``step`` reads has to live as long as the result
        is used. The caller sees to that by keeping ``step``."""


class Captured(Protocol):
    """What a layer group remembers by, where decoding with it can be captured."""

    @property
    def chunk_tokens(self) -> int: ...

    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        """See :meth:`~tierstore_engine.attention.cuda.CudaAttention.fix`."""


class DecodeGraphs:
    """Captured decode steps of up to ``max_sequences`` sequences with block tables of up to ``width`` pages.

    Capturing happens here, for all buckets, before anything else computes or copies. ``replayed`` counts the
    steps that were, ``eager`` those that were not, by reason. Not thread-safe.
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
        """``memories`` are the model's, one for each layer group."""
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
        """The logits of a decode step, new for each call; None for any other step."""
        reason = self._reason(step)
        if reason is not None:
            self.eager[reason] += 1
            return None
        self.replayed += 1
        longest = _longest_table(step)
        fitting = (b for b in self._buckets if b.size >= len(step.spans) and b.width >= longest)
        return next(fitting).replay(step)

    def _reason(self, step: Step) -> str | None:
        """Why a step cannot be replayed."""
        spans = step.spans
        if self._experts:
            return "experts"  # how many tokens go to each is looked at by the host
        if any(span.tokens != 1 for span in spans) or len(step.logit_rows) != len(spans):
            return "prefill"
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
        self._states = model.config.states  # their tables have one page, of which no token is written
        groups = len(memories)
        # First what all groups share, then the page that each group writes to, then the tables.
        shapes = ((len(_ROWS), size), (groups, size), (groups, size, width))
        host, self._numbers = recorder.buffers(sum(prod(shape) for shape in shapes))
        self._host = host
        rows, self._pages, self._tables = _parts(host.numpy(), shapes)
        self._rows = dict(zip(_ROWS, rows, strict=True))
        # What each row of the first group's tables holds.
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

        # And with it all that the capture reads. It does not know this bucket: in a circle of references the
        # device's memory would wait for the collector.
        self._step = step
        self._replay = recorder.record(step)

    def replay(self, step: Step) -> torch.Tensor:
        self._put(step)
        self._numbers.copy_(self._host, non_blocking=True)
        return self._replay()[: len(step.spans)].clone()

    def _put(self, step: Step) -> None:
        """Write the step's numbers into host memory. (The step before has been waited for.)"""
        rows, used = self._rows, len(step.spans)
        starts = np.array([span.start for span in step.spans], np.int32)
        rows["tokens"][:used] = step.tokens
        rows["positions"][:used] = starts
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
                tables[row, : len(table)] = table  # what was given back is not looked at

    def _put_table(self, row: int, table: Sequence[int]) -> None:
        """A sequence's table only grows, and mostly it is the one that is there already."""
        known, count = self._known[row]
        first = count if known is table else 0
        self._tables[0, row, first : len(table)] = table[first:]
        self._known[row] = (table, len(table))


def _parts(numbers: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Views of an array, or of a tensor, one behind the other."""
    ends = list(accumulate(prod(shape) for shape in shapes))
    starts = [0, *ends[:-1]]
    return [numbers[start:end].reshape(shape) for start, end, shape in zip(starts, ends, shapes, strict=True)]


def _longest_table(step: Step) -> int:
    return max(len(span.block_table) for span in step.spans)


@contextmanager
def _collected() -> Iterator[None]:
    """Without the garbage collector, and with nothing left for it. Device memory that it gave back in the
    middle of a capture, on the capturing thread, would end the capture with an error."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def bucket_sizes(max_sequences: int) -> list[int]:
    """Powers of two up to the first that holds ``max_sequences``."""
    sizes = [1]
    while sizes[-1] < max_sequences:
        sizes.append(2 * sizes[-1])
    return sizes
