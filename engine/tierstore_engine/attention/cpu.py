"""Paged attention on the CPU. Pages are gathered block by block into a small buffer, and attention reads this
buffer. For spans of a few tokens, attention reads the pages in place
(:mod:`tierstore_engine.attention.in_place`).

The queries of a span of new tokens see two parts: the *past*, which every query sees completely, and the span
*itself*, causally. Each part gives an output and the logarithm of its softmax denominator. Two such pairs
merge exactly::

    lse = log(exp(lse₁) + exp(lse₂))        out = out₁ exp(lse₁ - lse) + out₂ exp(lse₂ - lse)

No mask of span × context is therefore needed, and the past can be processed in blocks. Blocks begin at
multiples of ``BLOCK_TOKENS``, independently of where the past ends. Equal work therefore has equal shapes and
equal bits. A block of a few MB stays in the cache between gathering and reading. Gathering 100K tokens at
once costs twice as much, and its buffer would be as large as the KV itself.

If scores are capped, plain products are used, because the library's kernel cannot cap scores. Everything is
computed in float32 for every page format: quantised data is dequantised on the way into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierstore.spec import LayerKind
from tierstore.tiers.beyond import Numbers
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.overflow import OverflowPool
from tierstore_engine.attention.base import BatchLayout, PartAttention, SeenTokens, Span
from tierstore_engine.attention.beyond import BeyondMemory
from tierstore_engine.attention.in_place import InPlace
from tierstore_engine.attention.pages import KVPages, heads_of, kv_pages
from tierstore_engine.config import ModelConfig

BLOCK_TOKENS = 8192

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the keys: ``out``, usually ``[kv_heads, groups, tokens, head_dim]``, and
    ``lse`` in the same shape with a last dimension of 1."""

    out: torch.Tensor
    lse: torch.Tensor

    def merge(self, other: Partial) -> Partial:
        lse = torch.logaddexp(self.lse, other.lse)
        out = self.out * (self.lse - lse).exp_() + other.out * (other.lse - lse).exp_()
        return Partial(out, lse)


class CpuAttention(PartAttention):
    """Attention on the CPU; see the module. It has one gather buffer of ``BLOCK_TOKENS`` tokens of one
    layer.

    With ``past_only``, every new token sees the tokens before its span, and not its span. This is for spans
    whose own pages are on a GPU, in layers that see every token.
    """

    def __init__(self, pool: PagePool, config: ModelConfig, *, past_only: bool = False) -> None:
        self._past_only = past_only
        self._config = config
        self._chunk = pool.spec.chunk_tokens
        self._block = max(BLOCK_TOKENS // self._chunk, 1) * self._chunk
        [group] = pool.spec.groups
        self._heads, self._kv_heads = config.heads, len(heads_of(group, config))
        self._width = group.head_dim
        self._planes = group.planes
        self._scale = config.attention_scale
        self._cap = config.score_cap
        # The buffer has one page more than a block, because the first token of a block may lie inside a page.
        tokens = self._block + self._chunk
        memory = torch.from_numpy(pool.array)
        self._spec = pool.spec
        self._pages = kv_pages(memory, pool.spec, config, gathered=tokens // self._chunk)
        self._beyond = BeyondMemory(pool, config) if isinstance(pool, OverflowPool) else None
        # the last batch for which the pages that it writes got memory
        self._prepared: BatchLayout | None = None
        self._in_place = InPlace.over(pool, config, past_only=past_only)
        self._gathered = torch.empty((self._planes, self._kv_heads, tokens, self._width))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        self.prepare(batch)
        for plane, new in enumerate((keys,) if values is None else (keys, values)):
            self._pages.put(layer, plane, batch.pages, batch.offsets, new)

    def write_pages(self, layer: int, keys: torch.Tensor, values: torch.Tensor, pages: Sequence[int]) -> None:
        """Write whole pages: ``keys`` and ``values`` (``[tokens, kv_heads, head_dim]``), and zeros behind
        them."""
        places = torch.arange(len(pages) * self._chunk)
        numbers = torch.tensor(pages, dtype=torch.int64)[places // self._chunk]
        for plane, new in enumerate((keys, values)):
            padded = torch.nn.functional.pad(new, (0, 0, 0, 0, 0, len(places) - len(new)))
            self._pages.put(layer, plane, numbers, places % self._chunk, padded)

    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        return self.attend_with_lse(layer, queries, batch)[0]

    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.partial(layer, queries, batch)
        return out.to(queries.dtype), lse

    def partial(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as :meth:`attend_with_lse` with outputs in float32, to be merged with attention
        over other keys."""
        wide = queries.float().contiguous()
        out, lse = torch.empty_like(wide), torch.empty(queries.shape[:2])
        self.prepare(batch)
        if self._in_place is not None:
            if self._beyond is not None and self._beyond.active:
                self._in_place.attend_beyond(layer, wide, out, lse)
            else:
                self._in_place.attend(layer, wide, batch, out, lse)
        groups = wide.view(-1, self._kv_heads, self._heads // self._kv_heads, self._width)
        row = 0
        for span, table in zip(batch.spans, batch.block_tables, strict=True):
            if self._in_place is not None and self._in_place.takes(span.tokens):
                row += span.tokens
                continue
            for start, stop, mutual in self._parts(span, self._chunked(layer)):
                rows = slice(row, row + stop - start)
                queries_of = groups[rows].permute(1, 2, 0, 3)
                part = self._attend_span(layer, queries_of, table, start, stop, mutual=mutual)
                out[rows] = part.out.permute(2, 0, 1, 3).reshape(stop - start, self._heads, self._width)
                lse[rows] = part.lse.permute(2, 0, 1, 3).reshape(stop - start, self._heads)
                row = rows.stop
        return out, lse

    def plan(self, seen: Sequence[SeenTokens]) -> Sequence[SeenTokens]:
        return seen

    def over(
        self,
        layer: int,
        queries: torch.Tensor,
        planned: Sequence[SeenTokens],
        block: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        staged = None
        if block is not None:
            most = BLOCK_TOKENS // self._chunk + 2
            staged = kv_pages(block, self._spec, self._config, gathered=most, start_of=lambda layer: 0)
        wide = queries.float().contiguous()
        out, lse = torch.empty_like(wide), torch.empty(queries.shape[:2])
        few = self._in_place if staged is None else None
        if few is not None:
            few.attend_over(layer, wide, planned, out, lse)
        groups = wide.view(-1, self._kv_heads, self._heads // self._kv_heads, self._width)
        for each in planned:
            tokens = len(each.firsts)
            if few is None or not few.takes(tokens):
                rows = slice(each.first_row, each.first_row + tokens)
                part = self._within(layer, groups[rows].permute(1, 2, 0, 3), each, staged or self._pages)
                out[rows] = part.out.permute(2, 0, 1, 3).reshape(tokens, self._heads, self._width)
                lse[rows] = part.lse.permute(2, 0, 1, 3).reshape(tokens, self._heads)
        return out, lse

    def prepare(self, batch: BatchLayout) -> None:
        """Give memory to the pages that a batch writes, and start to read its pages that are not in memory.
        Do nothing if the batch is prepared already. Raises the errors of :meth:`OverflowPool.prepare
        <tierstore.tiers.overflow.OverflowPool.prepare>`."""
        if self._beyond is None or self._prepared is batch:
            return
        self._prepared = None
        tables = self._beyond.prepare(batch)
        if any(self._beyond.pool.is_beyond(table).any() for table in tables):
            batches = self._in_place.plan(batch, tables, self._beyond) if self._in_place is not None else []
            for span, table in zip(batch.spans, tables, strict=True):
                if self._in_place is None or not self._in_place.takes(span.tokens):
                    batches += self._past_batches(self._beyond, table, span)
            self._beyond.read(batches)
        self._prepared = batch

    def stop_reading(self) -> None:
        """Stop reading ahead for the last batch, so that another reader may use the staging memory."""
        self._prepared = None
        if self._beyond is not None:
            self._beyond.close()

    def _past_batches(self, beyond: BeyondMemory, table: Numbers, span: Span) -> Iterator[Numbers]:
        """Yield the pages that a longer span reads, in the order of :meth:`_attend_span`."""
        for first, _, _ in self._parts(span, None):
            for begin, end in _cut(0, first, self._block):
                pages = table[begin // self._chunk : -(-end // self._chunk)]
                yield from (pages[positions] for positions in beyond.batches(pages))

    def _parts(self, span: Span, chunk: int | None) -> Iterator[tuple[int, int, bool]]:
        """Yield the parts of a span for which attention is computed in one call, and whether the tokens of
        each see one another. A part is an image, or consecutive other tokens within a block (and within an
        attention ``chunk`` if the layer has chunks). A span that does not see itself is one part."""
        if self._past_only:
            yield span.start, span.stop, False
            return
        for part in span.parts():
            if part.mutual:
                yield part.start, part.stop, True
                continue
            for first, end in _cut(part.start, part.stop, self._block):
                yield from ((start, stop, False) for start, stop in _cut(first, end, chunk or self._block))

    def _chunked(self, layer: int) -> int | None:
        """Return the number of tokens in an attention chunk of the layer; None if the layer has no chunks."""
        chunked = self._config.kind(layer) is LayerKind.CHUNKED_ATTENTION
        return self._config.window(layer) if chunked else None

    def _attend_span(
        self, layer: int, queries: torch.Tensor, table: torch.Tensor, start: int, stop: int, *, mutual: bool
    ) -> Partial:
        """Return attention of ``queries [kv_heads, groups, tokens, head_dim]`` of the tokens ``start … stop``
        of one sequence. A token sees the tokens before it. If the tokens are ``mutual``, it also sees the
        later ones."""
        first, chunk = 0, self._chunked(layer)
        if chunk is not None:
            first = start - start % chunk
        elif (window := self._config.window(layer)) is not None and stop > window:
            return self._windowed(layer, queries, table, start, stop, window, mutual=mutual)
        past = self._over_past(layer, queries, table, range(first, start))
        if self._past_only:
            assert past is not None, "the query sees no token"
            return past
        keys, values = self._gather(layer, table, start, stop)
        own = self._flash(queries, keys, values, causal=stop - start > 1 and not mutual)
        return own if past is None else past.merge(own)

    def _over_past(
        self,
        layer: int,
        queries: torch.Tensor,
        table: torch.Tensor,
        past: range,
        staged: KVPages | None = None,
    ) -> Partial | None:
        """Return attention of all queries over the tokens of ``past``. Return None if ``past`` is empty."""
        kv_heads, groups, tokens, head_dim = queries.shape
        # Every query sees the whole past, so queries that share a KV head are rows of one product.
        folded = queries.reshape(kv_heads, 1, groups * tokens, head_dim)
        merged: Partial | None = None
        for start, stop in _cut(past.start, past.stop, self._block):
            part = self._flash(folded, *self._gather(layer, table, start, stop, staged))
            merged = part if merged is None else merged.merge(part)
        if merged is None:
            return None
        return Partial(merged.out.reshape(queries.shape), merged.lse.reshape(kv_heads, groups, tokens, 1))

    def _windowed(
        self,
        layer: int,
        queries: torch.Tensor,
        table: torch.Tensor,
        start: int,
        stop: int,
        window: int,
        *,
        mutual: bool,
    ) -> Partial:
        """Return attention of each query over the last ``window`` tokens up to itself, and over all later
        ones if they are ``mutual``."""
        ends = np.arange(start, stop) + 1
        stops = np.full_like(ends, stop) if mutual else ends
        seen = SeenTokens(0, table, np.maximum(ends - window, 0), stops)
        return self._within(layer, queries, seen, self._pages)

    def _within(self, layer: int, queries: torch.Tensor, seen: SeenTokens, pages: KVPages) -> Partial:
        """Return attention of each query over the tokens that it sees, with masks of at most tokens × block.
        The tokens that all queries see need no mask."""
        common = range(int(seen.firsts.max()), int(seen.stops.min()))
        oldest, newest = int(seen.firsts.min()) // self._chunk * self._chunk, int(seen.stops.max())
        if not common:
            return self._masked(layer, queries, seen, range(oldest, newest), pages)
        merged = self._over_past(layer, queries, seen.table, common, pages)
        assert merged is not None
        for edge in (range(oldest, common.start), range(common.stop, newest)):
            if edge:
                merged = merged.merge(self._masked(layer, queries, seen, edge, pages))
        return merged

    def _masked(
        self, layer: int, queries: torch.Tensor, seen: SeenTokens, tokens: range, pages: KVPages
    ) -> Partial:
        """Return attention of each query over those of ``tokens`` that it sees."""
        merged: Partial | None = None
        firsts, stops = (torch.from_numpy(each)[:, None] for each in (seen.firsts, seen.stops))
        for first, end in _cut(tokens.start, tokens.stop, self._block):
            others = torch.arange(first, end)[None, :]
            hidden = (others >= stops) | (others < firsts)
            # The mask is not -inf, because the output of a query that sees nothing in this block would be
            # nan. Its large negative lse removes the block's part when parts are merged.
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -1e30)
            found = self._gather(layer, seen.table, first, end, pages)
            part = self._flash(queries, *found, mask=mask[None, None])
            merged = part if merged is None else merged.merge(part)
        assert merged is not None
        return merged

    def _flash(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        causal: bool = False,
        mask: torch.Tensor | None = None,
    ) -> Partial:
        if self._cap is not None:
            return _capped(queries, keys, values, self._scale, self._cap, causal=causal, mask=mask)
        # The KV heads are the batch dimension here. Query heads that share a KV head get it through a stride
        # of 0.
        shape = (keys.shape[0], queries.shape[1], keys.shape[2], keys.shape[3])
        out, lse = _flash(
            queries, keys.expand(shape), values.expand(shape), 0.0, causal, attn_mask=mask, scale=self._scale
        )
        return Partial(out, lse.unsqueeze(-1))

    def _gather(
        self, layer: int, table: torch.Tensor, start: int, stop: int, staged: KVPages | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the tokens ``start … stop``, float32 ``[kv_heads, 1, tokens, head_dim]``. Latents
        are returned as both. The next call overwrites the returned arrays."""
        first = start // self._chunk
        pages = table[first : -(-stop // self._chunk)]
        out = self._gathered[:, :, : len(pages) * self._chunk]
        if self._beyond is not None and self._beyond.active:
            self._beyond.gather(layer, pages, out, self._pages)
        else:
            (staged or self._pages).gather(layer, pages, out)
        begin = first * self._chunk
        planes = self._gathered[:, :, start - begin : stop - begin].unsqueeze(2)
        return planes[0], planes[-1]


def _capped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float,
    *,
    causal: bool,
    mask: torch.Tensor | None,
) -> Partial:
    """Return attention whose scores ``s`` become ``cap × tanh(s / cap)``."""
    kv_heads, groups, tokens, width = queries.shape
    folded = queries.reshape(kv_heads, groups * tokens, width)
    scores = (folded @ keys.squeeze(1).mT).view(kv_heads, groups, tokens, -1) * scale
    scores = cap * torch.tanh(scores / cap)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1, keepdim=True)
    shares = (scores - lse).exp().view(kv_heads, groups * tokens, -1)
    return Partial((shares @ values.squeeze(1)).view(queries.shape), lse)


def _cut(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield ``start … stop`` cut at the multiples of ``width``."""
    while start < stop:
        end = min((start // width + 1) * width, stop)
        yield start, end
        start = end
