"""Paged attention on a GPU, by the kernels of :mod:`tierstore_engine.kernels`, which read the pages in place.

Sequences with one new token in a step go to the decode kernels, all others to the prefill kernel. Any batch
takes two launches (three for decoding). Chunks with few tokens after a long past are divided into splits,
which takes two more launches. Chunks for which torch's own attention was measured to be faster are computed
by it, one by one (``gathered.py``). Everything is launched on torch's current stream, in order with the
model's matrix products, and nothing waits for the device.

The results for a sequence depend on that sequence alone, not on the rest of the batch or on the choice of
pages. If a token must have the same bits in every step (``ModelConfig.arithmetic``), the prefill kernel
computes single tokens too, in splits that begin at multiples of ``PART_TOKENS``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tierstore.spec import KVSpec, LayerKind
from tierstore.tiers.beyond import Numbers
from tierstore_engine.attention.base import (
    BatchLayout,
    PartAttention,
    Prepared,
    SeenTokens,
    Span,
    numbers_on,
)
from tierstore_engine.attention.gathered import NOWHERE, GatheredPrefill, pages_of
from tierstore_engine.config import ModelConfig
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import (
    EVERYTHING,
    PART_TOKENS,
    AttentionKernels,
    ChunkSplits,
    LayerPages,
    MergingKernels,
    PointwiseKernels,
    Sequences,
    Sight,
    Slots,
    SplitRule,
)
from tierstore_engine.kernels.products import ProductKernels
from tierstore_engine.moving import to_device
from tierstore_engine.pointwise import Pointwise
from tierstore_engine.products import Product

MOST_PARTS = 1 << 17
"""The most parts of one launch, each of one query head. They need 64 MiB with a head_dim of 128. One chunk
has at most a quarter of these parts."""


@dataclass(frozen=True, slots=True)
class _PagedStep:
    """A batch in the form that the kernels need."""

    slots: Slots
    decoding: Sequences | None
    prefilling: Sequence[Sequences]
    mutual: Sequence[Sequences] = ()  # the sequences of tokens that see one another
    # the first row, the span and the pages of each sequence
    gathered: Sequence[tuple[int, Span, torch.Tensor]] = ()


@dataclass(frozen=True, slots=True)
class _Launch:
    """The queries of one launch of :meth:`KernelAttention.partial`, at the rows ``rows``. ``attention``
    belongs to this launch only."""

    rows: torch.Tensor
    layout: BatchLayout
    attention: KernelAttention


class KernelAttention(PartAttention):
    """Attention by kernels, over keys and values or over latents. The results over several parts of the keys
    can be merged."""

    _kernels: MergingKernels
    _launcher: Launcher
    _dtype: torch.dtype
    _layers: dict[int, LayerPages]
    _steps: Prepared[Any]
    _causal = True

    def pointwise(self, config: ModelConfig) -> Pointwise:
        return kernel_pointwise(self._launcher, config)

    def product(self, config: ModelConfig) -> Product:
        return ProductKernels(self._launcher, dtype=config.dtype).multiply

    @abstractmethod
    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        """Return a batch of decoding sequences over these tensors, to be captured once and replayed. A replay
        reads the tensors' contents at that time. The batch's spans are empty."""

    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        return self._attend(layer, queries, batch, None)

    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention and LSEs from the kernels, because torch's attention gives no LSE."""
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        return self._attend(layer, queries, batch, lse), lse

    def partial(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same as :meth:`attend_with_lse` with outputs in float32, which :meth:`merge` rounds."""
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        return self._attend(layer, queries, batch, lse, wide=True), lse

    def merge(
        self,
        first: tuple[torch.Tensor, torch.Tensor],
        second: tuple[torch.Tensor, torch.Tensor],
        into: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge attention over two parts of the keys, each computed by :meth:`partial` of this or another
        backend. Return outputs and LSEs: in float32 for another merge, or ``into`` (an output of the model's
        dtype, and LSEs)."""
        merged = into or (torch.empty_like(first[0]), torch.empty_like(first[1]))
        self._kernels.merge(first, second, *merged)
        return merged

    def over_layers(self, memory: torch.Tensor) -> KernelAttention:
        """Return the same attention over other pages, for spans that are complete: each of their new tokens
        sees all tokens up to ``stop``. ``memory`` (uint8 ``[pages, bytes]``) has one layer of each page,
        whichever layer is computed."""
        other = self._copy(causal=False)
        other._layers = {layer: _layer_in(memory, pages) for layer, pages in self._layers.items()}
        return other

    def _copy(self, *, causal: bool) -> KernelAttention:
        """Return the same attention, with preparations of its own. If not ``causal``, spans are complete."""
        other = copy.copy(self)
        other._steps, other._causal = Prepared(), causal
        return other

    def plan(self, seen: Sequence[SeenTokens]) -> Sequence[_Launch]:
        """Sort the rows into runs that the kernels know: each token sees one more than the token before, or
        all see the same tokens. Every token must see its sequence from the first one on."""
        runs: dict[bool, list[tuple[range, Span]]] = {True: [], False: []}
        for each in seen:
            assert not each.firsts.any(), "the kernels know no windows over parts"
            pages, steps = each.table.tolist(), np.diff(each.stops)
            for run in _runs(steps):
                stop = int(each.stops[run.stop - 1])
                causal = len(run) == 1 or bool(steps[run.start])
                of_step = range(each.first_row + run.start, each.first_row + run.stop)
                runs[causal].append((of_step, Span((pages,), stop - len(run), stop)))
        device, launches = next(iter(self._layers.values())).pool.device, []
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        for causal, found in runs.items():
            if found:
                rows = numbers_on([row for each, _ in found for row in each], device)
                layout = BatchLayout(tuple(span for _, span in found), (), nothing, nothing)
                launches.append(_Launch(rows, layout, self._copy(causal=causal)))
        return launches

    def over(
        self,
        layer: int,
        queries: torch.Tensor,
        planned: Sequence[_Launch],
        block: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        out: torch.Tensor | None = None
        for launch in planned:
            attention = launch.attention
            if block is not None:
                attention._layers = {layer: _layer_in(block, self._layers[layer])}
            some, lse[launch.rows] = attention.partial(layer, queries[launch.rows], launch.layout)
            out = some.new_empty(len(queries), *some.shape[1:]) if out is None else out
            out[launch.rows] = some
        assert out is not None, "there are no queries"
        return out, lse

    @abstractmethod
    def _attend(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: BatchLayout,
        lse: torch.Tensor | None,
        *,
        wide: bool = False,
    ) -> torch.Tensor:
        """Return attention, in float32 if ``wide``. Write LSEs into ``lse`` if it is given."""


class CudaAttention(KernelAttention):
    """Attention over ``pages``, the whole pool of one layer group as uint8 ``[num_pages, page_bytes]`` on the
    launcher's device (with any stride between pages). ``spec`` is their layout.

    Every kernel dequantises codes to the model's dtype while reading. Not thread-safe. Raises
    :class:`~tierstore_engine.errors.KernelError` for a model that the kernels do not compute (its
    head_dim, dtype, heads per KV head), and if they cannot be built or loaded.
    """

    _kernels: AttentionKernels

    def __init__(self, pages: torch.Tensor, spec: KVSpec, config: ModelConfig, launcher: Launcher) -> None:
        assert pages.shape[1] == spec.page_bytes, "the pool has another layout than the model"
        [group] = spec.groups
        self.chunk_tokens = spec.chunk_tokens
        self.layers = group.layers
        self._launcher = launcher
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        scale = config.score_scale or group.head_dim**-0.5
        self._kernels = AttentionKernels(
            launcher,
            dtype=config.dtype,
            heads=config.heads,
            kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            page_tokens=spec.chunk_tokens,
            kv=config.kv,
            score_scale=scale,
            score_cap=config.score_cap,
            split_rule=SplitRule(part_tokens=PART_TOKENS) if config.arithmetic else None,
        )
        self._same_bits = bool(config.arithmetic)
        self.library: GatheredPrefill | None = None
        """Set only if torch's attention supports the model: pages hold no codes, scores are not capped, and a
        token need not have the same bits in every step."""
        self.library_at = NOWHERE
        """Set after a measurement."""
        pool = pages
        if not config.kv.quantised:
            pool = pages.view(getattr(torch, config.dtype))
            if config.score_cap is None and not self._same_bits:
                shape = (len(group.layers), 2, group.kv_heads, spec.chunk_tokens, group.head_dim)
                self.library = GatheredPrefill(pool.view(len(pool), *shape), scale)
        self._most_parts = MOST_PARTS // config.heads
        self._sights = {layer: sight_of(config, layer) for layer in group.layers}
        self._layers = {
            layer: LayerPages(
                pool,
                page_stride=pool.stride(0),
                offset=spec.layer(layer).start // pool.element_size(),
                scales=_static_scales(config, layer, pool.device),
            )
            for layer in group.layers
        }
        self._place = {layer: place for place, layer in enumerate(group.layers)}
        self._steps: Prepared[_PagedStep] = Prepared()

    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        layout = BatchLayout((), (), slots.pages, slots.offsets)
        return self._steps.fix(layout, _PagedStep(slots, decoding, ()))

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        assert values is not None, "the kernels know no latents"
        slots = self._prepared(batch).slots
        self._kernels.write(self._layers[layer], _by_heads(keys), _by_heads(values), slots)

    def rotate_and_write(
        self,
        layer: int,
        projections: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotations: tuple[torch.Tensor, torch.Tensor],
        batch: BatchLayout,
    ) -> torch.Tensor:
        """Rotate and write in one launch, if pages hold no codes and whole heads are rotated. The bits are
        the same."""
        if not self._kernels.rotates or rotations[0].shape[-1] != projections[0].shape[-1]:
            return super().rotate_and_write(layer, projections, rotations, batch)
        queries, keys, values = (_by_heads(each) for each in projections)
        rotated = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        cosines, sines = (part.reshape(len(queries), -1) for part in rotations)
        slots = self._prepared(batch).slots
        self._kernels.rope_write(self._layers[layer], queries, keys, values, cosines, sines, slots, rotated)
        return rotated

    def _copy(self, *, causal: bool) -> KernelAttention:
        other = super()._copy(causal=causal)
        assert isinstance(other, CudaAttention)
        other._sights = {layer: replace(sight, causal=causal) for layer, sight in self._sights.items()}
        return other

    def _attend(
        self,
        layer: int,
        queries: torch.Tensor,
        batch: BatchLayout,
        lse: torch.Tensor | None,
        *,
        wide: bool = False,
    ) -> torch.Tensor:
        step = self._prepared(batch, with_lse=lse is not None, wide=wide)
        sight = self._sights[layer]
        queries = queries.contiguous()
        out = torch.empty_like(queries, dtype=torch.float32 if wide else queries.dtype)
        for sequences in step.prefilling:
            self._kernels.prefill(self._layers[layer], queries, sequences, out, lse, sight=sight)
        for sequences in step.mutual:
            mutual = replace(sight, causal=False)
            self._kernels.prefill(self._layers[layer], queries, sequences, out, lse, sight=mutual)
        for row, span, table in step.gathered:
            assert self.library is not None
            rows = slice(row, row + span.tokens)
            out[rows] = self.library.attend(self._place[layer], queries[rows], table, span.stop)
        if step.decoding is not None:
            self._kernels.decode(self._layers[layer], queries, step.decoding, out, lse, sight=sight)
        return out

    def _prepared(self, batch: BatchLayout, *, with_lse: bool = False, wide: bool = False) -> _PagedStep:
        def make() -> _PagedStep:
            at_library = self._at_library if not with_lse else _nowhere
            # Every chunk is split, some into one part, because only the kernel that merges splits writes
            # float32.
            whole_at = 0 if wide or self._same_bits else 1
            parts = self._splits, whole_at, self._most_parts
            return _prepare(batch, self.chunk_tokens, at_library, *parts, decodes=not self._same_bits)

        return self._steps.of(batch, make, kind=(with_lse, wide))

    def _at_library(self, span: Span) -> bool:
        """Return whether a span is computed by the library. This depends on the span alone, so that the same
        tokens are always computed in the same way."""
        everything = all(sight == EVERYTHING for sight in self._sights.values())
        return self.library is not None and everything and self.library_at.takes(span.tokens, span.start)

    def _splits(self, span: Span) -> int:
        """Return how many parts a span is attended to in, in all layers. This also depends on the span
        alone."""
        widest = max(self._sights.values(), key=lambda sight: sight.most(span.stop))
        return self._kernels.chunk_splits(span.tokens, span.stop, widest)


def kernel_pointwise(launcher: Launcher, config: ModelConfig) -> Pointwise:
    """Return the kernels' pointwise operations, if they support the model's norms."""
    if config.centred_norms or config.norm != "rms":
        return Pointwise.of(config)
    return PointwiseKernels(launcher, dtype=config.dtype, epsilon=config.norm_eps)


def sight_of(config: ModelConfig, layer: int) -> Sight:
    """Return the window or chunk in which a token of ``layer`` sees other tokens."""
    if config.kind(layer) is LayerKind.CHUNKED_ATTENTION:
        return Sight(chunk=config.window(layer))
    return Sight(window=config.window(layer))


def _layer_in(memory: torch.Tensor, pages: LayerPages) -> LayerPages:
    """Return a layer of other pages, which have only this layer."""
    numbers = memory.view(pages.pool.dtype)
    return replace(pages, pool=numbers, page_stride=numbers.stride(0), offset=0)


def _runs(steps: Numbers) -> Iterator[range]:
    """Yield runs of consecutive rows in which each number grows by the same step, 0 or 1, from row to row.

    >>> list(_runs(np.array([1, 1, 0, 0, 5, 1])))
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    start = 0
    for row in range(1, len(steps) + 1):
        if steps[row - 1] not in (0, 1) or steps[row - 1] != steps[start]:
            yield range(start, row)
            start = row
    yield range(start, len(steps) + 1)


def _static_scales(config: ModelConfig, layer: int, device: torch.device) -> torch.Tensor | None:
    if not config.kv.ranges:
        return None
    return torch.stack([config.kv.static_scales(layer, plane) for plane in range(2)]).to(device)


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """Return ``[tokens, heads, width]`` in the kernels' layout: a token's heads in a row."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _nowhere(span: Span) -> bool:
    return False


_Member: TypeAlias = "tuple[Span, int]"  # and its first row


def _prepare(
    batch: BatchLayout,
    chunk_tokens: int,
    at_library: Callable[[Span], bool],
    splits_of: Callable[[Span], int],
    whole_at: int,
    most_parts: int,
    *,
    decodes: bool,
) -> _PagedStep:
    """Sort the sequences by kernel, and copy their numbers to the device at once. An image whose tokens see
    one another counts as a sequence. Chunks of at most ``whole_at`` splits are computed without splits.
    If the decode kernel does not compute single tokens (``decodes``), every token has the same bits in any
    chunk, and chunks may be cut."""
    first_rows = accumulate((span.tokens for span in batch.spans), initial=0)
    everyone = [
        (part, row + part.start - span.start)
        for span, row in zip(batch.spans, first_rows, strict=False)
        for part in span.parts()
    ]
    device, group = batch.pages.device, batch.group
    gathered = [
        (row, span, pages_of(span.tables[group], span.stop, chunk_tokens, device))
        for span, row in everyone
        if at_library(span)
    ]
    singles: list[_Member] = []
    whole: list[_Member] = []
    split: list[_Member] = []
    mutual: list[_Member] = []
    split_mutual: list[_Member] = []
    for member in everyone:
        span, _ = member
        if span.tokens == 1 and decodes:
            singles.append(member)
        elif at_library(span):
            continue
        elif splits_of(span) <= whole_at:
            (mutual if span.mutual else whole).append(member)
        elif span.mutual:
            split_mutual.append(member)
        else:
            split += [member] if decodes else _pieces(member, max(most_parts // splits_of(span), 1))
    kinds = [_KernelKind(group, singles)]
    for unsplit, cut in ((whole, split), (mutual, split_mutual)):
        kinds.append(_KernelKind(group, unsplit))
        for members in _groups(cut, splits_of, most_parts):
            kinds.append(_KernelKind(group, members, [splits_of(span) for span, _ in members]))
    parts = [kind.numbers(chunk_tokens) for kind in kinds]
    numbers = to_device(torch.from_numpy(np.concatenate(parts)), device)
    on_device = torch.split(numbers, [len(part) for part in parts])
    decoding, *prefilling = (kind.sequences(part) for part, kind in zip(on_device, kinds, strict=True))
    slots = Slots(batch.pages.to(torch.int32), batch.offsets.to(torch.int32))
    causal: list[Sequences] = []
    seeing: list[Sequences] = []
    for each, kind in zip(prefilling, kinds[1:], strict=True):
        if each is not None:
            (seeing if kind.mutual else causal).append(each)
    return _PagedStep(slots, decoding, causal, seeing, gathered)


def _pieces(member: _Member, most_tokens: int) -> Iterator[_Member]:
    """Yield pieces of a span, of at most ``most_tokens`` tokens, each with its first row."""
    span, row = member
    for start in range(span.start, span.stop, most_tokens):
        stop = min(start + most_tokens, span.stop)
        yield Span(span.tables, start, stop), row + start - span.start


def _groups(
    members: Sequence[_Member], splits_of: Callable[[Span], int], most_parts: int
) -> Iterator[list[_Member]]:
    """Yield the ``members`` of each launch: parts need memory, so a launch has at most ``most_parts`` parts,
    or one member."""
    group: list[_Member] = []
    room = most_parts
    for member in members:
        parts = member[0].tokens * splits_of(member[0])
        if group and parts > room:
            yield group
            group, room = [], most_parts
        group.append(member)
        room -= parts
    if group:
        yield group


@dataclass(frozen=True, slots=True)
class _KernelKind:
    """The sequences of one launch, with the number of ``splits`` of each if they are split."""

    group: int
    members: Sequence[_Member]
    splits: Sequence[int] = ()

    @property
    def mutual(self) -> bool:
        return any(span.mutual for span, _ in self.members)

    def numbers(self, chunk_tokens: int) -> npt.NDArray[np.int32]:
        """Return all sequences' first rows, then their counts, lengths, splits and first parts (if they are
        split), and block tables, padded to one width."""
        spans = [span for span, _ in self.members]
        tables = [span.tables[self.group][: -(-span.stop // chunk_tokens)] for span in spans]
        width = max(map(len, tables), default=0)
        numbers = [first for _, first in self.members]
        numbers += [span.tokens for span in spans]
        numbers += [span.stop for span in spans]
        numbers += self.splits
        numbers += self._first_parts()[: len(self.splits)]
        for table in tables:
            numbers += [*table, *(0,) * (width - len(table))]
        return np.array(numbers, np.int32)

    def sequences(self, numbers: torch.Tensor) -> Sequences | None:
        """Return the sequences from :meth:`numbers` on the device; None without sequences."""
        if not self.members:
            return None
        spans, count = [span for span, _ in self.members], len(self.members)
        columns = 5 if self.splits else 3
        rows, counts, lengths, *split = numbers[: columns * count].view(columns, count)
        return Sequences(
            rows,
            counts,
            lengths,
            tables=numbers[columns * count :].view(count, -1),
            max_count=max(span.tokens for span in spans),
            max_length=max(span.stop for span in spans),
            splits=ChunkSplits(split[0], split[1], max(self.splits), self._first_parts()[-1])
            if split
            else None,
        )

    def _first_parts(self) -> list[int]:
        """Return each sequence's first part, then the number of all parts."""
        parts = (span.tokens * splits for (span, _), splits in zip(self.members, self.splits, strict=False))
        return list(accumulate(parts, initial=0))
