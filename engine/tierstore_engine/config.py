"""The shape of a model: what its ``config.json`` says, checked, in the engine's own words.

transformers 5 writes ``rope_parameters`` and ``dtype`` where 4.x wrote ``rope_theta``/``rope_scaling`` and
``torch_dtype``; both are read. Whatever this engine cannot compute exactly is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import msgspec
import xxhash

from tierstore.spec import DEFAULT_CHUNK_TOKENS, DTYPE_BITS, KVSpec, LayerGroup, LayerKind
from tierstore_engine.errors import ModelError
from tierstore_engine.kv_format import KVFormat

DTYPES = ("float32", "bfloat16", "float16")

_QKV_BIAS_ALWAYS = {"Qwen2ForCausalLM"}
_QK_NORM = {"Qwen3ForCausalLM"}
_HAS_SLIDING_WINDOW = {"MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. ``kind`` is ``default``, ``linear`` or ``llama3``; the rest only where it applies."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def describe(self) -> str:
        """One line; equal lines mean equal rotations (it goes into the identity)."""
        return ";".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA): of each token one vector is kept, ``rank + rope_dim`` wide, from
    which all heads' keys and values follow. Queries are made by way of ``query_rank`` numbers, if any."""

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim


STATE_ALIGN = 64
"""Bytes: each tensor of a state begins at a multiple of that within its page."""


@dataclass(frozen=True)
class DeltaConfig:
    """A gated delta rule layer: its state is a matrix ``key_dim × value_dim`` of each value head (float32),
    and the last ``conv_width - 1`` inputs of a causal convolution (in the model's dtype)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, dtype: str) -> int:
        """Of one layer: the convolution's inputs, then the matrices."""
        inputs = self.channels * (self.conv_width - 1) * DTYPE_BITS[dtype] // 8
        return _aligned(inputs) + _aligned(self.value_heads * self.key_dim * self.value_dim * 4)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // STATE_ALIGN) * STATE_ALIGN


@dataclass(frozen=True)
class ModelConfig:
    """A decoder. ``windows`` has one entry per layer: attended tokens, or None for all.

    ``kinds`` says for each layer how it remembers the past; ``windows`` then has the attention chunks, too.
    Models whose layers all have K and V of all tokens in their pages leave it empty: whatever their windows
    are, there is one layer group.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    dtype: str
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    eos_ids: tuple[int, ...] = ()
    kv: KVFormat = field(default_factory=KVFormat)
    # What follows was added later: at its default it is left out of the digest, so that the pages of models
    # that have none of it stay theirs.
    kinds: tuple[LayerKind, ...] = ()
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ModelError(f"model dtype {self.dtype!r} is not supported (use one of {', '.join(DTYPES)})")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[layer] if self.kinds else LayerKind.FULL_ATTENTION

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups: those that need every token first."""
        members: dict[tuple[LayerKind, int | None], list[int]] = {}
        for layer in range(self.layers):
            window = self.window(layer) if self.kind(layer) in _WINDOWED else None
            members.setdefault((self.kind(layer), window), []).append(layer)
        ordered = sorted(members.items(), key=lambda item: _ORDER.index(item[0][0]))
        return tuple(self._group(kind, window, tuple(layers)) for (kind, window), layers in ordered)

    def _group(self, kind: LayerKind, window: int | None, layers: tuple[int, ...]) -> LayerGroup:
        if kind is LayerKind.RECURRENT_STATE:
            assert self.delta is not None
            return LayerGroup(kind, layers, state_bytes=self.delta.state_bytes(self.dtype))
        if kind is LayerKind.MLA_LATENT:
            assert self.latent is not None
            return LayerGroup(kind, layers, 1, self.latent.width)
        return LayerGroup(kind, layers, self.kv_heads, self.head_dim, window)

    @cached_property
    def states(self) -> frozenset[int]:
        """The layer groups that are recurrent states."""
        found = enumerate(self.groups)
        return frozenset(at for at, group in found if group.kind is LayerKind.RECURRENT_STATE)

    def group_of(self, layer: int) -> int:
        """The layer group that ``layer`` is in."""
        return self._group_of[layer]

    @cached_property
    def _group_of(self) -> dict[int, int]:
        return {layer: at for at, group in enumerate(self.groups) for layer in group.layers}

    def kv_spec(self, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> KVSpec:
        """The page layout of all layer groups."""
        return KVSpec(
            self.groups,
            self.kv.codes[0].dtype if self.kv.quantised else self.dtype,
            chunk_tokens,
            value_dtype=self.kv.codes[1].dtype if self.kv.keys != self.kv.values else None,
            scaled=self.kv.dynamic,
        )

    def digest(self) -> str:
        """A short hex digest of every field that changes what the model computes, besides how KV is kept."""
        values = asdict(self)
        for unused in ("eos_ids", "kv"):
            del values[unused]
        names = [each.name for each in fields(self)]
        for each in fields(self)[names.index("kv") + 1 :]:
            if values[each.name] == each.default:
                del values[each.name]
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(sorted(values.items())))


_WINDOWED = (LayerKind.SLIDING_WINDOW, LayerKind.CHUNKED_ATTENTION)
_ORDER = (
    LayerKind.FULL_ATTENTION,
    LayerKind.MLA_LATENT,
    LayerKind.SLIDING_WINDOW,
    LayerKind.CHUNKED_ATTENTION,
    LayerKind.RECURRENT_STATE,
)


def config_from_hf(raw: Mapping[str, Any], *, dtype: str | None = None) -> ModelConfig:
    """The :class:`ModelConfig` of a ``config.json``; ``dtype`` overrides the checkpoint's own.

    Raises :class:`ModelError` for architectures, activations and RoPE types this engine does not compute, and
    for missing or senseless fields.
    """
    architecture = _architecture(raw)
    _check_activation(raw)
    layers = _positive(raw, "num_hidden_layers")
    hidden = _positive(raw, "hidden_size")
    heads = _positive(raw, "num_attention_heads")
    max_positions = _positive(raw, "max_position_embeddings")
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=_positive(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else heads,
        head_dim=_positive(raw, "head_dim") if raw.get("head_dim") else hidden // heads,
        max_positions=max_positions,
        dtype=dtype or str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        rope=_rope(raw, max_positions),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        qkv_bias=architecture in _QKV_BIAS_ALWAYS or attention_bias,
        o_bias=architecture not in _QKV_BIAS_ALWAYS and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture in _QK_NORM,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        windows=_windows(raw, layers) if architecture in _HAS_SLIDING_WINDOW else (),
        eos_ids=token_ids(raw.get("eos_token_id")),
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """``eos_token_id`` as it is written in the wild: null, one id or a list of them."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    what = ", ".join(map(str, names)) or "no architecture at all"
    raise ModelError(f"config.json names {what}; supported are {', '.join(ARCHITECTURES)}")


def _check_activation(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported (only silu)")


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    try:
        if kind == "default":
            return RopeConfig(theta=float(theta))
        if kind == "linear":
            return RopeConfig(theta=float(theta), kind="linear", factor=float(scaling["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta=float(theta),
                kind="llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_positions=int(scaling.get("original_max_position_embeddings", max_positions)),
            )
    except KeyError as missing:
        raise ModelError(f"config.json: rope type {kind!r} needs the field {missing}") from None
    raise ModelError(f"config.json: rope type {kind!r} is not supported (default, linear, llama3 are)")


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer; empty when every layer attends to everything."""
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", True):
        return ()
    kinds = raw.get("layer_types")
    if kinds is None:
        # Qwen 2 and 3 before transformers 5: the first max_window_layers layers attend to everything.
        first = int(raw.get("max_window_layers", 0)) if "use_sliding_window" in raw else 0
        kinds = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != layers:
        raise ModelError(
            f"config.json: layer_types does not fit {layers} layers of full or sliding attention"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _positive(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
