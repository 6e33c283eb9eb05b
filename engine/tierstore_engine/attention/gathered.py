"""Prefill with torch's own attention, over pages gathered into one piece first.

Gathering reads and writes the past once more. This takes little time compared with the attention of a chunk
of a thousand tokens. Whether torch's kernels are still faster depends on the device, on torch and on the
length of the past, so it is measured (:func:`choose`). The outcome is stored, because a hit and the earlier
cold run must compute in the same way. Otherwise they would differ in their last bits.

A chunk after a past is computed in two parts without a mask: attention over the past, and causal attention
over the chunk itself. The parts merge exactly by the logarithms of their softmax denominators (LSE).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from tierstore_engine.attention.base import numbers_on

PASTS = (0, 2048, 8192, 32768, 131072)
"""The lengths of the past (tokens before a chunk) at which the two ways are compared."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_WORTH = 0.97  # the library is used if it takes less than this part of the kernels' time


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
    chunk_tokens, head_dim]``. Products are multiplied by ``scale``. A layer's number is its number within its
    layer group."""

    def __init__(self, kv: torch.Tensor, scale: float) -> None:
        self._dtype = kv.dtype
        # the cost of a gather depends on the number of its elements, so each element is four 16-bit numbers
        self._words = kv.view(torch.int64)
        self._scale = scale

    def attend(self, layer: int, queries: torch.Tensor, table: torch.Tensor, stop: int) -> torch.Tensor:
        """Return attention of ``queries [tokens, heads, head_dim]``, which belong to the last tokens before
        ``stop``, in the same shape. ``table`` (int64) has the sequence's pages."""
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
    """Return the lengths of the past for which the library is faster. Each function returns the seconds of a
    chunk after that many tokens, infinity if it cannot be used. ``limit`` is the longest sequence.

    The faster way at a measured length is used up to the next measured length. The library must be usable at
    that length as well, because it needs more memory for gathered pages with every token.
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
