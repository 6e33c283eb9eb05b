"""What the model asks of paged attention, and the choice of a backend. One class per kind of device.

The pool of the hbm tier *is* the KV memory. Seen by a backend it is::

    kv [num_pages, layers, 2, kv_heads, chunk_tokens, head_dim]     (0 is K, 1 is V)

(of codes, with each layer's scales behind them, where KV is quantised: :mod:`tierstore_engine.kv_format`)
and a sequence's tokens ``64 i … 64 i + 63`` (for 64-token chunks) live in the page that its block table
names at ``i``. Which pages those are must not matter: the same contents give the same bits. A model whose
layers remember the past in several ways has a pool, a table and a backend for each layer group, and a table
names no page (``NO_PAGE``) for what no token of its group can see any more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from tierstore.tiers.hbm import PagePool
from tierstore_engine.config import ModelConfig
from tierstore_engine.moving import to_device
from tierstore_engine.pointwise import Pointwise
from tierstore_engine.rope import rotate

S = TypeVar("S")

NO_PAGE = -1
"""In a block table: the chunk's page has been given back."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens ``start … stop`` of one sequence, computed in this step; those before are in pages.

    ``tables`` has a block table for each layer group, of one page per chunk, at least up to ``stop``; that of
    a recurrent state has the one page that the sequence's state is in.
    """

    tables: tuple[Sequence[int], ...]
    start: int
    stop: int

    @property
    def block_table(self) -> Sequence[int]:
        """Of the first group."""
        return self.tables[0]

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where a step's flattened tokens are in the pages of one layer group: rows of the batch in the order of
    ``spans``.

    ``pages`` and ``offsets`` (int64 ``[tokens]``) say where each new token's KV goes; ``block_tables`` holds
    each span's table as an int64 tensor. Of a recurrent state there is nothing for each token: the first two
    are empty, and a table has the state's page. ``group`` is the layer group's place in the spans' tables.
    """

    spans: tuple[Span, ...]
    block_tables: tuple[torch.Tensor, ...]
    pages: torch.Tensor
    offsets: torch.Tensor
    group: int = 0

    @classmethod
    def of(cls, spans: Sequence[Span], *, chunk_tokens: int, device: str, group: int = 0) -> BatchLayout:
        """Of a layer group with KV."""
        tables = tuple(numbers_on(span.tables[group], device) for span in spans)
        positions = positions_of(spans, device=device)
        owners = torch.cat(
            [table[_chunks_of(span, chunk_tokens, device)] for table, span in zip(tables, spans, strict=True)]
        )
        return cls(tuple(spans), tables, owners, positions % chunk_tokens, group)

    @classmethod
    def of_states(cls, spans: Sequence[Span], *, device: str, group: int) -> BatchLayout:
        """Of a layer group with recurrent states."""
        tables = tuple(numbers_on(span.tables[group], device) for span in spans)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return cls(tuple(spans), tables, nothing, nothing, group)


class Prepared(Generic[S]):
    """What a backend makes of a batch, once for all layers: of the newest one, and for good of those that are
    fixed (:meth:`CudaAttention.fix <tierstore_engine.attention.cuda.CudaAttention.fix>`)."""

    def __init__(self) -> None:
        self._fixed: dict[int, tuple[BatchLayout, S]] = {}  # by the batch's id, which it keeps
        self._newest: tuple[BatchLayout, Hashable, S] | None = None

    def fix(self, batch: BatchLayout, made: S) -> BatchLayout:
        """It is ``made`` whatever is asked for; the same batch."""
        self._fixed[id(batch)] = batch, made
        return batch

    def of(self, batch: BatchLayout, make: Callable[[], S], *, kind: Hashable = None) -> S:
        """What has been made of ``batch``, of this ``kind``, or is made now."""
        if (fixed := self._fixed.get(id(batch))) is not None:
            return fixed[1]
        newest = self._newest
        if newest is None or newest[0] is not batch or newest[1] != kind:
            newest = self._newest = batch, kind, make()
        return newest[2]


class Attention(ABC):
    """Paged attention on one device. A layer is first written and then attended to, once per step."""

    def pointwise(self, config: ModelConfig) -> Pointwise:
        """What goes with it on this device."""
        return Pointwise(config.norm_eps, centred=config.centred_norms)

    @abstractmethod
    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, batch: BatchLayout) -> None:
        """Put the new tokens' ``keys`` and ``values`` (``[tokens, kv_heads, head_dim]``) into their pages. Of
        a group with latents these are the keys, ``[tokens, 1, width]``, and there are no values."""

    def rotate_and_write(
        self,
        layer: int,
        projections: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rotations: tuple[torch.Tensor, torch.Tensor],
        batch: BatchLayout,
    ) -> torch.Tensor:
        """Rotate queries and keys, :meth:`write` keys and values, and return the queries.

        ``projections`` are queries, keys and values ``[tokens, (kv_)heads, head_dim]``, ``rotations`` what
        :class:`~tierstore_engine.rope.Rope` gives.
        """
        queries, keys, values = projections
        self.write(layer, rotate(keys, *rotations), values, batch)
        return rotate(queries, *rotations)

    @abstractmethod
    def attend(self, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        """Causal attention of ``queries [tokens, heads, head_dim]`` over each sequence's own pages, windowed
        or chunked where the layer is; returns the same shape and dtype. Of latents the width is theirs, and
        they are keys and values. Reads pages, changes none."""

    @abstractmethod
    def attend_with_lse(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`attend`, and the logarithm of each softmax denominator, float32 ``[tokens, heads]``: what it
        takes to merge the result with attention over something else."""


def pages_on_device(pool: PagePool) -> torch.Tensor:
    """The memory of a pool on a GPU, uint8 ``[num_pages, page_bytes]``."""
    # Not a copy: it shows its memory through __cuda_array_interface__.
    pages = torch.as_tensor(pool.array, device=pool.device)
    assert pages.data_ptr() == pool.array.__cuda_array_interface__["data"][0], "torch copied the pool"
    return pages


def numbers_on(numbers: Sequence[int], device: str | torch.device) -> torch.Tensor:
    """``numbers`` as int64 on ``device``. Does not wait for it."""
    return to_device(torch.tensor(numbers, dtype=torch.int64), device)


def positions_of(spans: Sequence[Span], *, device: str) -> torch.Tensor:
    """The position of every row of the batch, int64 ``[tokens]``."""
    return torch.cat([torch.arange(span.start, span.stop, device=device) for span in spans])


def _chunks_of(span: Span, chunk_tokens: int, device: str) -> torch.Tensor:
    return torch.arange(span.start, span.stop, device=device) // chunk_tokens
