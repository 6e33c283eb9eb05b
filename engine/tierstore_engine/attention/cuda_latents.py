"""Attention over latents on a GPU, by the kernels of :mod:`tierstore_engine.kernels.latents`.

Each token is handled separately. The number of splits of a decoded token depends on the length of its
sequence. A token of a prefill chunk has one split. All chunks take one launch, and all decoded tokens take
two. The results for a token depend on its sequence alone. If a token must have the same bits in every step
(``ModelConfig.arithmetic``), a token in a chunk gets the same splits as a decoded token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from tierstore.spec import KVSpec
from tierstore_engine.attention.base import BatchLayout, Prepared, Span
from tierstore_engine.attention.cuda import MOST_PARTS, KernelAttention
from tierstore_engine.config import ModelConfig
from tierstore_engine.kernels.latents import Entries, LatentKernels
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import LayerPages, Sequences, Slots
from tierstore_engine.moving import to_device


@dataclass(frozen=True, slots=True)
class _LatentStep:
    """A batch in the form that the kernels need."""

    slots: Slots
    decoding: Entries | None
    chunks: Entries | None


class CudaLatentAttention(KernelAttention):
    """Attention over ``pages`` of latents; see :class:`~tierstore_engine.attention.cuda.CudaAttention`. The
    output of a head is as wide as values are. Not thread-safe."""

    _kernels: LatentKernels

    def __init__(self, pages: torch.Tensor, spec: KVSpec, config: ModelConfig, launcher: Launcher) -> None:
        assert config.latent is not None
        assert pages.shape[1] == spec.page_bytes, "the pool has another layout than the model"
        [group] = spec.groups
        self.chunk_tokens = spec.chunk_tokens
        self._launcher = launcher
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._heads, self._rank = config.heads, config.latent.rank
        self._same_bits = bool(config.arithmetic)
        self._kernels = LatentKernels(
            launcher,
            dtype=config.dtype,
            heads=config.heads,
            width=config.latent.width,
            rank=config.latent.rank,
            page_tokens=spec.chunk_tokens,
            score_scale=config.attention_scale,
        )
        pool = pages.view(getattr(torch, config.dtype))
        self._layers = {
            layer: LayerPages(pool, pool.stride(0), spec.layer(layer).start // pool.element_size())
            for layer in group.layers
        }
        self._steps: Prepared[_LatentStep] = Prepared()

    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        layout = BatchLayout((), (), slots.pages, slots.offsets)
        entries = Entries(decoding.rows, decoding.lengths, decoding.tables, decoding.max_length)
        return self._steps.fix(layout, _LatentStep(slots, entries, None))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        assert values is None, "latents are keys"
        latents = keys.flatten(1).contiguous()
        self._kernels.write(self._layers[layer], latents, self._prepared(batch).slots)

    def _attend(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: BatchLayout,
        lse: torch.Tensor | None,
        *,
        wide: bool = False,
    ) -> torch.Tensor:
        step, pages, queries = self._prepared(batch), self._layers[layer], queries.contiguous()
        dtype = torch.float32 if wide else queries.dtype
        out = queries.new_empty(len(queries), self._heads, self._rank, dtype=dtype)
        if step.chunks is not None:
            most = self._most_entries(step.chunks) if self._same_bits else len(step.chunks)
            for entries in step.chunks.cut(most):
                self._kernels.attend(pages, queries, entries, out, lse, split=self._same_bits)
        if step.decoding is not None:
            self._kernels.attend(pages, queries, step.decoding, out, lse, split=True)
        return out

    def _most_entries(self, entries: Entries) -> int:
        """Return the largest number of ``entries`` that one launch may compute in splits."""
        splits = self._kernels.split_rule.splits(entries.max_length, self.chunk_tokens)
        return max(MOST_PARTS // self._heads // splits, 1)

    def _prepared(self, batch: BatchLayout) -> _LatentStep:
        return self._steps.of(batch, lambda: _prepare(batch, self.chunk_tokens, causal=self._causal))


def _prepare(batch: BatchLayout, chunk_tokens: int, *, causal: bool) -> _LatentStep:
    """Separate single tokens from chunks, and copy their numbers to the device at once."""
    first_rows = accumulate((span.tokens for span in batch.spans), initial=0)
    members = list(zip(batch.spans, first_rows, strict=False))
    kinds = [
        _LatentKind(batch.group, [member for member in members if (member[0].tokens == 1) is single], causal)
        for single in (True, False)
    ]
    parts = [kind.numbers(chunk_tokens) for kind in kinds]
    numbers = to_device(torch.from_numpy(np.concatenate(parts)), batch.pages.device)
    on_device = torch.split(numbers, [len(part) for part in parts])
    decoding, chunks = (kind.entries(part) for part, kind in zip(on_device, kinds, strict=True))
    slots = Slots(batch.pages.to(torch.int32), batch.offsets.to(torch.int32))
    return _LatentStep(slots, decoding, chunks)


@dataclass(frozen=True, slots=True)
class _LatentKind:
    """The spans of one launch, each with its first row. Each token of a span is an *entry*."""

    group: int
    members: Sequence[tuple[Span, int]]
    causal: bool

    @property
    def tokens(self) -> int:
        return sum(span.tokens for span, _ in self.members)

    def numbers(self, chunk_tokens: int) -> npt.NDArray[np.int32]:
        """Return all entries' rows, lengths and owners, then the members' block tables, padded to one
        width."""
        if not self.members:
            return np.empty(0, np.int32)
        spans = [span for span, _ in self.members]
        rows = [np.arange(first, first + span.tokens) for span, first in self.members]
        lengths = [
            np.arange(span.start + 1, span.stop + 1) if self.causal else np.full(span.tokens, span.stop)
            for span in spans
        ]
        owners = np.repeat(np.arange(len(spans)), [span.tokens for span in spans])
        tables = [span.tables[self.group][: -(-span.stop // chunk_tokens)] for span in spans]
        padded = np.zeros((len(tables), max(map(len, tables))), np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        return np.concatenate([*rows, *lengths, owners, padded.ravel()]).astype(np.int32)

    def entries(self, numbers: torch.Tensor) -> Entries | None:
        """Return the entries from :meth:`numbers` on the device; None without members."""
        if not self.members:
            return None
        rows, lengths, owners = numbers[: 3 * self.tokens].view(3, -1)
        tables = numbers[3 * self.tokens :].view(len(self.members), -1)
        return Entries(rows, lengths, tables, max(span.stop for span, _ in self.members), owners)
