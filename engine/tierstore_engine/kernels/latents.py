"""The kernels for latents (MLA) as operations on tensors, like those in
:mod:`~tierstore_engine.kernels.operations`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tierstore_engine.kernels import operations
from tierstore_engine.kernels.catalog import latent_set
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import LayerPages, MergingKernels, Slots, SplitRule


@dataclass(frozen=True, slots=True)
class Entries:
    """The query tokens of one launch, as int32 device arrays.

    ``rows`` are the rows of the queries. ``lengths`` counts the tokens of an entry's sequence up to the
    entry's own token, at most ``max_length``. 0 means that there is no entry. ``tables`` has a row of pages
    for each entry, or for the sequence that ``owners`` names.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    max_length: int
    owners: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def cut(self, most: int) -> Iterator[Entries]:
        """Yield the entries, divided into launches of at most ``most`` entries."""
        rows, lengths = torch.split(self.rows, most), torch.split(self.lengths, most)
        owners: Sequence[torch.Tensor | None] = [None] * len(rows)
        if self.owners is not None:
            owners = torch.split(self.owners, most)
        for some, until, each in zip(rows, lengths, owners, strict=True):
            yield replace(self, rows=some, lengths=until, owners=each)


class LatentKernels(MergingKernels):
    """The kernels for latents of ``width`` numbers, loaded on one device. The first ``rank`` numbers are
    their values. Raises :class:`~tierstore_engine.errors.KernelError` as
    :class:`~tierstore_engine.kernels.operations.AttentionKernels` does."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        dtype: str,
        heads: int,
        width: int,
        rank: int,
        page_tokens: int,
        score_scale: float,
        split_rule: SplitRule | None = None,
    ) -> None:
        self.heads, self.rank, self.page_tokens = heads, rank, page_tokens
        self.split_rule = split_rule or SplitRule()
        kernels = latent_set(dtype=dtype, width=width, rank=rank, page_tokens=page_tokens)
        self._write = launcher.load(kernels.write)
        self._decode = launcher.load(kernels.decode)
        self._combine = launcher.load(kernels.combine)
        self._merge = launcher.load(kernels.merge)
        self._scale = np.float32(score_scale)

    def write(self, layer: LayerPages, latents: torch.Tensor, slots: Slots) -> None:
        """Write ``latents [tokens, width]`` (contiguous) into pages."""
        stride, none = np.int64(latents.stride(0)), np.int64(0)
        arguments = (
            *(None, latents, None, none, stride, none, None, None, slots.pages, slots.offsets, None),
            *(layer.pool, np.int64(layer.page_stride), np.int64(layer.offset), np.int32(0), np.int32(1)),
        )
        self._write((len(latents),), arguments)

    def attend(
        self,
        layer: LayerPages,
        queries: torch.Tensor,
        entries: Entries,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        split: bool,
    ) -> None:
        """Compute attention of each entry over its sequence, up to the entry's own token.

        ``queries`` are ``[tokens, heads, width]``, ``out [tokens, heads, rank]``, ``lse [tokens, heads]``.
        Only the entries' rows are read and written. With ``split``, several blocks compute an entry, more for
        a longer sequence, and a second launch merges their results. This suits few entries. An ``out`` in
        float32 also needs a second launch, and memory for a second output.
        """
        splits = max(self.split_rule.splits(entries.max_length, self.page_tokens), 1) if split else 1
        most = self.split_rule.max_splits if split else 1
        part_log2 = part_out = None
        if combined := split or out.dtype == torch.float32:
            part_log2 = operations.workspace((len(entries), splits, self.heads), queries.device)
            part_out = operations.workspace((*part_log2.shape, self.rank), queries.device)
        rule = (np.int32(self.split_rule.min_pages), np.int32(most))
        arguments = (
            *(queries, entries.rows, layer.pool, np.int64(layer.page_stride), np.int64(layer.offset)),
            *(entries.tables, np.int32(entries.tables.shape[1]), entries.owners, entries.lengths),
            *(part_out, part_log2, None if combined else out, lse, np.int32(self.heads), *rule, self._scale),
        )
        self._decode((-(-self.heads // 16), splits, len(entries)), arguments)
        if combined:
            everything = (np.int32(splits), np.int32(0), np.int32(0), *rule)
            sums = (part_out, part_log2, entries.rows, entries.lengths, *operations.narrow_or_wide(out))
            self._combine((self.heads, len(entries)), (*sums, lse, *everything))
