"""The tensors of a model, the place of each checkpoint tensor in them, and a digest of the loaded bytes.

Q, K and V are one matrix here, and so are the gate and up projections, and those of all experts: one large
product costs less than several small ones. A :class:`Slot` is the place of one checkpoint tensor, a view into
these. Loading, seeding and digesting all use the same list of slots.

Weights that a checkpoint has quantised stay so (:class:`~tierstore_engine.quantised.QuantisedMatrix`), or are
expanded when they are read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash

from tierstore.spec import LayerKind
from tierstore_engine.checkpoint import Checkpoint, StoredWeights
from tierstore_engine.config import (
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    Mamba1Config,
    Mamba2Config,
    ModelConfig,
    SharedBlocksConfig,
    ShortConvConfig,
)
from tierstore_engine.errors import ModelError
from tierstore_engine.gguf_file import GGUFWeights
from tierstore_engine.pointwise import each
from tierstore_engine.quantised import LowRank, Matrix, MatrixKernels, PackedMatrix, QuantisedMatrix
from tierstore_engine.weight_formats import dense_format
from tierstore_engine.weights_on_disk import WeightStream

_DIGEST_STEP_BYTES = 64 << 20

# Matrices are [out, in]; None if the architecture has no such tensor.


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The weights of a layer with keys and values. With gated attention a head's rows of Q are followed by
    those of its gate."""

    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Matrix
    o_bias: torch.Tensor | None
    sinks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """The weights of a layer with latents. ``q`` takes the output of ``q_down``, if that exists. ``kv_up``
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
    """The weights of a Mamba-2 layer. The projection yields gates, the convolution's channels, and steps."""

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
    """One use of a shared block: the block, and what only this use has. ``use`` counts the uses of all blocks
    before it. ``qkv_changes`` are those of Q, K and V, empty in a model without them. ``out`` takes the
    block's output."""

    use: int
    block: BlockWeights
    qkv_changes: tuple[LowRank, ...]
    gate_up_change: LowRank
    out: Matrix


MixerWeights: TypeAlias = (
    AttentionWeights
    | LatentWeights
    | DeltaWeights
    | Mamba1Weights
    | Mamba2Weights
    | ShortConvWeights
    | SharedBlockWeights
)


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """The weights of a mixture of experts: like those of an MLP, with the expert as first dimension."""

    router: torch.Tensor
    router_bias: torch.Tensor | None
    correction: torch.Tensor | None
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None
    shared: MLPWeights | None
    shared_gate: torch.Tensor | None


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
class ModelWeights:
    """All tensors. ``head`` is ``embed`` itself if the embeddings are tied."""

    embed: Matrix
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix
    stream: WeightStream | None = None  # of weights that stay on disk


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of checkpoint tensor ``name``. ``inputs`` is how many numbers each of its outputs sums up.

    If a checkpoint tensor fills several slots, ``members`` are (first, stop, total): the tensor has the rows
    of ``total`` heads for each KV head, and the slot ``[kv_heads, stop - first, head_dim, …]`` some of them.

    ``swapped``: a checkpoint has the matrices as ``[in, out]`` unless they are quantised. So has the slot,
    unless they stay quantised.
    """

    name: str
    tensor: Matrix
    inputs: int = 0
    members: tuple[int, int, int] | None = None
    swapped: bool = False

    def fill(self, checkpoint: StoredWeights, stored_name: str) -> None:
        """Read the tensor from a checkpoint."""
        shape, target = torch.Size(self._stored_shape()), self.tensor
        turned = torch.Size((*shape[:-2], shape[-1], shape[-2])) if self.swapped else shape
        kept = isinstance(target, QuantisedMatrix)
        packed = checkpoint.packed(stored_name, shape if kept else turned)
        if isinstance(target, QuantisedMatrix):
            if packed is None:
                plain = checkpoint.read(stored_name, turned)
                kept = bool(checkpoint.mapped) and not self.swapped
                packed = _viewed(plain) if kept else _unquantised(plain, target.dtype, self.swapped)
            if checkpoint.mapped and not _in_files(packed, checkpoint):
                raise ModelError(
                    f"weight {stored_name} is rearranged when it is read, so it cannot stay on disk: "
                    "leave out --weights-on-disk"
                )
            target.put(packed)
            return
        if packed is None:
            stored = checkpoint.read(stored_name, shape)
        else:
            stored = packed.expanded().view(turned)
            stored = stored.transpose(-1, -2) if self.swapped else stored
        if self.members is not None:
            first, stop, total = self.members
            groups, _, width, *rest = target.shape
            stored = stored.view(groups, total, width, *rest)[:, first:stop]
        target.copy_(stored)

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
    """Return a matrix of these numbers as they are stored."""
    rows = stored.flatten(0, -2)
    return PackedMatrix(dense_format(rows.dtype), rows.view(torch.uint8))


def _in_files(packed: PackedMatrix, checkpoint: StoredWeights) -> bool:
    return any(file.place(packed.codes) is not None for file in checkpoint.mapped)


def open_weights(source: Path, *, mapped: bool = False) -> StoredWeights:
    """Return the weights of a checkpoint folder or of a GGUF file. ``mapped``: they are views of the file."""
    return (GGUFWeights if source.is_file() else Checkpoint)(source, mapped=mapped)


def load_weights(
    config: ModelConfig,
    source: Path,
    *,
    device: str,
    expand: bool = False,
    on_disk: bool = False,
    kernels: MatrixKernels | None = None,
) -> ModelWeights:
    """Return the weights of a checkpoint, in ``config.dtype``. Quantised weights stay quantised unless
    ``expand``; a GPU computes with them by ``kernels``. This needs memory for the weights and one tensor.
    ``on_disk``: matrices stay in their files (:mod:`tierstore_engine.weights_on_disk`).

    Raises :class:`ModelError` for a tensor that is missing, unreadable or of another shape.
    """
    with open_weights(source, mapped=on_disk) as checkpoint:
        stored = _stored_names(config, checkpoint)
        keep = on_disk or (checkpoint.quantised is not None and not expand)
        weights = _allocate(config, device, keep=keep, kernels=kernels)
        for slot in slots(config, weights):
            slot.fill(checkpoint, stored(slot.name))
        if not on_disk:
            return weights
        parts = [list(_codes(_slots_of(config, layer))) for layer in weights.layers]
        parts.append(list(_codes([Slot("head", weights.head)])))
        return replace(weights, stream=WeightStream(parts, checkpoint.mapped))


def _codes(slots_: Iterable[Slot]) -> Iterator[torch.Tensor]:
    """Yield the bytes of matrices that stay as they are stored."""
    for slot in slots_:
        if isinstance(slot.tensor, QuantisedMatrix):
            for _, inner, rows, packed in slot.tensor.parts():
                yield packed.codes[inner : inner + rows]


def check_tensors(config: ModelConfig, source: Path) -> None:
    """Check by name and dtype that a checkpoint holds exactly the model of ``config``. No weights are read.

    Raises :class:`ModelError` for a tensor that is missing, in an unreadable dtype, or not part of the model.
    """
    with open_weights(source) as checkpoint:
        stored = _stored_names(config, checkpoint)
        names = {stored(slot.name) for slot in slots(config, meta_weights(config))}
        tied = {stored("lm_head.weight")} if config.tied_embeddings else set()
        checkpoint.account_for(names, unread=tied)


def _stored_names(config: ModelConfig, checkpoint: StoredWeights) -> Callable[[str], str]:
    """Return a function from a tensor's name to its name in the checkpoint. Some families have names of their
    own. In models that also take images the text part has a prefix; Nemotron-H has a backbone."""

    if config.names.renamed:
        return lambda name: stored_name(config, name)
    for prefix, head in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint:
            return lambda name: prefix + name[6:] if name.startswith("model.") else head + name
    if "backbone.embeddings.weight" in checkpoint:
        return lambda name: _BACKBONE.get(name, name.replace("model.", "backbone."))
    return lambda name: name


def stored_name(config: ModelConfig, name: str) -> str:
    """Return a tensor's name in a checkpoint of the model's family, without a prefix of the text part."""
    for part, stored in config.names.renamed:
        name = name.replace(part, stored)
    return name


def meta_weights(config: ModelConfig) -> ModelWeights:
    """Return weights without memory, for their shapes and places."""
    return _allocate(config, "meta")


_PREFIXES = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
)
_BACKBONE = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
}


def random_weights(config: ModelConfig, *, seed: int, device: str) -> ModelWeights:
    """Return seeded random weights, made in place, tensor by tensor."""
    weights = _allocate(config, device)
    generator = torch.Generator(device)
    for slot in slots(config, weights):
        generator.manual_seed(xxhash.xxh3_64_intdigest(slot.name.encode(), seed) >> 1)
        _seed(slot, config, generator)
    return weights


def digest_weights(config: ModelConfig, weights: ModelWeights) -> str:
    """Return XXH3-128 over every tensor's name, shape, dtype and bytes, as hex. It is the same on any
    device."""
    digest = xxhash.xxh3_128()
    for slot in slots(config, weights):
        digest.update(f"{slot.name}{list(slot.tensor.shape)}{slot.tensor.dtype}".encode())
        for tensor in _bytes_of(slot.tensor, digest):
            flat = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _DIGEST_STEP_BYTES):
                digest.update(flat[start : start + _DIGEST_STEP_BYTES].cpu().numpy().data)
        if weights.stream is not None:
            weights.stream.release()
    return digest.hexdigest()


def _bytes_of(matrix: Matrix, digest: xxhash.xxh3_128) -> Iterator[torch.Tensor]:
    """Yield the tensors of a matrix. If it is quantised, add its formats to ``digest``."""
    if isinstance(matrix, torch.Tensor):
        yield matrix
        return
    for _, _, _, packed in matrix.parts():
        digest.update(f"{packed.format.name}/{packed.group}/{packed.block_rows}".encode())
        yield from packed.tensors()


def weights_bytes(config: ModelConfig) -> int:
    """Return the memory that the weights take if they are not quantised."""
    sizes = []
    for slot in slots(config, meta_weights(config)):
        assert isinstance(slot.tensor, torch.Tensor)
        sizes.append(slot.tensor.nbytes)
    return sum(sizes)


def slots(config: ModelConfig, weights: ModelWeights) -> Iterator[Slot]:
    """Yield a slot for every tensor that a checkpoint of this model holds, under its name there."""
    yield Slot("model.embed_tokens.weight", weights.embed)
    parts = _block_slots if config.names.blocks else _layer_slots
    yield from parts(config, weights.layers)
    yield from _norm_slots(config, "model.norm", weights.norm)
    if not config.tied_embeddings:
        yield Slot("lm_head.weight", weights.head)


def _layer_slots(config: ModelConfig, layers: Sequence[LayerWeights]) -> Iterator[Slot]:
    number, uses = -1, list[int]()  # the numbers of the layers that use shared blocks
    for index, layer in enumerate(layers):
        number += index not in config.joined
        if isinstance(layer.mixer, SharedBlockWeights):
            uses.append(number)
            yield from _use_slots(config, layer.mixer, uses)
            continue
        part = "mamba_decoder." if index in config.fed else ""
        for slot in _slots_of(config, layer):
            yield replace(slot, name=f"model.layers.{number}.{part}{slot.name}")


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


def _slots_of(config: ModelConfig, layer: LayerWeights) -> Iterator[Slot]:
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
    return _mamba2_slots(weights)


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


def _projection_slots(config: ModelConfig, kind: str, qkv: Matrix) -> Iterator[Slot]:
    """Yield the slots of Q, K and V, or of their biases."""
    if config.names.fused_qkv == "rows":
        yield Slot(f"self_attn.qkv_proj.{kind}", qkv)
        return
    per_group, width = config.heads // config.kv_heads, config.head_dim
    q, kv = _query_rows(config), config.kv_heads * width
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


def _query_rows(config: ModelConfig) -> int:
    return config.heads * config.head_dim * (2 if config.gated_attention else 1)


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
    """Yield the slots of one use of a shared block; unless ``whole``, without those that all uses share."""
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
    """Return the rows of each in one matrix."""
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


def _allocate(
    config: ModelConfig, device: str, *, keep: bool = False, kernels: MatrixKernels | None = None
) -> ModelWeights:
    """Return weights to be filled. ``keep`` makes matrices that stay quantised, with ``kernels``."""
    if keep and config.names.fused_qkv == "heads":
        raise ModelError(
            "weights of an architecture that mixes the rows of Q, K and V are rearranged when they are read: "
            "give --expand-weights if they are quantised, and leave out --weights-on-disk"
        )
    make = _Maker(config, device, keep=keep, kernels=kernels)
    embed = make.matrix(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embed=embed,
        layers=tuple(make.layer(index) for index in range(config.layers)),
        norm=make.norm(),
        head=embed if config.tied_embeddings else make.matrix(config.vocab_size, config.hidden_size),
    )


class _Maker:
    """Allocate the tensors of a model, without filling them."""

    def __init__(
        self, config: ModelConfig, device: str, *, keep: bool, kernels: MatrixKernels | None
    ) -> None:
        self._config = config
        self._device = device
        self._keep = keep
        self._kernels = kernels
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._blocks: dict[int, BlockWeights] = {}

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def matrix(self, *shape: int) -> Matrix:
        if not self._keep:
            return self.empty(*shape)
        return QuantisedMatrix(*shape, dtype=self._dtype, kernels=self._kernels)

    def norm(self) -> torch.Tensor:
        hidden = self._config.hidden_size
        return self.empty(2, hidden) if self._config.norm_bias else self.empty(hidden)

    def layer(self, index: int) -> LayerWeights:
        config = self._config
        bare = index in config.bare_layers
        mixer = self._mixer(index)
        mixer_normed = index not in config.beside and not isinstance(mixer, SharedBlockWeights)
        mlp_normed = not bare and config.parallel != "one norm"
        return LayerWeights(
            mixer_norm=self.norm() if config.pre_norms and mixer_normed else None,
            mixer=mixer,
            mlp_norm=self.norm() if config.pre_norms and mlp_normed else None,
            mlp=None if bare else self._feed_forward(config.experts_of(index)),
            mixer_post_norm=self.norm() if config.post_norms else None,
            mlp_post_norm=self.norm() if config.post_norms else None,
        )

    def _mixer(self, index: int) -> MixerWeights:
        config, kind = self._config, self._config.kind(index)
        if kind is LayerKind.MLA_LATENT:
            assert config.latent is not None
            return self._latent(config.latent)
        if kind is LayerKind.RECURRENT_STATE:
            if config.mamba is not None:
                return self._mamba2(config.mamba)
            if config.short_conv is not None:
                return self._short_conv(config.short_conv)
            if config.mamba1 is not None:
                return self._mamba1(config.mamba1)
            assert config.delta is not None
            return self._delta(config.delta)
        if config.shared is not None:
            return self._shared(config.shared, index)
        return self._attention(config.hidden_size)

    def _feed_forward(self, experts: ExpertsConfig | None) -> MLPWeights | ExpertsWeights:
        if experts is not None:
            return self._experts(experts)
        return self._mlp(self._config.intermediate_size, self._config.mlp_bias)

    def _shared(self, shared: SharedBlocksConfig, index: int) -> SharedBlockWeights:
        """Return a use of a block, which is made once."""
        config, hidden = self._config, self._config.hidden_size
        number = shared.block(index)
        if number not in self._blocks:
            self._blocks[number] = BlockWeights(
                norm=self.empty(2 * hidden),
                attention=self._attention(2 * hidden),
                mlp_norm=self.empty(hidden),
                mlp=self._mlp(config.intermediate_size, config.mlp_bias),
            )
        queries, kv = _query_rows(config), config.kv_heads * config.head_dim
        changed = [(0, queries), (queries, kv), (queries + kv, kv)] if shared.adapted_attention else []
        return SharedBlockWeights(
            use=shared.uses.index(index),
            block=self._blocks[number],
            qkv_changes=tuple(self._low_rank(shared.rank, *each, 2 * hidden) for each in changed),
            gate_up_change=self._low_rank(
                shared.rank, 0, self._gate_up_rows(config.intermediate_size), hidden
            ),
            out=self.matrix(hidden, hidden),
        )

    def _low_rank(self, rank: int, first: int, rows: int, columns: int) -> LowRank:
        return LowRank(first, self.matrix(rank, columns), self.matrix(rows, rank))

    def _attention(self, width: int) -> AttentionWeights:
        """Return the weights of attention whose input is ``width`` wide."""
        config, hidden = self._config, self._config.hidden_size
        rows = _query_rows(config) + 2 * config.kv_heads * config.head_dim
        return AttentionWeights(
            qkv=self.matrix(rows, width),
            qkv_bias=self.empty(rows) if config.qkv_bias else None,
            q_norm=self._head_norm(config.heads),
            k_norm=self._head_norm(config.kv_heads),
            o=self.matrix(hidden, config.heads * config.head_dim),
            o_bias=self.empty(hidden) if config.o_bias else None,
            sinks=self.empty(config.heads) if config.sinks else None,
        )

    def _head_norm(self, heads: int) -> torch.Tensor | None:
        config = self._config
        shapes = {
            "head": (config.head_dim,),
            "each": (heads, config.head_dim),
            "all": (heads * config.head_dim,),
        }
        return self.empty(*shapes[config.qk_norm_over]) if config.qk_norm else None

    def _latent(self, latent: LatentConfig) -> LatentWeights:
        heads, hidden, rank = self._config.heads, self._config.hidden_size, latent.query_rank
        return LatentWeights(
            q_down=self.matrix(rank, hidden) if rank else None,
            q_norm=self.empty(rank) if rank else None,
            q=self.matrix(heads * (latent.nope_dim + latent.rope_dim), rank or hidden),
            kv_down=self.matrix(latent.width, hidden),
            kv_norm=self.empty(latent.rank),
            kv_up=self.empty(heads, latent.nope_dim + latent.value_dim, latent.rank),
            o=self.matrix(hidden, heads * latent.value_dim),
        )

    def _delta(self, delta: DeltaConfig) -> DeltaWeights:
        hidden, values = self._config.hidden_size, delta.value_heads * delta.value_dim
        return DeltaWeights(
            qkvz=self.matrix(delta.channels + values, hidden),
            ba=self.matrix(2 * delta.value_heads, hidden),
            conv=self.empty(delta.channels, 1, delta.conv_width),
            dt_bias=self.empty(delta.value_heads),
            a_log=self.empty(delta.value_heads),
            norm=self.empty(delta.value_dim),
            o=self.matrix(hidden, values),
        )

    def _mamba2(self, mamba: Mamba2Config) -> Mamba2Weights:
        hidden, rows = self._config.hidden_size, mamba.width + mamba.channels + mamba.heads
        return Mamba2Weights(
            projection=self.matrix(rows, hidden),
            projection_bias=self.empty(rows) if mamba.biased else None,
            conv=self.empty(mamba.channels, 1, mamba.conv_width),
            conv_bias=self.empty(mamba.channels) if mamba.conv_bias else None,
            dt_bias=self.empty(mamba.heads),
            a_log=self.empty(mamba.heads),
            skip=self.empty(mamba.heads),
            norm=self.empty(mamba.width) if mamba.norm else None,
            o=self.matrix(hidden, mamba.width),
            o_bias=self.empty(hidden) if mamba.biased else None,
        )

    def _mamba1(self, mamba: Mamba1Config) -> Mamba1Weights:
        hidden, width = self._config.hidden_size, mamba.width
        return Mamba1Weights(
            projection=self.matrix(2 * width, hidden),
            projection_bias=self.empty(2 * width) if mamba.biased else None,
            conv=self.empty(width, 1, mamba.conv_width),
            conv_bias=self.empty(width) if mamba.conv_bias else None,
            selection=self.matrix(mamba.rank + 2 * mamba.state_dim, width),
            steps=self.matrix(width, mamba.rank),
            step_bias=self.empty(width),
            a_log=self.empty(width, mamba.state_dim),
            skip=self.empty(width),
            step_norm=self.empty(mamba.rank) if mamba.trained_norms else None,
            key_norm=self.empty(mamba.state_dim) if mamba.trained_norms else None,
            query_norm=self.empty(mamba.state_dim) if mamba.trained_norms else None,
            o=self.matrix(hidden, width),
            o_bias=self.empty(hidden) if mamba.biased else None,
        )

    def _short_conv(self, conv: ShortConvConfig) -> ShortConvWeights:
        hidden, biased = self._config.hidden_size, conv.biased
        return ShortConvWeights(
            projection=self.matrix(3 * conv.width, hidden),
            projection_bias=self.empty(3 * conv.width) if biased else None,
            conv=self.empty(conv.width, 1, conv.conv_width),
            conv_bias=self.empty(conv.width) if biased else None,
            o=self.matrix(hidden, conv.width),
            o_bias=self.empty(hidden) if biased else None,
        )

    def _gate_up_rows(self, width: int) -> int:
        return 2 * width if self._config.gated_mlps else width

    def _mlp(self, width: int, biased: bool) -> MLPWeights:
        hidden, rows = self._config.hidden_size, self._gate_up_rows(width)
        return MLPWeights(
            gate_up=self.matrix(rows, hidden),
            gate_up_bias=self.empty(rows) if biased else None,
            down=self.matrix(hidden, width),
            down_bias=self.empty(hidden) if biased else None,
            xielu=self.empty(4) if self._config.activation == "xielu" else None,
        )

    def _experts(self, experts: ExpertsConfig) -> ExpertsWeights:
        hidden, count, width = self._config.hidden_size, experts.count, experts.width
        rows = self._gate_up_rows(width)
        correction = torch.empty(count, dtype=torch.float32, device=self._device)
        return ExpertsWeights(
            router=self.empty(count, hidden),
            router_bias=self.empty(count) if experts.biased else None,
            correction=correction if experts.correction else None,
            gate_up=self.matrix(count, rows, hidden),
            gate_up_bias=self.empty(count, rows) if experts.biased else None,
            down=self.matrix(count, hidden, width),
            down_bias=self.empty(count, hidden) if experts.biased else None,
            shared=self._mlp(experts.shared_width, biased=False) if experts.shared_width else None,
            shared_gate=self.empty(1, hidden) if experts.shared_gate else None,
        )


# Standard deviation of each kind of random matrix, in units of 1/√(inputs). Q and K let attention pick few of
# very many tokens. o and down outweigh the newest token's own embedding: otherwise that alone would decide
# the next token, and the text would soon repeat itself. The head spreads the logits, so that ties are rare.
_GAINS = {
    "embed_tokens.weight": 3.0,  # a tied embedding is also the head
    "lm_head.weight": 3.0,
    "q_proj.weight": 2.2,
    "k_proj.weight": 2.2,
    "o_proj.weight": 3.0,
    "down_proj.weight": 2.0,
    "output_linear.weight": 2.0,
}


_STATE_DECAY = 0.02
"""Approximate part of its state that a recurrent layer forgets per token, so that a few hundred tokens
count."""


def _seed(slot: Slot, config: ModelConfig, generator: torch.Generator) -> None:
    """Fill a slot so that the greedy continuation depends on the whole context, as in a trained model."""
    kind, tensor = ".".join(slot.name.split(".")[-2:]), slot.tensor
    assert isinstance(tensor, torch.Tensor)
    if kind.endswith("norm.weight"):
        tensor.fill_(0.0 if config.centred_norms and "linear_attn" not in slot.name else 1.0)
    elif kind.endswith(".D"):
        tensor.fill_(1.0)
    elif kind.endswith("A_log"):
        tensor.fill_(math.log(_STATE_DECAY))
    elif kind.endswith(("bias", "sinks")):
        tensor.normal_(0.0, 0.1, generator=generator)
    elif kind == "embed_tokens.weight" and not config.tied_embeddings:
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        deviation = _GAINS.get(kind, 1.0) * (slot.inputs or tensor.shape[-1]) ** -0.5
        tensor.normal_(0.0, deviation, generator=generator)
