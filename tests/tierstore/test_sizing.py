"""What a model's KV takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tierstore.cli import app
from tierstore.errors import SpecError
from tierstore.groups import GroupRule
from tierstore.sizing import PRESETS, EmbeddingSize, embedding_size, embedding_worth, group_sizes
from tierstore.spec import KVSpec, LayerKind

LLAMA = PRESETS["llama-3-8b"]


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "qwen2.5-0.5b", "deepseek-v3", "mixtral-8x7b"])
def test_a_token_takes_what_a_page_of_the_store_does(name):
    spec = KVSpec.from_hf_config(PRESETS[name])
    assert sum(each.token_bytes for each in group_sizes(PRESETS[name])) == spec.token_bytes


def test_heads_that_are_shared_take_less():
    shape = dict(PRESETS["llama-2-7b"])
    [every] = group_sizes(shape)
    [grouped] = group_sizes({**shape, "num_key_value_heads": 8})
    assert every.token_bytes == 4 * grouped.token_bytes
    [narrow] = group_sizes(shape, dtype="float8_e4m3fn")
    assert every.token_bytes == 2 * narrow.token_bytes


@given(st.integers(1, 5000), st.sampled_from([16, 64, 256]))
def test_a_window_keeps_the_pages_that_a_hit_needs(tokens, chunk_tokens):
    """As the rule for hits has them."""
    gemma = {each.group.kind: each for each in group_sizes(PRESETS["gemma-3-27b"])}
    window = gemma[LayerKind.SLIDING_WINDOW]
    pages = GroupRule.window(1023).pages(tokens, chunk_tokens=chunk_tokens)
    page_bytes = window.token_bytes * chunk_tokens
    kept = window.session_bytes(tokens, chunk_tokens)
    assert len(pages) * page_bytes <= kept <= (len(pages) + 1) * page_bytes
    assert kept <= window.all_bytes(tokens, chunk_tokens)


def test_a_long_session_of_a_windowed_model_takes_a_part():
    sizes = group_sizes(PRESETS["gemma-3-27b"])
    kept = sum(each.session_bytes(100_000) for each in sizes)
    assert kept < 0.25 * sum(each.all_bytes(100_000) for each in sizes)


def test_a_state_does_not_grow():
    states = [each for each in group_sizes(PRESETS["qwen3-next-80b-a3b"]) if each.state_bytes]
    [state] = states
    assert state.session_bytes(10) == state.session_bytes(100_000) == state.state_bytes
    # 32 value heads of 128, with keys of 128: a matrix of float32 each, and the convolution's three inputs.
    assert state.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))


@pytest.mark.parametrize(
    ("name", "attention", "mamba", "heads", "width", "groups"),
    [("granite-4.0-h-tiny", 4, 36, 48, 64, 1), ("nemotron-h-8b", 4, 24, 128, 64, 8)],
)
def test_states_of_mamba_2(name, attention, mamba, heads, width, groups):
    """A matrix for each head, and the convolution's three inputs; blocks without a past keep nothing."""
    sizes = {each.group.kind: each for each in group_sizes(PRESETS[name])}
    attended, state = sizes[LayerKind.FULL_ATTENTION], sizes[LayerKind.RECURRENT_STATE]
    assert (len(attended.group.layers), len(state.group.layers)) == (attention, mamba)
    assert state.token_bytes == 0
    channels = heads * width + 2 * groups * 128
    assert state.state_bytes == mamba * 4 * (heads * width * 128 + 3 * channels)


def test_a_head_of_mamba_2_may_follow_from_the_hidden_size():
    shape = {**PRESETS["granite-4.0-h-tiny"], "hidden_size": 1536}
    assert group_sizes({**shape, "mamba_d_head": "auto"}) == group_sizes(shape)


@pytest.mark.parametrize(
    "blocks",
    [
        {"hybrid_override_pattern": "M-ME*"},
        {"layers_block_type": ["mamba", "mlp", "linear_attention", "moe", "attention"]},
    ],
)
def test_blocks_of_nemotron_h(blocks):
    shape = {**PRESETS["nemotron-h-8b"], "hybrid_override_pattern": None, "num_hidden_layers": None}
    sizes = group_sizes({**shape, **blocks})
    assert {each.group.kind.value: len(each.group.layers) for each in sizes} == {
        "recurrent_state": 2,
        "full_attention": 1,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be .* got 0"),
        ({"layer_types": ["full_attention"] * 31 + ["hybrid"]}, "hybrid"),
        ({"layer_types": ["full_attention"] * 31 + ["mamba"]}, "its layers with a recurrent state"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"dtype": "complex64"}, "unknown KV dtype"),
        ({"layer_types": ["chunked_attention"] * 32}, "attention_chunk_size"),
        ({"attn_layer_period": 8, "mamba_d_state": 16}, "attn_layer_period, mamba_d_state"),
        ({"hybrid_override_pattern": "M-X*"}, "'X'"),
    ],
)
def test_what_is_not_understood_is_said(change, message):
    with pytest.raises(SpecError, match=message):
        group_sizes({**LLAMA, **change})


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"model_type": "gemma2", "sliding_window": 4096}, {"full_attention": 16, "sliding_window": 16}),
        ({"attention_chunk_size": 8192}, {"full_attention": 8, "chunked_attention": 24}),
        (
            {"attention_chunk_size": 8192, "no_rope_layers": [0] + [1] * 31},
            {"full_attention": 1, "chunked_attention": 31},
        ),
        (
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28},
            {"full_attention": 28, "sliding_window": 4},
        ),
        ({"sliding_window": 4096, "use_sliding_window": False}, {"full_attention": 32}),
        ({"sliding_window": 4096}, {"sliding_window": 32}),
    ],
)
def test_which_layers_keep_what(change, layers):
    sizes = group_sizes({**LLAMA, **change})
    assert {each.group.kind.value: len(each.group.layers) for each in sizes} == layers


def test_the_command(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": dict(PRESETS["gemma-3-27b"])}))
    run = CliRunner().invoke
    by_name = run(app, ["size", "gemma-3-27b", "--json"])
    by_file = run(app, ["size", str(tmp_path), "--json"])
    named, read = json.loads(by_name.output), json.loads(by_file.output)
    assert named["groups"] == read["groups"]
    assert named["session_bytes"] < named["all_tokens_bytes"]
    table = run(app, ["size", "llama-3-8b", "--tokens", "8192", "--batch", "2"])
    assert "128 KiB" in table.output
    assert "1 GiB" in table.output


def test_cross_attention_has_a_size_by_row():
    """Llama 3.2 Vision cuts an image into at most 4 tiles of 1,601 rows."""
    full, cross = group_sizes(PRESETS["llama-3.2-11b-vision"])
    assert (full.token_bytes, full.row_bytes, len(full.group.layers)) == (128 << 10, 0, 32)
    assert (cross.token_bytes, cross.row_bytes, cross.session_bytes(1000)) == (0, 32 << 10, 0)
    shown = CliRunner().invoke(app, ["size", "llama-3.2-11b-vision"]).output
    assert "cross attention (not in a session): 32 KiB a row, 202 MiB an input of 6,404 rows" in shown


def test_an_image_has_a_size_of_its_own(tmp_path):
    """Gemma 3 has 256 rows for an image, and Qwen3-VL four outputs of its encoder in a row."""
    gemma: dict[str, Any] = {"text_config": {**PRESETS["gemma-3-27b"], "hidden_size": 5376}}
    assert embedding_size(gemma) is None
    gemma |= {"vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256}
    assert embedding_size(gemma) == EmbeddingSize(2 * 5376, 256)
    deep = {**gemma, "vision_config": {"deepstack_visual_indexes": [8, 16, 24]}, "mm_tokens_per_image": None}
    assert embedding_size(deep) == EmbeddingSize(4 * 2 * 5376, None)
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    run = CliRunner().invoke
    shown = run(app, ["size", str(tmp_path), "--dtype", "int8"]).output  # the dtype of KV
    assert "embeddings (not in a session): 10.5 KiB a row, 2.62 MiB an input of 256 rows" in shown
    document = json.loads(run(app, ["size", str(tmp_path), "--json"]).output)
    assert document["embedding"] == {"row_bytes": 10752, "rows": 256, "input_bytes": 256 * 10752}
    (tmp_path / "config.json").write_text(json.dumps(deep))
    assert "embeddings (not in a session): 42 KiB a row\n" in run(app, ["size", str(tmp_path)]).output


def test_weights_leave_room_for_sessions(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(PRESETS["llama-3-8b"])))
    run = CliRunner().invoke
    refused = run(app, ["size", str(tmp_path), "--device", "2GiB"])
    assert "--device needs weights" in str(refused.exception or refused.output)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    session = ["size", str(tmp_path), "--tokens", "8192", "--json"]
    found = json.loads(run(app, [*session, "--device", "4GiB"]).output)
    assert found["weights_bytes"] == 1 << 30
    assert found["sessions_that_fit"]["hbm"] == (3 << 30) // found["session_bytes"]
    assert "1 GiB" in run(app, session[:-1]).output
    refused = run(app, [*session, "--device", "1GiB"])
    assert "the weights take 1 GiB" in str(refused.exception or refused.output)


def test_every_preset_has_a_size():
    for name, config in PRESETS.items():
        assert sum(each.session_bytes(1000) for each in group_sizes(config)) > 0, name


@pytest.mark.parametrize(
    "fields", [{"layer_types": ["conv", "conv", "full_attention", "conv"]}, {"full_attn_idxs": [2]}]
)
def test_states_of_short_convolutions(fields):
    """LFM2 keeps the last inputs of a convolution, and no matrix."""
    shape = {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 4, "conv_L_cache": 3, **fields}
    sizes = {each.group.kind: each for each in group_sizes(shape)}
    assert sizes[LayerKind.FULL_ATTENTION].group.layers == (2,)
    assert sizes[LayerKind.RECURRENT_STATE].state_bytes == 3 * 2 * 4096 * 4


def test_states_of_mamba_1():
    """Jamba keeps a column for each channel, and the last inputs of a convolution."""
    shape = {
        **LLAMA,
        "model_type": "jamba",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_dt_rank": 256,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    }
    sizes = {each.group.kind: each for each in group_sizes(shape)}
    assert sizes[LayerKind.FULL_ATTENTION].group.layers == (4, 12, 20, 28)
    assert sizes[LayerKind.RECURRENT_STATE].state_bytes == 28 * 8192 * (16 + 3) * 4


def test_zamba2_attends_with_twice_its_width():
    """A layer with a shared block before it keeps keys and values, and a state."""
    shape = {
        **LLAMA,
        "model_type": "zamba2",
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "layers_block_type": ["mamba", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 80,
        "mamba_expand": 2,
        "mamba_d_state": 64,
        "mamba_ngroups": 2,
        "mamba_d_conv": 4,
        "head_dim": 99,  # ignored, as in transformers
    }
    sizes = {each.group.kind: each for each in group_sizes(shape)}
    attended, state = sizes[LayerKind.FULL_ATTENTION], sizes[LayerKind.RECURRENT_STATE]
    assert (attended.group.layers, attended.group.head_dim) == ((1, 4), 160)
    assert (state.group.layers, state.state_bytes) == (
        (0, 2, 3, 5),
        4 * 4 * (5120 * 64 + 3 * (5120 + 2 * 2 * 64)),
    )
    with pytest.raises(SpecError, match="hybrid"):
        group_sizes({**shape, "model_type": "zamba"})


_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896}
_QWEN = {"depth": 32, "hidden_size": 1280, "hidden_act": "silu", "spatial_merge_size": 2}


@pytest.mark.parametrize(
    ("more", "text", "worth"),
    [
        (
            {"vision_config": {**_SIGLIP, "patch_size": 14}, "mm_tokens_per_image": 256},
            (62, 32, 16, 5376, 21504),
            4,
        ),
        ({"vision_config": {**_QWEN, "intermediate_size": 3420}}, (80, 64, 8, 8192, 29568), 0),
        ({"vision_config": {**_QWEN, "intermediate_size": 3420}}, (28, 28, 4, 3584, 18944), 2),
        ({"vision_config": {"embed_dim": 1280, "depth": 32, "mlp_ratio": 4}}, (28, 28, 4, 3584, 18944), 0),
        ({"vision_config": _QWEN}, (28, 28, 4, 3584, 18944), 0),
        ({"vision_config": {**_QWEN, "mlp_ratio": "wide"}}, (28, 28, 4, 3584, 18944), 0),
        ({"vision_config": 7}, (28, 28, 4, 3584, 18944), 0),
        ({}, (28, 28, 4, 3584, 18944), 0),
    ],
)
def test_a_row_of_a_large_encoder_is_worth_more_than_kv_of_a_small_model(more, text, worth):
    names = (
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
    )
    shape = {**dict(zip(names, text, strict=True)), "head_dim": 128, "dtype": "bfloat16"}
    assert embedding_worth({**more, "text_config": shape}) == worth


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_gguf_file_has_the_size_of_a_folder_with_its_configuration(
    architecture: str, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(12)
    writer.add_embedding_length(96)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    config: dict[str, Any] = {
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
    }
    if architecture == "gemma3":
        writer.add_sliding_window(512)
        config |= {"sliding_window": 512, "sliding_window_pattern": 6}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = [CliRunner().invoke(app, ["size", str(each), "--json"]) for each in (file, tmp_path)]
    of_file, of_folder = (json.loads(each.stdout) for each in sizes)
    assert of_file["groups"] == of_folder["groups"]
    assert of_file["weights_bytes"] == file.stat().st_size


@pytest.mark.parametrize(
    ("data", "message"), [(b"GGUF", "cannot be read as GGUF"), (b"{}", "begin with GGUF")]
)
def test_a_damaged_gguf_file_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    refused = CliRunner().invoke(app, ["size", str(file)])
    assert refused.exit_code
    assert message in str(refused.exception or refused.output)
