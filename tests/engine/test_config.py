"""What is read from ``config.json``, in both of transformers' spellings, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tierstore_engine.config import RopeConfig, config_from_hf
from tierstore_engine.errors import ModelError
from tierstore_engine.presets import PRESETS, preset

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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "names GPT2LMHeadModel; supported are LlamaForCausalLM"),
        ({"architectures": None}, "no architecture at all"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs the field 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
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
