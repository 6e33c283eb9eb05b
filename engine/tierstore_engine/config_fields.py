"""Read the fields of ``config.json`` that have the same form in many architectures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from tierstore.spec import LayerKind, kv_dtype, layer_kinds, positive
from tierstore_engine.config import RopeConfig
from tierstore_engine.errors import ModelError

Raw: TypeAlias = Mapping[str, Any]
"""A ``config.json``, or its text part."""


_FIELDS = {
    "a positive number": "attention_in_multiplier factor key_multiplier layer_norm_eps layer_norm_epsilon "
    "lm_head_multiplier norm_eps norm_epsilon partial_rotary_factor rms_norm_eps rope_local_base_freq "
    "rope_theta rotary_emb_base rotary_pct",
    "a number": "alpha attention_factor attention_multiplier attention_out_multiplier beta_fast beta_slow "
    "embedding_multiplier high_freq_factor logit_scale logits_scaling low_freq_factor mscale mscale_all_dim "
    "residual_multiplier ssm_in_multiplier ssm_out_multiplier time_step_min",
    "a whole number of at least 0": "ffn_hidden_size head_dim max_window_layers no_rope_layer_interval "
    "num_key_value_heads num_kv_heads num_ln_in_parallel_attn original_max_position_embeddings "
    "sliding_window",
    "true or false": "add_bias_linear alibi attention_bias attention_out_bias bias mlp_bias multi_query "
    "new_decoder_architecture parallel_attn qk_layernorm qkv_bias tie_word_embeddings truncate use_bias "
    "use_conv_bias use_long_context use_mem_rope use_parallel_residual use_qk_norm use_qkv_bias "
    "use_shared_attention_adapter use_sliding_window",
    "an object": "full_attention rope_parameters rope_scaling sliding_attention",
    "a list": "layer_types long_factor mlp_multipliers no_rope_layers short_factor ssm_multipliers",
}
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "a positive number": lambda value: _is_number(value) and 0 < value < math.inf,
    "a number": lambda value: _is_number(value) and -math.inf < value < math.inf,
    "a whole number of at least 0": lambda value: _is_number(value) and isinstance(value, int) and value >= 0,
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, Mapping),
    "a list": lambda value: isinstance(value, list),
}
_WANTED = {name: wanted for wanted, names in _FIELDS.items() for name in names.split()}
_NOT_NULL = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_values(raw: Raw) -> None:
    """Check the values of all fields that are converted later, including those of a RoPE. Most may be null.

    Raises :class:`ModelError` with the field, what it must be, and its value.
    """
    for name, value in raw.items():
        wanted = _WANTED.get(name)
        if wanted is None or (value is None and name not in _NOT_NULL):
            continue
        if not _FITS[wanted](value):
            raise ModelError(f"config.json: {name} must be {wanted}, got {value!r}")
        if isinstance(value, Mapping):
            check_values(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids of ``eos_token_id``, which may be null, one id or a list."""
    if value is None:
        return ()
    return tuple(int(token) for token in value) if isinstance(value, list) else (int(value),)


def common_fields(raw: Raw, *, partial: bool = False) -> dict[str, Any]:
    """Return the fields of a :class:`ModelConfig` that have the same form in all families. ``partial`` allows
    a field by which only a part of each head is rotated."""
    hidden = positive(raw, "hidden_size")
    heads = positive(raw, "num_attention_heads")
    head_dim = positive(raw, "head_dim") if raw.get("head_dim") else hidden // heads
    return {
        "vocab_size": positive(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": positive(raw, "intermediate_size"),
        "layers": positive(raw, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": positive(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else heads,
        "head_dim": head_dim,
        "max_positions": positive(raw, "max_position_embeddings"),
        "dtype": kv_dtype(raw),
        "rope": read_rope(raw, rope_fields(raw), head_dim if partial else None),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "activation": read_activation(raw),
        "eos_ids": token_ids(raw.get("eos_token_id")),
    }


def read_activation(raw: Raw) -> str:
    activation = raw.get("hidden_act", "silu")
    known = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
    }
    if activation not in known:
        raise ModelError(
            f"config.json: hidden_act {activation!r} is not supported (use one of {', '.join(known)})"
        )
    return known[activation]


def rope_fields(raw: Raw) -> Raw:
    """Return the fields of the RoPE, in the old or the new form of transformers."""
    fields: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return fields


def rope_kind(rope: Raw) -> str:
    """Return the type of a RoPE."""
    return rope.get("rope_type") or rope.get("type") or "default"


def read_rope(raw: Raw, scaling: Raw, head_dim: int | None = None) -> RopeConfig:
    """Read the RoPE. ``head_dim`` is given if only a part of a head may be rotated."""
    theta = float(scaling.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope_kind(scaling)
    part = float(scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)))
    if part != 1.0 and head_dim is None:
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    rotary_dim = int((head_dim or 0) * part) if part != 1.0 else 0
    if rotary_dim % 2 or not 0 < part <= 1 or (part != 1.0 and not rotary_dim):
        raise ModelError(f"config.json: partial_rotary_factor {part} turns no even part of {head_dim}")
    rope = RopeConfig(theta=theta, kind=kind, rotary_dim=rotary_dim)
    original = scaling.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
    try:
        if kind == "default":
            return rope
        if kind == "linear":
            return replace(rope, factor=float(scaling["factor"]))
        if kind == "llama3":
            return replace(
                rope,
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_max_positions=int(original or 0),
            )
        if kind == "yarn":
            return replace(
                rope,
                factor=float(scaling["factor"]),
                original_max_positions=int(original or 0),
                beta_fast=float(scaling.get("beta_fast") or 32),
                beta_slow=float(scaling.get("beta_slow") or 1),
                truncate=bool(scaling.get("truncate", True)),
                amplitude=_amplitude(scaling),
            )
    except KeyError as missing:
        raise ModelError(f"config.json: rope type {kind!r} needs the field {missing}") from None
    raise ModelError(f"config.json: rope type {kind!r} is not supported (default, linear, llama3, yarn are)")


def _amplitude(scaling: Raw) -> float:
    """Return YaRN's factor of cosines and sines."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, one, every = float(scaling["factor"]), scaling.get("mscale"), scaling.get("mscale_all_dim")
    if one and every:
        return yarn_growth(factor, float(one)) / yarn_growth(factor, float(every))
    return yarn_growth(factor, 1.0)


def yarn_growth(factor: float, share: float) -> float:
    return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0


def every_other(raw: Raw) -> tuple[LayerKind, ...]:
    """Return the kinds of layers. If the file has no list, every second layer attends to all tokens."""
    return tuple(layer_kinds({**raw, "sliding_window_pattern": raw.get("sliding_window_pattern") or 2}))


def mixed_layers(raw: Raw, kinds: tuple[LayerKind, ...], window: str) -> dict[str, Any]:
    """Return ``kinds`` and ``windows`` of a model with layer groups. ``window`` is the name of the field with
    the windows' width. If all layers are equal, they form one group, which stores the keys and values of all
    tokens."""
    if set(kinds) == {LayerKind.FULL_ATTENTION}:
        return {}
    width = positive(raw, window)
    windows = tuple(None if kind is LayerKind.FULL_ATTENTION else width for kind in kinds)
    if set(kinds) == {LayerKind.SLIDING_WINDOW}:
        return {"windows": windows}
    check_kinds(kinds)
    return {"kinds": kinds, "windows": windows}


def check_kinds(kinds: tuple[LayerKind, ...]) -> None:
    if LayerKind.FULL_ATTENTION not in kinds:
        raise ModelError("config.json: a model none of whose layers attends to everything is not supported")


def windows_of(raw: Raw) -> tuple[int | None, ...]:
    """Return the attention window of each layer of a model with one layer group; empty if every layer attends
    to all tokens."""
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", True):
        return ()
    kinds = layer_kinds(raw)
    if odd := set(kinds) - {LayerKind.FULL_ATTENTION, LayerKind.SLIDING_WINDOW}:
        raise ModelError(f"config.json: layer_types names {min(odd).value}, which is not supported here")
    return tuple(int(window) if kind is LayerKind.SLIDING_WINDOW else None for kind in kinds)


def number_of(value: Any) -> float:
    """Return a number. Infinity and NaN, which JSON does not have, are read in transformers' form."""
    return float(value["__float__"] if isinstance(value, Mapping) else value)
