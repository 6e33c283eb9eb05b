"""The gated delta rule: a state that every token corrects.

For each token, with a decay ``a``, a rate ``b``, a key ``k`` and a value ``v``, the matrix ``S`` of a head
(:mod:`tierstore_engine.states`) becomes::

    S  ←  a S + k ⊗ b (v - a Sᵀk)            and the token reads      Sᵀq

A block of tokens is solved at once. With ``A[i, j]`` the decay from token j to token i, the corrections ``u =
b (v - …)`` of the block's tokens solve a triangular system::

    uᵢ + bᵢ Σⱼ﹤ᵢ A[i, j] (kᵢ·kⱼ) uⱼ  =  bᵢ (vᵢ - aᵢ…a₁ S₀ᵀkᵢ)
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn.functional import silu, softplus

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.config import DeltaConfig, ModelConfig
from tierstore_engine.pointwise import Pointwise
from tierstore_engine.quantised import linear
from tierstore_engine.states import BlockDecays, LayerState, StatePages, blocks, read_and_add
from tierstore_engine.weights import DeltaWeights

_EPSILON = 1e-6  # for the norms of queries and keys


class DeltaStates(ABC):
    """The states of a layer group under the rule. One class per kind of device."""

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
        """Take a layer's states through the tokens of the layout's spans. Return what the tokens read,
        ``[tokens, value_heads, value_dim]`` in the model's dtype. The pages then have the states after the
        spans, or will have them.

        ``channels [tokens, channels]`` go into the convolution by ``conv [channels, 1, width]``; ``rates``
        and ``decays`` (logarithms) are float32 ``[tokens, value_heads]``.
        """


class CpuDeltaStates(DeltaStates):
    """Compute in blocks of tokens, with torch."""

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
        out = channels.new_empty(len(channels), self._delta.value_heads, self._delta.value_dim)
        for span, state, rows in self._pages.through(layer, layout):
            out[rows] = self._of_span(span, state, channels[rows], conv, rates[rows], decays[rows])
        return out

    def _of_span(
        self,
        span: Span,
        state: LayerState,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``[tokens, value_heads, value_dim]``. ``state`` becomes the state after the span."""
        delta = self._delta
        mixed = silu(state.convolve(channels, conv, None))
        keys_width = delta.key_heads * delta.key_dim
        widths = [keys_width, keys_width, delta.value_heads * delta.value_dim]
        queries, keys, values = torch.split(mixed.float(), widths, dim=1)
        shared = delta.value_heads // delta.key_heads
        queries = _unit(queries.view(-1, delta.key_heads, delta.key_dim)) * delta.key_dim**-0.5
        keys = _unit(keys.view(-1, delta.key_heads, delta.key_dim))
        queries, keys = (each.repeat_interleave(shared, dim=1).transpose(0, 1) for each in (queries, keys))
        values = values.view(-1, delta.value_heads, delta.value_dim).transpose(0, 1)
        out = torch.empty_like(values)
        for rows in blocks(span):
            out[:, rows] = delta_rule(
                state.matrices,
                queries[:, rows],
                keys[:, rows],
                values[:, rows],
                rates.T[:, rows],
                decays.T[:, rows],
            )
        return out.transpose(0, 1)


class GatedDelta:
    """One layer with a gated delta rule."""

    def __init__(self, layer: int, config: ModelConfig, weights: DeltaWeights, states: DeltaStates) -> None:
        assert config.delta is not None
        self._layer = layer
        self._delta = config.delta
        self._weights = weights
        self._states = states
        self._pointwise = Pointwise(config.norm_eps)
        self._decay = -weights.a_log.float().exp()

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of the layout's spans. Return the same shape."""
        delta, weights = self._delta, self._weights
        channels, gates = _by_kind(linear(hidden, weights.qkvz), delta)
        rates, steps = (
            each.flatten(1) for each in _by_key_head(linear(hidden, weights.ba), delta).chunk(2, -1)
        )
        decays = self._decay * softplus(steps.float() + weights.dt_bias)
        out = self._states.advance(
            self._layer, channels, weights.conv, rates.float().sigmoid(), decays, layout
        )
        normed = self._pointwise.norm(out, weights.norm)
        gated = (normed * silu(gates.float())).to(hidden.dtype)
        return linear(gated.flatten(1), weights.o)


def delta_rule(
    state: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rates: torch.Tensor,
    decays: torch.Tensor,
) -> torch.Tensor:
    """Return what a block of tokens reads, ``[heads, tokens, value_dim]``.

    ``state [heads, key_dim, value_dim]`` is the state before the block, and is updated to the state after it.
    ``queries`` and ``keys`` are ``[heads, tokens, key_dim]``, ``rates`` and ``decays`` (as logarithms)
    ``[heads, tokens]``. All are float32.
    """
    left = BlockDecays.of(decays)
    system = rates.unsqueeze(-1) * (keys @ keys.mT) * left.between  # its diagonal counts as 1
    target = rates.unsqueeze(-1) * (values - left.since_start * (keys @ state))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    return read_and_add(state, queries, keys, corrections, left)


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
