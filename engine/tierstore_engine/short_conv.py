"""Short convolutions (LFM2): a layer whose state is the last inputs of a causal convolution.

A token's projection has three parts ``b``, ``c`` and ``x``. The convolution runs over ``b x`` of the last few
tokens, and ``c`` multiplies its output. :mod:`tierstore_engine.states` describes the pages.
"""

from __future__ import annotations

import torch

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout
from tierstore_engine.config import ModelConfig
from tierstore_engine.layer_weights import ShortConvWeights
from tierstore_engine.quantised import linear
from tierstore_engine.states import StatePages


class CpuShortConvStates:
    """The states of a layer group with short convolutions. There is no class for GPUs."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        self._pages = StatePages(pool, config)

    def advance(
        self, layer: int, channels: torch.Tensor, weights: ShortConvWeights, layout: BatchLayout
    ) -> torch.Tensor:
        """Return the convolution of ``channels [tokens, channels]`` for the layout's spans, in the same
        shape. The pages then have the states after the spans."""
        return self._pages.convolve(layer, channels, weights.conv, weights.conv_bias, layout)


class ShortConv:
    """One layer with a short convolution."""

    def __init__(self, layer: int, weights: ShortConvWeights, states: CpuShortConvStates) -> None:
        self._layer = layer
        self._weights = weights
        self._states = states

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of the layout's spans. Return the same shape."""
        weights = self._weights
        before, after, values = linear(hidden, weights.projection, weights.projection_bias).chunk(3, dim=1)
        mixed = self._states.advance(self._layer, before * values, weights, layout)
        return linear(after * mixed, weights.o, weights.o_bias)
