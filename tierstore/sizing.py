"""The bytes of a model's KV, by layer group, for one token and for one session. Pure, and without torch.

The kinds of layers are read from a Hugging Face ``config.json``, or from one of ``PRESETS``: the shapes of
popular models, from their published configurations. The size of a session is what its next turn needs: every
token of full attention and latents, the pages of a window that cover its last tokens, one snapshot of a
recurrent state. A session does not include embeddings of images and sound, nor KV that cross attention
computes from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import SpecError
from tierstore.spec import (
    DEFAULT_CHUNK_TOKENS,
    DTYPE_BITS,
    MOST_WORTH,
    KVSpec,
    LayerGroup,
    LayerKind,
    head_dim_of,
    kv_dtype,
    kv_heads_of,
    layer_groups,
    positive,
)


def _dense(layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**shape, "head_dim": head_dim, "dtype": "bfloat16", **more}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _dense(32, 32, 32, 128, dtype="float16"),
    "llama-3-8b": _dense(32, 32, 8, 128),
    "llama-3-70b": _dense(80, 64, 8, 128),
    "llama-3.2-11b-vision": _dense(
        40,
        32,
        8,
        128,
        hidden_size=4096,
        cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
        vision_config={"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
    ),
    "mixtral-8x7b": _dense(32, 32, 8, 128),
    "qwen2.5-0.5b": _dense(24, 14, 2, 64),
    "qwen3-8b": _dense(36, 32, 8, 128),
    "qwen3-32b": _dense(64, 64, 8, 128),
    "qwen3-30b-a3b": _dense(48, 32, 4, 128),
    "qwen3-next-80b-a3b": _dense(
        48,
        16,
        2,
        256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
    ),
    "granite-4.0-h-tiny": _dense(
        40,
        12,
        4,
        128,
        layer_types=["attention" if at in (5, 15, 25, 35) else "mamba" for at in range(40)],
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
    ),
    "nemotron-h-8b": _dense(
        52,
        32,
        8,
        128,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        mamba_num_heads=128,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
    ),
    "gemma-3-27b": _dense(62, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6),
    "gpt-oss-120b": _dense(36, 64, 8, 64, sliding_window=128, sliding_window_pattern=2),
    "deepseek-v3": _dense(61, 128, 128, 128, kv_lora_rank=512, qk_rope_head_dim=64),
}


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The size of one layer group: ``token_bytes`` for each token, plus ``state_bytes`` for its recurrent
    state. Cross attention has ``row_bytes`` for each row of an input."""

    group: LayerGroup
    token_bytes: float
    state_bytes: int
    row_bytes: float = 0.0

    def session_bytes(self, tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
        """Return the bytes, in whole pages, that the next turn needs after a session of ``tokens`` tokens."""
        pages = -(-tokens // chunk_tokens)
        window = self.group.window
        if window is not None:
            # The window may begin and end inside pages.
            pages = min(pages, -(-(window - 1) // chunk_tokens) + 1)
        return int(pages * chunk_tokens * self.token_bytes) + (self.state_bytes if tokens else 0)

    def all_bytes(self, tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
        """Return the bytes of a session if every token is kept."""
        return int(-(-tokens // chunk_tokens) * chunk_tokens * self.token_bytes) + self.state_bytes


def group_sizes(config: Mapping[str, Any], *, dtype: str | None = None) -> list[GroupSize]:
    """Return the sizes of all layer groups. ``dtype`` replaces the model's own dtype. Raise
    :class:`SpecError` for a configuration that this version does not support.

    >>> [group] = group_sizes(PRESETS["llama-3-8b"])
    >>> group.token_bytes, group.session_bytes(100_000)
    (131072.0, 13111394304)
    """
    named = dtype or kv_dtype(config)
    bits = DTYPE_BITS.get(named)
    if bits is None:
        raise SpecError(f"unknown KV dtype {named!r} (known: {', '.join(DTYPE_BITS)})")
    sizes = []
    for group in layer_groups(config):
        vectors = len(group.layers) * group.planes * group.kv_heads
        each = vectors * group.head_dim * bits / 8 if not group.state_bytes else 0.0
        crosses = group.kind is LayerKind.CROSS_ATTENTION
        by_token, by_row = (0.0, each) if crosses else (each, 0.0)
        sizes.append(GroupSize(group, by_token, len(group.layers) * group.state_bytes, by_row))
    return sizes


@dataclass(frozen=True, slots=True)
class EmbeddingSize:
    """The size of an encoder's output for an image or a sound. Each row has ``row_bytes``. ``rows`` is None
    if the number of rows depends on the input."""

    row_bytes: int
    rows: int | None

    @property
    def input_bytes(self) -> int | None:
        """The bytes of one input, in whole pages of the default size; None if ``rows`` is None."""
        chunk = DEFAULT_CHUNK_TOKENS
        return None if self.rows is None else -(-self.rows // chunk) * chunk * self.row_bytes


def embedding_size(config: Mapping[str, Any]) -> EmbeddingSize | None:
    """Return the size of the embeddings of a model's encoder; None for a model without an encoder. Embeddings
    have the model's dtype, even if KV has another one. Models like Qwen3-VL append the outputs of some inner
    layers (``deepstack_visual_indexes``) to each row. Llama 3.2 Vision cuts an image into tiles: ``rows`` is
    for the largest number of tiles.

    >>> gemma = {"vision_config": {}, "text_config": {"hidden_size": 5376, "dtype": "bfloat16"}}
    >>> embedding_size({**gemma, "mm_tokens_per_image": 256})
    EmbeddingSize(row_bytes=10752, rows=256)
    """
    encoder = config.get("vision_config", config.get("audio_config"))
    shape = config.get("text_config") or config
    if not isinstance(encoder, Mapping) or not shape.get("hidden_size"):
        return None
    width = positive(shape, "hidden_size") * (1 + len(encoder.get("deepstack_visual_indexes") or ()))
    spec = KVSpec.embedding(width=width, dtype=kv_dtype(config))
    rows = config.get("mm_tokens_per_image") or config.get("image_seq_length")
    if tiles := encoder.get("max_num_tiles"):
        rows = int(tiles) * ((positive(encoder, "image_size") // positive(encoder, "patch_size")) ** 2 + 1)
    return EmbeddingSize(int(spec.token_bytes), int(rows) if rows else None)


_PATCHES = 4096  # assumed number of an image's patches, if images differ in size
_GATED = ("silu", "swish")  # encoders with these activations have a third matrix in their MLPs


def embedding_worth(config: Mapping[str, Any], modality: str = "image") -> int:
    """Return the ``worth`` of a model's embeddings (:class:`~tierstore.spec.LayerGroup`): log2 of the ratio
    of operations per byte of an embedding to operations per byte of KV. ``config`` is a ``config.json`` with
    the defaults of its model. Return 0 if the configuration lacks the sizes of the encoder or the language
    model.

    >>> encoder = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    >>> text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "head_dim": 256}
    >>> text |= {"num_attention_heads": 8, "num_key_value_heads": 4, "dtype": "bfloat16"}
    >>> gemma_4b = {"vision_config": {**encoder, "image_size": 896, "patch_size": 14}, "text_config": text}
    >>> embedding_worth({**gemma_4b, "mm_tokens_per_image": 256})
    6
    """
    encoder = config.get("audio_config" if modality == "audio" else "vision_config")
    text = config.get("text_config") or config
    if not isinstance(encoder, Mapping):
        return 0
    try:
        row = KVSpec.embedding(width=positive(text, "hidden_size"), dtype=kv_dtype(config)).token_bytes
        embedding = _row_operations(config, encoder) / row
        kv = _token_operations(text) / sum(size.token_bytes for size in group_sizes(config))
        return min(max(round(math.log2(embedding / kv)), 0), MOST_WORTH)
    except (SpecError, TypeError, ValueError, ArithmeticError):  # a field is missing or is not a number
        return 0


def _row_operations(config: Mapping[str, Any], encoder: Mapping[str, Any]) -> float:
    """Return the encoder's operations for one row of an embedding."""
    width = _first(encoder, "embed_dim", "d_model", "hidden_size")
    layers = _first(encoder, "depth", "encoder_layers", "num_hidden_layers")
    if encoder.get("mlp_ratio"):
        inner = int(width * encoder["mlp_ratio"])
    else:
        inner = _first(encoder, "encoder_ffn_dim", "intermediate_size")
    matrices = 4 * width * width + (3 if encoder.get("hidden_act") in _GATED else 2) * width * inner
    patches = int(encoder.get("max_source_positions") or _PATCHES)
    if "image_size" in encoder:
        patches = (positive(encoder, "image_size") // positive(encoder, "patch_size")) ** 2
    # Only these layers attend to all patches; in other layers, attention is cheap.
    full = len(encoder.get("fullatt_block_indexes") or range(layers))
    rows = config.get("mm_tokens_per_image")
    merged = patches / rows if rows else (encoder.get("spatial_merge_size") or 1) ** 2
    return float(merged * (layers * 2 * matrices + full * 4 * patches * width))


def _token_operations(text: Mapping[str, Any]) -> float:
    """Return the language model's operations for one token, without attention scores and logits."""
    width, heads = positive(text, "hidden_size"), positive(text, "num_attention_heads")
    attention = 2 * width * head_dim_of(text) * (heads + kv_heads_of(text))
    mlp = 3 * width * _first(text, "moe_intermediate_size", "intermediate_size")
    experts = int(text.get("num_experts_per_tok") or 1)
    return 2.0 * positive(text, "num_hidden_layers") * (attention + experts * mlp)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the value of the first of these fields that has one."""
    return positive(config, next((name for name in names if config.get(name) is not None), names[-1]))


def fitting(capacity: int, session_bytes: Iterable[int]) -> int:
    """Return how many sessions fit ``capacity``."""
    return capacity // max(sum(session_bytes), 1)
