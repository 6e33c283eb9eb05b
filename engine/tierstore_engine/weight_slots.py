"""The place of each checkpoint tensor in a model's tensors.

A :class:`Slot` is the place of one checkpoint tensor, a view into the tensors of
:mod:`tierstore_engine.layer_weights`. Loading, seeding, digesting and adapters use the same list of slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from tierstore_engine.checkpoint import StoredWeights
from tierstore_engine.config import ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.layer_weights import (
    AttentionWeights,
    BlockWeights,
    CrossWeights,
    DeltaWeights,
    Elsewhere,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
    Mamba1Weights,
    Mamba2Weights,
    MixerWeights,
    MLPWeights,
    ModelWeights,
    PredictorWeights,
    SharedBlockWeights,
    ShortConvWeights,
)
from tierstore_engine.quantised import Matrix, PackedMatrix, QuantisedMatrix
from tierstore_engine.weight_formats import dense_format


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of checkpoint tensor ``name``. ``inputs`` is how many numbers are summed for each output.

    If a checkpoint tensor fills several slots, ``members`` are (first, stop, total): the tensor has the rows
    of ``total`` heads for each KV head, and the slot ``[kv_heads, stop - first, head_dim, …]`` some of them.

    If ``swapped``, a checkpoint has matrices as ``[in, out]`` unless they are quantised. The slot has the
    same order, unless matrices stay quantised.
    """

    name: str
    tensor: Matrix
    inputs: int = 0
    members: tuple[int, int, int] | None = None
    swapped: bool = False

    def fill(self, checkpoint: StoredWeights, stored_name: str) -> None:
        """Read the tensor from a checkpoint."""
        target = self.tensor
        if isinstance(target, QuantisedMatrix):
            shape = torch.Size(self._stored_shape())
            packed = checkpoint.packed(stored_name, shape)
            if packed is None:
                turned = torch.Size((*shape[:-2], shape[-1], shape[-2])) if self.swapped else shape
                plain = checkpoint.read(stored_name, turned)
                kept = bool(checkpoint.mapped) and not self.swapped
                packed = _viewed(plain) if kept else _unquantised(plain, target.dtype, self.swapped)
            if checkpoint.mapped and not _in_files(packed, checkpoint):
                raise ModelError(
                    f"weight {stored_name} is rearranged when it is read, so it cannot stay on disk: "
                    "leave out --weights-on-disk"
                )
            target.put(packed)
        else:
            target.copy_(self.numbers(checkpoint, stored_name))

    def numbers(self, checkpoint: StoredWeights, stored_name: str) -> torch.Tensor:
        """Return the tensor's numbers in a checkpoint, in the slot's shape and any dtype. If they are not
        quantised, they are a view of the file until they are used."""
        shape = torch.Size(self._stored_shape())
        turned = torch.Size((*shape[:-2], shape[-1], shape[-2])) if self.swapped else shape
        packed = checkpoint.packed(stored_name, turned)
        if packed is None:
            stored = checkpoint.read(stored_name, shape)
        else:
            stored = packed.expanded().view(turned)
            stored = stored.transpose(-1, -2) if self.swapped else stored
        if self.members is not None:
            first, stop, total = self.members
            groups, _, width, *rest = self.tensor.shape
            stored = stored.view(groups, total, width, *rest)[:, first:stop]
        return stored

    def _stored_shape(self) -> tuple[int, ...]:
        if self.members is None:
            return tuple(self.tensor.shape)
        groups, _, width, *rest = self.tensor.shape
        return (groups * self.members[2] * width, *rest)


def _unquantised(stored: torch.Tensor, dtype: torch.dtype, swapped: bool) -> PackedMatrix:
    """Return a matrix of a quantised model that is not quantised itself."""
    rows = (stored.transpose(1, 2) if swapped else stored).flatten(0, -2)
    numbers = rows.to(dtype, copy=True).contiguous()
    return PackedMatrix(dense_format(dtype), numbers.view(torch.uint8))


def _viewed(stored: torch.Tensor) -> PackedMatrix:
    """Return a matrix of these numbers in their stored form."""
    rows = stored.flatten(0, -2)
    return PackedMatrix(dense_format(rows.dtype), rows.view(torch.uint8))


def _in_files(packed: PackedMatrix, checkpoint: StoredWeights) -> bool:
    return any(file.place(packed.codes) is not None for file in checkpoint.mapped)


def slots(config: ModelConfig, weights: ModelWeights) -> Iterator[Slot]:
    """Yield a slot for every tensor that a checkpoint of this model holds, under its name there."""
    yield Slot("model.embed_tokens.weight", weights.embed)
    parts = _block_slots if config.names.blocks else _layer_slots
    yield from parts(config, weights.layers)
    if weights.predictor is not None:
        yield from _predictor_slots(config, weights.predictor)
    yield from _norm_slots(config, "model.norm", weights.norm)
    if not config.tied_embeddings:
        yield Slot("lm_head.weight", weights.head)


def _predictor_slots(config: ModelConfig, weights: PredictorWeights) -> Iterator[Slot]:
    """Yield the slots of the layer that drafts tokens, besides those of a decoder layer. Its embeddings and
    its head are the model's."""
    names = predictor_names(config)
    yield from _norm_slots(config, names.embed_norm, weights.embed_norm)
    yield from _norm_slots(config, names.hidden_norm, weights.hidden_norm)
    yield Slot(f"{names.merge}.weight", weights.merge)
    yield from _norm_slots(config, names.norm, weights.norm)


@dataclass(frozen=True, slots=True)
class PredictorNames:
    """The names of a predictor's tensors, and the prefix of those of its decoder layer."""

    embed_norm: str
    hidden_norm: str
    merge: str
    norm: str
    layer: str


def predictor_names(config: ModelConfig) -> PredictorNames:
    """Return the names of the predictor's tensors in a checkpoint."""
    if config.predictor == "mtp":
        parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.")
        return PredictorNames(*(f"mtp.{part}" for part in parts))
    prefix = f"model.layers.{config.layers}."
    parts = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")
    return PredictorNames(*(prefix + part for part in parts))


def _layer_slots(config: ModelConfig, layers: Sequence[LayerWeights]) -> Iterator[Slot]:
    uses: list[int] = []  # the numbers of those layers that use shared blocks
    for index, layer in enumerate(layers):
        number = config.stored_number(index)
        if isinstance(layer.mixer, SharedBlockWeights):
            uses.append(number)
            yield from _use_slots(config, layer.mixer, uses)
            continue
        prefix = f"model.layers.{number}." + ("mamba_decoder." if index in config.fed else "")
        if index == config.layers:
            prefix = predictor_names(config).layer
        for slot in layer_slots(config, layer):
            yield replace(slot, name=prefix + slot.name)


def _use_slots(config: ModelConfig, weights: SharedBlockWeights, uses: Sequence[int]) -> Iterator[Slot]:
    """Yield the slots of the last of ``uses``. A checkpoint has each block once, with the changes of all its
    uses, in the layer of its first use."""
    assert config.shared is not None
    number, first = uses[-1], uses[weights.use % config.shared.blocks]
    for slot in _shared_slots(config, weights, whole=number == first):
        place = first if slot.name.startswith(_SHARED) else number
        yield replace(slot, name=f"model.layers.{place}.{slot.name}")


def _block_slots(config: ModelConfig, layers: Sequence[LayerWeights]) -> Iterator[Slot]:
    """Yield the slots of a model whose mixers and MLPs are numbered together: each is a ``mixer`` with a
    ``norm``."""
    numbers = itertools.count()
    for layer in layers:
        assert layer.mixer_norm is not None
        parts = [(layer.mixer_norm, _mixer_slots(config, layer.mixer))]
        if layer.mlp is not None and layer.mlp_norm is not None:
            parts.append((layer.mlp_norm, _feed_forward_slots(config, layer.mlp)))
        for norm, slots_of_part in parts:
            number = next(numbers)
            yield Slot(f"model.layers.{number}.norm.weight", norm)
            for slot in slots_of_part:
                _, _, name = slot.name.partition(".")
                yield replace(slot, name=f"model.layers.{number}.mixer.{name}")


def layer_slots(config: ModelConfig, layer: LayerWeights) -> Iterator[Slot]:
    yield from _norm_slots(config, "input_layernorm", layer.mixer_norm)
    yield from _mixer_slots(config, layer.mixer)
    yield from _norm_slots(config, "post_attention_layernorm", layer.mixer_post_norm)
    yield from _norm_slots(config, config.names.mlp_norm, layer.mlp_norm)
    if layer.mlp is not None:
        yield from _feed_forward_slots(config, layer.mlp)
    yield from _norm_slots(config, "post_feedforward_layernorm", layer.mlp_post_norm)


def _norm_slots(config: ModelConfig, name: str, norm: torch.Tensor | None) -> Iterator[Slot]:
    if norm is not None and config.norm_bias:
        yield Slot(f"{name}.weight", norm[0])
        yield Slot(f"{name}.bias", norm[1])
    else:
        yield from _optional(f"{name}.weight", norm)


def _mixer_slots(config: ModelConfig, weights: MixerWeights) -> Iterator[Slot]:
    if isinstance(weights, AttentionWeights):
        return _attention_slots(config, weights)
    if isinstance(weights, CrossWeights):
        return _cross_slots(weights)
    if isinstance(weights, LatentWeights):
        return _latent_slots(weights)
    if isinstance(weights, DeltaWeights):
        return _delta_slots(weights)
    if isinstance(weights, ShortConvWeights):
        return _short_conv_slots(weights)
    if isinstance(weights, SharedBlockWeights):
        return _shared_slots(config, weights, whole=True)
    if isinstance(weights, Mamba1Weights):
        return _mamba1_slots(weights)
    return iter(()) if isinstance(weights, Elsewhere) else _mamba2_slots(weights)


def _feed_forward_slots(config: ModelConfig, weights: MLPWeights | ExpertsWeights) -> Iterator[Slot]:
    if isinstance(weights, ExpertsWeights):
        return _experts_slots(config, weights)
    return _mlp_slots(config, config.names.aside or config.names.mlp, weights)


def _attention_slots(config: ModelConfig, weights: AttentionWeights) -> Iterator[Slot]:
    yield from _projection_slots(config, "weight", weights.qkv)
    if weights.qkv_bias is not None:
        yield from _projection_slots(config, "bias", weights.qkv_bias)
    yield from _optional("self_attn.q_norm.weight", weights.q_norm)
    yield from _optional("self_attn.k_norm.weight", weights.k_norm)
    yield Slot("self_attn.o_proj.weight", weights.o)
    yield from _optional("self_attn.o_proj.bias", weights.o_bias)
    yield from _optional("self_attn.sinks", weights.sinks)


def _cross_slots(weights: CrossWeights) -> Iterator[Slot]:
    rows = weights.kv.shape[0] // 2
    yield Slot("cross_attn.q_proj.weight", weights.q)
    yield Slot("cross_attn.k_proj.weight", weights.kv[:rows])
    yield Slot("cross_attn.v_proj.weight", weights.kv[rows:])
    yield Slot("cross_attn.o_proj.weight", weights.o)
    yield Slot("cross_attn.q_norm.weight", weights.q_norm)
    yield Slot("cross_attn.k_norm.weight", weights.k_norm)
    yield Slot("cross_attn_attn_gate", weights.gate)
    yield Slot("cross_attn_mlp_gate", weights.mlp_gate)


def _projection_slots(config: ModelConfig, kind: str, qkv: Matrix) -> Iterator[Slot]:
    """Yield the slots of Q, K and V, or of their biases."""
    if config.names.fused_qkv == "rows":
        yield Slot(f"self_attn.qkv_proj.{kind}", qkv)
        return
    per_group, width = config.heads // config.kv_heads, config.head_dim
    q, kv = config.query_rows, config.kv_heads * width
    members = {"q_proj": (0, per_group), "k_proj": (per_group, 1), "v_proj": (per_group + 1, 1)}
    for name, start, rows in (("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)):
        part = qkv[start : start + rows]
        if config.names.fused_qkv == "heads":
            assert isinstance(part, torch.Tensor), "refused by _allocate"
            first, count = members[name]
            part = part.view(config.kv_heads, count, width, *qkv.shape[1:])
            yield Slot(f"self_attn.qkv_proj.{kind}", part, members=(first, first + count, per_group + 2))
        else:
            yield Slot(f"self_attn.{name}.{kind}", part)


def _latent_slots(weights: LatentWeights) -> Iterator[Slot]:
    yield from _optional("self_attn.q_a_proj.weight", weights.q_down)
    yield from _optional("self_attn.q_a_layernorm.weight", weights.q_norm)
    yield Slot(f"self_attn.{'q_proj' if weights.q_down is None else 'q_b_proj'}.weight", weights.q)
    yield Slot("self_attn.kv_a_proj_with_mqa.weight", weights.kv_down)
    yield Slot("self_attn.kv_a_layernorm.weight", weights.kv_norm)
    yield Slot("self_attn.kv_b_proj.weight", weights.kv_up.flatten(0, 1))
    yield Slot("self_attn.o_proj.weight", weights.o)


def _delta_slots(weights: DeltaWeights) -> Iterator[Slot]:
    yield Slot("linear_attn.in_proj_qkvz.weight", weights.qkvz)
    yield Slot("linear_attn.in_proj_ba.weight", weights.ba)
    yield Slot("linear_attn.conv1d.weight", weights.conv)
    yield Slot("linear_attn.dt_bias", weights.dt_bias)
    yield Slot("linear_attn.A_log", weights.a_log)
    yield Slot("linear_attn.norm.weight", weights.norm)
    yield Slot("linear_attn.out_proj.weight", weights.o)


def _mamba2_slots(weights: Mamba2Weights) -> Iterator[Slot]:
    yield Slot("mamba.in_proj.weight", weights.projection)
    yield from _optional("mamba.in_proj.bias", weights.projection_bias)
    yield Slot("mamba.conv1d.weight", weights.conv)
    yield from _optional("mamba.conv1d.bias", weights.conv_bias)
    yield Slot("mamba.dt_bias", weights.dt_bias)
    yield Slot("mamba.A_log", weights.a_log)
    yield Slot("mamba.D", weights.skip)
    yield from _optional("mamba.norm.weight", weights.norm)
    yield Slot("mamba.out_proj.weight", weights.o)
    yield from _optional("mamba.out_proj.bias", weights.o_bias)


def _mamba1_slots(weights: Mamba1Weights) -> Iterator[Slot]:
    yield Slot("mamba.in_proj.weight", weights.projection)
    yield from _optional("mamba.in_proj.bias", weights.projection_bias)
    yield Slot("mamba.conv1d.weight", weights.conv)
    yield from _optional("mamba.conv1d.bias", weights.conv_bias)
    yield Slot("mamba.x_proj.weight", weights.selection)
    yield Slot("mamba.dt_proj.weight", weights.steps)
    yield Slot("mamba.dt_proj.bias", weights.step_bias)
    yield Slot("mamba.A_log", weights.a_log)
    yield Slot("mamba.D", weights.skip)
    yield from _optional("mamba.dt_layernorm.weight", weights.step_norm)
    yield from _optional("mamba.b_layernorm.weight", weights.key_norm)
    yield from _optional("mamba.c_layernorm.weight", weights.query_norm)
    yield Slot("mamba.out_proj.weight", weights.o)
    yield from _optional("mamba.out_proj.bias", weights.o_bias)


def _short_conv_slots(weights: ShortConvWeights) -> Iterator[Slot]:
    yield Slot("conv.in_proj.weight", weights.projection)
    yield from _optional("conv.in_proj.bias", weights.projection_bias)
    yield Slot("conv.conv.weight", weights.conv)
    yield from _optional("conv.conv.bias", weights.conv_bias)
    yield Slot("conv.out_proj.weight", weights.o)
    yield from _optional("conv.out_proj.bias", weights.o_bias)


_SHARED = "shared_transformer."


def _shared_slots(config: ModelConfig, weights: SharedBlockWeights, *, whole: bool) -> Iterator[Slot]:
    """Yield the slots of one use of a shared block. Leave out the slots that all uses share, unless
    ``whole``."""
    yield Slot("linear.weight", weights.out)
    names = ("self_attn.linear_q", "self_attn.linear_k", "self_attn.linear_v")[: len(weights.qkv_changes)]
    changes = zip(names, weights.qkv_changes, strict=True)
    for name, change in (*changes, ("feed_forward.gate_up_proj", weights.gate_up_change)):
        prefix = f"{_SHARED}{name}_adapter_list.{weights.use}"
        yield Slot(f"{prefix}.0.weight", change.down)
        yield Slot(f"{prefix}.1.weight", change.up)
    if whole:
        for slot in _transformer_slots(config, weights.block):
            yield replace(slot, name=f"{_SHARED}{slot.name}")


def _transformer_slots(config: ModelConfig, weights: BlockWeights) -> Iterator[Slot]:
    mlp = weights.mlp
    yield Slot("input_layernorm.weight", weights.norm)
    yield from _attention_slots(config, weights.attention)
    yield Slot("pre_ff_layernorm.weight", weights.mlp_norm)
    yield Slot("feed_forward.gate_up_proj.weight", mlp.gate_up)
    yield from _optional("feed_forward.gate_up_proj.bias", mlp.gate_up_bias)
    yield Slot("feed_forward.down_proj.weight", mlp.down)
    yield from _optional("feed_forward.down_proj.bias", mlp.down_bias)


def _mlp_slots(config: ModelConfig, prefix: str, weights: MLPWeights) -> Iterator[Slot]:
    if config.names.joined:
        yield Slot(f"{prefix}.input_linear.weight", weights.gate_up)
        yield Slot(f"{prefix}.output_linear.weight", weights.down)
        return
    for name, rows in _gate_and_up(config, len(weights.gate_up)):
        yield Slot(f"{prefix}.{name}.weight", weights.gate_up[rows])
        if weights.gate_up_bias is not None:
            yield Slot(f"{prefix}.{name}.bias", weights.gate_up_bias[rows])
    yield Slot(f"{prefix}.down_proj.weight", weights.down)
    yield from _optional(f"{prefix}.down_proj.bias", weights.down_bias)
    if weights.xielu is not None:
        yield Slot(f"{prefix}.act_fn.alpha_p", weights.xielu[0:1])
        yield Slot(f"{prefix}.act_fn.alpha_n", weights.xielu[1:2])
        yield Slot(f"{prefix}.act_fn.beta", weights.xielu[2])
        yield Slot(f"{prefix}.act_fn.eps", weights.xielu[3])


def _gate_and_up(
    config: ModelConfig, rows: int, names: tuple[str, str] = ("gate_proj", "up_proj")
) -> list[tuple[str, slice]]:
    """Return the rows of the gate and of the up projection in their common matrix, by their names."""
    gate, up = names
    if not config.gated_mlps:
        return [(up, slice(0, rows))]
    return [(gate, slice(0, rows // 2)), (up, slice(rows // 2, rows))]


def _experts_slots(config: ModelConfig, weights: ExpertsWeights) -> Iterator[Slot]:
    names, prefix = config.names, config.names.mlp
    router = f"{prefix}.{names.router}"
    yield Slot(f"{router}.weight", weights.router)
    yield from _optional(f"{router}.bias", weights.router_bias)
    yield from _optional(f"{router}.e_score_correction_bias", weights.correction)
    if names.joined:
        yield Slot(f"{prefix}.input_linear.weight", weights.gate_up)
        yield Slot(f"{prefix}.output_linear.weight", weights.down)
    elif names.packed:
        hidden, width = weights.down.shape[1:]
        yield Slot(f"{prefix}.experts.gate_up_proj", _swapped(weights.gate_up), hidden, swapped=True)
        yield from _optional(f"{prefix}.experts.gate_up_proj_bias", weights.gate_up_bias)
        yield Slot(f"{prefix}.experts.down_proj", _swapped(weights.down), width, swapped=True)
        yield from _optional(f"{prefix}.experts.down_proj_bias", weights.down_bias)
    else:
        gate, up, down = names.expert
        for number, (gate_up, out) in enumerate(zip(weights.gate_up, weights.down, strict=True)):
            expert = f"{prefix}.experts.{number}"
            for name, rows in _gate_and_up(config, len(gate_up), (gate, up)):
                yield Slot(f"{expert}.{name}.weight", gate_up[rows])
            yield Slot(f"{expert}.{down}.weight", out)
    if weights.shared is not None:
        yield from _mlp_slots(config, names.aside or f"{prefix}.{names.shared}", weights.shared)
    yield from _optional(f"{prefix}.{names.shared}_gate.weight", weights.shared_gate)


def _swapped(matrix: Matrix) -> Matrix:
    return matrix.transpose(1, 2) if isinstance(matrix, torch.Tensor) else matrix


def _optional(name: str, tensor: Matrix | None) -> Iterator[Slot]:
    if tensor is not None:
        yield Slot(name, tensor)
