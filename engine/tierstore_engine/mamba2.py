"""Mamba-2: a state to which every token adds, and which decays by what each token says.

Each head has a matrix ``S``, of which a token reads by ``C`` what tokens have written by ``B``. With a step
``Δ > 0`` and values ``x``::

    S  ←  exp(-Δ a) S + B ⊗ Δ x             and what the token reads is      Sᵀ C + d x

That is the gated delta rule without the correction of what is written: tokens are taken by blocks as in
:mod:`tierstore_engine.states`, where the pages are described, too.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu, softplus

from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.config import ModelConfig
from tierstore_engine.states import BlockDecays, CpuStates, blocks, read_and_add, sequences
from tierstore_engine.weights import Mamba2Weights


class Mamba2:
    """One Mamba-2 layer."""

    def __init__(self, layer: int, config: ModelConfig, weights: Mamba2Weights, states: CpuStates) -> None:
        assert config.mamba is not None
        self._layer = layer
        self._mamba = config.mamba
        self._epsilon = config.norm_eps
        self._weights = weights
        self._states = states
        self._decay = -weights.a_log.float().exp()
        self._steps_bias = weights.dt_bias.float()
        self._skip = weights.skip.float().unsqueeze(-1)

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """``hidden [tokens, hidden_size]`` of the layout's spans; the same shape."""
        mamba, weights = self._mamba, self._weights
        projected = linear(hidden, weights.projection, weights.projection_bias)
        gates, channels, steps = torch.split(projected, [mamba.width, mamba.channels, mamba.heads], dim=1)
        steps = softplus(steps.float() + self._steps_bias).clamp(mamba.least_step, mamba.most_step)
        out = torch.empty(gates.shape, dtype=torch.float32, device=hidden.device)
        for span, page, rows in sequences(layout):
            out[rows] = self._of_span(span, page, channels[rows], steps[rows])
        return linear(self._norm(out * silu(gates.float()), hidden.dtype), weights.o, weights.o_bias)

    def _of_span(self, span: Span, page: int, channels: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """float32 ``[tokens, width]``; the page has the state behind the span then."""
        mamba = self._mamba
        state = self._states.before(span, self._layer, page)
        mixed = state.convolve(channels, self._weights.conv, self._weights.conv_bias).float()
        shared = mamba.groups * mamba.state_dim
        values, keys, queries = torch.split(mixed, [mamba.width, shared, shared], dim=1)
        values = values.view(-1, mamba.heads, mamba.head_dim)
        keys, queries = (
            each.view(-1, mamba.groups, mamba.state_dim)
            .repeat_interleave(mamba.heads // mamba.groups, dim=1)
            .transpose(0, 1)
            for each in (keys, queries)
        )
        added = (values * steps.unsqueeze(-1)).transpose(0, 1)
        decays = (steps * self._decay).T
        out = values * self._skip
        for rows in blocks(span):
            left = BlockDecays.of(decays[:, rows])
            read = read_and_add(state.matrices, queries[:, rows], keys[:, rows], added[:, rows], left)
            out[rows] += read.transpose(0, 1)
        return out.flatten(1)

    def _norm(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """RMSNorm over the heads of each group."""
        by_group = x.view(len(x), self._mamba.groups, -1)
        by_group = by_group * torch.rsqrt(by_group.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return (by_group.flatten(1) * self._weights.norm.float()).to(dtype)
