"""Readers of ``config.json`` for architectures with recurrent states, alone or beside attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tierstore.spec import LAYER_KINDS, LayerKind, blocks, head_dim_of, kv_dtype, layer_kinds, positive
from tierstore_engine.config import (
    ExpertsConfig,
    Mamba1Config,
    Mamba2Config,
    ModelConfig,
    SharedBlocksConfig,
    ShortConvConfig,
    TensorNames,
)
from tierstore_engine.config_fields import Raw, check_kinds, common_fields, number_of, token_ids
from tierstore_engine.errors import ModelError
from tierstore_engine.llama_like import llama


def _granite_hybrid(raw: Raw) -> ModelConfig:
    """Read Granite 4.0-H: Mamba-2 and attention, the latter mostly without rotation. A layer without experts
    has only the MLP that otherwise stands beside the experts."""
    width = positive(raw, "shared_intermediate_size")
    experts = None
    if raw.get("num_local_experts"):
        experts = ExpertsConfig(
            count=positive(raw, "num_local_experts"),
            chosen=positive(raw, "num_experts_per_tok"),
            width=positive(raw, "intermediate_size"),
            scoring="softmax of chosen",
            shared_width=width,
        )
    plain = llama({**raw, "intermediate_size": width})
    _require_silu(plain, "Mamba-2")
    kinds = tuple(layer_kinds({"layer_types": ["mamba"] * plain.layers, **raw}))
    check_kinds(kinds)
    hybrid = LayerKind.RECURRENT_STATE in kinds
    turned = raw.get("position_embedding_type") == "rope"
    return replace(
        plain,
        kinds=kinds if hybrid else (),
        mamba=_granite_mamba2(raw) if hybrid else None,
        ropes=() if turned else (None,) * plain.layers,
        experts=experts,
        embed_scale=float(raw.get("embedding_multiplier") or 1.0),
        residual_scale=float(raw.get("residual_multiplier") or 1.0),
        score_scale=float(raw.get("attention_multiplier") or 1.0),
        logit_divisor=float(raw.get("logits_scaling") or 1.0),
        names=TensorNames(mlp="block_sparse_moe", router="router.layer", aside="shared_mlp", joined=True),
    )


def _require_silu(plain: ModelConfig, kind: str) -> None:
    if plain.activation != "silu":
        raise ModelError(f"config.json: hidden_act other than silu is not supported with {kind} layers")


def _granite_mamba2(raw: Raw) -> Mamba2Config:
    heads = positive(raw, "mamba_n_heads")
    width = raw.get("mamba_d_ssm") or positive(raw, "hidden_size") * int(raw.get("mamba_expand") or 2)
    head_dim = raw.get("mamba_d_head", "auto")
    least, most = _step_limits(raw)
    return Mamba2Config(
        heads=heads,
        head_dim=width // heads if head_dim == "auto" else positive(raw, "mamba_d_head"),
        state_dim=positive(raw, "mamba_d_state"),
        groups=positive(raw, "mamba_n_groups"),
        conv_width=positive(raw, "mamba_d_conv"),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        biased=bool(raw.get("mamba_proj_bias", False)),
        least_step=least,
        most_step=most,
    )


def _step_limits(raw: Raw) -> tuple[float, float | None]:
    """Return the least and the largest step of Mamba-2; None without a limit."""
    least, most = (number_of(each) for each in raw.get("time_step_limit") or (0.0, math.inf))
    return least, most if math.isfinite(most) else None


def _nemotron_h(raw: Raw) -> ModelConfig:
    """Read Nemotron-H: its blocks are a mixer (Mamba-2, or attention without rotation) or an MLP. Here, a
    mixer's block and the MLP block that follows it, if there is one, are read as one layer."""
    names = blocks(raw) or [str(each) for each in raw.get("layer_types") or ()]
    unknown = sorted(set(names) - {*_MIXERS, "mlp", "moe"})
    if unknown or not names:
        raise ModelError(f"config.json: layers_block_type names {', '.join(unknown) or 'nothing'}: not known")
    mixers = [at for at, kind in enumerate(names) if kind in _MIXERS]
    follow = [names[at + 1] if at + 1 < len(names) else None for at in mixers]
    if len(mixers) + sum(kind in ("mlp", "moe") for kind in follow) != len(names):
        raise ModelError("config.json: an MLP that does not follow a mixer is not supported")
    kinds = tuple(LAYER_KINDS[names[at]] for at in mixers)
    check_kinds(kinds)
    activations = raw.get("mlp_hidden_act", "relu2"), raw.get("mamba_hidden_act", "silu")
    if activations != ("relu2", "silu"):
        raise ModelError(
            "config.json: of Nemotron-H only mlp_hidden_act relu2 and mamba_hidden_act silu are known"
        )
    for name in ("attention_bias", "moe_latent_size", "sliding_window"):
        if raw.get(name):
            raise ModelError(f"config.json: {name} is not supported with Nemotron-H")
    head_dim = raw.get("head_dim") or raw.get("attention_head_dim") or 128
    common = common_fields(
        {**raw, "head_dim": head_dim, "num_hidden_layers": len(mixers), "hidden_act": "silu"}
    )
    layers = range(len(mixers))
    experts = _nemotron_experts(raw) if "moe" in follow else None
    if experts is not None and common["mlp_bias"]:
        raise ModelError("config.json: mlp_bias is not supported with experts")
    return ModelConfig(
        **{
            **common,
            "norm_eps": float(raw.get("layer_norm_epsilon") or 1e-5),
            "activation": "relu2",
        },
        kinds=kinds,
        ropes=(None,) * len(mixers),
        mamba=_nemotron_mamba2(raw) if LayerKind.RECURRENT_STATE in kinds else None,
        experts=experts,
        dense_layers=tuple(at for at in layers if follow[at] == "mlp") if experts is not None else (),
        bare_layers=tuple(at for at in layers if follow[at] not in ("mlp", "moe")),
        names=TensorNames(shared="shared_experts", blocks=True),
    )


_MIXERS = ("mamba", "linear_attention", "attention", "full_attention")


def _nemotron_mamba2(raw: Raw) -> Mamba2Config:
    # As in transformers: time_step_min is the limit, and time_step_limit is not read.
    return Mamba2Config(
        heads=positive(raw, "mamba_num_heads"),
        head_dim=positive(raw, "mamba_head_dim"),
        state_dim=positive(raw, "ssm_state_size"),
        groups=positive(raw, "n_groups"),
        conv_width=positive(raw, "conv_kernel"),
        conv_bias=bool(raw.get("use_conv_bias", True)),
        biased=bool(raw.get("use_bias", False)),
        least_step=float(raw.get("time_step_min", 0.001)),
    )


def _nemotron_experts(raw: Raw) -> ExpertsConfig:
    return ExpertsConfig(
        count=positive(raw, "n_routed_experts"),
        chosen=positive(raw, "num_experts_per_tok"),
        width=positive(raw, "moe_intermediate_size"),
        scoring="sigmoid",
        normalised=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor") or 1.0),
        groups=int(raw.get("n_group") or 1),
        best_groups=int(raw.get("topk_group") or 1),
        group_members=2,
        correction=True,
        shared_width=positive(raw, "moe_shared_expert_intermediate_size"),
    )


_BAMBA_NAMES = TensorNames(
    mlp="feed_forward", mlp_norm="pre_ff_layernorm", renamed=(("model.norm", "model.final_layernorm"),)
)


def _bamba(raw: Raw) -> ModelConfig:
    """Read Bamba: Mamba-2, and a few layers of attention that rotate half of each head."""
    kinds = tuple(layer_kinds(raw))
    check_kinds(kinds)
    plain = llama({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, **raw}, partial=True)
    _require_silu(plain, "Mamba-2")
    return replace(plain, kinds=kinds, mamba=_granite_mamba2(raw), names=_BAMBA_NAMES)


def _falcon_h1(raw: Raw) -> ModelConfig:
    """Read Falcon-H1: each layer has attention and Mamba-2 side by side, which are two layers here."""
    for name in ("attention_bias", "mamba_proj_bias", "projectors_bias"):
        if raw.get(name):
            raise ModelError(f"config.json: {name} is not supported with Falcon-H1")
    plain = llama({"rms_norm_eps": 1e-5, **raw})
    _require_silu(plain, "Mamba-2")
    entering, keys = _factor(raw, "attention_in_multiplier"), _factor(raw, "key_multiplier")
    scales = tuple(_factor(raw, "ssm_in_multiplier") * each for each in _factors(raw, "ssm_multipliers", 5))
    gate, down = _factors(raw, "mlp_multipliers", 2)
    norm = "before gate" if raw.get("mamba_norm_before_gate", True) else "after gate"
    mamba = replace(
        _granite_mamba2(raw), norm=norm if raw.get("mamba_rms_norm", False) else "", scales=scales
    )
    layers = range(2 * plain.layers)
    return replace(
        plain,
        layers=len(layers),
        kinds=tuple(layer_kinds({**raw, "model_type": "falcon_h1"})),
        mamba=mamba,
        bare_layers=tuple(layers[::2]),
        beside=tuple(layers[1::2]),
        embed_scale=_factor(raw, "embedding_multiplier"),
        # The factor of attention's input applies once to values, and twice to scores.
        mixer_scales=(
            entering * _factor(raw, "attention_out_multiplier"),
            _factor(raw, "ssm_out_multiplier"),
        )
        * plain.layers,
        score_scale=plain.attention_scale * entering**2 * keys,
        mlp_scales=(gate, down),
        logit_divisor=1.0 / _factor(raw, "lm_head_multiplier"),
        names=_BAMBA_NAMES,
    )


def _zamba2(raw: Raw) -> ModelConfig:
    """Read Zamba2: Mamba-2, with uses of shared blocks before some layers. A use is read as a layer."""
    raw = {**_ZAMBA2, **raw, "model_type": "zamba2", "mlp_bias": raw.get("add_bias_linear", False)}
    raw["intermediate_size"] = raw.get("intermediate_size") or 4 * positive(raw, "hidden_size")
    adapted = bool(raw["use_shared_attention_adapter"])
    grouped = raw.get("num_key_value_heads") not in (None, raw.get("num_attention_heads"))
    refused = {
        "layers_block_type": blocks(raw) is None,
        "num_key_value_heads": adapted and grouped,
        "rms_norm_eps": raw["rms_norm_eps"] != 1e-5,  # Mamba-2's own norm always has this epsilon
        "use_conv_bias": not raw["use_conv_bias"],
        "use_long_context": raw["use_long_context"],
    }
    for name in (name for name, wrong in refused.items() if wrong):
        raise ModelError(f"config.json: {name} {raw.get(name)!r} is not supported with Zamba2")
    kinds = tuple(layer_kinds(raw))
    check_kinds(kinds)
    head_dim, heads = head_dim_of(raw), positive(raw, "n_mamba_heads")
    plain = llama({**raw, "num_hidden_layers": len(kinds), "head_dim": head_dim})
    return replace(
        plain,
        kinds=kinds,
        ropes=() if raw["use_mem_rope"] else (None,) * len(kinds),
        score_scale=(head_dim / 2) ** -0.5,
        mamba=Mamba2Config(
            heads=heads,
            head_dim=positive(raw, "hidden_size") * positive(raw, "mamba_expand") // heads,
            state_dim=positive(raw, "mamba_d_state"),
            groups=positive(raw, "mamba_ngroups"),
            conv_width=positive(raw, "mamba_d_conv"),
            biased=plain.mlp_bias,
            least_step=float(raw["time_step_min"]),
        ),
        bare_layers=tuple(range(len(kinds))),
        shared=SharedBlocksConfig(
            uses=tuple(at for at, kind in enumerate(kinds) if kind is LayerKind.FULL_ATTENTION),
            blocks=positive(raw, "num_mem_blocks"),
            rank=positive(raw, "adapter_rank"),
            adapted_attention=adapted,
        ),
        names=_BAMBA_NAMES,
    )


_ZAMBA2: Raw = {
    "adapter_rank": 128,
    "hidden_act": "gelu",
    "mamba_d_conv": 4,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "time_step_min": 0.001,
    "use_conv_bias": True,
    "use_long_context": False,
    "use_mem_rope": False,
    "use_shared_attention_adapter": False,
}
"""Values of fields that are absent, as in transformers."""


def _factor(raw: Raw, name: str) -> float:
    given = raw.get(name)
    return 1.0 if given is None else float(given)


def _factors(raw: Raw, name: str, count: int) -> tuple[float, ...]:
    """Return the ``count`` factors of a field; 1 if it is absent or null."""
    given = [1.0] * count if raw.get(name) is None else raw[name]
    if len(given) != count:
        raise ModelError(f"config.json: {name} must be {count} numbers, got {given!r}")
    return tuple(float(each) for each in given)


def _jamba(raw: Raw) -> ModelConfig:
    """Read Jamba: Mamba-1, few layers of attention without rotation, and experts in every second layer."""
    kinds = tuple(layer_kinds({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, **raw}))
    check_kinds(kinds)
    plain = llama(raw)
    _require_silu(plain, "Mamba-1")
    count = int(raw.get("num_experts", raw.get("num_local_experts", 16)))
    chosen = int(raw.get("num_experts_per_tok") or 2)
    every, offset = int(raw.get("expert_layer_period") or 2), int(raw.get("expert_layer_offset", 1))
    rank, hidden = raw.get("mamba_dt_rank", "auto"), positive(raw, "hidden_size")
    mamba = Mamba1Config(
        width=hidden * int(raw.get("mamba_expand") or 2),
        state_dim=int(raw.get("mamba_d_state") or 16),
        rank=-(-hidden // 16) if rank == "auto" else positive(raw, "mamba_dt_rank"),
        conv_width=int(raw.get("mamba_d_conv") or 4),
        conv_bias=bool(raw.get("mamba_conv_bias", True)),
        biased=bool(raw.get("mamba_proj_bias", False)),
        norm_eps=plain.norm_eps,
        trained_norms=True,
    )
    return replace(
        plain,
        kinds=kinds,
        mamba1=mamba if LayerKind.RECURRENT_STATE in kinds else None,
        ropes=(None,) * plain.layers,
        experts=ExpertsConfig(count, chosen, plain.intermediate_size) if count > 1 else None,
        dense_layers=tuple(at for at in range(plain.layers) if at % every != offset) if count > 1 else (),
        names=replace(_BAMBA_NAMES, router="router"),
    )


def _lfm2(raw: Raw) -> ModelConfig:
    """Read LFM2: short convolutions, and some layers of attention."""
    kinds = tuple(layer_kinds(raw))
    check_kinds(kinds)
    width = raw.get("block_ff_dim") or positive(raw, "intermediate_size")
    if raw.get("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if (factor := raw.get("block_ffn_dim_multiplier", 1.0)) is not None:
            multiple = int(raw.get("block_multiple_of") or 256)
            width = -(-int(factor * width) // multiple) * multiple
    plain = llama(
        {
            "rope_theta": 1000000.0,
            **raw,
            "intermediate_size": width,
            "rms_norm_eps": raw.get("norm_eps") or 1e-5,
            "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
        }
    )
    conv = ShortConvConfig(
        positive(raw, "hidden_size"), int(raw.get("conv_L_cache") or 3), bool(raw.get("conv_bias"))
    )
    recurrent = LayerKind.RECURRENT_STATE in kinds
    return replace(
        plain,
        kinds=kinds if recurrent else (),
        short_conv=conv if recurrent else None,
        qk_norm=True,
        names=TensorNames(renamed=_LFM2_NAMES),
    )


_LFM2_NAMES = (
    ("self_attn.o_proj", "self_attn.out_proj"),
    ("self_attn.q_norm", "self_attn.q_layernorm"),
    ("self_attn.k_norm", "self_attn.k_layernorm"),
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("model.norm", "model.embedding_norm"),
)

_LONGEST = 1 << 20
"""Tokens of the longest sequence of a model without attention, which has no limit of its own."""


def _states_only(raw: Raw, *, tied: bool, **changes: Any) -> ModelConfig:
    """Return a model whose layers are a norm and a mixer with a state."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError("config.json: hidden_act other than silu is not supported with this architecture")
    layers = positive(raw, "num_hidden_layers")
    return ModelConfig(
        vocab_size=positive(raw, "vocab_size"),
        hidden_size=positive(raw, "hidden_size"),
        intermediate_size=0,
        layers=layers,
        heads=0,
        kv_heads=0,
        head_dim=0,
        max_positions=_LONGEST,
        dtype=kv_dtype(raw),
        norm_eps=float(raw.get("layer_norm_epsilon") or 1e-5),
        tied_embeddings=bool(raw.get("tie_word_embeddings", tied)),
        eos_ids=token_ids(raw.get("eos_token_id")),
        kinds=(LayerKind.RECURRENT_STATE,) * layers,
        ropes=(None,) * layers,
        bare_layers=tuple(range(layers)),
        names=TensorNames(blocks=True),
        **changes,
    )


def _mamba(raw: Raw, *, norm_eps: float | None = None) -> ModelConfig:
    hidden, rank = positive(raw, "hidden_size"), raw.get("time_step_rank", "auto")
    mamba = Mamba1Config(
        width=int(raw.get("intermediate_size") or hidden * int(raw.get("expand") or 2)),
        state_dim=positive(raw, "state_size"),
        rank=-(-hidden // 16) if rank == "auto" else positive(raw, "time_step_rank"),
        conv_width=positive(raw, "conv_kernel"),
        conv_bias=bool(raw.get("use_conv_bias", True)),
        biased=bool(raw.get("use_bias", False)),
        norm_eps=norm_eps,
    )
    return _states_only(raw, tied=True, mamba1=mamba)


def _falcon_mamba(raw: Raw) -> ModelConfig:
    """Read Falcon Mamba: its steps, keys and queries have norms without weights."""
    return _mamba(raw, norm_eps=float(raw.get("mixer_rms_eps") or 1e-6))


def _mamba2(raw: Raw) -> ModelConfig:
    least, most = _step_limits(raw)
    mamba = Mamba2Config(
        heads=positive(raw, "num_heads"),
        head_dim=positive(raw, "head_dim"),
        state_dim=positive(raw, "state_size"),
        groups=positive(raw, "n_groups"),
        conv_width=positive(raw, "conv_kernel"),
        conv_bias=bool(raw.get("use_conv_bias", True)),
        biased=bool(raw.get("use_bias", False)),
        least_step=least,
        most_step=most,
    )
    return _states_only(raw, tied=False, mamba=mamba)


READERS: Mapping[str, Callable[[Raw], ModelConfig]] = {
    "BambaForCausalLM": _bamba,
    "FalconH1ForCausalLM": _falcon_h1,
    "FalconMambaForCausalLM": _falcon_mamba,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "JambaForCausalLM": _jamba,
    "Lfm2ForCausalLM": _lfm2,
    "Mamba2ForCausalLM": _mamba2,
    "MambaForCausalLM": _mamba,
    "NemotronHForCausalLM": _nemotron_h,
    "Zamba2ForCausalLM": _zamba2,
}
