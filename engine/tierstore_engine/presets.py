"""Model shapes with seeded random weights, for running without a checkpoint: weights cannot be shipped.

Random weights speak no language, but they cost exactly what real ones cost, and their keys and values are
moved, kept and compared like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierstore_engine.config import ModelConfig, RopeConfig
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

# Attention is nearly all of the work, as it is in a real model at 100K tokens: a cold prefill of that many
# takes about 40 s on two cores, 99 % of it in the attention kernel.
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

# As deep as a real model and small otherwise: shows what 16-bit rounding adds up to over many layers. (The
# width is Qwen2.5-0.5B's; with narrower rows torch's CPU kernels round one row as they round a thousand.)
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
    "demo": _DEMO,
    "deep": _DEEP,
    "qwen2.5-0.5b": _QWEN25_05B,
    "llama-3-8b": _LLAMA3_8B,
}


def preset(name: str, *, dtype: str | None = None) -> ModelConfig:
    """The shape called ``name``. Raises :class:`ModelError` when there is none."""
    if name not in PRESETS:
        raise ModelError(f"no preset {name!r} (there are: {', '.join(PRESETS)}) and no folder of that name")
    config = replace(PRESETS[name], eos_ids=(EOS_BYTE_ID,))
    return replace(config, dtype=dtype) if dtype else config
