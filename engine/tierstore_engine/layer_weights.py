"""The tensors of a model, layer by layer.

Q, K and V are stored as one matrix, and so are the gate and up projections, also those of all experts,
because one large product costs less than several small ones. Matrices are ``[out, in]``; None if the
architecture has no such tensor. :mod:`tierstore_engine.weights` loads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch

from tierstore_engine.pointwise import each
from tierstore_engine.quantised import LowRank, Matrix
from tierstore_engine.weights_on_disk import WeightStream


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of a layer with keys and values. With gated attention, the rows of Q of a head are followed
    by the rows of its gate."""

    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    o_bias: torch.Tensor | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CrossWeights:
    """The weights of a cross-attention layer. ``kv`` is multiplied with the rows of an encoder. ``gate`` and
    ``mlp_gate`` have one number each, whose hyperbolic tangent is a factor of the output of attention or of
    the MLP."""

    q: Matrix
    kv: Matrix
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    o: Matrix
    gate: torch.Tensor
    mlp_gate: torch.Tensor


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of a layer with latents. If ``q_down`` exists, its output is the input of ``q``. ``kv_up``
    has all heads' keys (without RoPE) and values, ``[heads, nope_dim + value_dim, rank]``."""

    q_down: Matrix | None
    q_norm: torch.Tensor | None
    q: Matrix
    kv_down: Matrix
    kv_norm: torch.Tensor
    kv_up: torch.Tensor
    o: Matrix


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a gated delta rule layer."""

    qkvz: Matrix
    ba: Matrix
    conv: torch.Tensor
    dt_bias: torch.Tensor
    a_log: torch.Tensor
    norm: torch.Tensor
    o: Matrix


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The weights of a Mamba-2 layer. The projection yields gates, the convolution's channels, and step
    sizes."""

    projection: Matrix
    projection_bias: torch.Tensor | None
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    dt_bias: torch.Tensor
    a_log: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None
    o: Matrix
    o_bias: torch.Tensor | None

    def terms(self) -> Mamba2Terms:
        return Mamba2Terms(
            self.conv,
            self.conv_bias,
            self.dt_bias.float(),
            -each(torch.exp, self.a_log.float()),
            self.skip.float(),
        )


@dataclass(frozen=True, slots=True)
class Mamba2Terms:
    """The terms of a Mamba-2 layer's rule: the convolution ``[channels, 1, width]`` and its bias, and for
    each head the bias of steps, the decay (below 0) and the skip, float32."""

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    step_bias: torch.Tensor
    decay: torch.Tensor
    skip: torch.Tensor


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """The weights of a layer with a short convolution."""

    projection: Matrix
    projection_bias: torch.Tensor | None
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    o: Matrix
    o_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """The weights of a Mamba-1 layer. The projection yields the channels and their gates, the selection the
    inputs of ``steps``, the keys and the queries. The norms are None if they have no weights."""

    projection: Matrix
    projection_bias: torch.Tensor | None
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    selection: Matrix
    steps: Matrix
    step_bias: torch.Tensor
    a_log: torch.Tensor
    skip: torch.Tensor
    step_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    o: Matrix
    o_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class MLPWeights:
    """The weights of an MLP: the rows of the gate, if it has one, then the rows that it multiplies. ``xielu``
    has the four numbers of that activation: two trained ones, beta and epsilon."""

    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    xielu: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of a transformer block that layers share. The input of its attention and ``norm`` are
    ``2 × hidden_size`` wide."""

    norm: torch.Tensor
    attention: AttentionWeights
    mlp_norm: torch.Tensor
    mlp: MLPWeights


@dataclass(frozen=True, slots=True)
class SharedBlockWeights:
    """One use of a shared block: the block, and the weights that belong to this use only. ``use`` counts the
    uses of all blocks before it. ``qkv_changes`` holds its changes to Q, K and V; empty in a model without
    such changes. ``out`` is multiplied with the block's output."""

    use: int
    block: BlockWeights
    qkv_changes: tuple[LowRank, ...]
    gate_up_change: LowRank
    out: Matrix


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another rank computes this mixer (:mod:`tierstore_engine.ranks`)."""


MixerWeights: TypeAlias = (
    AttentionWeights
    | CrossWeights
    | LatentWeights
    | DeltaWeights
    | Mamba1Weights
    | Mamba2Weights
    | ShortConvWeights
    | SharedBlockWeights
    | Elsewhere
)


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The weights of a mixture of experts, which are those of an MLP with the expert as first dimension. The
    router has rows for all experts. The other matrices have the experts from ``first`` on, and other ranks
    have the rest."""

    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction: torch.Tensor | None
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    shared: MLPWeights | None
    shared_gate: torch.Tensor | None
    first: int = 0

    @property
    def held(self) -> range:
        """Return the range of experts whose matrices this rank has."""
        return range(self.first, self.first + self.down.shape[0])


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. The last two norms apply to the outputs of the mixer and the MLP. A norm with a bias
    is ``[2, hidden_size]``."""

    mixer_norm: torch.Tensor | None
    mixer: MixerWeights
    mlp_norm: torch.Tensor | None
    mlp: MLPWeights | ExpertsWeights | None
    mixer_post_norm: torch.Tensor | None
    mlp_post_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PredictorWeights:
    """The weights of a predictor, except those of its decoder layer. ``merge [hidden_size, 2 × hidden_size]``
    is multiplied with the normed embedding and the normed output, one after the other. ``norm`` comes before
    the head."""

    embed_norm: torch.Tensor
    hidden_norm: torch.Tensor
    merge: Matrix
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors. ``head`` is ``embed`` itself if the embeddings are tied. The last of ``layers`` belongs to
    the ``predictor``, if there is one."""

    embed: Matrix
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix
    predictor: PredictorWeights | None = None
    stream: WeightStream | None = None  # the files of weights that stay on disk


T = TypeVar("T")


def with_tensors(weights: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return weights in which ``change`` has replaced each tensor, once for each place that has it."""
    if isinstance(weights, torch.Tensor):
        return change(weights)  # type: ignore[return-value]
    if isinstance(weights, tuple):
        return tuple(with_tensors(each, change) for each in weights)  # type: ignore[return-value]
    if is_dataclass(weights) and not isinstance(weights, type):
        values: dict[str, Any] = {each.name: getattr(weights, each.name) for each in fields(weights)}
        return replace(weights, **{name: with_tensors(value, change) for name, value in values.items()})
    return weights
