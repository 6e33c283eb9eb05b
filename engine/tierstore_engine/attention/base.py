"""The interface of paged attention. One class per kind of device.

The pool of the hbm tier *is* the KV memory. A backend sees it as::

    kv [num_pages, layers, 2, kv_heads, chunk_tokens, head_dim]     (0 is K, 1 is V)

If KV is quantised, a page has codes instead of numbers, followed by each layer's scales
(:mod:`tierstore_engine.kv_format`). A sequence's tokens ``64 i … 64 i + 63`` (for 64-token chunks) are in the
page at entry ``i`` of its block table. The result must not depend on which pages are used: pages with the
same contents give the same bits. A model with several layer groups has a pool, a block table and a backend
for each of them. A block table has ``NO_PAGE`` in the place of a chunk that no later token of the group can
see.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch

from tierstore.tiers.beyond import Numbers
from tierstore.tiers.hbm import PagePool
from tierstore_engine.config import ModelConfig
from tierstore_engine.moving import to_device
from tierstore_engine.pointwise import Pointwise
from tierstore_engine.products import Product
from tierstore_engine.rope import rotate

S = TypeVar("S")

_LEAST_SHARE = 1e-6  # the least part of a softmax by which WithoutFirst divides

NO_PAGE = -1
"""An entry of a block table that says that the chunk's page was released."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``start … stop`` of one sequence, which this step computes. The KV of earlier tokens is in
    pages.

    ``tables`` has a block table for each layer group, with one page per chunk, at least up to ``stop``. The
    table of a recurrent state has the one page with the sequence's state. The last ``drafted`` tokens may be
    rejected, so the page keeps the state before them. The tokens of each range in ``mutual`` (of one image)
    see one another; all others see only tokens before them.
    """

    tables: tuple[Sequence[int], ...]
    start: int
    stop: int
    drafted: int = 0
    mutual: tuple[range, ...] = ()

    def parts(self) -> Iterator[Span]:
        """Split the span at its images. Yield its parts: each is one image (then ``mutual`` covers all of
        it), or has no token of an image."""
        at = self.start
        for image in (*self.mutual, range(self.stop, self.stop)):
            if at < image.start:
                yield replace(self, start=at, stop=image.start, mutual=())
            if image:
                yield replace(self, start=image.start, stop=image.stop, mutual=(image,))
            at = image.stop

    def moved(self, tables: tuple[Sequence[int], ...], tokens: int) -> Span:
        """Return the span with other block tables, which do not have the first ``tokens`` tokens of the
        sequence."""
        mutual = tuple(range(image.start - tokens, image.stop - tokens) for image in self.mutual)
        return Span(tables, self.start - tokens, self.stop - tokens, self.drafted, mutual)

    def sees(self, token: int) -> int:
        """Return the end of the tokens that ``token`` sees."""
        return next((part.stop for part in self.mutual if token in part), token + 1)

    @property
    def block_table(self) -> Sequence[int]:
        """Return the block table of the first layer group."""
        return self.tables[0]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The places of a step's tokens in the pages of one layer group. The tokens of all spans are numbered one
    after the other. Rows are in the order of ``spans``.

    ``pages`` and ``offsets`` (int64 ``[tokens]``) are the places of each new token's KV. ``block_tables`` has
    each span's table as an int64 tensor. A recurrent state has no data per token: ``pages`` and ``offsets``
    are empty, and a table has the state's page. ``group`` is the layer group's index in the spans' tables.
    """

    spans: tuple[Span, ...]
    block_tables: tuple[torch.Tensor, ...]
    pages: torch.Tensor
    offsets: torch.Tensor
    group: int = 0

    @classmethod
    def of(cls, spans: Sequence[Span], *, chunk_tokens: int, device: str, group: int = 0) -> BatchLayout:
        """Return the layout of a layer group with KV."""
        tables = tuple(numbers_on(span.tables[group], device) for span in spans)
        positions = positions_of(spans, device=device)
        owners = torch.cat(
            [table[_chunks_of(span, chunk_tokens, device)] for table, span in zip(tables, spans, strict=True)]
        )
        return cls(tuple(spans), tables, owners, positions % chunk_tokens, group)

    @classmethod
    def of_states(cls, spans: Sequence[Span], *, device: str, group: int) -> BatchLayout:
        """Return the layout of a layer group with recurrent states."""
        tables = tuple(numbers_on(span.tables[group], device) for span in spans)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return cls(tuple(spans), tables, nothing, nothing, group)


class Prepared(Generic[S]):
    """A backend's preparation of a batch, made once for all layers. The preparation is kept for the newest
    batch, and permanently for fixed batches (:meth:`CudaAttention.fix
    <tierstore_engine.attention.cuda.CudaAttention.fix>`)."""

    def __init__(self) -> None:
        # by the id of a batch, which the entry keeps alive
        self._fixed: dict[int, tuple[BatchLayout, S]] = {}
        self._newest: tuple[BatchLayout, Hashable, S] | None = None

    def fix(self, batch: BatchLayout, made: S) -> BatchLayout:
        """Use ``made`` as the preparation of this batch for every kind. Return
        the batch."""
        self._fixed[id(batch)] = batch, made
        return batch

    def of(self, batch: BatchLayout, make: Callable[[], S], *, kind: Hashable = None) -> S:
        """Return the preparation of ``batch`` for this ``kind``, and make it if necessary."""
        if (fixed := self._fixed.get(id(batch))) is not None:
            return fixed[1]
        newest = self._newest
        if newest is None or newest[0] is not batch or newest[1] != kind:
            newest = self._newest = batch, kind, make()
        return newest[2]


class Attention(ABC):
    """Paged attention on one device. In each step, call :meth:`write` for a layer before its attention."""

    def pointwise(self, config: ModelConfig) -> Pointwise:
        """Return the pointwise operations for this device."""
        return Pointwise.of(config)

    def product(self, config: ModelConfig) -> Product | None:
        """Return this device's matrix products, in which a row's bits do not depend on the other rows. Return
        None if the compiled part computes products."""
        return None

    @abstractmethod
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        """Write the new tokens' ``keys`` and ``values`` (``[tokens, kv_heads, head_dim]``) into their pages.
        Latents are passed as keys, ``[tokens, 1, width]``, without values."""

    def rotate_and_write(
        self,
        layer: int,
        projections: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotations: tuple[torch.Tensor, torch.Tensor],
        batch: BatchLayout,
    ) -> torch.Tensor:
        """Rotate queries and keys, :meth:`write` keys and values, and return the queries.

        ``projections`` are queries, keys and values ``[tokens, (kv_)heads, head_dim]``. ``rotations`` come
        from :class:`~tierstore_engine.rope.Rope`.
        """
        queries, keys, values = projections
        self.write(layer, rotate(keys, *rotations), values, batch)
        return rotate(queries, *rotations)

    @abstractmethod
    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        """Return causal attention of ``queries [tokens, heads, head_dim]`` over each sequence's own pages, in
        the same shape and dtype. If the layer has a window or chunks, so has the attention. Latents are both
        keys and values, and set the width. Pages are only read."""

    @abstractmethod
    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return :meth:`attend`, and the logarithm of each softmax denominator, float32 ``[tokens, heads]``,
        for merging with attention over other keys."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Which tokens of one sequence's pages a range of queries sees. ``table`` (int64) has the pages, and must
    stay alive. Tokens are numbered through these pages. The query of row ``first_row + i`` sees the tokens
    ``firsts[i] … stops[i]``, at least one."""

    first_row: int
    table: torch.Tensor
    firsts: Numbers
    stops: Numbers


class PartAttention(Attention):
    """Attention over some of a sequence's pages. Its outputs can be merged with the outputs of attention over
    the sequence's other pages."""

    @abstractmethod
    def plan(self, seen: Sequence[SeenTokens]) -> Any:
        """Return a preparation of :meth:`over`, for any layer. The entries of ``seen`` cover all rows of the
        queries, in order."""

    @abstractmethod
    def over(
        self, layer: int, queries: torch.Tensor, planned: Any, block: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention of ``queries [rows, heads, head_dim]`` over the tokens that they see, in float32,
        and LSEs as :meth:`attend_with_lse` does. The pages are in the pool, or in ``block``, uint8 ``[pages,
        bytes]``, which has this layer of each page."""


class WithoutFirst(Attention):
    """Attention over the pages of ``inner`` in which no token sees its sequence's token 0.

    Token 0 is written as zeros. Its score is therefore 0, its part of the softmax is ``exp(-lse)``, and it
    adds nothing to the output. Dividing the output by the rest of the softmax leaves out this part exactly.
    Do not use the output of token 0 itself.
    """

    def __init__(self, inner: Attention) -> None:
        self._inner = inner

    def pointwise(self, config: ModelConfig) -> Pointwise:
        return self._inner.pointwise(config)

    def product(self, config: ModelConfig) -> Product | None:
        return self._inner.product(config)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        ends = accumulate(span.tokens for span in batch.spans)
        first = [end - span.tokens for span, end in zip(batch.spans, ends, strict=True) if not span.start]
        if first:
            rows = numbers_on(first, keys.device)
            keys = keys.index_fill(0, rows, 0)
            values = None if values is None else values.index_fill(0, rows, 0)
        self._inner.write(layer, keys, values, batch)

    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        return self.attend_with_lse(layer, queries, batch)[0]

    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        attended, lse = self._inner.attend_with_lse(layer, queries, batch)
        rest = -torch.expm1(-lse).clamp(max=-_LEAST_SHARE)
        return (attended / rest.unsqueeze(-1)).to(attended.dtype), lse + rest.log()


def pages_on_device(pool: PagePool) -> torch.Tensor:
    """Return the memory of a pool on a GPU, uint8 ``[num_pages, page_bytes]``."""
    # This makes no copy, because the array has a __cuda_array_interface__.
    pages = torch.as_tensor(pool.array, device=pool.device)
    assert pages.data_ptr() == pool.array.__cuda_array_interface__["data"][0], "torch copied the pool"
    return pages


def numbers_on(numbers: Sequence[int], device: str | torch.device) -> torch.Tensor:
    """Return ``numbers`` as int64 on ``device``, without waiting for it."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


def positions_of(spans: Sequence[Span], *, device: str) -> torch.Tensor:
    """Return the position of every row of the batch, int64 ``[tokens]``."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _chunks_of(span: Span, chunk_tokens: int, device: str) -> torch.Tensor:
    return torch.arange(span.start, span.stop, device=device) // chunk_tokens
