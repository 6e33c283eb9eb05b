"""Recurrent states in pages. :mod:`tierstore_engine.delta` (the gated delta rule),
:mod:`tierstore_engine.mamba1`, :mod:`tierstore_engine.mamba2` and :mod:`tierstore_engine.short_conv` compute
with them.

A sequence has one page of a layer group with states, independent of its length. For each layer the page has
the last inputs of its convolution, then its matrices. A step reads the state after the earlier tokens (zeros
if its span begins with token 0), and writes the state after its own tokens. A copy of the page is a snapshot.

A state cannot go back. So the tokens of a draft read the state, and the page keeps the state before them. The
next step computes those that were accepted again, with the newest token.

On the CPU ``BLOCK`` tokens are computed at a time: within a block their states depend on one another
linearly. Blocks begin at multiples of ``BLOCK`` tokens of the sequence, independent of where spans begin. So
the same tokens are computed in the same shapes, unless a span ends within a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import conv1d

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.config import ModelConfig

BLOCK = 64


class StatePages:
    """The states of a layer group, in the pages of its pool in host memory."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        assert config.recurrent is not None
        shape, dtype = config.recurrent, getattr(torch, config.dtype)
        memory = torch.from_numpy(pool.array)
        self._inputs: dict[int, torch.Tensor] = {}
        self._matrices: dict[int, torch.Tensor] = {}
        [group] = pool.spec.groups
        for layer in group.layers:
            inputs = pool.spec.layer(layer).start
            matrices = inputs + shape.inputs_bytes(config.dtype)
            self._inputs[layer] = _view(memory, dtype, inputs, (shape.channels, shape.conv_width - 1))
            self._matrices[layer] = _view(memory, torch.float32, matrices, shape.matrices)

    def state(self, layer: int, page: int) -> LayerState:
        """Return the state in a page."""
        return LayerState(self._inputs[layer][page], self._matrices[layer][page])

    def through(
        self, layer: int, layout: BatchLayout, *, begin: bool = True
    ) -> Iterator[tuple[Span, LayerState, slice]]:
        """Yield the spans of the layout with the states before them (zeros before token 0) and their rows.
        The caller takes each state through its span's tokens before it asks for the next one.

        The tokens of a draft are a span of their own, with a copy of the state. ``begin`` is False if another
        call has begun the states of this step.
        """
        row = 0
        for span, table in zip(layout.spans, layout.block_tables, strict=True):
            state, certain = self.state(layer, int(table[0])), span.stop - span.drafted
            if span.start == 0 and begin:
                state.inputs.zero_()
                state.matrices.zero_()
            if span.start < certain:
                part = replace(span, stop=certain, drafted=0)
                yield part, state, slice(row, row + part.tokens)
                row += part.tokens
            if span.drafted:
                part = replace(span, start=certain, drafted=0)
                yield part, state.copy(), slice(row, row + part.tokens)
                row += part.tokens

    def convolve(
        self,
        layer: int,
        channels: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Return the convolution of ``channels [tokens, channels]`` for the layout's spans, in the same
        shape. The pages then have the inputs for the tokens after the spans."""
        out = torch.empty_like(channels)
        for _, state, rows in self.through(layer, layout):
            out[rows] = state.convolve(channels[rows], weight, bias)
        return out


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's state of a sequence, as views of its page."""

    inputs: torch.Tensor
    """``[channels, conv_width - 1]``, the newest last."""
    matrices: torch.Tensor
    """float32 ``[heads, key_dim, value_dim]``."""

    def copy(self) -> LayerState:
        """Return a copy that is in no page."""
        return LayerState(self.inputs.clone(), self.matrices.clone())

    def convolve(
        self, channels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the causal convolution of the next tokens' ``channels [tokens, channels]``, in the same
        shape. The last tokens are kept for the next call."""
        series = torch.cat((self.inputs, channels.T), dim=1)
        self.inputs.copy_(series[:, series.shape[1] - self.inputs.shape[1] :])
        return conv1d(series.unsqueeze(0), weight, bias, groups=len(series)).squeeze(0).T


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


def read_and_add(
    state: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    added: torch.Tensor,
    left: BlockDecays,
) -> torch.Tensor:
    """Return what a block of tokens reads of a state, ``[heads, tokens, value_dim]``. Each token adds ``key ⊗
    added``.

    ``state [heads, key_dim, value_dim]`` is the state before the block, and is updated to the state after it.
    ``queries`` and ``keys`` are ``[heads, tokens, key_dim]``. All are float32.
    """
    before = left.since_start * (queries @ state)
    out: torch.Tensor = before + (queries @ keys.mT * left.between) @ added
    state.mul_(left.since_start[:, -1:]).add_((keys * left.until_end).mT @ added)
    return out


def blocks(span: Span) -> Iterator[slice]:
    """Yield the rows of a span, cut where a block of the sequence begins."""
    start = span.start
    while start < span.stop:
        stop = min((start // BLOCK + 1) * BLOCK, span.stop)
        yield slice(start - span.start, stop - span.start)
        start = stop
