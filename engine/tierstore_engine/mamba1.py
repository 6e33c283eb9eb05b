"""Mamba-1: each channel has a state. Every token decides how much the state decays, and what is added to it.

A token has a step size ``Δ > 0`` for each channel, a key ``B`` and a query ``C`` for all channels, and the
channels' values ``x`` after a convolution::

    S  ←  exp(Δ a) S + B ⊗ Δ x              and the token reads      Sᵀ C + d x

``a`` (below 0) differs for every entry of ``S``, so tokens are always taken one by one. Sums are computed in
float32. :mod:`tierstore_engine.states` describes the pages.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout
from tierstore_engine.config import ModelConfig
from tierstore_engine.layer_weights import Mamba1Weights
from tierstore_engine.pointwise import Pointwise, each
from tierstore_engine.quantised import linear
from tierstore_engine.states import StatePages, Tokens


class CpuMamba1States:
    """The states of a layer group with Mamba-1. There is no class for GPUs."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        self._pages = StatePages(pool, config)

    def convolve(
        self, layer: int, channels: torch.Tensor, weights: Mamba1Weights, layout: BatchLayout
    ) -> torch.Tensor:
        """Return the convolution of ``channels [tokens, width]`` for the layout's spans, in the same shape.
        Call this before :meth:`advance`."""
        return self._pages.convolve(layer, channels, weights.conv, weights.conv_bias, layout)

    def advance(
        self,
        layer: int,
        added: torch.Tensor,
        steps: torch.Tensor,
        keys: torch.Tensor,
        queries: torch.Tensor,
        decay: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Update a layer's states with the tokens of the layout's spans. Return the outputs,
        ``[tokens, width]``. All is float32: ``added`` and ``steps`` are ``[tokens, width]``, ``keys`` and
        ``queries`` ``[tokens, state_dim]``, ``decay [state_dim, width]`` is below 0."""
        tokens = Tokens(
            queries.unsqueeze(1), keys.unsqueeze(1), added.unsqueeze(1), steps.unsqueeze(1), fading=decay
        )
        return self._pages.advance(layer, tokens, layout, fading_rule).squeeze(1)


def fading_rule(state: torch.Tensor, block: Tokens) -> torch.Tensor:
    """Compute a block of tokens, one by one; see :data:`~tierstore_engine.states.Rule`."""
    assert block.fading is not None
    left = (block.decays * block.fading).exp_()
    states = block.keys.mT * block.added
    before = state.squeeze(0)
    for after, kept in zip(states, left, strict=True):
        after.addcmul_(before, kept)
        before = after
    state.copy_(before)
    return torch.einsum("tnw,tn->tw", states, block.queries.squeeze(1)).unsqueeze(1)


class Mamba1:
    """One Mamba-1 layer."""

    def __init__(
        self, layer: int, config: ModelConfig, weights: Mamba1Weights, states: CpuMamba1States
    ) -> None:
        assert config.mamba1 is not None
        self._layer = layer
        self._mamba = config.mamba1
        self._weights = weights
        self._states = states
        self._norm = None if self._mamba.norm_eps is None else Pointwise(self._mamba.norm_eps).norm
        self._decay = -each(torch.exp, weights.a_log.float()).T.contiguous()

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of the layout's spans. Return the same shape."""
        mamba, weights = self._mamba, self._weights
        channels, gates = linear(hidden, weights.projection, weights.projection_bias).chunk(2, dim=1)
        values = each(silu, self._states.convolve(self._layer, channels, weights, layout))
        chosen = linear(values, weights.selection)
        steps, keys, queries = torch.split(chosen, [mamba.rank, mamba.state_dim, mamba.state_dim], dim=1)
        steps = linear(self._normed(steps, weights.step_norm), weights.steps).float()
        steps = each(softplus, steps + weights.step_bias.float())
        keys = self._normed(keys, weights.key_norm).float()
        queries = self._normed(queries, weights.query_norm).float()
        wide = values.float()
        out = self._states.advance(self._layer, steps * wide, steps, keys, queries, self._decay, layout)
        out = (out + wide * weights.skip.float()) * each(silu, gates.float())
        return linear(out.to(hidden.dtype), weights.o, weights.o_bias)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if self._norm is None:
            return x
        return self._norm(x, x.new_ones(x.shape[1]) if weight is None else weight)
