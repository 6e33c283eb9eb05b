"""Attention over pages on a GPU and pages in host memory or in a file.

The kernels attend to the pages on the device, and the CPU to the others where they lie. Only queries go down,
and only outputs with their LSEs come up. Both parts are in float32. The ``merge_states`` kernel merges them,
the device's first, and rounds once to the model's dtype::

    compute stream   queries down │ attention over pages on the device │ outputs up, merge
    host                          └ attention over the other pages ────┘

The pages that are not on the device are complete, so every query sees all of their tokens. The device's part
of a sequence is a sequence without these pages. Its keys were rotated when they were written, and the mask
hides only the newest tokens.

Everything on the device is on the compute stream, so one wait is enough: the host waits for the queries of a
layer. It then also knows that the outputs of the layer before have gone up, and writes new ones in their
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.memory import Memory
from tierstore.tiers.device_overflow import NO_SLOT, DeviceOverflowPool
from tierstore.units import round_up
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.attention.cuda import KernelAttention
from tierstore_engine.config import ModelConfig
from tierstore_engine.pointwise import Pointwise

_ROWS = 64  # rows of the smallest buffers


@dataclass(frozen=True, slots=True)
class _Split:
    """A batch in two parts. ``runs`` are the rows (first, stop) of the spans that the host has a part of.
    ``beyond`` has these spans, with the pages that are not on the device; None without such pages."""

    here: BatchLayout
    beyond: BatchLayout | None
    runs: tuple[tuple[int, int], ...]


class PushDownAttention(Attention):
    """Attention over the pages of ``pool``: ``device`` over those in its slots, the CPU over the others. Not
    thread-safe.

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
        if parts.beyond is None:
            return self.device.attend(layer, queries, parts.here)
        return self._attend(layer, queries, parts, parts.beyond, with_lse=False)[0]

    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._parts(batch)
        if parts.beyond is None:
            return self.device.attend_with_lse(layer, queries, parts.here)
        return self._attend(layer, queries, parts, parts.beyond, with_lse=True)

    def _attend(
        self, layer: int, queries: torch.Tensor, parts: _Split, beyond: BatchLayout, *, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and LSEs. Without ``with_lse``, the LSEs are the device's part only. A row without
        pages beyond the device has a second part that saw nothing."""
        runtime, stream = self._pool.hbm.runtime, self._pool.hbm.compute
        queries = queries.contiguous()
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
        merged = torch.empty_like(lse) if with_lse else None
        return self.device.merge((out, lse), (others, other_lse), merged), lse if merged is None else merged

    def _attend_on_host(self, layer: int, rows: int, beyond: BatchLayout) -> None:
        """Attend to the pages that are not on the device: from the buffer of queries to those of outputs and
        LSEs."""
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
        pool.prepare(np.concatenate(written), np.concatenate(tables))
        here: list[Span] = []
        beyond: list[Span] = []
        runs: list[tuple[int, int]] = []
        row = 0
        for span, table in zip(batch.spans, tables, strict=True):
            slots = pool.slots(table)
            away = table[slots == NO_SLOT]
            past = len(away) * chunk
            here.append(Span((slots[slots != NO_SLOT].tolist(),), span.start - past, span.stop - past))
            if len(away):
                beyond.append(Span((away.tolist(),), past, past + span.tokens))
                if runs and runs[-1][1] == row:
                    runs[-1] = runs[-1][0], row + span.tokens
                else:
                    runs.append((row, row + span.tokens))
            row += span.tokens
        device = str(batch.pages.device)
        on_device = BatchLayout.of(here, chunk_tokens=chunk, device=device)
        if not beyond:
            return _Split(on_device, None, ())
        nothing = torch.empty(0, dtype=torch.int64)
        pages = tuple(torch.tensor(span.tables[0], dtype=torch.int64) for span in beyond)
        on_host = BatchLayout(tuple(beyond), pages, nothing, nothing)
        self._host.prepare(on_host)
        return _Split(on_device, on_host, tuple(runs))


class _Buffers:
    """Host memory for the queries, outputs and LSEs of ``rows`` rows, registered for copies."""

    def __init__(self, pool: DeviceOverflowPool, rows: int, row_bytes: tuple[int, int, int]) -> None:
        self.rows = rows
        self._pool = pool
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

    def close(self) -> None:
        """Unregister the memory. No copy may be in flight."""
        self._pool.unregister(self._memory.address)


def _placed(runs: tuple[tuple[int, int], ...]) -> Iterator[tuple[slice, int]]:
    """Yield each run of rows, and the first row of it when all runs are put one behind the other."""
    at = 0
    for first, stop in runs:
        yield slice(first, stop), at
        at += stop - first
