"""The kernels as operations on tensors. A method is one launch, or two with splits. The order of its
parameters is that of the kernel's.

All tensors are on the launcher's device, and contiguous unless stated otherwise. No method waits for the
device. Indices are int32. ``queries``, keys, values and outputs are in the kernels' dtype, LSEs (natural
logarithms of the softmax denominators) in float32. Outputs of attention may be in float32 instead if they
will be merged. ``heads`` is the number of query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tierstore_engine.kernels.catalog import FLOATS, PAGE_COPY, kernel_set, pointwise_set
from tierstore_engine.kernels.launcher import Kernel, Launcher
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.pointwise import Pointwise

_VECTOR = 8  # numbers that a thread reads with one instruction
_COPY_BLOCKS = 16  # enough blocks to use all of PCIe's bandwidth; more would take SMs from the model


@dataclass(frozen=True, slots=True)
class Sight:
    """Which tokens a token sees: the last ``window`` tokens up to itself, the tokens of its attention chunk
    of ``chunk`` tokens up to itself, or all tokens up to itself. If not ``causal``, it also sees the
    sequence's later tokens."""

    window: int | None = None
    chunk: int | None = None
    causal: bool = True

    def first(self, position: int) -> int:
        """Return the first visible position, like ``first_visible`` in ``scores.cuh``."""
        if self.chunk is not None:
            return position - position % self.chunk
        return max(position - self.window + 1, 0) if self.window is not None else 0

    def most(self, length: int, tokens: int = 1) -> int:
        """Return the largest number of tokens that the last ``tokens`` of ``length`` tokens see in total."""
        reach = self.window or self.chunk
        return min(length, reach + tokens) if reach is not None else length

    def numbers(self) -> tuple[np.int32, np.int32]:
        """Return the kernels' arguments."""
        return np.int32(self.window or 0), np.int32(self.chunk or 0)


EVERYTHING = Sight()

PART_TOKENS = 2048
"""Tokens in a part of a sequence, for models in which a token must have the same bits in every step. The
number was not tuned on a GPU."""


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How a sequence is cut into splits: at most ``max_splits``, each of at least ``min_pages`` pages. A
    chunk of prefill, which has its own blocks, is cut so that it has at most ``chunk_blocks`` of them (about
    two per SM of a large GPU; not tuned on one).

    The splits of a sequence depend on its own tokens only, so that its results do not depend on the batch.

    With ``part_tokens`` (a multiple of 64), parts of prefill begin at its multiples in the sequence. If the
    prefill kernel also computes single tokens, a token's bits do not depend on its chunk either.
    """

    min_pages: int = 8
    max_splits: int = 64
    chunk_blocks: int = 256
    part_tokens: int = 0

    def splits(self, length: int, page_tokens: int, sight: Sight = EVERYTHING) -> int:
        """Return the splits of a token that is the last of ``length``, like ``split_count`` in
        ``split.cuh``."""
        pages = -(-length // page_tokens) - sight.first(length - 1) // page_tokens
        return min(-(-pages // self.min_pages), self.max_splits)

    def chunk_splits(self, blocks: int, visible: int, page_tokens: int) -> int:
        """Return the splits of a chunk that has ``blocks`` blocks unsplit and sees ``visible`` tokens."""
        pages = -(-visible // page_tokens)
        return max(min(pages // self.min_pages, self.chunk_blocks // blocks, self.max_splits), 1)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's keys and values in the pool.

    ``pool`` is the whole pool. ``page_stride`` (from page to page) and ``offset`` (of the layer within a
    page) count numbers; they count bytes if the numbers are codes. ``scales`` are the codes' static scales,
    float32 ``[2, kv_heads]``; None if they are in the pages.
    """

    pool: torch.Tensor
    page_stride: int
    offset: int
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ChunkSplits:
    """Into how many parts the attention of each sequence's prefill chunk is divided.

    ``counts`` and ``first_parts`` are int32 arrays on the device. ``most`` is the largest count. ``parts`` is
    the total over all queries: a sequence with ``n`` new tokens has ``n * count`` parts, from its first part
    on.
    """

    counts: torch.Tensor
    first_parts: torch.Tensor
    most: int
    parts: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one launch, as device arrays with one entry each, so that a captured graph may be
    replayed with other contents.

    For each sequence, ``rows`` has its first row of queries, ``counts`` its number of rows (its last tokens),
    ``lengths`` its number of tokens including these, and ``tables [sequences, width]`` its pages.
    ``max_count`` and ``max_length`` are upper bounds for the launch. ``splits`` is for prefill.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    max_count: int
    max_length: int
    splits: ChunkSplits | None = None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Slots:
    """The places of new tokens: ``pages [tokens]`` and ``offsets [tokens]`` within them. A token with page -1
    is skipped."""

    pages: torch.Tensor
    offsets: torch.Tensor


class MergingKernels:
    """Kernels of attention over parts of the keys, with one that merges two parts."""

    _merge: Kernel

    def merge(
        self,
        first: tuple[torch.Tensor, torch.Tensor],
        second: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Merge attention over two disjoint parts of the keys into ``out [tokens, heads, head_dim]``, and
        their LSEs into ``lse``. Each part is an output like ``out``, but in float32, and its LSE
        ``[tokens, heads]``. ``out`` may be in float32 for another merge."""
        self._merge((first[1].numel(),), (*first, *second, *narrow_or_wide(out), lse))


class AttentionKernels(MergingKernels):
    """The kernels for one shape of attention, loaded on one device. ``dtype`` is ``float16`` or ``bfloat16``.
    Products are multiplied by ``score_scale`` (None: divided by the root of head_dim), and scores are capped
    by ``score_cap`` if it is set.

    Raises :class:`~tierstore_engine.errors.KernelError` for shapes that they do not compute, and if
    they cannot be built or loaded.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        dtype: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        kv: KVFormat = FLOATS,
        score_scale: float | None = None,
        score_cap: float | None = None,
        split_rule: SplitRule | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.group = heads // kv_heads
        self.page_tokens = page_tokens
        self.split_rule = split_rule or SplitRule()
        kernels = kernel_set(
            dtype=dtype,
            head_dim=head_dim,
            group=self.group,
            page_tokens=page_tokens,
            kv=kv,
            capped=score_cap is not None,
        )
        self._prefill_rows = kernels.prefill_rows
        self._rope_write = None if kernels.rope_write is None else launcher.load(kernels.rope_write)
        self._write = launcher.load(kernels.write)
        self._decode = launcher.load(kernels.decode)
        self._combine = launcher.load(kernels.combine)
        self._prefill = launcher.load(kernels.prefill)
        self._split_prefill = launcher.load(kernels.split_prefill)
        self._combine_chunks = launcher.load(kernels.combine_chunks)
        self._merge = launcher.load(kernels.merge)
        self._scoring = (np.float32(score_scale or head_dim**-0.5), np.float32(score_cap or 0.0))

    def write(self, layer: LayerPages, keys: torch.Tensor, values: torch.Tensor, slots: Slots) -> None:
        """Write ``keys`` and ``values`` (``[tokens, kv_heads, head_dim]``, any stride between tokens) into
        pages, quantised if the pages hold codes."""
        if not self.rotates:
            places = (slots.pages, slots.offsets, *_pool(layer), layer.scales, np.int32(self.kv_heads))
            self._write((len(keys),), (keys, values, *_token_strides(keys, values), *places))
            return
        arguments = (
            *(None, keys, values, np.int64(0), *_token_strides(keys, values), None, None),
            *(slots.pages, slots.offsets, None, *_pool(layer), np.int32(self.heads), np.int32(self.kv_heads)),
        )
        self._write((len(keys),), arguments)

    @property
    def rotates(self) -> bool:
        """Return whether :meth:`rope_write` is available. It is not available if pages hold codes."""
        return self._rope_write is not None

    def rope_write(
        self,
        layer: LayerPages,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        slots: Slots,
        rotated: torch.Tensor,
    ) -> None:
        """Rotate queries (into ``rotated [tokens, heads, head_dim]``) and keys, and write keys and values.

        ``queries``, ``keys`` and ``values`` may have any stride between tokens. ``cosines`` and ``sines`` are
        ``[tokens, head_dim]``.
        """
        arguments = (
            *(queries, keys, values, *_token_strides(queries, keys, values), cosines, sines),
            *(
                slots.pages,
                slots.offsets,
                rotated,
                *_pool(layer),
                np.int32(self.heads),
                np.int32(self.kv_heads),
            ),
        )
        assert self._rope_write is not None
        self._rope_write((len(keys),), arguments)

    def chunk_splits(self, count: int, length: int, sight: Sight = EVERYTHING) -> int:
        """Return the number of parts for a chunk of ``count`` tokens, the last of ``length``. Without
        ``part_tokens``, this is the number that keeps a device busy: 1 if the chunk has enough blocks or sees
        few tokens. The result depends on ``count`` and ``length`` alone."""
        if part := self.split_rule.part_tokens:
            return -(-length // part) - sight.first(length - count) // part
        visible = sight.most(length, count)
        blocks = -(-count * self.group // self._prefill_rows) * self.kv_heads
        return self.split_rule.chunk_splits(blocks, visible, self.page_tokens)

    def prefill(
        self,
        layer: LayerPages,
        queries: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        sight: Sight = EVERYTHING,
    ) -> None:
        """Compute attention of each sequence's last ``counts`` tokens over the tokens that they see. If each
        query sees the whole sequence and attention is not causal, the queries need not belong to the
        sequence's ``lengths`` tokens.

        ``queries`` and ``out`` are ``[tokens, heads, head_dim]``, ``lse [tokens, heads]``. Only the
        sequences' rows are read and written. If the sequences have ``splits``, this takes two launches, and
        memory for all parts. A float32 ``out`` needs ``splits``; each sequence may have one split only.
        """
        rows = -(-sequences.max_count * self.group // self._prefill_rows)
        pages = (*_pool(layer), layer.scales, *_tables(sequences))
        inputs = (queries, sequences.rows, sequences.counts, *pages)
        numbers = (np.int32(self.group), *sight.numbers(), np.int32(sight.causal), *self._scoring)
        splits = sequences.splits
        if splits is None:
            assert out.dtype != torch.float32, "only splits are merged in float32"
            unused = (None, np.int32(1), None, None, None, np.int32(0))
            self._prefill((rows, self.kv_heads, len(sequences)), (*inputs, out, lse, *unused, *numbers))
            return
        part_log2 = workspace((splits.parts, self.heads), queries.device)
        part_out = workspace((*part_log2.shape, self.head_dim), queries.device)
        part_tokens = np.int32(self.split_rule.part_tokens)
        parts = (splits.counts, np.int32(splits.most), splits.first_parts, part_out, part_log2, part_tokens)
        grid = (rows, self.kv_heads, len(sequences) * splits.most)
        self._split_prefill(grid, (*inputs, None, None, *parts, *numbers))
        combined = (
            *(part_out, part_log2, sequences.rows, sequences.counts),
            *(splits.counts, splits.first_parts, *narrow_or_wide(out), lse),
        )
        self._combine_chunks((self.heads, sequences.max_count, len(sequences)), combined)

    def decode(
        self,
        layer: LayerPages,
        queries: torch.Tensor,
        sequences: Sequences,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        sight: Sight = EVERYTHING,
    ) -> None:
        """Compute attention as :meth:`prefill` does, but for one row per sequence; ``counts`` is ignored. The
        row of ``out`` of a sequence of length 0 is not written."""
        # The visible range may cover one page more than its number of tokens suggests.
        most = sight.most(sequences.max_length, self.page_tokens)
        splits = max(self.split_rule.splits(most, self.page_tokens), 1)
        part_log2 = workspace((len(sequences), splits, self.heads), queries.device)
        part_out = workspace((*part_log2.shape, self.head_dim), queries.device)
        rule = (np.int32(self.split_rule.min_pages), np.int32(self.split_rule.max_splits))
        arguments = (
            *(queries, sequences.rows, *_pool(layer), layer.scales, *_tables(sequences), part_out, part_log2),
            *(np.int32(self.group), *sight.numbers(), *rule, *self._scoring),
        )
        self._decode((self.kv_heads, splits, len(sequences)), arguments)
        combined = (
            *(part_out, part_log2, sequences.rows, sequences.lengths, *narrow_or_wide(out), lse),
            *(np.int32(splits), *sight.numbers(), *rule),
        )
        self._combine((self.heads, len(sequences)), combined)


class PointwiseKernels(Pointwise):
    """Additions with the norm that follows, and gates, in one launch each. torch computes rows that are empty
    or whose width is not a multiple of 8, and gates that are not contiguous. ``dtype`` is ``float16`` or
    ``bfloat16``."""

    def __init__(self, launcher: Launcher, *, dtype: str, epsilon: float) -> None:
        super().__init__(epsilon)
        kernels = pointwise_set(dtype)
        self._add_norm = launcher.load(kernels.add_norm)
        self._silu_mul = launcher.load(kernels.silu_mul)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if not _fits(x, x.shape[-1]):
            return super().norm(x, weight)
        normed = torch.empty_like(x)
        self._launch(x, None, weight, None, normed)
        return normed

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, added = hidden.contiguous(), added.contiguous()
        if not _fits(hidden, hidden.shape[-1]):
            return super().add_norm(hidden, added, weight)
        total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        self._launch(hidden, added, weight, total, normed)
        return total, normed

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        width = gate_up.shape[-1] // 2
        if not _fits(gate_up, width):
            return super().silu_mul(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._silu_mul((out.numel() // width,), (gate_up, out, np.int32(width)))
        return out

    def _launch(
        self,
        hidden: torch.Tensor,
        added: torch.Tensor | None,
        weight: torch.Tensor,
        total: torch.Tensor | None,
        normed: torch.Tensor,
    ) -> None:
        width = hidden.shape[-1]
        numbers = (np.int32(width), np.float32(self.epsilon))
        self._add_norm((hidden.numel() // width,), (hidden, added, weight, total, normed, *numbers))


def _fits(rows: torch.Tensor, width: int) -> bool:
    """Return whether a kernel whose blocks process ``width`` numbers at a time supports ``rows``."""
    return width % _VECTOR == 0 and rows.is_contiguous() and rows.numel() > 0


class PageCopy:
    """Copy many small fragments between device memory and mapped pinned host memory, in any direction."""

    def __init__(self, launcher: Launcher) -> None:
        self._copy = launcher.load(PAGE_COPY)

    def copy(self, to: torch.Tensor, source: torch.Tensor, fragment_bytes: int) -> None:
        """Copy ``fragment_bytes`` (a multiple of 16) from each address of ``source`` to that of ``to``. Both
        are int64 ``[fragments]`` on the device, with addresses that are multiples of 16."""
        if fragment_bytes % 16:
            raise ValueError(f"fragments must be multiples of 16 bytes, got {fragment_bytes}")
        arguments = (to, source, np.int32(len(to)), np.int32(fragment_bytes))
        self._copy((_COPY_BLOCKS,), arguments)


def workspace(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return a float32 tensor from torch's caching allocator, which supports streams and graph capture."""
    return torch.empty(shape, dtype=torch.float32, device=device)


def narrow_or_wide(out: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the kernels' arguments ``out`` and ``wide`` for an output. One of the two is None."""
    return (None, out) if out.dtype == torch.float32 else (out, None)


def _pool(layer: LayerPages) -> tuple[torch.Tensor, np.int64, np.int64]:
    return layer.pool, np.int64(layer.page_stride), np.int64(layer.offset)


def _tables(sequences: Sequences) -> tuple[torch.Tensor, np.int32, torch.Tensor]:
    return sequences.tables, np.int32(sequences.tables.shape[1]), sequences.lengths


def _token_strides(*tensors: torch.Tensor) -> Sequence[np.int64]:
    for tensor in tensors:
        assert tensor.stride()[1:] == (tensor.shape[2], 1), "heads of one token must be contiguous"
    return [np.int64(tensor.stride(0)) for tensor in tensors]
