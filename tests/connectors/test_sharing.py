"""Pages are shared by engines that compute the same numbers, and by no others."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore_connectors.common import sharing
from tierstore_connectors.common.sharing import shared_identity

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "5.0.0",
}


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Where digests of files are remembered: not in the cache of who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path):
    """``folder(rope_theta=1.0)``: a new model folder whose config.json has these changes."""

    def make(weight: float = 1.0, **changes: object):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        save_file({"w": np.full(8, weight, np.float32)}, place / "model.safetensors")
        return place

    return make


def identity(folder, **changes) -> Identity:
    return shared_identity(folder, **{"dtype": "float32", "chunk_tokens": 64, **changes})


def test_equal_files_have_one_identity_wherever_they_are(folder):
    other = folder(transformers_version="4.57.1", torch_dtype="bfloat16", use_cache=False)
    (other / "README.md").write_text("another copy")
    (other / "tokenizer.json").write_text("{}")
    assert identity(folder()) == identity(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10001.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        {"rms_norm_eps": 1e-6},
        {"attention_bias": True},
        {"model_type": "qwen2"},
        {"num_key_value_heads": 1},
        {"max_position_embeddings": 128},
        {"weight": 2.0},
    ],
    ids=str,
)
def test_what_changes_kv_is_another_identity(folder, changes):
    assert identity(folder(**changes)).digest != identity(folder()).digest


@pytest.mark.parametrize(
    "changes", [{"dtype": "bfloat16"}, {"chunk_tokens": 128}, {"namespace": "other"}], ids=str
)
def test_what_the_engine_chooses_is_in_the_identity(folder, changes):
    model = folder()
    assert identity(model, **changes).digest != identity(model).digest


def test_pages_of_another_form_are_other_pages(folder, monkeypatch):
    model = folder()
    before = identity(model)
    monkeypatch.setattr(sharing, "FORM", "2: keys before RoPE")
    assert identity(model).digest != before.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_multiplier": 2.0}, "config.json has key_multiplier, which may change KV"),
        ({"quantization_config": {}}, "config.json has quantization_config, which may change KV"),
        ({"use_bidirectional_attention": True}, "config.json has use_bidirectional_attention, which may"),
        ({"model_type": "falcon"}, "pages of model_type 'falcon' are not shared"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE must be one of .* got 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE must be one of .* got 'dynamic'"),
        ({"num_attention_heads": None}, "num_attention_heads must be a positive integer"),
    ],
    ids=str,
)
def test_what_is_not_known_refuses_sharing_and_says_what_to_do(folder, changes, message):
    with pytest.raises(UsageError, match=f"share_engines: .*{message}.*leave share_engines out"):
        identity(folder(**changes))


def test_a_model_without_files_is_refused(folder, tmp_path):
    for place in (None, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="needs a local folder"):
            identity(place)
    model = folder()
    (model / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="has no weights"):
        identity(model)
    with pytest.raises(UsageError, match="KV must be in float32, bfloat16, float16, got float8_e5m2"):
        identity(folder(), dtype="float8_e5m2")
