"""Model shapes with seeded random weights, to run without a checkpoint, because this package cannot contain
weights.

Random weights produce no language, but they cost as much as real ones, and their keys and values are moved,
stored and compared like any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierstore.spec import LayerKind
from tierstore_engine.config import (
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    Mamba2Config,
    ModelConfig,
    RopeConfig,
    Temperature,
    TensorNames,
)
from tierstore_engine.errors import ModelError
from tierstore_engine.tokenizer import BYTE_VOCAB_SIZE, EOS_BYTE_ID

_TINY = ModelConfig(
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=8192,
    dtype="float32",
)

# One small model of each family. The models differ in the kinds of their layers.

_FULL, _WINDOW, _CHUNK, _LATENT, _STATE = (
    LayerKind.FULL_ATTENTION,
    LayerKind.SLIDING_WINDOW,
    LayerKind.CHUNKED_ATTENTION,
    LayerKind.MLA_LATENT,
    LayerKind.RECURRENT_STATE,
)
_EXPERTS = ExpertsConfig(count=8, chosen=2, width=64, normalised=True)

_TINY_MOE = replace(_TINY, qk_norm=True, experts=_EXPERTS)  # like Qwen3-MoE

_TINY_GEMMA3 = replace(
    _TINY,
    layers=6,
    kinds=(_WINDOW,) * 5 + (_FULL,),
    windows=(256,) * 5 + (None,),
    rope=RopeConfig(theta=1000000.0),
    ropes=(RopeConfig(),) * 5 + (RopeConfig(theta=1000000.0),),
    tied_embeddings=True,
    qk_norm=True,
    activation="gelu_tanh",
    centred_norms=True,
    post_norms=True,
    embed_scale=8.0,
    names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
)

_TINY_GPT_OSS = replace(
    _TINY,
    layers=4,
    kinds=(_WINDOW, _FULL) * 2,
    windows=(128, None) * 2,
    rope=RopeConfig(
        theta=150000.0,
        kind="yarn",
        factor=8.0,
        original_max_positions=1024,
        truncate=False,
        amplitude=1.2079441541679836,
    ),
    qkv_bias=True,
    o_bias=True,
    sinks=True,
    experts=ExpertsConfig(
        count=8, chosen=2, width=64, scoring="softmax of chosen", biased=True, clamp=7.0, sharpness=1.702
    ),
    names=TensorNames(router="router", packed=True),
)

_TINY_DEEPSEEK = replace(
    _TINY,
    layers=3,
    kv_heads=4,
    head_dim=24,
    kinds=(_LATENT,) * 3,
    rope=RopeConfig(interleaved=True),
    latent=LatentConfig(rank=32, nope_dim=16, rope_dim=8, value_dim=16, query_rank=48),
    experts=ExpertsConfig(
        count=8,
        chosen=2,
        width=64,
        scoring="sigmoid",
        normalised=True,
        scale=2.5,
        groups=4,
        best_groups=2,
        group_members=2,
        correction=True,
        shared_width=64,
    ),
    dense_layers=(0,),
    names=TensorNames(shared="shared_experts"),
)

_TINY_LLAMA4 = replace(
    _TINY,
    layers=4,
    kinds=(_CHUNK,) * 3 + (_FULL,),
    windows=(512,) * 3 + (None,),
    rope=RopeConfig(theta=500000.0, interleaved=True),
    ropes=(RopeConfig(theta=500000.0, interleaved=True),) * 3 + (None,),
    unit_qk=True,
    temperature=Temperature(floor=512.0, scale=0.1),
    experts=ExpertsConfig(count=8, chosen=1, width=64, scoring="sigmoid", scaled_input=True, shared_width=64),
    dense_layers=(0, 2),
    names=TensorNames(mlp="feed_forward", router="router", packed=True),
)

_TINY_QWEN3_NEXT = replace(
    _TINY,
    layers=4,
    kinds=(_STATE,) * 3 + (_FULL,),
    rope=RopeConfig(theta=1000000.0, rotary_dim=8),
    delta=DeltaConfig(key_heads=2, value_heads=4, key_dim=16, value_dim=16, conv_width=4),
    qk_norm=True,
    centred_norms=True,
    gated_attention=True,
    experts=replace(_EXPERTS, shared_width=64, shared_gate=True),
)

_MAMBA = Mamba2Config(heads=8, head_dim=16, state_dim=16, groups=2, conv_width=4)

_TINY_GRANITE_HYBRID = replace(
    _TINY,
    layers=4,
    kinds=(_STATE,) * 3 + (_FULL,),
    ropes=(None,) * 4,
    mamba=_MAMBA,
    experts=ExpertsConfig(count=8, chosen=2, width=64, scoring="softmax of chosen", shared_width=64),
    embed_scale=12.0,
    residual_scale=0.22,
    score_scale=0.0625,
    logit_divisor=2.0,
    names=TensorNames(mlp="block_sparse_moe", router="router.layer", aside="shared_mlp", joined=True),
)

_TINY_NEMOTRON_H = replace(  # M-M*-M
    _TINY,
    layers=4,
    kinds=(_STATE, _STATE, _FULL, _STATE),
    ropes=(None,) * 4,
    mamba=_MAMBA,
    bare_layers=(1, 3),
    activation="relu2",
    names=TensorNames(shared="shared_experts", blocks=True),
)

_TINY_MAMBA2 = replace(
    _TINY,
    layers=4,
    heads=0,
    kv_heads=0,
    head_dim=0,
    kinds=(_STATE,) * 4,
    ropes=(None,) * 4,
    mamba=_MAMBA,
    bare_layers=(0, 1, 2, 3),
    names=TensorNames(blocks=True),
)

# Attention is nearly all of the work, as in a real model at 100K tokens. A cold prefill of that length takes
# about 40 s on two cores, 99 % of it in the attention kernel.
_DEMO = ModelConfig(
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=512,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=64,
    max_positions=262144,
    dtype="float32",
    rope=RopeConfig(theta=500000.0),
)

# As deep as a real model and small otherwise: this model shows how 16-bit rounding adds up over many layers.
# (The width is Qwen2.5-0.5B's; with narrower rows torch's CPU kernels round one row like a thousand.)
_DEEP = ModelConfig(
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=896,
    intermediate_size=256,
    layers=12,
    heads=14,
    kv_heads=2,
    head_dim=64,
    max_positions=8192,
    dtype="bfloat16",
)

# The KV of an 8B model in 8 layers, with small weights: this model shows the cost of long contexts.
_WIDE = ModelConfig(
    vocab_size=BYTE_VOCAB_SIZE,
    hidden_size=512,
    intermediate_size=512,
    layers=8,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=1 << 21,
    dtype="bfloat16",
)

_QWEN25_05B = ModelConfig(
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    max_positions=32768,
    dtype="bfloat16",
    rope=RopeConfig(theta=1000000.0),
    qkv_bias=True,
    tied_embeddings=True,
)

_LLAMA3_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=131072,
    dtype="bfloat16",
    norm_eps=1e-5,
    rope=RopeConfig(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    ),
)

PRESETS: Mapping[str, ModelConfig] = {
    "tiny": _TINY,
    "tiny-moe": _TINY_MOE,
    "tiny-gemma3": _TINY_GEMMA3,
    "tiny-gpt-oss": _TINY_GPT_OSS,
    "tiny-deepseek": _TINY_DEEPSEEK,
    "tiny-llama4": _TINY_LLAMA4,
    "tiny-qwen3-next": _TINY_QWEN3_NEXT,
    "tiny-granite-hybrid": _TINY_GRANITE_HYBRID,
    "tiny-nemotron-h": _TINY_NEMOTRON_H,
    "tiny-mamba2": _TINY_MAMBA2,
    "demo": _DEMO,
    "deep": _DEEP,
    "wide": _WIDE,
    "qwen2.5-0.5b": _QWEN25_05B,
    "llama-3-8b": _LLAMA3_8B,
}


def preset(name: str, *, dtype: str | None = None) -> ModelConfig:
    """Return the shape called ``name``. Raises :class:`ModelError` for an unknown name."""
    if name not in PRESETS:
        raise ModelError(f"no preset {name!r} (there are: {', '.join(PRESETS)}) and no folder of that name")
    config = replace(PRESETS[name], eos_ids=(EOS_BYTE_ID,))
    return replace(config, dtype=dtype) if dtype else config
