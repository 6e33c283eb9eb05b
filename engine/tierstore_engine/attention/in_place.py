"""Attention of a few queries of a sequence on the CPU, which reads the pages in place.

A decode step has one query for each sequence, or a few more if tokens are drafted. Gathering the pages of
each sequence and calling torch for each costs more than the attention itself. The compiled part
(``tierstore/native/decode.c``) computes one layer of all such sequences in one call. It computes in float32
and reads float32, bfloat16 and quantised pages. A query's result has the same bits in a span of any length. A
drafted token therefore has the bits of a token that is computed alone. If its bits differed, a number of
quantised KV could get another code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from tierstore import native
from tierstore.spec import LayerGroup, LayerKind
from tierstore.tiers.beyond import Numbers
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Prepared, SeenTokens
from tierstore_engine.attention.beyond import BeyondMemory, ChunkWindow
from tierstore_engine.attention.pages import heads_of
from tierstore_engine.config import ModelConfig
from tierstore_engine.products import threads_for

MOST_TOKENS = 16
"""In a longer span, many queries read each page, and torch computes that faster."""

_MOST_WIDTH = 1024  # numbers of a vector, as in the compiled part
_ROW = np.dtype([("number", "<i8"), ("table", "<u8"), ("first", "<i8"), ("stop", "<i8")])


_Sight: TypeAlias = tuple[int | None, bool]
"""The size of a layer's window or attention chunk in tokens, and which of the two it is."""


class _Layer(ctypes.Structure):
    """``struct layer`` of the compiled part."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("page_bytes", ctypes.c_uint64),
        ("start", ctypes.c_uint64 * 2),
        ("scales", ctypes.c_uint64 * 2),
        ("fixed", ctypes.c_void_p * 2),
        ("format", ctypes.c_int32),
        ("codes", ctypes.c_int32 * 2),
        ("chunk", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The queries of a batch whose attention is computed in place, and the total number of tokens that they
    see."""

    rows: np.ndarray[tuple[int], np.dtype[np.void]]
    tokens: int
    tables: tuple[torch.Tensor, ...]  # these arrays are kept alive, because the rows contain their addresses


@dataclass(frozen=True, slots=True)
class _Beyond:
    """The queries of a batch over pages that are partly not in memory: for each window of chunks, the same
    rows with the tokens that they see in it. ``places`` are the concatenated block tables: the offset of each
    page, in bytes from the pool's first page."""

    beyond: BeyondMemory
    places: Numbers
    parts: list[tuple[ChunkWindow, np.ndarray[tuple[int], np.dtype[np.void]]]]


class InPlace:
    """Attention in place over the pages of one layer group. Made by :meth:`over`."""

    def __init__(self, library: ctypes.CDLL, pool: PagePool, config: ModelConfig, *, past_only: bool) -> None:
        self._library = library
        self._past_only = past_only
        self._pool = pool
        self._config = config
        self._rows: dict[_Sight, Prepared[_Rows]] = {}
        [self._group] = pool.spec.groups
        self._token_bytes = pool.spec.page_bytes // pool.spec.chunk_tokens // len(self._group.layers)
        # these arrays are kept alive, because the layers contain their addresses
        self._fixed: list[torch.Tensor] = []
        self._layers = {layer: self._layer(layer) for layer in self._group.layers}
        self._beyond: _Beyond | None = None

    @classmethod
    def over(cls, pool: PagePool, config: ModelConfig, *, past_only: bool = False) -> InPlace | None:
        """Return attention over the pages of ``pool``, or None if the compiled part is missing or does not
        know their format. ``past_only`` is as for :class:`~tierstore_engine.attention.cpu.CpuAttention`."""
        [group] = pool.spec.groups
        if native.DECODE is None or not knows(config, group):
            return None
        return cls(native.DECODE, pool, config, past_only=past_only)

    def _layer(self, layer: int) -> _Layer:
        config, pool, spec = self._config, self._pool, self._pool.spec
        kinds = _kinds(config, self._group)
        alike = kinds[0] if kinds[0] == kinds[-1] else ""
        planes = (0, self._group.planes - 1)  # latents serve as both keys and values
        heads = heads_of(self._group, config)
        made = _Layer(
            pages=pool.array.ctypes.data,
            page_bytes=pool.array.strides[0],
            start=tuple(spec.tile(layer, plane, heads.start).start for plane in planes),
            format=native.DECODE_FORMATS.get(alike, native.CODED),
            codes=tuple(native.KV_CODES.get(kind, 0) for kind in (kinds[0], kinds[-1])),
            chunk=spec.chunk_tokens,
            heads=config.heads,
            kv_heads=len(heads),
            width=self._group.head_dim,
            scale=config.attention_scale,
            cap=config.score_cap or 0.0,
        )
        if config.kv.dynamic:
            made.scales = tuple(spec.scales(layer, plane, heads.start).start for plane in planes)
        elif config.kv.quantised:
            static = (config.kv.static_scales(layer, plane)[heads.start : heads.stop] for plane in planes)
            fixed = [each.float().flatten().contiguous() for each in static]
            self._fixed += fixed
            made.fixed = tuple(each.data_ptr() for each in fixed)
        return made

    def takes(self, tokens: int) -> bool:
        """Return whether the attention of a span of ``tokens`` new tokens is computed in place."""
        return tokens <= MOST_TOKENS or bool(self._config.arithmetic)

    def attend(
        self, layer: int, queries: torch.Tensor, batch: BatchLayout, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Compute the rows of all spans that it :meth:`takes`. ``queries`` and ``out`` are float32
        ``[tokens, heads, head_dim]``, ``lse`` is float32 ``[tokens, heads]``, all contiguous. Raise
        :class:`IndexError` if a token sees a chunk without a page."""
        sight = self._sight(layer)
        rows = self._rows.setdefault(sight, Prepared()).of(batch, lambda: self._rows_of(sight, batch))
        self._attend_rows(layer, rows.rows, rows.tokens, queries, out, lse)

    def attend_over(
        self,
        layer: int,
        queries: torch.Tensor,
        seen: Sequence[SeenTokens],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Compute attention for the entries of ``seen`` with few rows; see
        :meth:`~tierstore_engine.attention.base.PartAttention.over`."""
        made = np.concatenate(
            [np.empty(0, _ROW), *(_rows_over(each) for each in seen if self.takes(len(each.firsts)))]
        )
        self._attend_rows(layer, made, int((made["stop"] - made["first"]).sum()), queries, out, lse)

    def _attend_rows(
        self,
        layer: int,
        rows: np.ndarray[tuple[int], np.dtype[np.void]],
        tokens: int,
        queries: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        if not len(rows):
            return
        self._library.tierstore_attend(
            ctypes.byref(self._layers[layer]),
            rows.ctypes.data,
            len(rows),
            queries.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            None,
            True,
            threads_for(tokens * self._token_bytes),
        )

    def plan(self, batch: BatchLayout, tables: Sequence[Numbers], beyond: BeyondMemory) -> list[Numbers]:
        """Plan a batch with pages that are not in memory. Return the batches of pages that each layer's
        :meth:`attend_beyond` reads, in order. ``tables`` are the spans' used pages."""
        rows = self._rows_of((None, False), batch).rows
        few = [table for span, table in zip(batch.spans, tables, strict=True) if self.takes(span.tokens)]
        if not few:
            self._beyond = None
            return []
        places = beyond.places(np.concatenate(few))
        starts = np.cumsum([0, *map(len, few)])[:-1]
        counts = [span.tokens for span in batch.spans if self.takes(span.tokens)]
        rows["table"] = places.ctypes.data + np.repeat(starts, counts) * places.itemsize
        windows = beyond.windows(few)
        chunk, parts = self._pool.spec.chunk_tokens, []
        for window in windows:
            part = rows.copy()
            for end in ("first", "stop"):
                part[end] = rows[end].clip(window.first * chunk, window.stop * chunk)
            parts.append((window, part))
        self._beyond = _Beyond(beyond, places, parts)
        return [window.pages for window in windows if len(window.pages)]

    def attend_beyond(self, layer: int, queries: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Compute like :meth:`attend`, for the batch of the last :meth:`plan`."""
        planned = self._beyond
        if planned is None:
            return
        placed = _Layer.from_buffer_copy(self._layers[layer])
        placed.page_bytes = 1  # the tables have bytes
        rows = len(planned.parts[0][1])
        states = torch.zeros(rows, queries.shape[1], 2, self._group.head_dim + 2)
        states[..., 0] = -torch.inf
        for number, (window, part) in enumerate(planned.parts, 1):
            if len(window.pages):
                planned.places[window.slots] = planned.beyond.staged_places(layer, window)
            self._library.tierstore_attend(
                ctypes.byref(placed),
                part.ctypes.data,
                rows,
                queries.data_ptr(),
                out.data_ptr(),
                lse.data_ptr(),
                states.data_ptr(),
                number == len(planned.parts),
                threads_for(int((part["stop"] - part["first"]).sum()) * self._token_bytes),
            )

    def _sight(self, layer: int) -> _Sight:
        chunked = self._config.kind(layer) is LayerKind.CHUNKED_ATTENTION
        return self._config.window(layer), chunked

    def _rows_of(self, sight: _Sight, batch: BatchLayout) -> _Rows:
        window, chunked = sight
        chunk, pages = self._pool.spec.chunk_tokens, self._pool.num_pages
        rows, number = [], 0
        for span, table in zip(batch.spans, batch.block_tables, strict=True):
            if self.takes(span.tokens):
                positions = (
                    [span.start - 1] * span.tokens if self._past_only else range(span.start, span.stop)
                )
                if window is None:
                    firsts = [0] * span.tokens
                elif chunked:
                    firsts = [at - at % window for at in positions]
                else:
                    firsts = [max(at - window + 1, 0) for at in positions]
                seen = table[firsts[0] // chunk : positions[-1] // chunk + 1]
                if int(seen.min()) < 0 or int(seen.max()) >= pages:
                    raise IndexError(f"tokens {span.start} … {span.stop} see a page that is not in the pool")
                places = zip(range(number, number + span.tokens), firsts, positions, strict=True)
                rows += [(row, table.data_ptr(), first, span.sees(at)) for row, first, at in places]
            number += span.tokens
        made = np.array(rows, _ROW)
        return _Rows(made, int((made["stop"] - made["first"]).sum()), batch.block_tables)


def _rows_over(seen: SeenTokens) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = np.empty(len(seen.firsts), _ROW)
    rows["number"] = np.arange(seen.first_row, seen.first_row + len(rows))
    rows["table"] = seen.table.data_ptr()
    rows["first"], rows["stop"] = seen.firsts, seen.stops
    return rows


def knows(config: ModelConfig, group: LayerGroup) -> bool:
    """Return whether the compiled part knows the format of the pages of ``group``."""
    known = native.KV_CODES if config.kv.quantised else native.DECODE_FORMATS
    return all(kind in known for kind in _kinds(config, group)) and group.head_dim <= _MOST_WIDTH


def _kinds(config: ModelConfig, group: LayerGroup) -> tuple[str, ...]:
    """Return the names of the formats of the group's planes."""
    kv = config.kv
    return (kv.keys, kv.values)[: group.planes] if kv.quantised else (config.dtype,)
