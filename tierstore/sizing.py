"""The size of a model's KV: by layer group, for a token and for a session. Pure, and without torch.

The kinds of layers are read from a Hugging Face ``config.json``, or from one of ``PRESETS``: the shapes of
popular models, from their published configurations. The size of a session is what its next turn needs: every
token of full attention and latents, the pages of a window that cover its last tokens, one snapshot of a
recurrent state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tierstore.errors import SpecError
from tierstore.spec import DEFAULT_CHUNK_TOKENS, DTYPE_BITS, LayerGroup, LayerKind

# Fields of models with different layers, in which no list says which layer is which.
_MIXED = re.compile(r"mamba_|ssm_|attn_layer_(period|offset)|linear_attn_config")
_STATE_BYTES = 4  # a number of a recurrent state, stored as float32 with any model dtype


def _dense(layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**shape, "head_dim": head_dim, "dtype": "bfloat16", **more}


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _dense(32, 32, 32, 128, dtype="float16"),
    "llama-3-8b": _dense(32, 32, 8, 128),
    "llama-3-70b": _dense(80, 64, 8, 128),
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
    """The size of one layer group. Each token adds ``token_bytes``. ``state_bytes`` is the group's whole
    state."""

    group: LayerGroup
    token_bytes: float
    state_bytes: int

    def session_bytes(self, tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
        """Return the bytes that the next turn of a session of ``tokens`` tokens needs, in whole pages."""
        pages = -(-tokens // chunk_tokens)
        window = self.group.window
        if window is not None:
            # The last tokens may begin and end inside pages.
            pages = min(pages, -(-(window - 1) // chunk_tokens) + 1)
        return int(pages * chunk_tokens * self.token_bytes) + (self.state_bytes if tokens else 0)

    def all_bytes(self, tokens: int, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> int:
        """Return the bytes of a session if every token is kept."""
        return int(-(-tokens // chunk_tokens) * chunk_tokens * self.token_bytes) + self.state_bytes


def group_sizes(config: Mapping[str, Any], *, dtype: str | None = None) -> list[GroupSize]:
    """Return the sizes of all layer groups. ``dtype`` overrides the model's own. Raise :class:`SpecError` for
    a configuration that is not understood.

    >>> [group] = group_sizes(PRESETS["llama-3-8b"])
    >>> group.token_bytes, group.session_bytes(100_000)
    (131072.0, 13111394304)
    """
    config = config.get("text_config") or config
    kv_dtype = str(dtype or config.get("dtype") or config.get("torch_dtype") or "float32")
    bits = DTYPE_BITS.get(kv_dtype)
    if bits is None:
        raise SpecError(f"unknown KV dtype {kv_dtype!r} (known: {', '.join(DTYPE_BITS)})")
    sizes = []
    for group in _groups(config):
        vectors = len(group.layers) * group.planes * group.kv_heads
        per_token = vectors * group.head_dim * bits / 8 if not group.state_bytes else 0.0
        sizes.append(GroupSize(group, per_token, len(group.layers) * group.state_bytes))
    return sizes


def _groups(config: Mapping[str, Any]) -> list[LayerGroup]:
    named = _named_layers(config)
    layers = _count(config, "num_hidden_layers") if named is None else len(named)
    if named is None and (odd := sorted(name for name in config if _MIXED.match(name))):
        raise SpecError(f"config.json: {', '.join(odd)}: the layers of such models are not supported")
    if config.get("kv_lora_rank"):
        width = _count(config, "kv_lora_rank") + int(config.get("qk_rope_head_dim") or 0)
        return [LayerGroup(LayerKind.MLA_LATENT, tuple(range(layers)), 1, width)]
    heads = _count(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or _count(config, "hidden_size") // heads)
    kinds = _layer_kinds(config, layers, named)
    groups = []
    for kind in dict.fromkeys(kinds):
        members = tuple(at for at, each in enumerate(kinds) if each is kind)
        if kind is LayerKind.RECURRENT_STATE:
            groups.append(LayerGroup(kind, members, state_bytes=_state_bytes(config)))
        else:
            window = _window(config, kind)
            groups.append(LayerGroup(kind, members, kv_heads, head_dim, window))
    return groups


LAYER_KINDS = {
    "full_attention": LayerKind.FULL_ATTENTION,
    "sliding_attention": LayerKind.SLIDING_WINDOW,
    "chunked_attention": LayerKind.CHUNKED_ATTENTION,
    "linear_attention": LayerKind.RECURRENT_STATE,
    # Names before transformers 5:
    "attention": LayerKind.FULL_ATTENTION,
    "mamba": LayerKind.RECURRENT_STATE,
}
"""Names of layer kinds in ``layer_types`` of a ``config.json``."""
BLOCK_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Meaning of the letters in Nemotron-H's ``hybrid_override_pattern``."""


def _named_layers(config: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the layers in a list in ``config``. MLP blocks of Nemotron-H are left out."""
    blocks = config.get("layers_block_type")
    if blocks is None and (pattern := config.get("hybrid_override_pattern")):
        blocks = [BLOCK_PATTERN.get(each, each) for each in str(pattern)]
    if blocks is not None:
        return [str(each) for each in blocks if each not in ("mlp", "moe")]
    named = config.get("layer_types")
    if named is None:
        return None
    if len(named) != _count(config, "num_hidden_layers"):
        raise SpecError(f"config.json: layer_types names {len(named)} layers, not num_hidden_layers")
    return [str(each) for each in named]


def _layer_kinds(config: Mapping[str, Any], layers: int, named: list[str] | None) -> list[LayerKind]:
    if named is not None:
        unknown = sorted(set(named) - LAYER_KINDS.keys())
        if unknown:
            raise SpecError(f"config.json: layer_types names {unknown}, which are not supported")
        return [LAYER_KINDS[each] for each in named]
    if every := config.get("full_attention_interval"):
        recurrent = LayerKind.RECURRENT_STATE
        return [LayerKind.FULL_ATTENTION if (at + 1) % every == 0 else recurrent for at in range(layers)]
    full, window, chunk = LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_ATTENTION
    if config.get("attention_chunk_size"):  # Llama 4: layers without RoPE attend to all tokens
        with_rope = config.get("no_rope_layers") or [
            (at + 1) % int(config.get("no_rope_layer_interval") or 4) for at in range(layers)
        ]
        return [chunk if rope else full for rope in with_rope]
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [full] * layers
    every = config.get("sliding_window_pattern") or (2 if config.get("model_type") == "gemma2" else None)
    if every:
        return [full if (at + 1) % every == 0 else window for at in range(layers)]
    first = int(config.get("max_window_layers") or 0)  # Qwen2: layers before it have no window
    return [window if at >= first else full for at in range(layers)]


def _window(config: Mapping[str, Any], kind: LayerKind) -> int | None:
    if kind is LayerKind.SLIDING_WINDOW:
        return _count(config, "sliding_window")
    if kind is LayerKind.CHUNKED_ATTENTION:
        return _count(config, "attention_chunk_size")
    return None


def _state_bytes(config: Mapping[str, Any]) -> int:
    """Return the state bytes of one layer: a matrix for each head, and the convolution's last inputs."""
    if config.get("linear_num_value_heads"):  # gated delta
        keys = _count(config, "linear_num_key_heads") * _count(config, "linear_key_head_dim")
        values = _count(config, "linear_num_value_heads") * _count(config, "linear_value_head_dim")
        matrix = values * _count(config, "linear_key_head_dim")
        convolution = (2 * keys + values) * (_count(config, "linear_conv_kernel_dim") - 1)
        return (matrix + convolution) * _STATE_BYTES
    if config.get("ssm_state_size"):  # Nemotron-H
        values = _count(config, "mamba_num_heads") * _count(config, "mamba_head_dim")
        return _mamba2_bytes(config, values, "ssm_state_size", "n_groups", "conv_kernel")
    if config.get("mamba_n_heads"):  # Granite 4.0-H
        values = _count(config, "mamba_n_heads")
        if config.get("mamba_d_head", "auto") == "auto":
            values = int(config.get("mamba_expand") or 2) * _count(config, "hidden_size")
        else:
            values *= _count(config, "mamba_d_head")
        return _mamba2_bytes(config, values, "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    raise SpecError("config.json: its layers with a recurrent state are not supported")


def _mamba2_bytes(config: Mapping[str, Any], values: int, size: str, groups: str, width: str) -> int:
    """Return the state bytes of one layer with this many values. The names are those of the fields with the
    other sizes."""
    state = _count(config, size)
    channels = values + 2 * _count(config, groups) * state
    return (values * state + channels * (_count(config, width) - 1)) * _STATE_BYTES


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
    return value


def fitting(capacity: int, session_bytes: Iterable[int]) -> int:
    """Return how many sessions fit."""
    return capacity // max(sum(session_bytes), 1)
