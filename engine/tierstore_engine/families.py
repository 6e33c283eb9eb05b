"""Read a checkpoint's ``config.json`` into a :class:`ModelConfig`, with one reader for each architecture.

transformers 5 writes ``rope_parameters`` and ``dtype`` where 4.x wrote ``rope_theta``/``rope_scaling`` and
``torch_dtype``. The readers accept files of both versions. A model that this engine cannot compute exactly is
refused with an error that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tierstore.errors import SpecError
from tierstore.spec import LayerKind, layer_kinds, positive, rope_layers
from tierstore_engine import llama_like, recurrent
from tierstore_engine.config import (
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    Temperature,
    TensorNames,
)
from tierstore_engine.config_fields import (
    Raw,
    check_kinds,
    check_values,
    common_fields,
    every_other,
    mixed_layers,
    read_rope,
    rope_fields,
    rope_kind,
    windows_of,
    yarn_growth,
)
from tierstore_engine.errors import ModelError
from tierstore_engine.llama_like import llama
from tierstore_engine.weight_schemes import WeightScheme, read_scheme


def config_from_hf(raw: Raw, *, dtype: str | None = None) -> ModelConfig:
    """Return the :class:`ModelConfig` of a ``config.json``. ``dtype`` overrides the checkpoint's dtype. For a
    model with images, the result describes only its text part.

    Raises :class:`ModelError` for architectures, activations and RoPE types that this engine does not
    compute, and for missing or invalid fields.
    """
    architecture = _architecture(raw)
    weight_scheme(raw)
    check_quantisation({**raw, "quantization_config": None}, "config.json")
    if raw.get("text_config"):
        if not isinstance(raw["text_config"], Mapping):
            raise ModelError(f"config.json: text_config must be an object, got {raw['text_config']!r}")
        tied = {name: raw[name] for name in ("tie_word_embeddings",) if name in raw}
        raw = {"dtype": raw.get("dtype") or raw.get("torch_dtype"), **tied, **raw["text_config"]}
    check_values(raw)
    try:
        config = _READERS[architecture](raw)
    except SpecError as error:
        raise ModelError(str(error)) from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"config.json: the value of a field is of a wrong kind: {error}") from error
    return replace(config, dtype=dtype) if dtype else config


def weight_scheme(raw: Raw) -> WeightScheme | None:
    """Return how the weights of a ``config.json`` are quantised, None if they are not. Raises
    :class:`ModelError` for an unsupported scheme."""
    given = raw.get("quantization_config")
    if not given or (isinstance(given, Mapping) and _quantises_kv_only(given)):
        return None
    return read_scheme(given)


def check_quantisation(raw: Raw, file: str) -> None:
    """Raise :class:`ModelError` if ``raw``, or an object in it, says that weights are quantised. A
    ``quantization_config`` that concerns only KV is allowed, for ``--kv-scales checkpoint``."""
    for name, value in raw.items():
        if name not in _QUANTISATION:
            if isinstance(value, Mapping):
                check_quantisation(value, file)
        elif value and not (isinstance(value, Mapping) and _quantises_kv_only(value)):
            given = value if isinstance(value, Mapping) else {}
            method = given.get("quant_method") or given.get("quant_algo") or "quantised"
            raise ModelError(f"{file}: {method} weights are not read: convert them to bfloat16 ({name})")


def _quantises_kv_only(raw: Raw) -> bool:
    if "kv_cache_quant_algo" in raw:  # written by modelopt
        return not raw.get("quant_algo")
    return bool(raw.get("kv_cache_scheme")) and not raw.get("config_groups") and not raw.get("quant_algo")


def unread_tensors(raw: Raw) -> Mapping[str, str]:
    """Return the tensors that a checkpoint may have although the engine does not use them: patterns of whole
    names, with the reason why each is not needed."""
    architecture = _architecture(raw)
    text = raw.get("text_config") or raw
    unread = {**_UNREAD, **_UNREAD_OF.get(architecture, {})}
    layers = int(text.get("num_hidden_layers") or 0)
    more = range(layers, layers + int(text.get("num_nextn_predict_layers") or 0))
    if architecture.startswith("DeepseekV3") and more:
        unread[rf"model\.layers\.({'|'.join(map(str, more))})\..*"] = "layers that predict further tokens"
    return unread


# -- one reader for each architecture ------------------------------------------------------------------


def _mistral(raw: Raw) -> ModelConfig:
    return replace(llama(raw), windows=windows_of(raw))


def _qwen2(raw: Raw) -> ModelConfig:
    return ModelConfig(
        **common_fields(raw), qkv_bias=bool(raw.get("qkv_bias", True)), windows=windows_of(raw)
    )


def _qwen2_5_vl(raw: Raw) -> ModelConfig:
    """Read the text part of Qwen2.5-VL. In older files, its fields are at the top level of config.json."""
    given = dict(rope_fields(raw))
    sections = tuple(int(each) for each in given.get("mrope_section") or ())
    if rope_kind(given) == "mrope":
        given |= {"rope_type": "default", "type": "default"}
    config = _qwen2({"rope_theta": 1000000.0, **raw, "rope_parameters": given, "rope_scaling": None})
    if len(sections) != 3 or 2 * sum(sections) != config.head_dim:
        raise ModelError(
            f"config.json: mrope_section must be three numbers with the sum {config.head_dim // 2}, got "
            f"{list(sections)}"
        )
    return replace(config, rope=replace(config.rope, sections=sections))


def _qwen3(raw: Raw) -> ModelConfig:
    return replace(_mistral(raw), qk_norm=True)


def _mixtral(raw: Raw) -> ModelConfig:
    experts = ExpertsConfig(
        count=positive(raw, "num_local_experts"),
        chosen=positive(raw, "num_experts_per_tok"),
        width=positive(raw, "intermediate_size"),
        normalised=True,
    )
    names = TensorNames(mlp="block_sparse_moe", expert=("w1", "w3", "w2"))
    return replace(_mistral(raw), experts=experts, names=names)


def _qwen2_moe(raw: Raw) -> ModelConfig:
    return _with_qwen_experts(_qwen2(raw), raw)


def _qwen3_moe(raw: Raw) -> ModelConfig:
    return _with_qwen_experts(_qwen3(raw), raw)


def _gemma2(raw: Raw) -> ModelConfig:
    return _gemma(raw, every_other(raw))


def _gemma3(raw: Raw) -> ModelConfig:
    raw = {**_GEMMA3_DEFAULTS, **raw}
    kinds = tuple(layer_kinds({**raw, "sliding_window_pattern": raw.get("sliding_window_pattern") or 6}))
    given = raw.get("rope_parameters") or {}
    if "full_attention" in given:
        everywhere = read_rope(raw, given["full_attention"])
        nearby = read_rope(raw, given.get("sliding_attention") or {})
    else:
        everywhere = read_rope(raw, {"rope_theta": raw["rope_theta"], **(raw.get("rope_scaling") or {})})
        nearby = read_rope(raw, {"rope_theta": raw["rope_local_base_freq"]})
    ropes = tuple(everywhere if kind is LayerKind.FULL_ATTENTION else nearby for kind in kinds)
    plain = {name: value for name, value in raw.items() if not name.startswith("rope_")}
    return replace(_gemma(plain, kinds), rope=everywhere, ropes=ropes, qk_norm=True)


def _gemma(raw: Raw, kinds: tuple[LayerKind, ...]) -> ModelConfig:
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    activation = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    common = common_fields(
        {**raw, "hidden_act": activation, "tie_word_embeddings": raw.get("tie_word_embeddings", True)}
    )
    return ModelConfig(
        **common,
        qkv_bias=bool(raw.get("attention_bias", False)),
        o_bias=bool(raw.get("attention_bias", False)),
        **mixed_layers(raw, kinds, "sliding_window"),
        centred_norms=True,
        post_norms=True,
        embed_scale=positive(raw, "hidden_size") ** 0.5,
        score_scale=float(raw.get("query_pre_attn_scalar") or common["head_dim"]) ** -0.5,
        score_cap=raw.get("attn_logit_softcapping"),
        logit_cap=raw.get("final_logit_softcapping"),
        names=TensorNames(mlp_norm="pre_feedforward_layernorm"),
    )


def _gpt_oss(raw: Raw) -> ModelConfig:
    experts = ExpertsConfig(
        count=positive(raw, "num_local_experts"),
        chosen=positive(raw, "num_experts_per_tok"),
        width=positive(raw, "intermediate_size"),
        scoring="softmax of chosen",
        biased=True,
        clamp=float(raw.get("swiglu_limit") or 7.0),
        sharpness=float(raw.get("swiglu_alpha") or 1.702),
    )
    return replace(
        llama({"attention_bias": True, **raw}),
        **mixed_layers(raw, every_other(raw), "sliding_window"),
        sinks=True,
        experts=experts,
        names=TensorNames(router="router", packed=True),
    )


def _mllama(raw: Raw) -> ModelConfig:
    """Read the text part of Llama 3.2 Vision."""
    if raw.get("tie_word_embeddings"):
        raise ModelError("config.json: tie_word_embeddings is not supported with cross-attention layers")
    kinds = tuple(layer_kinds(raw))
    check_kinds(kinds)
    return llama(raw, kinds=kinds, added_tokens=_ADDED_TOKENS)


def _llama4(raw: Raw) -> ModelConfig:
    layers, turned = positive(raw, "num_hidden_layers"), rope_layers(raw)
    step = int(raw.get("interleave_moe_layer_step") or 1)
    with_experts = raw.get("moe_layers")
    if with_experts is None:
        with_experts = range(step - 1, layers, step)
    width = positive(raw, "intermediate_size")
    experts = ExpertsConfig(
        count=positive(raw, "num_local_experts"),
        chosen=positive(raw, "num_experts_per_tok"),
        width=width,
        scoring="sigmoid",
        scaled_input=True,
        shared_width=width,
    )
    plain = llama({**raw, "intermediate_size": raw.get("intermediate_size_mlp") or width})
    rope = replace(plain.rope, interleaved=True)
    return replace(
        plain,
        **mixed_layers(raw, tuple(layer_kinds(raw)), "attention_chunk_size"),
        rope=rope,
        ropes=tuple(rope if each else None for each in turned),
        unit_qk=bool(raw.get("use_qk_norm", True)),
        temperature=Temperature(float(raw.get("floor_scale") or 8192), float(raw.get("attn_scale") or 0.1))
        if raw.get("attn_temperature_tuning", True)
        else None,
        experts=experts,
        dense_layers=tuple(layer for layer in range(layers) if layer not in with_experts),
        names=TensorNames(mlp="feed_forward", router="router", packed=True),
    )


def _deepseek_v2(raw: Raw) -> ModelConfig:
    method = raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method {method!r} is not supported")
    if raw.get("norm_topk_prob") or raw.get("scoring_func", "softmax") != "softmax":
        raise ModelError("config.json: of DeepSeek V2 only softmax scores that are not normalised are known")
    limited = method == "group_limited_greedy"
    experts = ExpertsConfig(
        **_deepseek_experts(raw),
        groups=int(raw.get("n_group") or 1) if limited else 1,
        best_groups=int(raw.get("topk_group") or 1) if limited else 1,
    )
    return _deepseek(raw, experts, interleaved=True)


def _deepseek_v3(raw: Raw) -> ModelConfig:
    if raw.get("scoring_func", "sigmoid") != "sigmoid" or raw.get("topk_method", "noaux_tc") != "noaux_tc":
        raise ModelError("config.json: of DeepSeek V3 only sigmoid scores chosen by noaux_tc are supported")
    experts = ExpertsConfig(
        **_deepseek_experts(raw),
        scoring="sigmoid",
        normalised=bool(raw.get("norm_topk_prob", True)),
        groups=int(raw.get("n_group") or 1),
        best_groups=int(raw.get("topk_group") or 1),
        group_members=2,
        correction=True,
    )
    return _deepseek(raw, experts, interleaved=bool(raw.get("rope_interleave", True)))


def _deepseek(raw: Raw, experts: ExpertsConfig, *, interleaved: bool) -> ModelConfig:
    if raw.get("attention_bias"):
        raise ModelError("config.json: attention_bias is not supported with latent attention")
    if int(raw.get("moe_layer_freq") or 1) != 1:
        raise ModelError("config.json: moe_layer_freq other than 1 is not supported")
    layers = positive(raw, "num_hidden_layers")
    latent = LatentConfig(
        rank=positive(raw, "kv_lora_rank"),
        nope_dim=positive(raw, "qk_nope_head_dim"),
        rope_dim=positive(raw, "qk_rope_head_dim"),
        value_dim=positive(raw, "v_head_dim"),
        query_rank=positive(raw, "q_lora_rank") if raw.get("q_lora_rank") else None,
    )
    width = latent.nope_dim + latent.rope_dim
    plain = llama({**raw, "head_dim": width, "num_key_value_heads": None})
    scaling = rope_fields(raw)
    stretched = plain.rope.kind != "default" and scaling.get("mscale_all_dim")
    grown = yarn_growth(plain.rope.factor, float(scaling["mscale_all_dim"])) if stretched else 1.0
    first = int(raw.get("first_k_dense_replace") or 0)
    return replace(
        plain,
        kinds=(LayerKind.MLA_LATENT,) * layers,
        rope=replace(plain.rope, interleaved=interleaved),
        latent=latent,
        score_scale=width**-0.5 * grown**2,
        experts=experts,
        dense_layers=tuple(range(min(first, layers))),
        names=TensorNames(shared="shared_experts"),
    )


def _deepseek_experts(raw: Raw) -> dict[str, Any]:
    width = positive(raw, "moe_intermediate_size")
    return {
        "count": positive(raw, "n_routed_experts"),
        "chosen": positive(raw, "num_experts_per_tok"),
        "width": width,
        "scale": float(raw.get("routed_scaling_factor") or 1.0),
        "shared_width": width * int(raw.get("n_shared_experts") or 0),
    }


def _qwen3_next(raw: Raw) -> ModelConfig:
    kinds = tuple(layer_kinds({**raw, "full_attention_interval": raw.get("full_attention_interval") or 4}))
    check_kinds(kinds)
    delta = DeltaConfig(
        key_heads=positive(raw, "linear_num_key_heads"),
        value_heads=positive(raw, "linear_num_value_heads"),
        key_dim=positive(raw, "linear_key_head_dim"),
        value_dim=positive(raw, "linear_value_head_dim"),
        conv_width=positive(raw, "linear_conv_kernel_dim"),
    )
    plain = llama({"partial_rotary_factor": 0.25, **raw}, partial=True)
    return _with_qwen_experts(
        replace(plain, kinds=kinds, delta=delta, qk_norm=True, centred_norms=True, gated_attention=True),
        {"norm_topk_prob": True, **raw},
    )


_READERS: Mapping[str, Callable[[Raw], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "Qwen3ForCausalLM": _qwen3,
    "MixtralForCausalLM": _mixtral,
    "MllamaForConditionalGeneration": _mllama,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "Qwen3NextForCausalLM": _qwen3_next,
    **recurrent.READERS,
    **llama_like.READERS,
}
ARCHITECTURES = tuple(_READERS)

_QUANTISATION = ("quantization_config", "quantization", "compression_config")

_UNREAD = {
    r"(.*\.)?rotary_emb\.inv_freq": "RoPE frequencies, which config.json says",
    r".*\.self_attn\.(attn\.|[kv]_proj\.)?[kv]_scale": "scales of quantised KV, for --kv-scales checkpoint",
}
_IMAGES = {
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|visual)\..*": "the encoder of images",
}
_FURTHER = {r"mtp\..*": "layers that predict further tokens, which are not computed"}
_UNREAD_OF: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": _IMAGES,
    "Llama4ForConditionalGeneration": _IMAGES,
    "Mistral3ForConditionalGeneration": _IMAGES,
    "MllamaForConditionalGeneration": _IMAGES,
    "Qwen2_5_VLForConditionalGeneration": _IMAGES,
    "Qwen3NextForCausalLM": _FURTHER,
    "NemotronHForCausalLM": _FURTHER,
}

_ADDED_TOKENS = 8  # Llama 3.2 Vision has 8 more rows of embeddings than its vocab_size says

# Defaults of fields that config.json may lack in the text part of a Gemma 3 model with images.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}


def _with_qwen_experts(config: ModelConfig, raw: Raw) -> ModelConfig:
    """Add the experts of a Qwen model. Some versions of its files name their number
    ``num_local_experts``."""
    count = "num_experts" if raw.get("num_experts") else "num_local_experts"
    shared = int(raw.get("shared_expert_intermediate_size") or 0)
    experts = ExpertsConfig(
        count=positive(raw, count),
        chosen=positive(raw, "num_experts_per_tok"),
        width=positive(raw, "moe_intermediate_size"),
        normalised=bool(raw.get("norm_topk_prob", False)),
        shared_width=shared,
        shared_gate=bool(shared),
    )
    step, without = int(raw.get("decoder_sparse_step") or 1), raw.get("mlp_only_layers") or []
    dense = tuple(layer for layer in range(config.layers) if layer in without or (layer + 1) % step)
    return replace(config, experts=experts, dense_layers=dense)


def _architecture(raw: Raw) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list):
        raise ModelError(f"config.json: architectures must be a list, got {names!r}")
    for name in names:
        if str(name) in _READERS:
            return str(name)
    what = ", ".join(map(str, names)) or "no architecture at all"
    raise ModelError(f"config.json names {what}; supported are {', '.join(ARCHITECTURES)}")
