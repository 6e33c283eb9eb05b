"""Pages of another model, configuration or kind of weights are never found, and unsupported models are
refused with one sentence."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.tiny_models import reference_model, rewrite_json
from tests.transformers.asking import ask, loaded, prompt, same
from tierstore.errors import UsageError
from tierstore_connectors.transformers import TierStoreCache


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    reference_model("llama3").save_pretrained(folder)
    return folder


def open_model(folder, **options):
    options.setdefault("attn_implementation", "eager")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def found(model, make_cache):
    """Tokens of a prompt that a new cache of ``model`` loads."""
    cache = make_cache(model)
    ids = prompt(100)
    expected = ask(model, ids, new=2)
    assert same(ask(model, ids, cache, new=2), expected)
    assert cache.flush(60)
    tokens = loaded(cache)
    cache.close()
    return tokens


def test_the_same_files_elsewhere_and_other_files_in_the_same_place(folder, tmp_path, make_cache):
    assert found(open_model(folder), make_cache) == 0
    assert found(open_model(folder.rename(tmp_path / "elsewhere")), make_cache) == 96
    other = copy.deepcopy(reference_model("llama3"))
    with torch.no_grad():
        other.lm_head.weight[5, 5] += 1e-3  # one number, which no sample has
    other.save_pretrained(folder)
    assert found(open_model(folder), make_cache) == 0


@pytest.mark.parametrize("change", ["rope", "context", "dtype", "attention", "namespace", "in memory"])
def test_anything_that_changes_kv_is_a_miss(change, folder, make_cache):
    assert found(open_model(folder), make_cache) == 0
    assert found(open_model(folder), make_cache) == 96
    options, settings = {}, {}
    if change == "rope":
        rope = reference_model("llama3").config.to_dict()["rope_parameters"]
        rewrite_json(folder / "config.json", rope_parameters={**rope, "factor": 4.0})
    elif change == "context":
        rewrite_json(folder / "config.json", max_position_embeddings=4096)
    elif change == "dtype":
        options["dtype"] = torch.bfloat16
    elif change == "attention":
        options["attn_implementation"] = "sdpa"
    elif change == "namespace":
        settings["namespace"] = "tenant"
    model = open_model(folder, **options)
    if change == "in memory":
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight.mul_(1.01)  # as a merged adapter does
    cache = make_cache(model, **settings)
    ask(model, prompt(100), cache, new=2)
    assert cache.flush(60)
    assert loaded(cache) == 0


def test_quantised_weights_are_another_model(folder, make_cache):
    """torch's own weight-only rounding stands for any method: the tensors in memory differ."""
    assert found(open_model(folder), make_cache) == 0
    model = open_model(folder)
    with torch.no_grad():
        for weight in model.parameters():
            scale = weight.abs().amax() / 127
            weight.copy_((weight / scale).round() * scale)
    assert found(model, make_cache) == 0
    assert found(model, make_cache) == 96


def test_models_without_files_count_by_their_weights(make_cache):
    model = copy.deepcopy(reference_model("qwen3"))
    assert found(model, make_cache) == 0
    assert found(copy.deepcopy(model), make_cache) == 96
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1e-3
    assert found(model, make_cache) == 0


def test_what_is_refused(tmp_path, folder):
    model = reference_model("llama3")
    with pytest.raises(UsageError, match="has no 'chunks'"):
        TierStoreCache(model, tmp_path / "kv", chunks=3)
    with pytest.raises(UsageError, match="hash_weights"):
        TierStoreCache(model, tmp_path / "kv", hash_weights="none")
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    rewrite_json(folder / "config.json", rope_parameters=rope)
    with pytest.raises(UsageError, match="RoPE of type 'dynamic'"):
        TierStoreCache(open_model(folder), tmp_path / "kv")
    whisper = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    with pytest.raises(UsageError, match="encoder-decoder"):
        TierStoreCache(transformers.T5ForConditionalGeneration(whisper), tmp_path / "kv")
    hybrid = transformers.FalconH1Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
    )
    with pytest.raises(UsageError, match="layers of class LinearAttentionAndFullAttentionLayer"):
        TierStoreCache(transformers.FalconH1ForCausalLM(hybrid).eval(), tmp_path / "kv")
    with pytest.raises(UsageError, match="layers of class LinearAttentionAndFullAttentionLayer"):
        TierStoreCache(reference_model("zamba2"), tmp_path / "kv")
    assert not (tmp_path / "kv").exists()
