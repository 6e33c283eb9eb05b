"""Prefill with torch's own attention, over pages gathered into one piece first.

Gathering reads and writes the past once more, which is little beside what a chunk of a thousand tokens
computes with it. Whether torch's kernels make up for it depends on the device, torch and the length of the
past, so it is measured (:func:`choose`). The outcome is kept: a hit and the earlier cold run must compute in
the same way, or they would differ in their last bits.

After a past a chunk is attended to in two parts without a mask: all of it over the past, and itself causally.
They merge exactly by the logarithms of their softmax denominators (LSE).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from tierstore_engine.attention.base import numbers_on

PASTS = (0, 2048, 8192, 32768, 131072)
"""Tokens before a chunk, at which the two are compared."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_WORTH = 0.97  # part of the kernels' time below which the library is used


@dataclass(frozen=True, slots=True)
class LibraryRanges:
    """The lengths of the past at which the library is used: ``first ≤ past < stop`` for each pair. It is used
    only for chunks of at least ``least_tokens``, because shorter ones were not measured."""

    ranges: tuple[tuple[int, int], ...] = ()
    least_tokens: int = 2

    def takes(self, tokens: int, past: int) -> bool:
        """Return whether a chunk of ``tokens`` tokens after ``past`` others is computed by the library."""
        return tokens >= self.least_tokens and any(first <= past < stop for first, stop in self.ranges)


EVERYWHERE = LibraryRanges(((0, 1 << 31),))
NOWHERE = LibraryRanges()


class GatheredPrefill:
    """Attention of one sequence's newest tokens over its pages in ``kv`` ``[num_pages, layers, 2, kv_heads,
    chunk_tokens, head_dim]``. Products are multiplied by ``scale``. Layers are counted within their group."""

    def __init__(self, kv: torch.Tensor, scale: float) -> None:
        self._dtype = kv.dtype
        self._words = kv.view(torch.int64)  # a gather costs by its elements: four 16-bit numbers in each
        self._scale = scale

    def attend(self, layer: int, queries: torch.Tensor, table: torch.Tensor, stop: int) -> torch.Tensor:
        """Return attention of ``queries [tokens, heads, head_dim]``, those of the tokens up to ``stop``, in
        the same shape. ``table`` (int64) has the sequence's pages."""
        keys, values = self.gather(layer, table, stop)
        ours = queries.transpose(0, 1).unsqueeze(0)
        past = stop - len(queries)
        if past:
            return self._behind(ours, keys, values, past).squeeze(0).transpose(0, 1)
        out: torch.Tensor = scaled_dot_product_attention(
            ours, keys, values, is_causal=True, scale=self._scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    def _behind(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, past: int
    ) -> torch.Tensor:
        """Return attention of ``queries [1, heads, tokens, head_dim]`` of the tokens from ``past`` on."""
        _, heads, tokens, head_dim = queries.shape
        kv_heads = keys.shape[1]
        # Every query sees the whole past, so queries that share a KV head are rows of one product.
        folded = queries.reshape(1, kv_heads, heads // kv_heads * tokens, head_dim)
        before, before_lse = self._with_lse(folded, keys[:, :, :past], values[:, :, :past], causal=False)
        own = (each[:, :, past:].repeat_interleave(heads // kv_heads, dim=1) for each in (keys, values))
        within, lse = self._with_lse(queries, *own, causal=True)
        share = torch.sigmoid(before_lse.reshape(lse.shape) - lse).unsqueeze(-1)
        return torch.lerp(within.float(), before.reshape(within.shape).float(), share).to(queries.dtype)

    def _with_lse(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return torch's FlashAttention: the output, and the LSE of each row."""
        attend = _flash_on_cpu if queries.device.type == "cpu" else _flash
        out, lse, *_ = attend(queries, keys, values, 0.0, causal, scale=self._scale)
        return out, lse

    def gather(self, layer: int, table: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the first ``stop`` tokens, ``[1, kv_heads, stop, head_dim]``, with one copy."""
        planes = self._words[:, layer].permute(1, 2, 0, 3, 4).index_select(2, table).view(self._dtype)
        keys, values = planes.flatten(2, 3)[:, :, :stop].unsqueeze(1)
        return keys, values


def choose(
    kernels_s: Callable[[int], float], library_s: Callable[[int], float], *, chunk: int, limit: int
) -> LibraryRanges:
    """Return where the library is faster. Each function returns the seconds of a chunk after that many
    tokens, infinity if it cannot be used. ``limit`` is the longest sequence.

    The faster one at a measured length is used up to the next length. The library must be usable there as
    well: it needs memory for the gathered pages, and more with every token.
    """
    pasts = [past for past in PASTS if past + chunk <= limit] or [0]
    longest = max(limit // chunk - 1, 0) * chunk
    library = {past: library_s(past) for past in sorted({*pasts, longest})}
    ranges: list[tuple[int, int]] = []
    for past, stop in zip(pasts, [*pasts[1:], limit], strict=True):
        usable = math.isfinite(library[min(stop, longest)])
        if usable and library[past] < _WORTH * kernels_s(past):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == past else past
            ranges.append((first, stop))
    return LibraryRanges(tuple(ranges), least_tokens=least_tokens(chunk))


def least_tokens(chunk: int) -> int:
    """Return the shortest chunk for which a measurement with ``chunk`` tokens is used."""
    return max(chunk // 2, 2)


def pages_of(table: Sequence[int], stop: int, chunk_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the pages of a sequence's first ``stop`` tokens, for :meth:`GatheredPrefill.attend`."""
    return numbers_on(table[: -(-stop // chunk_tokens)], device)
