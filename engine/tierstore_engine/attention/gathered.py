"""Prefill by torch's own attention, over pages that are gathered into one piece first.

Gathering reads and writes the past once more, which is little beside what a chunk of a thousand tokens
computes with it. Whether torch's kernels make up for it depends on the device, torch and the length of the
past, so it is measured (:func:`choose`), and the outcome is kept: a hit and the cold run before it must take
the same way, or they would differ in their last bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tierstore_engine.attention.base import numbers_on

PASTS = (0, 2048, 8192, 32768, 131072)
"""Tokens before a chunk, at which the two are compared."""

_WORTH = 0.97  # of the kernels' time: below that the library is taken


@dataclass(frozen=True, slots=True)
class LibraryRanges:
    """The lengths of the past at which the library is used: ``first ≤ past < stop`` for each pair."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, past: int) -> bool:
        return any(first <= past < stop for first, stop in self.ranges)


EVERYWHERE = LibraryRanges(((0, 1 << 31),))
NOWHERE = LibraryRanges()


class GatheredPrefill:
    """Attention of one sequence's newest tokens over its pages in ``kv``
    ``[num_pages, layers, 2, kv_heads, chunk_tokens, head_dim]``."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        self._scale = kv.shape[-1] ** -0.5

    def attend(self, layer: int, queries: torch.Tensor, table: torch.Tensor, stop: int) -> torch.Tensor:
        """``queries [tokens, heads, head_dim]`` are of the tokens up to ``stop``; ``table`` (int64) are the
        sequence's pages. Returns the same shape."""
        keys, values = self.gather(layer, table, stop)
        ours = queries.transpose(0, 1).unsqueeze(0)
        mask = causal_lower_right(len(queries), stop) if len(queries) < stop else None
        out: torch.Tensor = scaled_dot_product_attention(
            ours, keys, values, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    def gather(self, layer: int, table: torch.Tensor, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first ``stop`` tokens, ``[1, kv_heads, stop, head_dim]``. One copy."""
        planes = self._kv[:, layer].permute(1, 2, 0, 3, 4).index_select(2, table)
        keys, values = planes.flatten(2, 3)[:, :, :stop].unsqueeze(1)
        return keys, values


def choose(
    kernels_s: Callable[[int], float], library_s: Callable[[int], float], *, chunk: int, limit: int
) -> LibraryRanges:
    """Where the library is faster: each gives the seconds of a chunk behind so many tokens, infinity where
    it cannot be used. ``limit`` is the longest sequence.

    What is faster at one length is taken to be so up to the next, if the library can be used there as well:
    it needs room for what it gathers, and more with every token."""
    pasts = [past for past in PASTS if past + chunk <= limit] or [0]
    longest = max(limit // chunk - 1, 0) * chunk
    library = {past: library_s(past) for past in sorted({*pasts, longest})}
    ranges: list[tuple[int, int]] = []
    for past, stop in zip(pasts, [*pasts[1:], limit], strict=True):
        usable = math.isfinite(library[min(stop, longest)])
        if usable and library[past] < _WORTH * kernels_s(past):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == past else past
            ranges.append((first, stop))
    return LibraryRanges(tuple(ranges))


def pages_of(table: Sequence[int], stop: int, chunk_tokens: int, device: torch.device) -> torch.Tensor:
    """The pages of a sequence's first ``stop`` tokens, for :meth:`GatheredPrefill.attend`."""
    return numbers_on(table[: -(-stop // chunk_tokens)], device)
