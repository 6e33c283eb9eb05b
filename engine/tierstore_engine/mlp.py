"""The part of a layer that computes each token separately: an MLP, usually a gated one, or a mixture of
experts.

In a mixture, the router chooses experts for each token. The tokens are then sorted by expert, so that an
expert computes all of its tokens in one product. No token is dropped. The outputs are summed for each token
in the order in which the router chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch.nn.functional import gelu, relu, silu, softplus

from tierstore_engine.config import ExpertsConfig, ModelConfig
from tierstore_engine.layer_weights import ExpertsWeights, MLPWeights
from tierstore_engine.pointwise import Pointwise, each
from tierstore_engine.products import short_sum
from tierstore_engine.quantised import linear

_Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each token, int64 ``[tokens, chosen]``, and their scores, float32 in the same shape."""

    experts: torch.Tensor
    scores: torch.Tensor


class MLPs:
    """The MLPs of a model's layers."""

    def __init__(self, config: ModelConfig, pointwise: Pointwise) -> None:
        self._experts = config.experts
        self._gate_scale, self._scale = config.mlp_scales
        gated: dict[str, _Activation] = {
            "silu": pointwise.silu_mul,
            "gelu_tanh": _gelu_tanh_mul,
            "gelu": _gelu_mul,
        }
        alone: dict[str, _Activation] = {
            "silu": _silu,
            "gelu_tanh": _gelu_tanh,
            "gelu": _gelu,
            "relu2": _relu_squared,
        }
        activations = gated if config.gated_mlps else alone
        self._gated = activations.get(config.activation, _silu)  # xIELU has numbers of each layer

    def compute(self, hidden: torch.Tensor, weights: MLPWeights | ExpertsWeights) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of any tokens. Return the same shape."""
        if not len(hidden):
            return hidden
        if isinstance(weights, MLPWeights):
            inner = linear(hidden, weights.gate_up, weights.gate_up_bias)
            if self._gate_scale != 1.0:
                inner[:, : inner.shape[1] // 2] *= self._gate_scale
            gated = self._gated(inner) if weights.xielu is None else _xielu(inner, weights.xielu)
            out = linear(gated, weights.down, weights.down_bias)
            return out if self._scale == 1.0 else out * self._scale
        assert self._experts is not None
        mixed = self._mix(hidden, weights, self._experts)
        if weights.shared is None:
            return mixed
        shared = self.compute(hidden, weights.shared)
        if weights.shared_gate is not None:
            shared = each(torch.sigmoid, linear(hidden, weights.shared_gate)) * shared
        return mixed + shared

    def _mix(self, hidden: torch.Tensor, weights: ExpertsWeights, experts: ExpertsConfig) -> torch.Tensor:
        routing = route(hidden, weights, experts)
        chosen = routing.experts.flatten()
        order = torch.argsort(chosen, stable=True)
        counts = torch.bincount(chosen, minlength=experts.count).tolist()
        scores = routing.scores.flatten()[order].unsqueeze(-1).to(hidden.dtype)
        entering = hidden[order // experts.chosen]
        if experts.scaled_input:
            entering = entering * scores
        held = weights.held
        # Other ranks compute the experts that this rank does not have.
        produced = torch.empty_like(entering) if len(held) == experts.count else torch.zeros_like(entering)
        start = 0
        for expert, count in enumerate(counts):
            if count and expert in held:
                rows = slice(start, start + count)
                produced[rows] = self._expert(entering[rows], weights, expert - held.start, experts)
            start += count
        if not experts.scaled_input:
            produced = produced * scores
        by_token = torch.empty_like(produced)
        by_token[order] = produced
        return short_sum(by_token.view(len(hidden), experts.chosen, -1), 1)

    def _expert(
        self, hidden: torch.Tensor, weights: ExpertsWeights, number: int, experts: ExpertsConfig
    ) -> torch.Tensor:
        def bias_of(biases: torch.Tensor | None) -> torch.Tensor | None:
            return None if biases is None else biases[number]

        gated = self._gated if experts.clamp is None else _clamped(experts.clamp, experts.sharpness)
        inner = linear(hidden, weights.gate_up[number], bias_of(weights.gate_up_bias))
        return linear(gated(inner), weights.down[number], bias_of(weights.down_bias))


def route(hidden: torch.Tensor, weights: ExpertsWeights, experts: ExpertsConfig) -> Routing:
    """Return the experts of each row of ``hidden``."""
    if experts.correction or experts.scale != 1.0 or experts.groups > 1:  # DeepSeek routes in float32
        logits = linear(hidden.float(), weights.router.float())
    else:
        logits = linear(hidden, weights.router, weights.router_bias).float()
    if experts.scoring == "softmax of chosen":
        best, chosen = logits.topk(experts.chosen, dim=-1)
        return Routing(chosen, best.softmax(-1))
    scores = each(torch.sigmoid, logits) if experts.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if weights.correction is None else scores + weights.correction
    chosen = _of_best_groups(ranked, experts).topk(experts.chosen, dim=-1).indices
    kept = scores.gather(1, chosen)
    if experts.normalised:
        kept = kept / (short_sum(kept, -1).unsqueeze(-1) + 1e-20)
    return Routing(chosen, kept * experts.scale)


def _of_best_groups(ranked: torch.Tensor, experts: ExpertsConfig) -> torch.Tensor:
    """Return ``ranked [tokens, experts]`` with minus infinity outside each token's best groups."""
    if experts.groups == 1:
        return ranked
    by_group = ranked.view(len(ranked), experts.groups, -1)
    worth = short_sum(by_group.topk(experts.group_members, dim=-1).values, -1)
    best = worth.topk(experts.best_groups, dim=-1).indices
    out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(1)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return each(silu, x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return each(gelu, x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return each(partial(gelu, approximate="tanh"), x)


def _gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _gelu_tanh(gate) * up


def _gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _gelu(gate) * up


def _xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the integral of a linear unit for positive numbers, and of ELU for negative ones (Apertus)."""
    positive, negative, beta, epsilon = numbers.unbind()
    above = softplus(positive) * x * x + beta * x
    below = (each(torch.expm1, torch.minimum(x, epsilon)) - x) * (beta + softplus(negative)) + beta * x
    return torch.where(x > 0, above, below)


def _relu_squared(up: torch.Tensor) -> torch.Tensor:
    return relu(up).square()


def _clamped(limit: float, sharpness: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return gpt-oss's gated activation: gates and ups alternate, both are clamped, and 1 is added to the
    ups."""

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate = gate_up[..., ::2].clamp(max=limit)
        up = gate_up[..., 1::2].clamp(-limit, limit)
        return (up + 1) * gate * each(torch.sigmoid, sharpness * gate)

    return gated
