"""Recurrent states in pages. :mod:`tierstore_engine.delta` (the gated delta rule),
:mod:`tierstore_engine.mamba1`, :mod:`tierstore_engine.mamba2` and :mod:`tierstore_engine.short_conv` compute
with them.

A sequence has one page of a layer group with states, independent of its length. For each layer the page has
the last inputs of its convolution, then its matrices. A step reads the state after the earlier tokens (zeros
if its span begins with token 0), and writes the state after its own tokens. A copy of the page is a snapshot.

A state cannot be reset to an earlier token. Therefore a draft's tokens are computed with a copy, and the page
keeps the state before the draft. The next step computes the accepted tokens again, together with the newest
token.

On the CPU, the compiled part (``tierstore/native/decode.c``) updates a state with one token after the other.
States and outputs then have the same bits, wherever steps and snapshots cut the sequence.

Without the compiled part, torch computes ``BLOCK`` tokens at a time: within a block their states depend on
one another linearly. Blocks begin at multiples of ``BLOCK`` tokens of the sequence, independent of where
spans begin. The same tokens are therefore computed in the same shapes, unless a span ends inside a block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from tierstore import native
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Prepared, Span
from tierstore_engine.config import ModelConfig
from tierstore_engine.products import threads_for

BLOCK = 64
MOST_ROWS = 256
"""Rows of the largest matrix that the compiled part computes."""

_PASSAGE = np.dtype([("page", "<i8"), ("first", "<i8"), ("tokens", "<i8")])


class _Recurrence(ctypes.Structure):
    """``struct recurrence`` of the compiled part."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("page_floats", ctypes.c_uint64),
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("decays", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("fading", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_uint64),
        ("key_heads", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("columns", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class Tokens:
    """The terms by which tokens change the matrices of a layer, ``[heads, key_dim, value_dim]``, in float32.

    ``queries`` and ``keys`` are ``[tokens, key_heads, key_dim]``. Each key head serves an equal number of
    heads. ``added`` is ``[tokens, heads, value_dim]``. ``decays`` are the logarithms of a matrix's factors,
    ``[tokens, heads]``. ``rates [tokens, heads]`` are the delta rule's, None under other rules. ``fading
    [key_dim, value_dim]`` is Mamba-1's, None under other rules: ``decays`` are then ``[tokens, heads,
    value_dim]``, to be multiplied by it.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    added: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor | None = None
    fading: torch.Tensor | None = None

    def at(self, rows: slice) -> Tokens:
        """Return some of the tokens."""
        return Tokens(
            self.queries[rows],
            self.keys[rows],
            self.added[rows],
            self.decays[rows],
            None if self.rates is None else self.rates[rows],
            self.fading,
        )

    def contiguous(self) -> tuple[torch.Tensor | None, ...]:
        """Return all fields in order, as the compiled part reads them."""
        every = (self.queries, self.keys, self.added, self.decays, self.rates, self.fading)
        return tuple(None if each is None else each.contiguous() for each in every)

    def of_heads(self) -> Tokens:
        """Return the terms with queries and keys for every head, with heads as the first dimension: ``[heads,
        tokens, …]``."""
        shared = self.added.shape[1] // self.keys.shape[1]
        queries, keys = (
            each.repeat_interleave(shared, dim=1).transpose(0, 1) for each in (self.queries, self.keys)
        )
        rates = None if self.rates is None else self.rates.T
        return Tokens(queries, keys, self.added.transpose(0, 1), self.decays.T, rates)


Rule: TypeAlias = Callable[[torch.Tensor, Tokens], torch.Tensor]
"""Update matrices of a state with a block of tokens, in place. Return the tokens' outputs, ``[tokens, heads,
value_dim]``."""


@dataclass(frozen=True, slots=True)
class _Passages:
    """Spans, each with the number of the state that its tokens update, and with its rows in the step.
    ``array`` has this for the compiled part."""

    spans: tuple[tuple[Span, int, slice], ...]
    array: np.ndarray[tuple[int], np.dtype[np.void]]

    @staticmethod
    def of(spans: Iterable[tuple[Span, int, slice]]) -> _Passages:
        kept = tuple(spans)
        array = np.array([(number, rows.start, span.tokens) for span, number, rows in kept], _PASSAGE)
        return _Passages(kept, array)


@dataclass(frozen=True, slots=True)
class _StateBatch:
    """A batch's sequences. ``pages`` have the states of the spans, and ``new`` are the pages of sequences
    that begin in this step. ``certain`` has the spans without drafted tokens, numbered by their pages.
    ``drafted`` has the pages with the states before drafts. ``drafts`` has the drafted tokens, numbered by
    their place in ``drafted``.

    The inputs of a convolution are the kept inputs of each sequence, and then the inputs of the batch's
    tokens. ``sources`` (int64 ``[tokens, width]``) are the inputs of each token, and ``kept`` (``[sequences,
    width - 1]``) the inputs to keep for later tokens.
    """

    certain: _Passages
    drafts: _Passages
    drafted: torch.Tensor
    pages: torch.Tensor
    new: torch.Tensor
    sources: torch.Tensor
    kept: torch.Tensor


class StatePages:
    """The states of a layer group, in the pages of its pool in host memory."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        assert config.recurrent is not None
        shape, dtype = config.recurrent, getattr(torch, config.dtype)
        memory = torch.from_numpy(pool.array)
        self._kept_inputs = shape.conv_width - 1
        self.inputs: dict[int, torch.Tensor] = {}
        """Views of all pages for each layer, ``[pages, channels, conv_width - 1]``, the newest last."""
        self.matrices: dict[int, torch.Tensor] = {}
        """Views of all pages' matrices for each layer, float32 ``[pages, heads, key_dim, value_dim]``."""
        self._batches: Prepared[_StateBatch] = Prepared()
        [group] = pool.spec.groups
        for layer in group.layers:
            inputs = pool.spec.layer(layer).start
            matrices = inputs + shape.inputs_bytes(config.dtype)
            self.inputs[layer] = _view(memory, dtype, inputs, (shape.channels, self._kept_inputs))
            self.matrices[layer] = _view(memory, torch.float32, matrices, shape.matrices)

    def convolve(
        self,
        layer: int,
        channels: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Return the causal convolution of ``channels [tokens, channels]`` for the layout's spans, in the
        same shape. Sums are float32. Afterwards the pages have the inputs for the tokens after the
        spans. For new sequences, the matrices in their pages are set to zero. Call this before
        :meth:`advance`."""
        batch = self._batch(layout)
        kept, matrices = self.inputs[layer], self.matrices[layer]
        if len(batch.new):
            kept[batch.new], matrices[batch.new] = 0.0, 0.0
        inputs = torch.cat((kept[batch.pages].mT.flatten(0, 1), channels))
        kept[batch.pages] = inputs[batch.kept].mT
        wide, taps = inputs.float(), weight.squeeze(1).T.float().contiguous()
        added = None if bias is None else bias.float()
        return _convolved(wide, batch.sources, taps, added).to(channels.dtype)

    def advance(self, layer: int, tokens: Tokens, layout: BatchLayout, rule: Rule) -> torch.Tensor:
        """Update a layer's matrices with the tokens of the layout's spans. Return the tokens' outputs,
        float32 ``[tokens, heads, value_dim]``. ``rule`` computes this if there is no compiled part.

        Drafted tokens change a copy of the matrices: the page keeps the matrices before the draft."""
        batch, matrices = self._batch(layout), self.matrices[layer]
        out = torch.empty(tokens.added.shape)
        _advance(matrices, tokens, batch.certain, rule, out)
        if len(batch.drafted):
            _advance(matrices[batch.drafted], tokens, batch.drafts, rule, out)
        return out

    def _batch(self, layout: BatchLayout) -> _StateBatch:
        return self._batches.of(layout, lambda: _batch_of(layout, self._kept_inputs))


def _advance(
    matrices: torch.Tensor, tokens: Tokens, passages: _Passages, rule: Rule, out: torch.Tensor
) -> None:
    """Update ``matrices [states, heads, key_dim, value_dim]`` with the tokens of ``passages``. Write each
    token's output into its row of ``out``."""
    rows, columns = matrices.shape[-2:]
    if native.DECODE is None or rows > MOST_ROWS:
        for span, number, own in passages.spans:
            for block in blocks(span):
                part = slice(own.start + block.start, own.start + block.stop)
                out[part] = rule(matrices[number], tokens.at(part))
        return
    read = tokens.contiguous()  # these arrays are kept alive until the call ends
    recurrence = _Recurrence(
        matrices.data_ptr(),
        matrices.stride(0),
        *(_pointer(each) for each in read),
        out.data_ptr(),
        *(tokens.added.shape[1], tokens.keys.shape[1], rows, columns),
    )
    native.DECODE.tierstore_recur(
        ctypes.byref(recurrence),
        *(passages.array.ctypes.data, len(passages.array), threads_for(out.nbytes * rows)),
    )


def _batch_of(layout: BatchLayout, kept_inputs: int) -> _StateBatch:
    """Return the sequences of a batch before a convolution that keeps ``kept_inputs`` inputs of each."""
    found = list(sequences(layout))
    first = len(found) * kept_inputs  # the place of the input of the batch's first token
    sources, kept, certain, drafted = [], [], [], []
    for number, (span, page, rows) in enumerate(found):
        cut, row = span.stop - span.drafted, rows.stop - span.drafted
        if span.start < cut:
            certain.append((replace(span, stop=cut, drafted=0), page, slice(rows.start, row)))
        if span.drafted:
            drafted.append((replace(span, start=cut, drafted=0), page, slice(row, rows.stop)))
        earlier = np.arange(number * kept_inputs, (number + 1) * kept_inputs)
        series = np.concatenate((earlier, np.arange(first + rows.start, first + rows.stop)))
        sources.append(np.lib.stride_tricks.sliding_window_view(series, kept_inputs + 1))
        kept.append(series[cut - span.start :][:kept_inputs])
    return _StateBatch(
        _Passages.of(certain),
        _Passages.of((span, at, rows) for at, (span, _, rows) in enumerate(drafted)),
        torch.tensor([page for _, page, _ in drafted], dtype=torch.int64),
        torch.tensor([page for _, page, _ in found]),
        torch.tensor([page for span, page, _ in found if span.start == 0], dtype=torch.int64),
        torch.from_numpy(np.concatenate(sources)),
        torch.from_numpy(np.array(kept)),
    )


def _convolved(
    inputs: torch.Tensor, sources: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return ``[tokens, channels]``, in float32: for each token the bias, and the sum of the rows of ``inputs
    [inputs, channels]`` that ``sources [tokens, width]`` names, each times its tap (``taps [width,
    channels]``)."""
    out = inputs.new_empty(len(sources), inputs.shape[1])
    if native.DECODE is not None:
        native.DECODE.tierstore_convolve(
            inputs.data_ptr(),
            *(sources.data_ptr(), len(sources)),
            *(taps.data_ptr(), len(taps)),
            _pointer(bias),
            *(inputs.shape[1], out.data_ptr(), threads_for(inputs.nbytes)),
        )
        return out
    out[:] = 0.0 if bias is None else bias
    for source, tap in zip(sources.unbind(1), taps, strict=True):
        out += inputs[source] * tap
    return out


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _view(memory: torch.Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of every page: ``shape`` of ``dtype``, from byte ``start`` on."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return memory[:, start : start + nbytes].view(dtype).view(len(memory), *shape)


@dataclass(frozen=True, slots=True)
class BlockDecays:
    """Decay factors within a block of tokens.

    ``since_start [heads, tokens, 1]`` is the decay of the state before the block up to each token. ``between
    [heads, i, j]`` is the decay up to token i of what token j adds. ``until_end [heads, tokens, 1]`` is the
    decay of each token's addition up to the block's end.
    """

    since_start: torch.Tensor
    between: torch.Tensor
    until_end: torch.Tensor

    @staticmethod
    def of(decays: torch.Tensor) -> BlockDecays:
        """Return the factors from each token's decay, as logarithms ``[heads, tokens]``."""
        total = decays.cumsum(-1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        until_end = (total[:, -1:] - total).exp().unsqueeze(-1)
        return BlockDecays(total.exp().unsqueeze(-1), between, until_end)


def read_and_add(state: torch.Tensor, tokens: Tokens, added: torch.Tensor, left: BlockDecays) -> torch.Tensor:
    """Update a state with a block of tokens. Return the tokens' outputs, ``[tokens, heads, value_dim]``. Each
    token adds ``key ⊗ added``.

    ``state [heads, key_dim, value_dim]`` is the state before the block, and is updated in place.
    ``tokens`` are :meth:`Tokens.of_heads`, and ``added`` is ``[heads, tokens, value_dim]``.
    """
    queries, keys = tokens.queries, tokens.keys
    before = left.since_start * (queries @ state)
    out: torch.Tensor = before + (queries @ keys.mT * left.between) @ added
    state.mul_(left.since_start[:, -1:]).add_((keys * left.until_end).mT @ added)
    return out.transpose(0, 1)


def sequences(layout: BatchLayout) -> Iterator[tuple[Span, int, slice]]:
    """Yield each span of a layer group with states, its page, and its rows in the step."""
    row = 0
    for span, table in zip(layout.spans, layout.block_tables, strict=True):
        yield span, int(table[0]), slice(row, row + span.tokens)
        row += span.tokens


def blocks(span: Span) -> Iterator[slice]:
    """Yield the rows of a span, cut where a block of the sequence begins."""
    start = span.start
    while start < span.stop:
        stop = min((start // BLOCK + 1) * BLOCK, span.stop)
        yield slice(start - span.start, stop - span.start)
        start = stop
