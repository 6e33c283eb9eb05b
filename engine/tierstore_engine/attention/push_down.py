"""Attention over pages on a GPU and pages in host memory or in a file.

The kernels attend to the pages on the device. In a decode step, the CPU computes the attention over the other
pages in place. Only queries are copied to the host, and only outputs with their LSEs are copied back. Both
parts are computed in float32. The ``merge_states`` kernel merges the two parts, the device's part first, and
rounds once to the model's dtype::

    compute stream   queries down │ attention over pages on the device │ outputs up, merge
    host                          └ attention over the other pages ────┘

In a step with many queries for each page, the other pages are copied to the device instead
(:mod:`tierstore_engine.attention.lift`).

The pages that are not on the device are complete, so every query sees all of their tokens. For the device,
such a sequence is a shorter sequence without these pages. This is correct because keys were rotated when they
were written, and the mask hides only the newest tokens.

All work of the device is on the compute stream, so the host waits only once, for the queries of a layer.
After this wait, the outputs of the previous layer have been copied to the device, and the host may overwrite
them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.memory import Memory
from tierstore.tiers.device_overflow import NO_SLOT, DeviceOverflowPool
from tierstore.units import round_up
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.attention.cuda import KernelAttention
from tierstore_engine.attention.lift import Lift, LiftedSpan, worth_lifting
from tierstore_engine.config import ModelConfig
from tierstore_engine.pointwise import Pointwise

_ROWS = 64  # rows of the smallest buffers
_MEASURED = 3  # calls; the fastest counts
BREAK_EVEN = 16.0
"""The ratio for a pool that was not measured. The compiled part also computes spans of at most this many
tokens."""


@dataclass(frozen=True, slots=True)
class _Split:
    """A batch, divided into the part on the device and the part on the host. ``runs`` are the rows (first,
    stop) of the spans with a part on the host. ``beyond`` has these spans, with the pages that are not on the
    device; None without such pages. ``lifted`` are the same spans if their pages are copied to the device.
    The host then computes no attention."""

    here: BatchLayout
    beyond: BatchLayout | None = None
    runs: tuple[tuple[int, int], ...] = ()
    lifted: tuple[LiftedSpan, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all pages are on the device."""
        return not self.runs and not self.lifted


class PushDownAttention(Attention):
    """Attention over the pages of ``pool``: ``device`` computes it over the pages in its slots, the CPU over
    the other pages. Not thread-safe.

    A batch that sees only pages on the device takes the same kernels as without other pages.
    """

    def __init__(self, pool: DeviceOverflowPool, config: ModelConfig, device: KernelAttention) -> None:
        self.device = device
        self._pool = pool
        self._chunk = pool.spec.chunk_tokens
        self._host = CpuAttention(pool.below, config, past_only=True)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        [group] = pool.spec.groups
        self._heads, self._width = config.heads, group.head_dim
        self._rank = group.head_dim if config.latent is None else config.latent.rank
        self._buffers = _Buffers(pool, _ROWS, self._row_bytes)
        self._lift: Lift | None = None  # made when it is needed first
        self.break_even = BREAK_EVEN
        """The host's rate of attention for one query over the link's rate; see :func:`worth_lifting`."""
        self._split: tuple[BatchLayout, _Split] | None = None  # the newest batch

    @property
    def _row_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of a row's queries, and of its output and LSEs in float32."""
        return self._heads * self._width * self._dtype.itemsize, self._heads * self._rank * 4, self._heads * 4

    def pointwise(self, config: ModelConfig) -> Pointwise:
        return self.device.pointwise(config)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        """Write into pages; see :meth:`Attention.write`. The first call for a batch raises the errors of
        :meth:`BeyondPool.prepare <tierstore.tiers.beyond.BeyondPool.prepare>`."""
        self.device.write(layer, keys, values, self._parts(batch).here)

    def rotate_and_write(
        self,
        layer: int,
        projections: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotations: tuple[torch.Tensor, torch.Tensor],
        batch: BatchLayout,
    ) -> torch.Tensor:
        return self.device.rotate_and_write(layer, projections, rotations, self._parts(batch).here)

    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        parts = self._parts(batch)
        if parts.whole:
            return self.device.attend(layer, queries, parts.here)
        return self._attend(layer, queries, parts)[0]

    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._parts(batch)
        if parts.whole:
            return self.device.attend_with_lse(layer, queries, parts.here)
        return self._attend(layer, queries, parts)

    def _attend(self, layer: int, queries: torch.Tensor, parts: _Split) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and LSEs of a batch with pages that are not on the device."""
        queries = queries.contiguous()
        shape = *queries.shape[:2], self._rank
        into = (
            torch.empty(shape, dtype=self._dtype, device=queries.device),
            torch.empty(shape[:2], dtype=torch.float32, device=queries.device),
        )
        if parts.beyond is not None:
            self._push_down(layer, queries, parts, parts.beyond, into)
        else:
            self._attend_above(layer, queries, parts, into)
        return into

    def _attend_above(
        self, layer: int, queries: torch.Tensor, parts: _Split, into: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Attend to all pages on the device. Pages of ``parts.lifted`` are copied to the device batch by
        batch."""
        assert self._lift is not None
        here = self.device.partial(layer, queries, parts.here)
        # rows without pages on the host are complete already
        if sum(span.tokens for span in parts.lifted) < len(queries):
            nothing = torch.empty_like(here[0]), torch.full_like(here[1], -torch.inf)
            self.device.merge(here, nothing, into)
        for number, span in enumerate(parts.lifted):
            merged, waiting = (here[0][span.rows], here[1][span.rows]), None
            for part in self._lift.parts(layer, queries[span.rows], number):
                if waiting is not None:
                    merged = self.device.merge(merged, waiting)
                waiting = part
            assert waiting is not None, "every lifted span has pages that are not on the device"
            self.device.merge(merged, waiting, (into[0][span.rows], into[1][span.rows]))

    def _push_down(
        self,
        layer: int,
        queries: torch.Tensor,
        parts: _Split,
        beyond: BatchLayout,
        into: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Let the host compute the attention over the pages that are not on the device, in place. A row that
        sees no such page has an empty second part."""
        runtime, stream = self._pool.hbm.runtime, self._pool.hbm.compute
        rows = sum(stop - first for first, stop in parts.runs)
        if rows > self._buffers.rows:
            runtime.synchronize(runtime.record(stream))
            self._buffers.close()
            self._buffers = _Buffers(self._pool, 2 * rows, self._row_bytes)
        query_bytes, out_bytes, lse_bytes = self._row_bytes
        down, up, up_lse = self._buffers.addresses
        for run, at in _placed(parts.runs):
            source, count = queries.data_ptr() + run.start * query_bytes, run.stop - run.start
            runtime.copy(stream, down + at * query_bytes, source, count * query_bytes)
        asked = runtime.record(stream)
        out, lse = self.device.partial(layer, queries, parts.here)
        runtime.synchronize(asked)
        self._attend_on_host(layer, rows, beyond)
        others, other_lse = torch.empty_like(out), torch.full_like(lse, -torch.inf)
        for run, at in _placed(parts.runs):
            count = run.stop - run.start
            runtime.copy(stream, others[run].data_ptr(), up + at * out_bytes, count * out_bytes)
            runtime.copy(stream, other_lse[run].data_ptr(), up_lse + at * lse_bytes, count * lse_bytes)
        self.device.merge((out, lse), (others, other_lse), into)

    def _attend_on_host(self, layer: int, rows: int, beyond: BatchLayout) -> None:
        """Attend to the pages that are not on the device. Read the buffer of queries, and fill the buffers of
        outputs and LSEs."""
        queries, outputs, lses = self._buffers.arrays
        asking = torch.from_numpy(queries).view(self._dtype).view(-1, self._heads, self._width)[:rows]
        out, lse = self._host.partial(layer, asking, beyond)
        put = torch.from_numpy(outputs).view(torch.float32).view(-1, self._heads, self._rank)
        put[:rows] = out[..., : self._rank]
        torch.from_numpy(lses).view(torch.float32).view(-1, self._heads)[:rows] = lse

    def _parts(self, batch: BatchLayout) -> _Split:
        """Return the batch in its two parts. For a new batch, give slots to the pages that it writes, and
        start to read those in the file."""
        if self._split is None or self._split[0] is not batch:
            self._split = None
            self._split = batch, self._divide(batch)
        return self._split[1]

    def _divide(self, batch: BatchLayout) -> _Split:
        chunk, pool = self._chunk, self._pool
        tables = [
            np.array(span.tables[batch.group][: -(-span.stop // chunk)], np.int64) for span in batch.spans
        ]
        written = [table[span.start // chunk :] for span, table in zip(batch.spans, tables, strict=True)]
        self._host.stop_reading()
        if self._lift is not None:
            self._lift.close()
        pool.prepare(np.concatenate(written), np.concatenate(tables))
        here: list[Span] = []
        beyond: list[LiftedSpan] = []
        row = 0
        for span, table in zip(batch.spans, tables, strict=True):
            slots = pool.slots(table)
            away = table[slots == NO_SLOT]
            past = len(away) * chunk
            here.append(span.moved((slots[slots != NO_SLOT].tolist(),), past))
            if len(away):
                beyond.append(LiftedSpan(slice(row, row + span.tokens), away))
            row += span.tokens
        on_device = BatchLayout.of(here, chunk_tokens=chunk, device=str(batch.pages.device))
        if not beyond:
            return _Split(on_device)
        counts = [len(span.pages) for span in beyond]
        if worth_lifting([span.tokens for span in beyond], counts, self.break_even):
            self._lifting(batch.pages.device).prepare(beyond)
            return _Split(on_device, lifted=tuple(beyond))
        on_host = _host_layout(beyond, chunk)
        self._host.prepare(on_host)
        return _Split(on_device, on_host, _runs(beyond))

    def _lifting(self, tensors: torch.device) -> Lift:
        if self._lift is None:
            self._lift = Lift(self._pool, self.device, tensors)
        return self._lift

    def measure_break_even(self, tensors: torch.device) -> float:
        """Return the host's rate of attention for one query over the rate of copies to ``tensors``, both over
        one layer of some pages in host memory. No page of the pool may be in use."""
        below, [group] = self._pool.below, self._pool.spec.groups
        pages = np.arange(min(below.staged_pages, below.resident_pages), dtype=np.int64)
        below.prepare(pages, ())
        for page in pages.tolist():
            below.array[page] = 0
        layer, lift = group.layers[0], self._lifting(tensors)
        layout = _host_layout([LiftedSpan(slice(0, 1), pages)], self._chunk)
        queries = torch.zeros((1, self._heads, self._width), dtype=self._dtype)

        def host_seconds() -> float:
            begun = time.perf_counter()
            self._host.partial(layer, queries, layout)
            return time.perf_counter() - begun

        host_s = min(host_seconds() for _ in range(_MEASURED))
        link_s = min(lift.copy_seconds(layer, pages) for _ in range(_MEASURED))
        self._host.stop_reading()
        below.forget(pages)
        return link_s / host_s


class _Buffers:
    """Host memory for the queries, outputs and LSEs of ``rows`` rows, registered for copies."""

    def __init__(self, pool: DeviceOverflowPool, rows: int, row_bytes: tuple[int, int, int]) -> None:
        self.rows = rows
        sizes = [round_up(rows * each, 4096) for each in row_bytes]
        self._memory = Memory(sum(sizes), shared=False)
        self._memory.populate()
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        self.addresses = tuple(self._memory.address + start for start in starts)
        self.arrays = tuple(
            np.frombuffer(self._memory.view(start, rows * each), np.uint8)
            for start, each in zip(starts, row_bytes, strict=True)
        )
        pool.register(self._memory.address, self._memory.nbytes)
        self._unregister = weakref.finalize(self, pool.unregister, self._memory.address)
        self._unregister.atexit = False  # the driver may be unloaded first

    def close(self) -> None:
        """Unregister the memory. Release the memory now. Otherwise it is released with the last reference. No
        copy may be in flight."""
        self._unregister()


def _host_layout(spans: Sequence[LiftedSpan], chunk_tokens: int) -> BatchLayout:
    """Return the layout of these spans over their pages alone. Each query sees all of these pages' tokens."""
    pasts = [len(span.pages) * chunk_tokens for span in spans]
    members = tuple(
        Span((span.pages.tolist(),), past, past + span.tokens)
        for span, past in zip(spans, pasts, strict=True)
    )
    nothing = torch.empty(0, dtype=torch.int64)
    return BatchLayout(members, tuple(torch.from_numpy(span.pages) for span in spans), nothing, nothing)


def _runs(spans: Sequence[LiftedSpan]) -> tuple[tuple[int, int], ...]:
    """Return the rows of these spans. Rows that follow one another form one run."""
    runs: list[tuple[int, int]] = []
    for span in spans:
        first = span.rows.start
        if runs and runs[-1][1] == first:
            first = runs.pop()[0]
        runs.append((first, span.rows.stop))
    return tuple(runs)


def _placed(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[slice, int]]:
    """Yield each run of rows, and the run's first row in an array that has all runs one after the other."""
    at = 0
    for first, stop in runs:
        yield slice(first, stop), at
        at += stop - first
