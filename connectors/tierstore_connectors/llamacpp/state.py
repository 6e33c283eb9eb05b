"""Reading and writing of llama.cpp's state of one sequence, as rows of bytes per token.

llama.cpp writes the metadata of a sequence's cells, then for each layer the K rows of all cells, then the V
rows (or, without flash attention, V transposed). A model with sliding windows has two KV caches in this
format: one of the layers with full attention, and one of the layers with a window::

    file    magic version, tokens, cache [cache]
    cache   streams, for each stream: cells; if there are any: (pos 1 seq)*, transposed, layers,
            (type row_bytes K-rows)*, (type row_bytes V-rows)*     or (type element width V-columns)*

Reading is strict, because misread bytes would become wrong KV. :class:`LlamaStateError` is raised for a size
that does not fit and for every unknown feature: another version, recurrent states, cells with two-dimensional
positions, images among the tokens. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.errors import TierStoreError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Tokens: TypeAlias = npt.NDArray[np.uint32]

FILE_MAGIC = 0x67677371  # "ggsq"
FILE_VERSION = 3
CONTENT_MAGIC = 0xAF143CD8  # the first number of ``llama_state_seq_get_data``
_SERVER_TOKENS = 0xFFFFFFFF  # the first number of llama-server's own format of the token list
_SERVER_TOKENS_VERSION = 1
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_MOST_STREAMS, _MOST_LAYERS, _MOST_ROW_BYTES, _MOST_TYPE = 256, 4096, 1 << 24, 1024
_MOST_CACHES = 2


class LlamaStateError(TierStoreError):
    """A state has an unknown format."""


@dataclass(frozen=True, slots=True)
class Row:
    """The format of K or V of one token in one layer: llama.cpp's type number, and the number of bytes.
    ``element`` is the size of one number in bytes if the state has V transposed, otherwise 0."""

    type: int
    nbytes: int
    element: int = 0


@dataclass(frozen=True)
class CellLayout:
    """The layout of one KV cache: its number of streams, and the rows of its layers. ``values`` is empty for
    latent vectors (MLA)."""

    streams: int
    transposed: bool
    keys: tuple[Row, ...]
    values: tuple[Row, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return all rows of a token, in the order of a page."""
        return (*self.keys, *self.values)

    @cached_property
    def token_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def describe(self) -> str:
        """Return a text that is equal for two states whose bytes are interchangeable. The number of streams
        is left out, because it only limits the number of sequences."""
        sides = [",".join(f"{row.type}:{row.nbytes}" for row in side) for side in (self.keys, self.values)]
        return f"{'transposed ' if self.transposed else ''}k[{sides[0]}] v[{sides[1]}]"


@dataclass(frozen=True)
class StateLayout:
    """The layout of a state: one KV cache, or one of full attention and one of sliding windows."""

    caches: tuple[CellLayout, ...]

    def describe(self) -> str:
        return " + ".join(cache.describe() for cache in self.caches)


@dataclass(frozen=True)
class CacheRows:
    """The rows of consecutive tokens from position ``first`` on. ``rows`` has an array of shape (tokens,
    bytes) for each row of ``layout``."""

    layout: CellLayout
    first: int
    rows: tuple[Bytes, ...]

    @property
    def stop(self) -> int:
        return self.first + len(self.rows[0])


@dataclass(frozen=True)
class LlamaSequence:
    """The state of a sequence. Every KV cache ends after the last computed token."""

    tokens: Tokens
    caches: tuple[CacheRows, ...]

    @property
    def layout(self) -> StateLayout:
        return StateLayout(tuple(cache.layout for cache in self.caches))


# -- reading -----------------------------------------------------------------------------------------


class _StateReader:
    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def bytes(self, count: int) -> Bytes:
        if count > self.left:
            raise LlamaStateError(f"the state ends {count - self.left} bytes too early")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, what: str, most: int, *, wide: bool = False) -> int:
        """Read a number of 4 bytes, or of 8 bytes if ``wide``. Raise an error for a number above ``most``."""
        value = int(self.bytes(8 if wide else 4).view("<u8" if wide else "<u4")[0])
        if value > most:
            raise LlamaStateError(f"{what} must be at most {most}, got {value}")
        return value


def read_file(data: Bytes) -> LlamaSequence | None:
    """Return the state in a file of ``llama_state_seq_save_file`` or of a llama-server's slot, or None for an
    empty slot. The arrays are views of ``data`` if possible."""
    reader = _StateReader(data)
    magic, version = (reader.number("a header field", 0xFFFFFFFF) for _ in range(2))
    if (magic, version) != (FILE_MAGIC, FILE_VERSION):
        raise LlamaStateError(
            f"the state has magic {magic:#x} and version {version}; this tierstore knows {FILE_MAGIC:#x} and "
            f"{FILE_VERSION}"
        )
    count = reader.number("the number of tokens", reader.left // 4)
    tokens = _tokens(reader.bytes(4 * count).view("<u4"))
    return _state(reader, tokens)


def read_sequence(data: Bytes, tokens: Tokens) -> LlamaSequence | None:
    """Return the state in the bytes of ``llama_state_seq_get_data``, or None for an empty sequence. The data
    does not contain the ``tokens``."""
    reader = _StateReader(data)
    magic = reader.number("the magic", 0xFFFFFFFF)
    if magic != CONTENT_MAGIC:
        raise LlamaStateError(f"the state has magic {magic:#x}; this tierstore knows {CONTENT_MAGIC:#x}")
    reader.bytes(4)  # the sequence's number
    return _state(reader, tokens)


def read_context(data: Bytes, tokens: Tokens, architecture: str) -> LlamaSequence | None:
    """Return the state in the bytes of ``llama_state_get_data`` of a context with one sequence, or None if
    the sequence is empty."""
    reader = _StateReader(data)
    name = reader.bytes(reader.number("the length of a name", 256)).tobytes().decode(errors="replace")
    if name != architecture:
        raise LlamaStateError(f"the state is of architecture {name!r}, not {architecture!r}")
    return _state(reader, tokens)


def _tokens(packed: Tokens) -> Tokens:
    """Return the tokens of a file. llama-server writes them with a first number, a version and a list of
    media."""
    if not len(packed) or packed[0] != _SERVER_TOKENS:
        return packed
    if len(packed) < 4 or packed[1] != _SERVER_TOKENS_VERSION:
        raise LlamaStateError(f"the list of tokens has version {packed[1:2].tolist()}, which is unknown")
    count = int(packed[2])
    if len(packed) != count + 4 or packed[-1] != 0:
        raise LlamaStateError("the state has images or sounds among its tokens")
    return packed[3:-1]


def _state(reader: _StateReader, tokens: Tokens) -> LlamaSequence | None:
    caches: list[CacheRows | None] = []
    while reader.left:
        if len(caches) == _MOST_CACHES:
            raise LlamaStateError(f"the state has more than {_MOST_CACHES} caches, or other data after them")
        caches.append(_cache(reader))
    if not caches:
        raise LlamaStateError("the state has no KV cache")
    filled = [cache for cache in caches if cache is not None]
    if not filled:
        return None
    computed = filled[0].stop
    if len(filled) < len(caches) or filled[0].first or computed > len(tokens):
        raise LlamaStateError(
            f"the state has cells from position {filled[0].first} to {computed} for {len(tokens)} tokens"
        )
    if any(cache.stop != computed for cache in filled):
        raise LlamaStateError(f"the caches end at positions {[cache.stop for cache in filled]}")
    return LlamaSequence(tokens[:computed], tuple(filled))


def _cache(reader: _StateReader) -> CacheRows | None:
    streams = reader.number("the number of streams", _MOST_STREAMS)
    found = None
    for _ in range(streams):
        cells = reader.number("the number of cells", reader.left)
        if not cells:
            continue
        if found is not None:
            raise LlamaStateError("the state has cells of two sequences")
        found = _cells(reader, cells, streams)
    return found


def _cells(reader: _StateReader, count: int, streams: int) -> CacheRows:
    cells = reader.bytes(count * _CELL.itemsize).view(_CELL)
    if (cells["sequences"] != 1).any() or (cells["sequence"] != cells["sequence"][0]).any():
        raise LlamaStateError("the cells are not those of one sequence with plain positions")
    positions = cells["position"].astype(np.int64)
    order = np.argsort(positions, kind="stable")
    first = int(positions[order[0]])
    if first < 0 or (positions[order] != np.arange(first, first + count)).any():
        raise LlamaStateError("the cells' positions are not consecutive")
    in_order = None if (order == np.arange(count)).all() else order
    transposed = bool(reader.number("the flag for transposed V", 1))
    layers = reader.number("the number of layers", _MOST_LAYERS)
    if not layers:
        raise LlamaStateError("the state has no layers")
    keys, values = [_plain(reader, count) for _ in range(layers)], []
    if reader.left:  # models with latent vectors have no V rows
        read = _columns if transposed else _plain
        values = [read(reader, count) for _ in range(layers)]
    layout = CellLayout(streams, transposed, tuple(row for row, _ in keys), tuple(row for row, _ in values))
    rows = (data if in_order is None else data[in_order] for _, data in (*keys, *values))
    return CacheRows(layout, first, tuple(rows))


def _plain(reader: _StateReader, count: int) -> tuple[Row, Bytes]:
    kind = reader.number("a type", _MOST_TYPE)
    nbytes = reader.number("the bytes of a row", _MOST_ROW_BYTES, wide=True)
    if not nbytes:
        raise LlamaStateError("a row has no bytes")
    return Row(kind, nbytes), reader.bytes(count * nbytes).reshape(count, nbytes)


def _columns(reader: _StateReader, count: int) -> tuple[Row, Bytes]:
    kind = reader.number("a type", _MOST_TYPE)
    element = reader.number("the bytes of a number", 64)
    width = reader.number("the numbers of a row", _MOST_ROW_BYTES)
    if not element or not width:
        raise LlamaStateError("a row has no bytes")
    columns = reader.bytes(width * count * element).reshape(width, count, element)
    return Row(kind, width * element, element), columns.transpose(1, 0, 2).reshape(count, width * element)


# -- writing -----------------------------------------------------------------------------------------


def write_file(state: LlamaSequence) -> list[Bytes]:
    """Return the parts of a slot file from which llama.cpp restores ``state``, for ``writelines``."""
    head = struct.pack("<III", FILE_MAGIC, FILE_VERSION, len(state.tokens))
    return [_bytes(head), _flat(state.tokens.astype("<u4", copy=False)), *_written(state)]


def write_context(state: LlamaSequence, architecture: str) -> Bytes:
    """Return the bytes from which ``llama_state_set_data`` restores ``state`` into a context with one
    sequence."""
    name = architecture.encode()
    return np.concatenate([_bytes(struct.pack("<I", len(name)) + name), *_written(state)])


def _written(state: LlamaSequence) -> list[Bytes]:
    parts: list[Bytes] = []
    for cache in state.caches:
        layout, count = cache.layout, cache.stop - cache.first
        cells = np.zeros(count, _CELL)
        cells["position"] = np.arange(cache.first, cache.stop)
        cells["sequences"] = 1
        # llama.cpp restores the cells into the sequence's own stream; their stream in the state does not
        # matter.
        parts.append(_bytes(struct.pack("<II", layout.streams, count)))
        parts.append(_flat(cells))
        parts.append(_bytes(struct.pack("<II", layout.transposed, len(layout.keys))))
        for row, data in zip(layout.rows, cache.rows, strict=True):
            parts += _written_row(row, data)
        parts.append(_bytes(bytes(4 * (layout.streams - 1))))  # the other streams have no cells
    return parts


def _written_row(row: Row, data: Bytes) -> Sequence[Bytes]:
    if not row.element:
        return _bytes(struct.pack("<iQ", row.type, row.nbytes)), _flat(data)
    width = row.nbytes // row.element
    head = _bytes(struct.pack("<iII", row.type, row.element, width))
    return head, _flat(data.reshape(len(data), width, row.element).transpose(1, 0, 2))


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def _flat(array: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
