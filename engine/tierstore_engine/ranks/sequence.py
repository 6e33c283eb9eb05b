"""The tokens of a sequence over several ranks (``--sequence-parallel N``).

The pages of a sequence are dealt over N *parts* of the pool's memory (:mod:`~tierstore.tiers.large_pages`),
and each rank has one part. A rank computes the rows of the tokens whose pages are in its part, with whole
weights, and writes their KV there. Only attention therefore needs other ranks. A query sees the same tokens
as with one rank, and each part has some of them. Attention over disjoint tokens merges exactly by the
logarithms of the softmax denominators (LSE), as in :mod:`tierstore_engine.attention.cpu`. Attention of each
span of a step is computed in one of two ways:

- *pass the queries*: each query goes to the other ranks with tokens that it sees. These ranks return outputs
  and LSEs, which the query's rank merges. Decode steps pass queries.
- *pass the KV*: the pages of one layer go round a ring of all ranks. Each rank computes attention over the
  pages of one part while those of the next part arrive (Liu et al., Ring Attention, arXiv:2310.01889).

:meth:`SequenceAttention.bytes_passed` has the bytes of both, and the smaller number decides. (Yang et al.,
arXiv:2411.01783, choose in the same way.) All ranks know the whole step. They therefore make the same choice
and know which tensors will arrive.

The pages of each layer group are dealt to parts independently. A row belongs to the part that has its page of
the first group with KV. The KV of another group goes to the rank with its page. Rank 0 computes recurrent
states, and the logits.

On one host, rank 0 maps all parts and copies pages and states in all of them. The store and the scheduler
therefore do not depend on ranks. The other ranks map only their own parts. Several hosts are not supported:
each rank would have to copy the pages of its own part.

On GPUs, rows, queries and KV stay on the devices. Plans are made on the host, once for all layers of a step.
The kernels support only runs of queries that all see the same tokens of a part, or that each see one token
more than the query before. In every part, the rows of a span are such runs, unless a layer has windows or
attention chunks.

With tensor parallelism, several ranks compute each part and share its heads
(:class:`~tierstore_engine.ranks.share.RankPlace`). The ranks with the same share of heads pass tokens to each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from tierstore.spec import LayerKind
from tierstore.tiers.beyond import Numbers
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import (
    Attention,
    BatchLayout,
    PartAttention,
    Prepared,
    SeenTokens,
    Span,
    pages_on_device,
)
from tierstore_engine.attention.cpu import Partial
from tierstore_engine.config import ModelConfig
from tierstore_engine.moving import to_device
from tierstore_engine.pointwise import Pointwise
from tierstore_engine.ranks.collective import Ranks
from tierstore_engine.step import StepInput


class TokenSplit:
    """The division of each step's rows among the ranks of all parts. ``part_pages`` has, for each layer
    group, the pages of a part. ``heads`` are the ranks that share the heads of this part, or None if there is
    one rank. Used by one thread; all ranks call the same methods in the same order."""

    def __init__(
        self, ranks: Ranks, heads: Ranks | None, config: ModelConfig, part_pages: Sequence[int]
    ) -> None:
        self.ranks = ranks
        self._heads = heads
        self.part_pages = tuple(part_pages)
        self.sent_bytes: list[float] = [0.0] * ranks.share.count
        """The bytes that each rank has sent to all others, in all steps so far."""
        self._leading = min(group for group in range(len(part_pages)) if group not in config.states)
        self.owners: Numbers = np.empty(0, np.int64)
        """The rank of each row of the step."""
        self.places: Numbers = np.empty(0, np.int64)
        """The place of each row among its rank's rows."""

    def begin(self, step: StepInput) -> StepInput:
        """Return the step with the tokens of this rank's rows only. Layouts and ``logit_rows`` stay those of
        all rows."""
        self.owners = _numbers(step.layouts[self._leading].pages) // self.part_pages[self._leading]
        self.places = np.empty_like(self.owners)
        for rank in range(self.ranks.share.count):
            rows = self.rows_of(rank)
            self.places[rows] = np.arange(len(rows))
        device = step.tokens.device
        mine = _rows(self.rows_of(self.ranks.share.rank), device)
        part = replace(step, tokens=step.tokens[mine], positions=step.positions[mine])
        if step.embedded_rows is None or step.embeddings is None:
            return part
        rows = _numbers(step.embedded_rows)
        [own] = np.nonzero(self.owners[rows] == self.ranks.share.rank)
        places = _rows(self.places[rows[own]], device)
        return replace(part, embedded_rows=places, embeddings=step.embeddings[_rows(own, device)])

    def rows_of(self, rank: int) -> Numbers:
        """Return the rows of a rank, in order."""
        return np.flatnonzero(self.owners == rank)

    def at_first(self, hidden: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return ``compute(hidden)`` for this rank's rows. Rank 0 computes it for the rows of all ranks
        together."""
        share = self.ranks.share
        if not share.first:
            self.ranks.exchange({0: hidden}, {}).wait()
            found = torch.empty_like(hidden)
            self.ranks.exchange({}, {0: found}).wait()
            return found
        rows = [_rows(self.rows_of(rank), hidden.device) for rank in range(share.count)]
        whole = compute(self._collected(hidden, rows))
        self.ranks.exchange({rank: whole[rows[rank]] for rank in range(1, share.count)}, {}).wait()
        return whole[rows[0]]

    def last(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``hidden`` of these rows of the step on rank 0, and no row on other ranks. When this
        returns, all ranks have written all KV of the step."""
        share, wanted, device = self.ranks.share, _numbers(rows), hidden.device
        owners = self.owners[wanted]
        mine = hidden[_rows(self.places[wanted[owners == share.rank]], device)]
        if share.first:
            places = [_rows(np.flatnonzero(owners == rank), device) for rank in range(share.count)]
            found = self._collected(mine, places)
        else:
            self.ranks.exchange({0: mine}, {}).wait()
            found = hidden[:0]
        of_heads = 0.0 if self._heads is None else self._heads.sent_bytes
        self.sent_bytes = self.ranks.meet(self.ranks.sent_bytes + of_heads)
        return found

    def _collected(self, mine: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor with the rows of all ranks: rank ``r`` computed the rows ``rows[r]``. ``mine`` are
        the rows of rank 0."""
        whole = mine.new_empty(sum(map(len, rows)), *mine.shape[1:])
        found = {
            rank: mine.new_empty(len(rows[rank]), *mine.shape[1:])
            for rank in range(1, self.ranks.share.count)
        }
        self.ranks.exchange({}, found).wait()
        whole[rows[0]] = mine
        for rank, part in found.items():
            whole[rows[rank]] = part
        return whole


@dataclass(frozen=True, slots=True)
class _Writes:
    """``to[rank]`` are the indices of this rank's rows whose KV goes to that rank. ``counts[rank]`` is the
    number of rows that come from that rank. ``layout`` says where rows are written in this part: first the
    rank's own, then those of each other rank."""

    to: tuple[torch.Tensor, ...]
    counts: tuple[int, ...]
    layout: BatchLayout


@dataclass(frozen=True, slots=True)
class _AskedRows:
    """The queries that see tokens of one part. ``rows`` are rows of the step, and ``seen`` is what each of
    them sees, in the part's own page numbers."""

    rows: Numbers
    seen: tuple[SeenTokens, ...]


@dataclass(frozen=True, slots=True)
class _Visit:
    """Pages of one part, which pass this rank in the ring. ``mine`` are the indices of this rank's rows whose
    queries see tokens of these ``pages``. ``planned`` says which tokens they see, with page numbers of the
    passed block; see :meth:`PartAttention.plan <tierstore_engine.attention.base.PartAttention.plan>`."""

    pages: torch.Tensor
    mine: torch.Tensor
    planned: Any


@dataclass(frozen=True, slots=True)
class _Ways:
    """The exchange for attention of a batch. ``asked`` are the queries of all ranks that see tokens of this
    part, and ``planned`` says which tokens. ``to[rank]`` are the indices of this rank's rows whose queries go
    to that rank. ``of[rank]`` are the places, among the asked queries, of the queries from that rank.
    ``visits`` are the parts in the order of the ring, empty if no span passes its KV."""

    asked: int
    planned: Any
    to: tuple[torch.Tensor, ...]
    of: tuple[torch.Tensor, ...]
    visits: tuple[_Visit, ...]


class SequenceAttention(Attention):
    """Attention of this rank's rows over the pages of all parts. ``inner`` computes attention over the pages
    of this part. ``group`` is the layer group's index. Not thread-safe."""

    def __init__(
        self, inner: PartAttention, pool: PagePool, config: ModelConfig, split: TokenSplit, group: int
    ) -> None:
        self._inner = inner
        self._split = split
        self._ranks = split.ranks
        self._config = config
        self._spec = pool.spec
        on_host = isinstance(pool.array, np.ndarray)
        self._memory = torch.from_numpy(pool.array) if on_host else pages_on_device(pool)
        self._part_pages = split.part_pages[group]
        [layers] = pool.spec.groups
        self._width = layers.head_dim
        self._out_width = layers.head_dim if config.latent is None else config.latent.rank
        self._slice = pool.spec.layer(layers.layers[0]).nbytes  # the bytes of one layer in a page
        self._writes: Prepared[_Writes] = Prepared()
        self._ways: dict[tuple[int | None, bool], Prepared[_Ways]] = {}

    def pointwise(self, config: ModelConfig) -> Pointwise:
        return self._inner.pointwise(config)

    @property
    def _row_bytes(self) -> tuple[int, int]:
        """Return the bytes of a row's queries, and of its outputs and LSEs in float32."""
        heads, dtype = self._config.heads, getattr(torch, self._config.dtype)
        return heads * self._width * dtype.itemsize, heads * (self._out_width + 1) * 4

    def bytes_passed(self, asking: int, pages: int) -> tuple[int, int]:
        """Return the bytes that all ranks together send for one layer of a span, if queries are passed, and
        if KV is passed. ``asking`` is the number of queries that are sent, each counted once for each
        receiving rank. ``pages`` is the number of pages of all parts; each is sent to all ranks."""
        return asking * sum(self._row_bytes), (self._ranks.share.count - 1) * pages * self._slice

    # -- writing ---------------------------------------------------------------------------------------

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        writes = self._writes.of(batch, lambda: self._plan_writes(batch))
        share = self._ranks.share
        new = torch.stack([keys] if values is None else [keys, values], dim=1)
        found = {rank: new.new_empty(count, *new.shape[1:]) for rank, count in enumerate(writes.counts)}
        del found[share.rank]
        passed = {rank: new[rows] for rank, rows in enumerate(writes.to) if rank != share.rank}
        self._ranks.exchange(passed, found).wait()
        here = torch.cat([new[writes.to[share.rank]], *found.values()])
        if len(here):
            self._inner.write(layer, here[:, 0], None if values is None else here[:, 1], writes.layout)

    def _plan_writes(self, batch: BatchLayout) -> _Writes:
        share, split = self._ranks.share, self._split
        to, device = _numbers(batch.pages) // self._part_pages, batch.pages.device
        between = [
            [np.flatnonzero((split.owners == of) & (to == rank)) for rank in range(share.count)]
            for of in range(share.count)
        ]
        others = [between[of][share.rank] for of in range(share.count) if of != share.rank]
        rows = _rows(np.concatenate([between[share.rank][share.rank], *others]), device)
        local = batch.pages[rows] - share.rank * self._part_pages
        return _Writes(
            tuple(_rows(split.places[rows], device) for rows in between[share.rank]),
            tuple(len(each[share.rank]) for each in between),
            BatchLayout((), (), local, batch.offsets[rows], batch.group),
        )

    # -- attending -------------------------------------------------------------------------------------

    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        return self.attend_with_lse(layer, queries, batch)[0]

    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window = self._config.window(layer)
        chunked = self._config.kind(layer) is LayerKind.CHUNKED_ATTENTION
        plans = self._ways.setdefault((window, chunked), Prepared())
        ways = plans.of(batch, lambda: self._plan(batch, window, chunked=chunked))
        # Outputs and LSEs are stored side by side, so that both are passed in one message.
        found = queries.new_zeros(*queries.shape[:2], self._out_width + 1, dtype=torch.float32)
        found[..., -1] = -torch.inf
        self._pass_queries(layer, queries, ways, found)
        if ways.visits:
            self._pass_kv(layer, queries, ways.visits, found)
        return found[..., :-1].to(queries.dtype), found[..., -1].contiguous()

    def _pass_queries(self, layer: int, queries: torch.Tensor, ways: _Ways, found: torch.Tensor) -> None:
        share = self._ranks.share
        others = [rank for rank in range(share.count) if rank != share.rank]
        asked = queries.new_empty(ways.asked, *queries.shape[1:])
        arriving = {rank: queries.new_empty(len(ways.of[rank]), *queries.shape[1:]) for rank in others}
        self._ranks.exchange({rank: queries[ways.to[rank]] for rank in others}, arriving).wait()
        asked[ways.of[share.rank]] = queries[ways.to[share.rank]]
        for rank, each in arriving.items():
            asked[ways.of[rank]] = each
        answers = self._over(layer, asked, ways.planned)
        _merge(found, ways.to[share.rank], answers[ways.of[share.rank]])
        returned = {rank: found.new_empty(len(ways.to[rank]), *found.shape[1:]) for rank in others}
        self._ranks.exchange({rank: answers[ways.of[rank]] for rank in others}, returned).wait()
        for rank in others:
            _merge(found, ways.to[rank], returned[rank])

    def _pass_kv(
        self, layer: int, queries: torch.Tensor, visits: Sequence[_Visit], found: torch.Tensor
    ) -> None:
        share = self._ranks.share
        after, before = (share.rank + 1) % share.count, (share.rank - 1) % share.count
        start = self._spec.layer(layer).start
        block = self._memory[:, start : start + self._slice][visits[0].pages]
        for number, visit in enumerate(visits):
            passing = None
            if number + 1 < len(visits):
                arriving = block.new_empty(len(visits[number + 1].pages), self._slice)
                passing = self._ranks.exchange({after: block}, {before: arriving})
            if len(visit.mine):
                answers = self._over(layer, queries[visit.mine], visit.planned, block)
                _merge(found, visit.mine, answers)
            if passing is not None:
                passing.wait()
                block = arriving

    def _over(
        self, layer: int, queries: torch.Tensor, planned: Any, block: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return outputs and LSEs, side by side, over pages of this part, or of a passed ``block``."""
        if not len(queries):
            return queries.new_empty(*queries.shape[:2], self._out_width + 1, dtype=torch.float32)
        out, lse = self._inner.over(layer, queries, planned, block)
        return torch.cat([out[..., : self._out_width], lse.unsqueeze(-1)], dim=-1)

    # -- planning --------------------------------------------------------------------------------------

    def _plan(self, batch: BatchLayout, window: int | None, *, chunked: bool) -> _Ways:
        share, split = self._ranks.share, self._split
        tables = [np.array(span.tables[batch.group], np.int64) for span in batch.spans]
        starts = [0, *accumulate(span.tokens for span in batch.spans)]
        asked: list[list[_AskedRows]] = [[] for _ in range(share.count)]
        passed: list[list[_AskedRows]] = [[] for _ in range(share.count)]
        for span, table, first in zip(batch.spans, tables, starts, strict=False):
            rows = np.arange(first, first + span.tokens)
            each = [
                self._seen(span, table, rows, part, window, chunked=chunked) for part in range(share.count)
            ]
            asking = sum(int((split.owners[one.rows] != part).sum()) for part, one in enumerate(each))
            pages = sum(len(seen.table) for one in each for seen in one.seen)
            by_query, by_kv = self.bytes_passed(asking, pages)
            for part, one in enumerate(each):
                (passed if by_kv < by_query else asked)[part].append(one)
        mine, device = _joined(asked[share.rank]), batch.pages.device
        everywhere = [np.concatenate([one.rows for one in each] or [np.empty(0, np.int64)]) for each in asked]
        return _Ways(
            len(mine.rows),
            self._inner.plan(mine.seen),
            tuple(_rows(split.places[rows[split.owners[rows] == share.rank]], device) for rows in everywhere),
            tuple(
                _rows(np.flatnonzero(split.owners[mine.rows] == rank), device) for rank in range(share.count)
            ),
            self._visits(passed, device),
        )

    def _seen(
        self,
        span: Span,
        table: Numbers,
        rows: Numbers,
        part: int,
        window: int | None,
        *,
        chunked: bool,
    ) -> _AskedRows:
        """Return the rows of a span that see tokens of a part, and what they see."""
        chunk = self._spec.chunk_tokens
        positions = np.arange(span.start, span.stop)
        oldest = np.zeros_like(positions)
        if window is not None:
            oldest = positions - positions % window if chunked else np.maximum(positions - window + 1, 0)
        here = np.append(table // self._part_pages == part, False)
        if (table[oldest[0] // chunk : (span.stop - 1) // chunk + 1] < 0).any():
            raise IndexError(f"tokens {span.start} … {span.stop} see a page that is not in the pool")
        pages_before = np.concatenate([[0], np.cumsum(here)])

        def before(at: Numbers) -> Numbers:
            """Return how many of the part's tokens are before each position."""
            return pages_before[at // chunk] * chunk + here[at // chunk] * (at % chunk)

        ends = np.array([span.sees(at) for at in range(span.start, span.stop)])
        firsts, stops = before(oldest), before(ends)
        seeing = firsts < stops
        rows, firsts, stops = rows[seeing], firsts[seeing], stops[seeing]
        if not len(rows):
            return _AskedRows(rows, ())
        first, last = int(firsts.min()) // chunk, -(-int(stops.max()) // chunk)
        pages = (table[here[:-1]] - part * self._part_pages)[first:last]
        seen = SeenTokens(0, torch.from_numpy(pages), firsts - first * chunk, stops - first * chunk)
        return _AskedRows(rows, (seen,))

    def _visits(self, passed: Sequence[Sequence[_AskedRows]], device: torch.device) -> tuple[_Visit, ...]:
        """Return the parts of the spans that pass their KV, in the order in which they visit this rank."""
        if not any(passed):
            return ()
        share, split = self._ranks.share, self._split
        visits = []
        for step in range(share.count):
            found = passed[(share.rank - step) % share.count]
            pages, mine = [np.empty(0, np.int64)], []
            for each in found:
                for seen in each.seen:
                    own = split.owners[each.rows] == share.rank
                    at = sum(map(len, pages))
                    table = torch.arange(at, at + len(seen.table))
                    pages.append(seen.table.numpy())
                    if own.any():
                        mine.append(
                            _AskedRows(
                                each.rows[own],
                                (SeenTokens(0, table, seen.firsts[own], seen.stops[own]),),
                            )
                        )
            joined = _joined(mine)
            visits.append(
                _Visit(
                    _rows(np.concatenate(pages), device),
                    _rows(split.places[joined.rows], device),
                    self._inner.plan(joined.seen),
                )
            )
        return tuple(visits)


def _joined(parts: Sequence[_AskedRows]) -> _AskedRows:
    """Return the queries of all spans, one span after the other."""
    starts = accumulate((len(part.rows) for part in parts), initial=0)
    seen = [
        replace(each, first_row=start)
        for start, part in zip(starts, parts, strict=False)
        for each in part.seen
    ]
    return _AskedRows(np.concatenate([np.empty(0, np.int64), *(part.rows for part in parts)]), tuple(seen))


def _merge(found: torch.Tensor, rows: torch.Tensor, part: torch.Tensor) -> None:
    """Merge outputs and LSEs over further tokens into these rows of ``found``."""
    if not len(rows):
        return
    one, other = (Partial(each[..., :-1], each[..., -1:]) for each in (found[rows], part))
    merged = one.merge(other)
    found[rows] = torch.cat([merged.out, merged.lse], dim=-1)


def _numbers(tensor: torch.Tensor) -> Numbers:
    """Return int64 numbers on the host. This waits for the work on their device that computes them."""
    numbers: Numbers = tensor.cpu().numpy()
    return numbers


def _rows(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """Return row numbers on a device."""
    return to_device(torch.from_numpy(numbers), device)
