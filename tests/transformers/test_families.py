"""Every family of the bundled engine: logits with hits equal those of a run without a store."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.portions import chosen
from tests.tiny_models import ARCHITECTURES, GROUPED, LLAMA_LIKE, VARIANTS, reference_model
from tests.transformers.asking import CHUNK, MAX_LOGIT_DIFF, ask, loaded, prompt, same
from tierstore.errors import UsageError

TOKENS = 100  # more than two windows, and more than two attention chunks


REFUSED = {"phi4-mini", "hunyuan"}  # longrope and dynamic: keys depend on the prompt's length
RESTARTING = {"jamba"}  # transformers computes the rest of a prompt from an empty state
LIKE_LLAMA = [name for name in LLAMA_LIKE if name not in REFUSED]
BESIDE = {"falcon-h1", "falcon-h1-normed", "zamba2", "zamba2-plain"}  # refused: see test_identity.py
ALONE = [name for name in [*ARCHITECTURES, *GROUPED] if name not in RESTARTING | BESIDE]
FAMILIES = chosen([*ALONE, *LIKE_LLAMA], *ALONE, "falcon", "cohere2")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_and_a_restart(name, make_cache):
    model = reference_model(name)
    first = prompt(TOKENS)
    cold = ask(model, first)
    cache = make_cache(model)
    assert same(ask(model, first, cache), cold)
    assert loaded(cache) == 0
    longer = torch.cat([cold.sequences, prompt(20, seed=8)], 1)
    expected = ask(model, longer)
    assert same(ask(model, longer, cache), expected)  # continues from what the cache holds
    assert loaded(cache) == 0
    assert cache.flush(60)
    cache.close()

    again = make_cache(model)
    assert same(ask(model, first, again), cold)
    assert loaded(again) >= TOKENS - TOKENS % CHUNK
    assert same(ask(model, longer, make_cache(model)), expected)
    assert loaded(again) >= longer.shape[1] // CHUNK * CHUNK - CHUNK


@pytest.mark.parametrize("name", sorted(RESTARTING))
def test_models_that_restart_within_a_prompt_are_refused(name, make_cache):
    with pytest.raises(UsageError, match="Mamba-1"):
        make_cache(reference_model(name))


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_of_models_that_decode_otherwise(name, make_cache):
    """transformers does not limit the steps of Mamba-2 in decoding, so only prompts are compared."""
    model = reference_model(name)
    first = prompt(TOKENS)
    cold = ask(model, first, new=1)
    assert same(ask(model, first, make_cache(model), new=1), cold)
    again = make_cache(model)
    assert same(ask(model, first, again, new=1), cold)
    assert loaded(again) == TOKENS - TOKENS % CHUNK


@pytest.mark.parametrize("name", ["qwen3-next", "gemma3"])
def test_prompts_that_diverge(name, make_cache):
    """A state is saved where a prompt diverges from one in the store, for the next that diverges there."""
    model = reference_model(name)
    begin = prompt(70)
    for seed, expected in ((1, 0), (2, 0), (3, 64)):
        ids = torch.cat([begin, prompt(30, seed)], 1)
        cache = make_cache(model)
        loaded(cache)
        assert same(ask(model, ids, cache), ask(model, ids))
        if name == "qwen3-next":
            assert loaded(cache) == expected
        assert cache.flush(60)


def test_the_bits_of_bfloat16(make_cache):
    model = copy.deepcopy(reference_model("gemma3")).to(torch.bfloat16)
    ids = prompt(TOKENS)
    cache = make_cache(model)
    ask(model, ids, cache, new=1)
    assert cache.flush(60)
    other = make_cache(model)
    columns = other.load(ids)
    assert columns == TOKENS - TOKENS % CHUNK
    kept = other.layers[0].keys.shape[-2]
    for layer, saved in zip(other.layers, cache.layers, strict=True):
        tail = TOKENS - columns
        for tensor, right in ((layer.keys, saved.keys), (layer.values, saved.values)):
            assert tensor.dtype is torch.bfloat16
            overlap = tensor[:, :, max(tensor.shape[-2] - (kept - tail), 0) :]
            assert torch.equal(overlap, right[:, :, -tail - overlap.shape[-2] : -tail])


@pytest.mark.parametrize("name", ["llama3", "gemma3", "granite-hybrid"])
def test_load_and_save_around_a_forward_pass(name, make_cache):
    model = reference_model(name)
    ids = prompt(TOKENS)
    with torch.inference_mode():
        expected = model(ids).logits
        cache = make_cache(model)
        assert cache.load(ids) == 0
        model(ids[:, :96], cache=cache)
        cache.save()
        assert cache.flush(60)
        other = make_cache(model)
        columns = other.load(ids)
        assert columns == 96
        found = model(ids[:, columns:], cache=other).logits
    assert (found - expected[:, columns:]).abs().max() <= MAX_LOGIT_DIFF
