"""What is read from ``config.json``, in both of transformers' spellings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tierstore.errors import UsageError
from tierstore_engine.build import open_model
from tierstore_engine.calibration import check_calibration
from tierstore_engine.config import RopeConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.families import config_from_hf
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.presets import PRESETS, preset
from tierstore_engine.weights import weights_bytes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_act": None,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
}
GPT_OSS = MIXTRAL | {"architectures": ["GptOssForCausalLM"], "sliding_window": 128}
LLAMA4 = MIXTRAL | {
    "architectures": ["Llama4ForCausalLM"],
    "attention_chunk_size": 512,
    "no_rope_layers": [1, 0],
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
GRANITE = MIXTRAL | {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 32,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_act": None,
    "hybrid_override_pattern": "M-MM*EM",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
FALCON_H1 = {
    "architectures": ["FalconH1ForCausalLM"],
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
}
ZAMBA2 = {
    "architectures": ["Zamba2ForCausalLM"],
    "hidden_act": "gelu",
    "layers_block_type": ["mamba", "hybrid", "hybrid"],
    "num_key_value_heads": 4,
    "n_mamba_heads": 8,
}


def test_old_and_new_spellings_are_equal() -> None:
    old = config_from_hf(
        LLAMA
        | {
            "torch_dtype": "bfloat16",
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING},
        }
    )
    new = config_from_hf(
        LLAMA
        | {
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_SCALING},
        }
    )
    assert old == new
    assert old.dtype == "bfloat16"
    assert old.rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 1024)


def test_the_oldest_spelling_of_the_rope_type() -> None:
    config = config_from_hf(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.rope == RopeConfig(kind="linear", factor=2.0)


def test_defaults() -> None:
    config = config_from_hf(LLAMA)
    assert (config.dtype, config.head_dim, config.kv_heads) == ("float32", 16, 2)
    assert config.rope == RopeConfig()
    assert config_from_hf(LLAMA, dtype="float16").dtype == "float16"
    without_groups = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert config_from_hf(without_groups).kv_heads == 4


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, ()),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8)),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "use_sliding_window": False},
            (),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (8, None),
        ),
        ({"sliding_window": 8}, ()),  # Llama has none, whatever its config says
    ],
)
def test_windows(fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = config_from_hf(LLAMA | fields)
    assert config.windows == windows
    assert len(config.kv_spec().groups) == 1  # the KV of all tokens is kept all the same


def groups_of(fields: dict[str, Any]) -> list[str]:
    groups = config_from_hf(LLAMA | fields).kv_spec().groups
    return [f"{group.kind.value}{list(group.layers)}" for group in groups]


def test_layers_that_remember_alike_are_a_group() -> None:
    """Those that need every token first, wherever they stand."""
    assert groups_of(GEMMA) == ["full_attention[1]", "sliding_window[0]"]
    assert groups_of(GPT_OSS) == ["full_attention[1]", "sliding_window[0]"]
    assert groups_of(LLAMA4) == ["full_attention[1]", "chunked_attention[0]"]
    assert groups_of(DEEPSEEK) == ["mla_latent[0, 1]"]
    assert groups_of(GRANITE) == ["full_attention[1]", "recurrent_state[0]"]
    assert groups_of(NEMOTRON) == ["full_attention[3]", "recurrent_state[0, 1, 2, 4]"]
    assert groups_of(FALCON_H1) == ["full_attention[0, 2]", "recurrent_state[1, 3]"]
    assert groups_of(ZAMBA2) == ["full_attention[1, 3]", "recurrent_state[0, 2, 4]"]
    assert groups_of(MIXTRAL) == ["full_attention[0, 1]"]
    config = config_from_hf(LLAMA | GEMMA)
    assert [config.group_of(layer) for layer in range(2)] == [1, 0]


def test_gemma3_before_transformers_5() -> None:
    """Every sixth layer attends to everything, and the others have a theta of their own."""
    config = config_from_hf(
        LLAMA
        | GEMMA
        | {
            "layer_types": None,
            "num_hidden_layers": 7,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    assert config.windows == (512,) * 5 + (None, 512)
    assert config.rope_of(5) == RopeConfig(1e6, "linear", 8.0)
    assert config.rope_of(0) == RopeConfig(1e4)


def test_the_text_part_of_a_model_that_takes_images() -> None:
    text = {name: value for name, value in (LLAMA | GEMMA).items() if name != "architectures"}
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": text,
    }
    assert config_from_hf(whole) == config_from_hf(LLAMA | GEMMA | {"torch_dtype": "bfloat16"})


QWEN_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 2,
}


def test_qwen2_5_vl_before_and_from_transformers_5() -> None:
    before = config_from_hf(LLAMA | QWEN_VL)
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 3, 3]}
    from_5 = {
        "architectures": QWEN_VL["architectures"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": {**LLAMA, "rope_parameters": rope},
    }
    assert before == config_from_hf(from_5)
    assert before.rope.sections == (2, 3, 3)
    assert before.tied_embeddings
    assert before.qkv_bias


@pytest.mark.parametrize("sections", [None, [2, 3], [2, 3, 4], [8]])
def test_sections_that_do_not_fill_a_head(sections: list[int] | None) -> None:
    scaling = {"type": "mrope", "mrope_section": sections}
    with pytest.raises(ModelError, match="mrope_section must be three numbers with the sum 8, got"):
        config_from_hf(LLAMA | QWEN_VL | {"rope_scaling": scaling})


def test_llama4_says_where_it_does_not_turn() -> None:
    config = config_from_hf(LLAMA | LLAMA4 | {"no_rope_layers": None, "num_hidden_layers": 8})
    assert [config.rope_of(layer) is None for layer in range(8)] == [False, False, False, True] * 2


def test_granite_with_attention_alone_is_one_group() -> None:
    config = config_from_hf(LLAMA | GRANITE | {"layer_types": ["attention"] * 2, "num_local_experts": 0})
    assert config.mamba is None
    assert groups_of(GRANITE | {"layer_types": ["attention"] * 2}) == ["full_attention[0, 1]"]


def test_a_block_of_nemotron_h_that_is_an_mlp_belongs_to_the_mixer_before() -> None:
    config = config_from_hf(LLAMA | NEMOTRON)
    assert (config.layers, config.dense_layers, config.bare_layers) == (5, (0,), (1, 2, 4))
    names = ["mamba", "mlp", "mamba", "mamba", "attention", "moe", "linear_attention"]
    assert config == config_from_hf(LLAMA | NEMOTRON | {"layers_block_type": names})


FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 2.0,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 2.0,
    "key_multiplier": 2.0,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 2.0,
    "ssm_multipliers": [1, 1, 1, 1, 2],
    "mlp_multipliers": [1, 2],
    "mamba_rms_norm": True,
}


@pytest.mark.parametrize("field", FACTORS)
def test_each_factor_of_falcon_h1_changes_its_identity(field: str) -> None:
    plain = config_from_hf(LLAMA | FALCON_H1)
    assert plain.digest() == config_from_hf(LLAMA | FALCON_H1 | {field: None}).digest()
    assert plain.digest() != config_from_hf(LLAMA | FALCON_H1 | {field: FACTORS[field]}).digest()


@pytest.mark.parametrize(
    ("before", "norm"), [(True, "before gate"), (False, "after gate"), (None, "before gate")]
)
def test_the_norm_of_falcon_h1(before: bool | None, norm: str) -> None:
    given = {"mamba_rms_norm": True} | ({} if before is None else {"mamba_norm_before_gate": before})
    mamba = config_from_hf(LLAMA | FALCON_H1 | given).mamba
    assert mamba is not None
    assert mamba.norm == norm


SHARED = {
    "num_mem_blocks": 2,
    "adapter_rank": 16,
    "use_shared_attention_adapter": True,
    "use_mem_rope": True,
    "add_bias_linear": True,
    "layers_block_type": ["hybrid", "mamba", "hybrid"],
    "time_step_min": 0.1,
}


@pytest.mark.parametrize("field", SHARED)
def test_what_changes_the_identity_of_zamba2(field: str) -> None:
    plain = config_from_hf(LLAMA | ZAMBA2)
    assert plain.digest() != config_from_hf(LLAMA | ZAMBA2 | {field: SHARED[field]}).digest()


def test_shared_blocks_are_counted_once() -> None:
    """A further use of a block adds its own matrices, and the weights of a layer with Mamba-2."""
    shape = LLAMA | ZAMBA2 | {"adapter_rank": 8}
    sizes = [
        weights_bytes(config_from_hf(shape | {"layers_block_type": ["hybrid"] * count}))
        for count in (1, 2, 3)
    ]
    hidden, width, mamba = 64, 96, 128
    channels = mamba + 2 * 64
    layer = hidden + (2 * mamba + 2 * 64 + 8) * hidden + 5 * channels + 3 * 8 + mamba + mamba * hidden
    use = hidden * hidden + 8 * hidden + 2 * width * 8
    block = 2 * hidden + 4 * (2 * hidden) ** 2 - 2 * hidden * hidden + hidden + 3 * hidden * width
    assert [after - before for before, after in pairwise(sizes)] == [4 * (layer + use)] * 2
    assert sizes[0] == 4 * (100 * hidden + hidden + block + layer + use)


def test_limits_of_steps_as_transformers_writes_them() -> None:
    for limits in (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]):
        assert config_from_hf(LLAMA | GRANITE | {"time_step_limit": limits}) == config_from_hf(
            LLAMA | GRANITE
        )
    limited = config_from_hf(LLAMA | GRANITE | {"time_step_limit": [0.1, 2]}).mamba
    assert limited is not None
    assert (limited.least_step, limited.most_step) == (0.1, 2.0)


def test_kv_formats_that_a_model_cannot_have() -> None:
    with pytest.raises(ModelError, match="latents are keys and values at once: give --kv-dtype one format"):
        replace(preset("tiny-deepseek"), kv=KVFormat.parse("k8v4"))
    with pytest.raises(ModelError, match="--kv-dtype is for keys and values: this model keeps only states"):
        replace(preset("tiny-mamba2"), kv=KVFormat.parse("int8"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "names GPT2LMHeadModel; supported are LlamaForCausalLM"),
        ({"architectures": None}, "no architecture at all"),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu'"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({"architectures": ["ArceeForCausalLM"]}, "hidden_act other than relu2"),
        ({"architectures": ["FalconForCausalLM"], "alibi": True}, "alibi is not supported"),
        (FALCON_H1 | {"projectors_bias": True}, "projectors_bias is not supported with Falcon-H1"),
        (FALCON_H1 | {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must be 5 numbers"),
        (FALCON_H1 | {"key_multiplier": 0}, "key_multiplier must be a positive number, got 0"),
        (ZAMBA2 | {"use_long_context": True}, "use_long_context True is not supported with Zamba2"),
        (ZAMBA2 | {"use_conv_bias": False}, "use_conv_bias False is not supported with Zamba2"),
        (ZAMBA2 | {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06 is not supported with Zamba2"),
        (ZAMBA2 | {"layers_block_type": None}, "layers_block_type None is not supported with Zamba2"),
        (ZAMBA2 | {"layers_block_type": ["mamba"]}, "none of whose layers attends to everything"),
        (ZAMBA2 | {"num_mem_blocks": 0}, "num_mem_blocks must be a positive integer, got 0"),
        (
            ZAMBA2 | {"num_key_value_heads": 2, "use_shared_attention_adapter": True},
            "num_key_value_heads 2 is not supported with Zamba2",
        ),
        ({"architectures": ["ZambaForCausalLM"]}, "names ZambaForCausalLM; supported are"),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm is not supported"),
        ({"architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "short_factor": [1.1], "long_factor": [2.0]},
            },
            "short_factor other than 1 is not supported",
        ),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' needs the field 'factor'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq weights are not read: convert them"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "a token cannot go to 5 of 4 experts"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts must be a positive integer, got None"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        (GEMMA | {"layer_types": ["sliding_attention"]}, "layer_types does not fit 2 layers"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window must be a positive integer, got None"),
        (LLAMA4 | {"no_rope_layers": [1, 1, 1]}, "no_rope_layers has 3 entries for 2 layers"),
        (LLAMA4 | {"no_rope_layers": [1, 1]}, "a model none of whose layers attends to everything"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias is not supported with latent attention"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "only sigmoid scores chosen by noaux_tc are supported"),
        (DEEPSEEK | {"n_group": 3}, "4 experts cannot be chosen from 1 of 3 groups"),
        (DEEPSEEK | {"n_group": 4}, "1 groups of experts have fewer than 2 experts"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq other than 1"),
        (GEMMA | {"layer_types": ["mamba", "full_attention"]}, "exactly if it has layers with a"),
        (GRANITE | {"layer_types": ["mamba"] * 2}, "a model none of whose layers attends to everything"),
        (GRANITE | {"mamba_n_groups": 3}, "8 Mamba-2 heads cannot share 3 groups evenly"),
        (GRANITE | {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act other than silu"),
        (NEMOTRON | {"hybrid_override_pattern": "-M*"}, "an MLP that does not follow a mixer"),
        (NEMOTRON | {"hybrid_override_pattern": "M*X"}, "layers_block_type names X: not known"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "layers_block_type names nothing"),
        (NEMOTRON | {"mlp_hidden_act": "silu"}, "only mlp_hidden_act relu2"),
        (NEMOTRON | {"moe_latent_size": 8}, "moe_latent_size is not supported"),
        (NEMOTRON | {"mlp_bias": True}, "mlp_bias is not supported with experts"),
        ({"architectures": ["ApertusForCausalLM"]}, "hidden_act other than xielu is not supported"),
        (
            {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "conv"]},
            "a model none of whose layers attends to everything",
        ),
        (
            {
                "architectures": ["Lfm2ForCausalLM"],
                "layer_types": ["conv", "full_attention"],
                "conv_L_cache": 1,
            },
            "a convolution of 1 tokens has no state",
        ),
        (
            {"architectures": ["JambaForCausalLM"], "attn_layer_period": 3, "attn_layer_offset": 2},
            "a model none of whose layers attends to everything",
        ),
        (
            {
                "architectures": ["Mistral3ForConditionalGeneration"],
                "text_config": {**LLAMA, "model_type": "ministral3"},
            },
            "model_type 'ministral3' is not supported with Mistral 3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs the field 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["GlmForCausalLM"], "partial_rotary_factor": 0.01}, "turns no even part"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a positive number, got None"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor must be a positive number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"sliding_window": -5}, "sliding_window must be a whole number of at least 0, got -5"),
        ({"layer_types": 2}, "layer_types must be a list, got 2"),
        ({"text_config": "x"}, "text_config must be an object, got 'x'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"eos_token_id": "x"}, "the value of a field is of a wrong kind: invalid literal"),
        ({"hidden_size": 3, "head_dim": None}, "head_dim must be even for rotary embeddings, got 0"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"dtype": "int8"}, "model dtype 'int8' is not supported"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "linear_attention"],
            },
            "layer_types",
        ),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_hf(LLAMA | fields)


def test_the_digest_covers_what_is_computed() -> None:
    config = config_from_hf(LLAMA)
    assert config.digest() == config_from_hf(LLAMA | {"eos_token_id": [2, 3]}).digest()
    assert config.digest() != config_from_hf(LLAMA | {"rope_theta": 5.0}).digest()
    assert config.digest() != config_from_hf(LLAMA | {"rms_norm_eps": 1e-5}).digest()


def test_presets() -> None:
    assert preset("demo").kv_spec().page_bytes == 2 * 2 * 2 * 64 * 64 * 4
    assert preset("llama-3-8b").kv_spec().page_bytes == 8 << 20
    assert preset("tiny", dtype="bfloat16").dtype == "bfloat16"
    assert all(preset(name).eos_ids for name in PRESETS)
    with pytest.raises(ModelError, match="no preset 'huge'"):
        preset("huge")


def test_a_model_of_states_has_no_scales(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="for keys and values: this model keeps only states"):
        check_calibration(open_model("tiny-mamba2", device="cpu"), "some text", tmp_path / "ranges.json")
