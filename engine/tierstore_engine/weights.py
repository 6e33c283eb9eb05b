"""The tensors of a model, where each of a checkpoint's tensors goes, and a digest of what arrived.

Q, K and V are one matrix here, and so are the gate and up projections: one large product costs less than
several small ones. A :class:`Slot` is the place of one checkpoint tensor, a view into those; loading,
seeding and digesting all walk the same list of slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from tierstore_engine.checkpoint import Checkpoint
from tierstore_engine.config import ModelConfig

_DIGEST_STEP_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; ``[out, in]`` matrices, None where the architecture has no such tensor."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All tensors; ``head`` is ``embed`` itself where the embeddings are tied."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Where checkpoint tensor ``name`` lives; ``tensor`` is a view of contiguous memory."""

    name: str
    tensor: torch.Tensor


def load_weights(config: ModelConfig, folder: Path, *, device: str) -> ModelWeights:
    """The weights of a checkpoint folder, in ``config.dtype``. Needs their size and one tensor of memory.

    Raises :class:`ModelError` for a tensor that is missing, unreadable or of another shape.
    """
    with Checkpoint(folder) as checkpoint:
        weights = _allocate(config, device)
        for slot in slots(config, weights):
            slot.tensor.copy_(checkpoint.read(slot.name, slot.tensor.shape))
    return weights


def random_weights(config: ModelConfig, *, seed: int, device: str) -> ModelWeights:
    """Seeded random weights, made in place, tensor by tensor."""
    weights = _allocate(config, device)
    generator = torch.Generator(device)
    for slot in slots(config, weights):
        generator.manual_seed(xxhash.xxh3_64_intdigest(slot.name.encode(), seed) >> 1)
        _seed(slot, config, generator)
    return weights


def digest_weights(config: ModelConfig, weights: ModelWeights) -> str:
    """XXH3-128 over every tensor's name, shape, dtype and bytes, as hex; the same on any device."""
    digest = xxhash.xxh3_128()
    for slot in slots(config, weights):
        digest.update(f"{slot.name}{list(slot.tensor.shape)}{slot.tensor.dtype}".encode())
        flat = slot.tensor.reshape(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _DIGEST_STEP_BYTES):
            digest.update(flat[start : start + _DIGEST_STEP_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def weights_bytes(config: ModelConfig) -> int:
    """The memory that the weights take."""
    weights = _allocate(config, "meta")
    return sum(slot.tensor.nbytes for slot in slots(config, weights))


def slots(config: ModelConfig, weights: ModelWeights) -> Iterator[Slot]:
    """Every tensor a checkpoint of this model holds, under the name it has there."""
    yield Slot("model.embed_tokens.weight", weights.embed)
    for index, layer in enumerate(weights.layers):
        for slot in _layer_slots(config, layer):
            yield Slot(f"model.layers.{index}.{slot.name}", slot.tensor)
    yield Slot("model.norm.weight", weights.norm)
    if not config.tied_embeddings:
        yield Slot("lm_head.weight", weights.head)


def _layer_slots(config: ModelConfig, layer: LayerWeights) -> Iterator[Slot]:
    q, kv, mlp = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate_size
    attention = (("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv))
    yield Slot("input_layernorm.weight", layer.input_norm)
    for name, start, rows in attention:
        yield Slot(f"self_attn.{name}.weight", layer.qkv[start : start + rows])
        if layer.qkv_bias is not None:
            yield Slot(f"self_attn.{name}.bias", layer.qkv_bias[start : start + rows])
    yield from _optional("self_attn.q_norm.weight", layer.q_norm)
    yield from _optional("self_attn.k_norm.weight", layer.k_norm)
    yield Slot("self_attn.o_proj.weight", layer.o)
    yield from _optional("self_attn.o_proj.bias", layer.o_bias)
    yield Slot("post_attention_layernorm.weight", layer.mlp_norm)
    for name, start in (("gate_proj", 0), ("up_proj", mlp)):
        yield Slot(f"mlp.{name}.weight", layer.gate_up[start : start + mlp])
        if layer.gate_up_bias is not None:
            yield Slot(f"mlp.{name}.bias", layer.gate_up_bias[start : start + mlp])
    yield Slot("mlp.down_proj.weight", layer.down)
    yield from _optional("mlp.down_proj.bias", layer.down_bias)


def _optional(name: str, tensor: torch.Tensor | None) -> Iterator[Slot]:
    if tensor is not None:
        yield Slot(name, tensor)


def _allocate(config: ModelConfig, device: str) -> ModelWeights:
    dtype: torch.dtype = getattr(torch, config.dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def layer() -> LayerWeights:
        hidden, mlp = config.hidden_size, config.intermediate_size
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        return LayerWeights(
            input_norm=empty(hidden),
            qkv=empty(q + 2 * kv, hidden),
            qkv_bias=empty(q + 2 * kv) if config.qkv_bias else None,
            q_norm=empty(config.head_dim) if config.qk_norm else None,
            k_norm=empty(config.head_dim) if config.qk_norm else None,
            o=empty(hidden, q),
            o_bias=empty(hidden) if config.o_bias else None,
            mlp_norm=empty(hidden),
            gate_up=empty(2 * mlp, hidden),
            gate_up_bias=empty(2 * mlp) if config.mlp_bias else None,
            down=empty(hidden, mlp),
            down_bias=empty(hidden) if config.mlp_bias else None,
        )

    embed = empty(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embed=embed,
        layers=tuple(layer() for _ in range(config.layers)),
        norm=empty(config.hidden_size),
        head=embed if config.tied_embeddings else empty(config.vocab_size, config.hidden_size),
    )


# Standard deviation of each kind of random matrix, in units of 1/√(inputs). Q and K make attention pick out
# few of very many tokens; o and down make that outweigh the newest token's own embedding, which would
# otherwise decide alone what follows and soon repeat itself; the head spreads the logits, so that ties are
# rare.
_GAINS = {
    "embed_tokens.weight": 3.0,  # of a tied embedding: it is the head as well
    "lm_head.weight": 3.0,
    "q_proj.weight": 2.2,
    "k_proj.weight": 2.2,
    "o_proj.weight": 3.0,
    "down_proj.weight": 2.0,
}


def _seed(slot: Slot, config: ModelConfig, generator: torch.Generator) -> None:
    """Fill a slot so that the greedy continuation depends on the whole context, as a trained model's does."""
    kind = ".".join(slot.name.split(".")[-2:])
    if kind.endswith("norm.weight"):
        slot.tensor.fill_(1.0)
    elif kind.endswith(".bias"):
        slot.tensor.normal_(0.0, 0.1, generator=generator)
    elif kind == "embed_tokens.weight" and not config.tied_embeddings:
        slot.tensor.normal_(0.0, 1.0, generator=generator)
    else:
        deviation = _GAINS.get(kind, 1.0) * slot.tensor.shape[-1] ** -0.5
        slot.tensor.normal_(0.0, deviation, generator=generator)
