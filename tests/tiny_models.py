"""Tiny models of transformers with random weights: the architectures that the bundled engine computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    import transformers

VOCAB = 320
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"num_key_value_heads": 2, "rope_parameters": _LLAMA3_ROPE}),
    "llama-linear-mqa-biased": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": None}),
    "mistral-windowed": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 37}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-windowed": (
        "Qwen2",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": True,
            "sliding_window": 70,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-yarn": (
        "Qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_key_value_heads": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_LATENTS,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_LATENTS,
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
            },
        },
    ),
}
"""Models of one layer group."""

_FALCON_H1 = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 32,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.7,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.9,
    "ssm_multipliers": [0.6, 0.8, 1.4, 0.7, 1.1],
    "mlp_multipliers": [0.75, 1.25],
}

_ZAMBA2 = {
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 12,
    "chunk_size": 32,
    "adapter_rank": 8,
    "time_step_min": 1e-9,
}

GROUPED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 37,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 37,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 37,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "truncate": False,
            },
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 48,
            "floor_scale": 32,
            "attn_scale": 0.3,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
        },
    ),
    "falcon-h1": ("FalconH1", _FALCON_H1),
    "falcon-h1-normed": (
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_d_ssm": None,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "intermediate_size": 24,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_head": 16,
            "mamba_chunk_size": 32,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "jamba": (
        "Jamba",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 12,
            "mamba_dt_rank": 8,
            "mamba_proj_bias": True,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_multiple_of": 16,
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "linear_attention", "moe", "full_attention", "mlp"],
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "ssm_state_size": 12,
            "n_groups": 3,
            "chunk_size": 32,
            "time_step_min": 1e-9,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
        },
    ),
    "zamba2": (
        "Zamba2",
        {
            **_ZAMBA2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
            "num_hidden_layers": 4,
            "num_mem_blocks": 2,
            "use_mem_rope": True,
            "use_shared_attention_adapter": True,
        },
    ),
    "zamba2-plain": (
        "Zamba2",
        {
            **_ZAMBA2,
            "layers_block_type": ["hybrid", "hybrid"],
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "add_bias_linear": True,
        },
    ),
}
"""Models whose layers remember the past in several ways."""

_FULL = ["full_attention"] * 3

VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_head": 16,
            "mamba_chunk_size": 32,
        },
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        {
            **GROUPED["granite-hybrid"][1],
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": (0.4, 1.2),
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-h-dense": (
        "NemotronH",
        {
            **GROUPED["nemotron-h"][1],
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "use_bias": True,
            "use_conv_bias": False,
            "mlp_bias": True,
            "time_step_min": 0.4,
        },
    ),
}
"""Of which transformers computes other logits with a cache: there it does not limit the steps of Mamba-2."""


_MAMBA = {"state_size": 12, "time_step_rank": 8, "tie_word_embeddings": True}

STATES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**_MAMBA, "use_bias": True}),
    "falcon-mamba": ("FalconMamba", {**_MAMBA, "mixer_rms_eps": 1e-3, "use_conv_bias": False}),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 12,
            "n_groups": 2,
            "chunk_size": 32,
        },
    ),
}
"""Models without attention: all that they remember is a recurrent state."""

_LAYERS = {"num_hidden_layers": 4, "num_key_value_heads": 2, "sliding_window": 37}

LLAMA_LIKE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", {"num_key_value_heads": 2}),
    "arcee": ("Arcee", {"num_key_value_heads": 2, "mlp_bias": True}),
    "cohere": ("Cohere", {"num_key_value_heads": 2, "logit_scale": 0.7}),
    "cohere-qk-norm": ("Cohere", {"num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 0.7}),
    "cohere2": ("Cohere2", {**_LAYERS, "sliding_window_pattern": 2, "logit_scale": 0.7}),
    "ernie": ("Ernie4_5", {"num_key_value_heads": 2, "head_dim": 16, "use_bias": True}),
    "exaone4": ("Exaone4", {**_LAYERS, "sliding_window_pattern": 2}),
    "exaone4-full": ("Exaone4", {"num_key_value_heads": 2, "sliding_window": None, "layer_types": _FULL}),
    "falcon": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}),
    "falcon-7b": ("Falcon", {"multi_query": True}),
    "falcon-rw": ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-sequential": ("GPTNeoX", {"use_parallel_residual": False}),
    "gemma": ("Gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "glm": ("Glm", {"num_key_value_heads": 2, "head_dim": 16}),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "ministral": (
        "Ministral",
        {**_LAYERS, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "mistral3": ("Mistral3", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": None}),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2, "mlp_bias": True}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3", {**_LAYERS, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 70}),
    "phi4-mini": (
        "Phi3",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [2.0] * 6,
            },
        },
    ),
    "seed-oss": ("SeedOss", {"num_key_value_heads": 2, "head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "num_key_value_heads": 2}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"num_key_value_heads": 2, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 37}),
}
"""Architectures that are Llama with a few changes."""


@cache
def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of ``VOCAB`` entries, 0 and 1 being special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog lay on the log"] * 4, trainer)
    return tokenizer


def rewrite_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    value = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: field for name, field in value.items() if field is not None}))


@cache
def reference_model(name: str) -> transformers.PreTrainedModel:
    import transformers  # seconds, and not everywhere where the kernels are tested

    transformers.utils.logging.disable_progress_bar()
    family, fields = {**ARCHITECTURES, **GROUPED, **VARIANTS, **STATES, **LLAMA_LIKE}[name]
    text = "Text" if family in ("Gemma3", "Llama4") else ""  # the others of that name take images
    if family == "Mistral3":
        model = _with_images(_BASE | fields)
    else:
        config = getattr(transformers, f"{family}{text}Config")(**(_BASE | fields))
        config._attn_implementation = "eager"  # the only one that knows caps and sinks
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(11)
    centred = family in ("Gemma", "Gemma2", "Gemma3", "Nemotron", "Qwen3Next")
    for parameter, tensor in (*model.named_parameters(), *_corrections(model)):
        # Away from transformers' tiny default weights, with which attention does next to nothing.
        small = "norm" in parameter or "bias" in parameter
        deviation = 0.1 if small else 1.5 * tensor.shape[-1] ** -0.5
        # Zamba2's blocks have no residuals: with large outputs, layers would amplify what is rounded.
        deviation *= 0.3 if "adapter_list" in parameter else 0.1 if ".linear." in parameter else 1.0
        mean = float("norm" in parameter and (not centred or "linear_attn" in parameter))
        if parameter.endswith("A_log"):  # a state that forgets within a hundred tokens, about
            mean, deviation = -4.0, 1.0
        torch.nn.init.normal_(tensor, mean, deviation, generator=generator)
    return model


def _with_images(fields: dict[str, Any]) -> transformers.PreTrainedModel:
    """A Mistral 3 with its image part."""
    import transformers

    images = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 56,
    }
    text = {"model_type": "mistral", **fields}
    config = transformers.Mistral3Config(
        text_config=text, vision_config={"model_type": "pixtral", **images}, tie_word_embeddings=False
    )
    return transformers.Mistral3ForConditionalGeneration(config).eval()


def _corrections(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What DeepSeek V3's routers add for choosing: no parameters, and kept all the same."""
    return [(name, each) for name, each in model.named_buffers() if "correction_bias" in name]
