"""The gated delta rule: a recurrent state to which every token adds a correction.

For each token, with a decay ``a``, a rate ``b``, a key ``k`` and a value ``v``, the matrix ``S`` of a head
(:mod:`tierstore_engine.states`) becomes::

    S  ←  a S + k ⊗ b (v - a Sᵀk)            and the token reads      Sᵀq

Torch solves a block of tokens at once. With ``A[i, j]`` the decay from token j to token i, the corrections
``u = b (v - …)`` of the block's tokens solve a triangular system::

    uᵢ + bᵢ Σⱼ﹤ᵢ A[i, j] (kᵢ·kⱼ) uⱼ  =  bᵢ (vᵢ - aᵢ…a₁ S₀ᵀkᵢ)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn.functional import silu, softplus

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout
from tierstore_engine.config import DeltaConfig, ModelConfig
from tierstore_engine.layer_weights import DeltaWeights
from tierstore_engine.pointwise import Pointwise, each
from tierstore_engine.quantised import linear
from tierstore_engine.states import BlockDecays, StatePages, Tokens, read_and_add

_EPSILON = 1e-6  # the epsilon in the norms of queries and keys


class DeltaStates(ABC):
    """The states of a layer group with the gated delta rule. One class per kind of device."""

    @abstractmethod
    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Update a layer's states with the tokens of the layout's spans. Return each token's output,
        ``[tokens, value_heads, value_dim]`` in the model's dtype. The pages have the states after the spans
        when the call, or the device's work, is done.

        ``channels [tokens, channels]`` are the input of the convolution with ``conv [channels, 1, width]``;
        ``rates`` and ``decays`` (logarithms) are float32 ``[tokens, value_heads]``.
        """


class CpuDeltaStates(DeltaStates):
    """States in host memory (:mod:`tierstore_engine.states`)."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        assert config.delta is not None
        self._delta = config.delta
        self._pages = StatePages(pool, config)

    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        delta = self._delta
        mixed = each(silu, self._pages.convolve(layer, channels, conv, None, layout)).float()
        keys_width = delta.key_heads * delta.key_dim
        widths = [keys_width, keys_width, delta.value_heads * delta.value_dim]
        queries, keys, values = torch.split(mixed, widths, dim=1)
        tokens = Tokens(
            _unit(queries.view(-1, delta.key_heads, delta.key_dim)) * delta.key_dim**-0.5,
            _unit(keys.view(-1, delta.key_heads, delta.key_dim)),
            values.view(-1, delta.value_heads, delta.value_dim),
            decays,
            rates,
        )
        return self._pages.advance(layer, tokens, layout, delta_rule).to(channels.dtype)


class GatedDelta:
    """One layer with a gated delta rule."""

    def __init__(self, layer: int, config: ModelConfig, weights: DeltaWeights, states: DeltaStates) -> None:
        assert config.delta is not None
        self._layer = layer
        self._delta = config.delta
        self._weights = weights
        self._states = states
        self._pointwise = Pointwise(config.norm_eps)
        self._decay = -each(torch.exp, weights.a_log.float())

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of the layout's spans. Return the same shape."""
        delta, weights = self._delta, self._weights
        channels, gates = _by_kind(linear(hidden, weights.qkvz), delta)
        rates, steps = (
            part.flatten(1).float() for part in _by_key_head(linear(hidden, weights.ba), delta).chunk(2, -1)
        )
        decays = self._decay * each(softplus, steps + weights.dt_bias)
        rates = each(torch.sigmoid, rates)
        out = self._states.advance(self._layer, channels, weights.conv, rates, decays, layout)
        normed = self._pointwise.norm(out, weights.norm)
        gated = (normed * each(silu, gates.float())).to(hidden.dtype)
        return linear(gated.flatten(1), weights.o)


def delta_rule(state: torch.Tensor, block: Tokens) -> torch.Tensor:
    """Compute a block of tokens; see :data:`~tierstore_engine.states.Rule`."""
    tokens = block.of_heads()
    assert tokens.rates is not None
    left, rates = BlockDecays.of(tokens.decays), tokens.rates.unsqueeze(-1)
    # the solver takes the diagonal of this matrix to be 1
    system = rates * (tokens.keys @ tokens.keys.mT) * left.between
    target = rates * (tokens.added - left.since_start * (tokens.keys @ state))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    return read_and_add(state, tokens, corrections, left)


def _by_key_head(projected: torch.Tensor, delta: DeltaConfig) -> torch.Tensor:
    """Return ``[tokens, key_heads, …]``: the projections are grouped by key head."""
    return projected.view(len(projected), delta.key_heads, -1)


def _by_kind(projected: torch.Tensor, delta: DeltaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution's inputs ``[tokens, channels]`` (all queries, all keys, all values), and the
    gates ``[tokens, value_heads, value_dim]``."""
    values = delta.value_heads // delta.key_heads * delta.value_dim
    widths = [delta.key_dim, delta.key_dim, values, values]
    parts = torch.split(_by_key_head(projected, delta), widths, dim=-1)
    channels = torch.cat([part.flatten(1) for part in parts[:3]], dim=1)
    return channels, parts[3].reshape(len(projected), delta.value_heads, delta.value_dim)


def _unit(x: torch.Tensor) -> torch.Tensor:
    unit: torch.Tensor = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPSILON)
    return unit
