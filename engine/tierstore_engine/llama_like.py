"""Readers of ``config.json`` for architectures that are Llama with a few changes.

Each reader states the changes as fields of a :class:`ModelConfig`: where norms stand, which part of a head is
rotated, which projections have biases, and what the checkpoint calls its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tierstore.spec import LayerKind, kv_heads_of, layer_kinds, positive, rope_layers
from tierstore_engine.config import ModelConfig, TensorNames
from tierstore_engine.config_fields import (
    Raw,
    check_kinds,
    common_fields,
    every_other,
    mixed_layers,
    read_rope,
    rope_fields,
    rope_kind,
    windows_of,
)
from tierstore_engine.errors import ModelError

_JOINED_MLP = (("mlp.input_linear", "mlp.gate_up_proj"), ("mlp.output_linear", "mlp.down_proj"))


def llama(raw: Raw, *, partial: bool = False, biases: str = "attention_bias", **changes: Any) -> ModelConfig:
    """Return the configuration of a Llama with ``changes``. ``partial`` allows a RoPE that rotates a part of
    each head. ``biases`` is the field that gives all projections of attention a bias.

    >>> sizes = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    >>> llama({**sizes, "num_hidden_layers": 1, "max_position_embeddings": 64}).head_dim
    4
    """
    biased = bool(raw.get(biases, False))
    plain = ModelConfig(**common_fields(raw, partial=partial), qkv_bias=biased, o_bias=biased)
    return replace(plain, **changes)


def _plain(raw: Raw, **changes: Any) -> ModelConfig:
    return llama(raw, partial=True, **changes)


def _with_layer_norm(raw: Raw, field: str, default: float, **changes: Any) -> dict[str, Any]:
    """Return the changes of a model with LayerNorm, whose epsilon is in ``field``."""
    return {"norm": "layer", "norm_eps": float(raw.get(field) or default), **changes}


def _phi3(raw: Raw) -> ModelConfig:
    """Read Phi-3 and Phi-4."""
    rope = rope_fields(raw)
    names = TensorNames(fused_qkv="rows", joined=True, renamed=_JOINED_MLP)
    if rope_kind(rope) not in ("longrope", "su", "yarn"):
        return _plain(raw, windows=windows_of(raw), names=names)
    if any(float(each) != 1.0 for each in rope.get("short_factor") or ()):
        raise ModelError("config.json: short_factor other than 1 is not supported with rope type longrope")
    original = positive({**raw, **rope}, "original_max_position_embeddings")
    longest = positive(raw, "max_position_embeddings")
    given = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    raw = {**raw, "rope_parameters": given, "rope_scaling": None}
    # Longer prompts have other rotations from their first token on, so the pages of a prefix would change.
    raw["max_position_embeddings"] = min(original, longest)
    plain = _plain(raw, windows=windows_of(raw), names=names)
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        stretched = float(rope.get("factor") or longest / original)
        amplitude = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    return replace(plain, rope=replace(plain.rope, amplitude=float(amplitude)))


def _gemma(raw: Raw) -> ModelConfig:
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    activation = "gelu_pytorch_tanh" if activation == "gelu" else activation  # as transformers reads it
    raw = {"tie_word_embeddings": True, **raw, "hidden_act": activation}
    return _plain(raw, centred_norms=True, embed_scale=positive(raw, "hidden_size") ** 0.5)


def _granite(raw: Raw) -> ModelConfig:
    return _plain(
        raw,
        embed_scale=float(raw.get("embedding_multiplier") or 1.0),
        residual_scale=float(raw.get("residual_multiplier") or 1.0),
        score_scale=float(raw.get("attention_multiplier") or 1.0),
        logit_divisor=float(raw.get("logits_scaling") or 1.0),
    )


def _olmo2(raw: Raw) -> ModelConfig:
    return _plain(raw, pre_norms=False, post_norms=True, qk_norm=True, qk_norm_over="all")


def _olmo3(raw: Raw) -> ModelConfig:
    raw = {"sliding_window_pattern": 4, **raw}
    layered = raw.get("rope_parameters") or {}
    if "full_attention" in layered:
        raw = {**raw, "rope_parameters": layered["full_attention"]}
    plain = _olmo2(raw)
    kinds = every_other(raw)
    nearby = layered.get("sliding_attention") or {"rope_theta": plain.rope.theta}
    near = read_rope(raw, nearby)
    ropes = tuple(near if kind is LayerKind.SLIDING_WINDOW else plain.rope for kind in kinds)
    return replace(
        plain, **mixed_layers(raw, kinds, "sliding_window"), ropes=ropes if near != plain.rope else ()
    )


def _glm(raw: Raw) -> ModelConfig:
    raw = {"partial_rotary_factor": 0.5, "attention_bias": True, **raw}
    plain = _plain(raw, o_bias=False, names=TensorNames(joined=True, renamed=_JOINED_MLP))
    return replace(plain, rope=replace(plain.rope, interleaved=True))


def _glm4(raw: Raw) -> ModelConfig:
    norms = (
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    )
    names = TensorNames(mlp_norm="pre_feedforward_layernorm", joined=True, renamed=(*_JOINED_MLP, *norms))
    return replace(_glm(raw), post_norms=True, names=names)


def _cohere(raw: Raw) -> ModelConfig:
    raw = {"rope_theta": 500000.0, "tie_word_embeddings": True, **raw}
    changes = _with_layer_norm(raw, "layer_norm_eps", 1e-5, parallel="one norm")
    plain = _plain(
        raw,
        **changes,
        qk_norm=bool(raw.get("use_qk_norm")),
        qk_norm_over="each" if raw.get("use_qk_norm") else "head",
        logit_divisor=1.0 / float(raw.get("logit_scale") or 0.0625),
    )
    return replace(plain, rope=replace(plain.rope, interleaved=True))


def _cohere2(raw: Raw) -> ModelConfig:
    plain = _cohere(raw)
    kinds = tuple(layer_kinds({"sliding_window_pattern": 4, **raw}))
    ropes = tuple(plain.rope if kind is LayerKind.SLIDING_WINDOW else None for kind in kinds)
    return replace(plain, **mixed_layers(raw, kinds, "sliding_window"), ropes=ropes)


def _smollm3(raw: Raw) -> ModelConfig:
    raw = {"rope_theta": 2000000.0, "tie_word_embeddings": True, **raw}
    if raw.get("use_sliding_window"):
        raise ModelError("config.json: use_sliding_window is not supported with SmolLM3")
    plain = _plain(raw)
    return replace(plain, ropes=tuple(plain.rope if each else None for each in rope_layers(raw)))


def _starcoder2(raw: Raw) -> ModelConfig:
    biased = bool(raw.get("use_bias", True))
    renamed = (("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj"))
    raw = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "mlp_bias": biased, **raw}
    changes = _with_layer_norm(raw, "norm_epsilon", 1e-5, norm_bias=True, ungated=True)
    names = TensorNames(renamed=renamed)
    return _plain(raw, **changes, qkv_bias=biased, o_bias=biased, windows=windows_of(raw), names=names)


def _stablelm(raw: Raw) -> ModelConfig:
    raw = {"partial_rotary_factor": 0.25, **raw}
    if raw.get("qk_layernorm"):
        raise ModelError("config.json: qk_layernorm is not supported with StableLM")
    parallel = "one norm" if raw.get("use_parallel_residual") else ""
    changes = _with_layer_norm(raw, "layer_norm_eps", 1e-5, norm_bias=True, parallel=parallel)
    return _plain(raw, **changes, qkv_bias=bool(raw.get("use_qkv_bias")))


def _gpt_neox(raw: Raw) -> ModelConfig:
    rope = raw.get("rope_parameters") or {}
    raw = {
        "hidden_act": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        **raw,
        "rope_parameters": {
            "rope_theta": raw.get("rotary_emb_base", 10000.0),
            "partial_rotary_factor": raw.get("rotary_pct", 0.25),
            **(raw.get("rope_scaling") or {}),
            **rope,
        },
    }
    renamed = (
        ("model.embed_tokens", "gpt_neox.embed_in"),
        ("model.layers", "gpt_neox.layers"),
        ("model.norm", "gpt_neox.final_layer_norm"),
        ("lm_head", "embed_out"),
        ("self_attn.qkv_proj", "attention.query_key_value"),
        ("self_attn.o_proj", "attention.dense"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
    )
    parallel = "two norms" if raw.get("use_parallel_residual", True) else ""
    changes = _with_layer_norm(raw, "layer_norm_eps", 1e-5, norm_bias=True, parallel=parallel, ungated=True)
    return _plain(raw, **changes, names=TensorNames(fused_qkv="heads", renamed=renamed))


def _falcon(raw: Raw) -> ModelConfig:
    if raw.get("alibi"):
        raise ModelError("config.json: alibi is not supported")
    new = bool(raw.get("new_decoder_architecture"))
    parallel = bool(raw.get("parallel_attn", True)) or new
    two_norms = new and (raw.get("num_ln_in_parallel_attn") or 2) == 2
    biased = bool(raw.get("bias"))
    raw = {
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        **raw,
        "hidden_act": raw.get("activation") or "gelu",
        "intermediate_size": raw.get("ffn_hidden_size") or 4 * positive(raw, "hidden_size"),
        "num_key_value_heads": kv_heads_of({"new_decoder_architecture": False, **raw}),
        "mlp_bias": biased,
    }
    norms = (("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")) if two_norms else ()
    renamed = (
        ("model.embed_tokens", "transformer.word_embeddings"),
        ("model.layers", "transformer.h"),
        ("model.norm", "transformer.ln_f"),
        ("self_attn.qkv_proj", "self_attention.query_key_value"),
        ("self_attn.o_proj", "self_attention.dense"),
        ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
        *norms,
    )
    placed = ("two norms" if two_norms else "one norm") if parallel else ""
    changes = _with_layer_norm(raw, "layer_norm_epsilon", 1e-5, norm_bias=True, parallel=placed, ungated=True)
    names = TensorNames(fused_qkv="heads", renamed=renamed)
    return _plain(raw, **changes, qkv_bias=biased, o_bias=biased, names=names)


def _ministral(raw: Raw) -> ModelConfig:
    return replace(_plain(raw), **mixed_layers(raw, tuple(layer_kinds(raw)), "sliding_window"))


def _exaone4(raw: Raw) -> ModelConfig:
    if raw.get("sliding_window") and raw.get("layer_types") is None:
        raise ModelError("config.json: layer_types is missing")
    plain = _plain(raw, pre_norms=False, post_norms=True, qk_norm=True)
    if not raw.get("sliding_window"):
        return plain
    kinds = tuple(layer_kinds(raw))
    check_kinds(kinds)
    ropes = tuple(plain.rope if kind is LayerKind.SLIDING_WINDOW else None for kind in kinds)
    return replace(plain, **mixed_layers(raw, kinds, "sliding_window"), ropes=ropes)


def _ernie(raw: Raw) -> ModelConfig:
    raw = {"rope_theta": 500000.0, "tie_word_embeddings": True, "mlp_bias": raw.get("use_bias"), **raw}
    plain = _plain(raw, biases="use_bias")
    return replace(plain, rope=replace(plain.rope, interleaved=True))


def _hunyuan(raw: Raw) -> ModelConfig:
    rope = rope_fields(raw)
    alpha = rope.get("alpha")
    if rope_kind(rope) == "dynamic" and alpha:  # the base is stretched once, for all lengths
        head_dim = int(
            raw.get("head_dim") or positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
        )
        theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
        stretched = theta * float(alpha) ** (head_dim / (head_dim - 2))
        raw = {**raw, "rope_parameters": {"rope_theta": stretched}, "rope_scaling": None}
    renamed = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
    return _plain(raw, qk_norm=True, qk_norm_late=True, names=TensorNames(renamed=renamed))


def _seed_oss(raw: Raw) -> ModelConfig:
    raw = {"attention_bias": True, **raw}
    return _plain(raw, o_bias=bool(raw.get("attention_out_bias")))


def _arcee(raw: Raw) -> ModelConfig:
    if raw.get("hidden_act", "relu2") != "relu2":
        raise ModelError("config.json: hidden_act other than relu2 is not supported with this architecture")
    return _plain({**raw, "hidden_act": "silu"}, activation="relu2")


def _nemotron(raw: Raw) -> ModelConfig:
    raw = {"partial_rotary_factor": 0.5, **raw}
    changes = _with_layer_norm(raw, "norm_eps", 1e-5, norm_bias=True)
    return replace(_arcee(raw), **changes, centred_norms=True)


def _apertus(raw: Raw) -> ModelConfig:
    if raw.get("hidden_act", "xielu") != "xielu":
        raise ModelError("config.json: hidden_act other than xielu is not supported with this architecture")
    renamed = (
        ("input_layernorm", "attention_layernorm"),
        ("post_attention_layernorm", "feedforward_layernorm"),
    )
    raw = {"rope_theta": 12000000.0, "rms_norm_eps": 1e-5, **raw, "hidden_act": "silu"}
    return _plain(raw, activation="xielu", qk_norm=True, names=TensorNames(renamed=renamed))


def _mistral3(raw: Raw) -> ModelConfig:
    """Read the text part of a Mistral for images."""
    if raw.get("model_type", "mistral") != "mistral":
        raise ModelError(f"config.json: model_type {raw['model_type']!r} is not supported with Mistral 3")
    return _plain(raw, windows=windows_of(raw))


READERS: Mapping[str, Callable[[Raw], ModelConfig]] = {
    "ApertusForCausalLM": _apertus,
    "ArceeForCausalLM": _arcee,
    "CohereForCausalLM": _cohere,
    "Cohere2ForCausalLM": _cohere2,
    "Ernie4_5ForCausalLM": _ernie,
    "Exaone4ForCausalLM": _exaone4,
    "FalconForCausalLM": _falcon,
    "GPTNeoXForCausalLM": _gpt_neox,
    "GemmaForCausalLM": _gemma,
    "GlmForCausalLM": _glm,
    "Glm4ForCausalLM": _glm4,
    "GraniteForCausalLM": _granite,
    "HunYuanDenseV1ForCausalLM": _hunyuan,
    "MinistralForCausalLM": _ministral,
    "Mistral3ForConditionalGeneration": _mistral3,
    "NemotronForCausalLM": _nemotron,
    "Olmo2ForCausalLM": _olmo2,
    "Olmo3ForCausalLM": _olmo3,
    "Phi3ForCausalLM": _phi3,
    "SeedOssForCausalLM": _seed_oss,
    "SmolLM3ForCausalLM": _smollm3,
    "StableLmForCausalLM": _stablelm,
    "Starcoder2ForCausalLM": _starcoder2,
}
