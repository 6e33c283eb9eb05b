"""Mamba-2: a state to which every token adds, and which decays by a factor that each token decides.

Each head has a matrix ``S``. A token writes to it by ``B`` and reads from it by ``C``. With a step size ``Δ >
0`` and values ``x``, a token computes::

    S  ←  exp(-Δ a) S + B ⊗ Δ x             and the token reads      Sᵀ C + d x

This is the gated delta rule (:mod:`tierstore_engine.delta`) without the correction.
:mod:`tierstore_engine.states` describes the pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn.functional import silu, softplus

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout
from tierstore_engine.config import Mamba2Config, ModelConfig
from tierstore_engine.layer_weights import Mamba2Terms, Mamba2Weights
from tierstore_engine.pointwise import each
from tierstore_engine.quantised import linear
from tierstore_engine.states import BlockDecays, StatePages, Tokens, read_and_add


class Mamba2States(ABC):
    """The states of a layer group with Mamba-2. One class per kind of device."""

    @abstractmethod
    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        steps: torch.Tensor,
        terms: Mamba2Terms,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Update a layer's states with the tokens of the layout's spans. Return the tokens' outputs, float32
        ``[tokens, heads, head_dim]``. The pages then have the states after the spans, or will have them.

        ``channels [tokens, channels]`` are the input of the convolution. ``steps [tokens, heads]`` are the
        step sizes before their bias is added. Both are in the model's dtype.
        """


class CpuMamba2States(Mamba2States):
    """States in host memory (:mod:`tierstore_engine.states`)."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        assert config.mamba is not None
        self._mamba = config.mamba
        self._pages = StatePages(pool, config)

    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        steps: torch.Tensor,
        terms: Mamba2Terms,
        layout: BatchLayout,
    ) -> torch.Tensor:
        mamba = self._mamba
        mixed = each(silu, self._pages.convolve(layer, channels, terms.conv, terms.conv_bias, layout)).float()
        shared = mamba.groups * mamba.state_dim
        values, keys, queries = torch.split(mixed, [mamba.width, shared, shared], dim=1)
        values = values.view(-1, mamba.heads, mamba.head_dim)
        sizes = each(softplus, steps.float() + terms.step_bias).clamp(mamba.least_step, mamba.most_step)
        tokens = Tokens(
            queries.view(-1, mamba.groups, mamba.state_dim),
            keys.view(-1, mamba.groups, mamba.state_dim),
            values * sizes.unsqueeze(-1),
            sizes * terms.decay,
        )
        return self._pages.advance(layer, tokens, layout, add_rule) + values * terms.skip.unsqueeze(-1)


def add_rule(state: torch.Tensor, block: Tokens) -> torch.Tensor:
    """Compute a block of tokens; see :data:`~tierstore_engine.states.Rule`."""
    tokens = block.of_heads()
    return read_and_add(state, tokens, tokens.added, BlockDecays.of(tokens.decays))


class Mamba2:
    """One Mamba-2 layer."""

    def __init__(self, layer: int, config: ModelConfig, weights: Mamba2Weights, states: Mamba2States) -> None:
        assert config.mamba is not None
        self._layer = layer
        self._mamba = config.mamba
        self._epsilon = config.norm_eps
        self._weights = weights
        self._terms = weights.terms()
        self._states = states
        self._scales = _scales(config.mamba, weights) if config.mamba.scales else None

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of the layout's spans. Return the same shape."""
        mamba, weights = self._mamba, self._weights
        projected = linear(hidden, weights.projection, weights.projection_bias)
        if self._scales is not None:
            projected = projected * self._scales
        gates, channels, steps = torch.split(projected, [mamba.width, mamba.channels, mamba.heads], dim=1)
        out = self._states.advance(self._layer, channels, steps, self._terms, layout).flatten(1)
        gates = each(silu, gates.float())
        out = self._norm(out) * gates if mamba.norm == "before gate" else self._norm(out * gates)
        return linear(out.to(hidden.dtype), weights.o, weights.o_bias)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm over the heads of each group, if the model has this norm."""
        if self._weights.norm is None:
            return x
        by_group = x.view(len(x), self._mamba.groups, -1)
        by_group = by_group * torch.rsqrt(by_group.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return by_group.flatten(1) * self._weights.norm.float()


def _scales(mamba: Mamba2Config, weights: Mamba2Weights) -> torch.Tensor:
    """Return the factor of each number of the projection, in the model's dtype."""
    shared = mamba.groups * mamba.state_dim
    counts = torch.tensor([mamba.width, mamba.width, shared, shared, mamba.heads])
    return torch.tensor(mamba.scales).repeat_interleave(counts).to(weights.dt_bias)
