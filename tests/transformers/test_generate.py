"""The ways in which ``generate`` uses a cache: batches, beams, drafts, conversations, and calls that the
cache has to stay out of."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.tiny_models import reference_model
from tests.transformers.asking import CHUNK, ask, loaded, padded, prompt, same

KINDS = ["llama3", "gemma3", "qwen3-next"]


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_with_different_hits(name, make_cache):
    model = reference_model(name)
    long, short = prompt(100, 1), prompt(84, 2)
    cache = make_cache(model)
    ask(model, long, cache)
    ask(model, short, cache)
    assert cache.flush(60)
    batch = padded(long, short, torch.cat([short[:, :40], prompt(60, 3)], 1))
    expected = ask(model, batch.pop("input_ids"), **batch)
    for rows in (1, 2):  # the second time everything is held
        batch = padded(long, short, torch.cat([short[:, :40], prompt(60, 3)], 1))
        other = make_cache(model)
        loaded(other)
        assert same(ask(model, batch.pop("input_ids"), other, **batch), expected)
        got = loaded(other)
        if name == "llama3":
            assert got == (40 + 24 + 40 if rows == 1 else 96 + 80 + 96)
        assert other.flush(60)


@pytest.mark.parametrize("name", KINDS)
def test_padded_prompts_are_found_alone(name, make_cache):
    model = reference_model(name)
    long, short = prompt(100, 1), prompt(75, 2)
    batch = padded(long, short)
    cache = make_cache(model)
    ask(model, batch.pop("input_ids"), cache, **batch)
    assert cache.flush(60)
    for ids in (long, short):
        other = make_cache(model)
        loaded(other)
        assert same(ask(model, ids, other), ask(model, ids))
        assert loaded(other) >= (ids.shape[1] - 1) // CHUNK * CHUNK


@pytest.mark.parametrize("name", KINDS)
def test_beams(name, make_cache):
    model = reference_model(name)
    ids = prompt(80, rows=2)
    beams = {"num_beams": 3, "num_return_sequences": 2, "output_logits": False, "output_scores": True}
    expected = ask(model, ids, **beams)
    for tokens in (0, 64):
        cache = make_cache(model)
        loaded(cache)
        found = ask(model, ids, cache, **beams)
        assert torch.equal(found.sequences, expected.sequences)
        assert (found.sequences_scores - expected.sequences_scores).abs().max() <= 1e-4
        assert loaded(cache) >= 6 * tokens
        assert cache.flush(60)
    best = found.sequences[:1]
    longer = torch.cat([best, prompt(9)], 1)
    assert same(ask(model, longer, make_cache(model)), ask(model, longer))


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
@pytest.mark.parametrize("drafts", ["prompt lookup", "assistant"])
def test_assisted_generation(name, drafts, make_cache):
    model = reference_model(name)
    if drafts == "assistant":
        options = {"assistant_model": copy.deepcopy(model)}
        with torch.no_grad():
            options["assistant_model"].lm_head.weight.add_(0.05)
    else:
        options = {"prompt_lookup_num_tokens": 4}
    ids = prompt(40).repeat(1, 2)
    expected = ask(model, ids, new=40)
    cache = make_cache(model)
    found = ask(model, ids, cache, new=40, **options)
    assert torch.equal(found.sequences, expected.sequences)
    longer = torch.cat([found.sequences, prompt(20)], 1)
    assert torch.equal(
        ask(model, longer, cache, new=20, **options).sequences, ask(model, longer, new=20).sequences
    )
    assert cache.flush(60)
    other = make_cache(model)
    loaded(other)
    assert torch.equal(ask(model, ids, other, new=40, **options).sequences, expected.sequences)
    assert loaded(other) >= 64
    assert same(ask(model, longer, make_cache(model)), ask(model, longer))
    assert loaded(other) >= 128


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_chunks(name, make_cache):
    model = reference_model(name)
    ids = prompt(100)
    expected = ask(model, ids)
    for _ in range(2):
        cache = make_cache(model)
        loaded(cache)
        assert same(ask(model, ids, cache, prefill_chunk_size=32), expected)
        assert cache.flush(60)
    if name == "llama3":
        assert loaded(cache) >= 90  # the last token of each part is computed


@pytest.mark.parametrize("name", KINDS)
def test_another_prompt_and_a_shorter_one(name, make_cache):
    model = reference_model(name)
    cache = make_cache(model)
    other = torch.cat([prompt(50), prompt(60, 3)], 1)
    for ids in (prompt(100), other, other[:, :70], other[:, :70], prompt(100, 5, rows=2), prompt(100)):
        assert same(ask(model, ids, cache), ask(model, ids))


def test_only_the_new_tokens_of_a_conversation(llama, make_cache):
    cache = make_cache(llama)
    begun = ask(llama, prompt(50), cache)
    longer = torch.cat([begun.sequences, prompt(20, 3)], 1)
    new = longer[:, cache.get_seq_length() :]
    found = ask(llama, new, cache, attention_mask=torch.ones_like(longer))
    expected = ask(llama, longer)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found.logits, expected.logits, strict=True))
    assert cache.flush(60)
    other = make_cache(llama)
    loaded(other)
    assert same(ask(llama, longer, other), expected)
    assert loaded(other) >= 64


class Interruption(Exception):
    pass


@pytest.mark.parametrize("name", KINDS)
def test_an_interruption(name, make_cache):
    """In the middle of a forward pass: the layers then have different lengths."""
    model = reference_model(name)
    ids = prompt(100)
    expected = ask(model, ids)
    cache = make_cache(model)
    calls = 0

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Interruption

    handle = model.model.layers[-1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(Interruption):
            ask(model, ids, cache)
        assert same(ask(model, ids, cache), expected)
    finally:
        handle.remove()
    assert cache.flush(60)
    assert same(ask(model, ids, make_cache(model)), expected)


@pytest.mark.parametrize("kind", ["embeddings", "positions", "mask", "training", "weights"])
def test_calls_that_bypass_the_store(kind, make_cache, monkeypatch):
    model = copy.deepcopy(reference_model("llama3"))
    ids = prompt(100)
    make_cache(model).flush(60)
    before = make_cache(model)
    ask(model, ids, before)
    assert before.flush(60)
    cache = make_cache(model)
    loaded(cache)
    saved = cache.counters()["saved_tokens"]
    if kind == "embeddings":
        options = {"inputs_embeds": model.get_input_embeddings()(prompt(100, 9))}
    elif kind == "positions":
        options = {"position_ids": torch.arange(100)[None] + 3}
    elif kind == "mask":
        mask = torch.ones_like(ids)
        mask[0, 20:30] = 0
        options = {"attention_mask": mask}
    else:
        options = {}
    if kind == "training":
        model.train()
    if kind == "weights":
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    expected = ask(model, ids, **options)
    assert same(ask(model, ids, cache, **options), expected)
    assert cache.flush(60)
    counters = cache.counters()
    assert loaded(cache) == 0
    assert counters["saved_tokens"] == saved
    assert counters["bypassed"] == 1
    assert cache.errors.counts["bypass"] == 1


def test_a_copy_of_a_model_does_not_use_its_caches(llama, make_cache):
    cache = make_cache(llama)
    ids = prompt(100)
    ask(llama, ids, cache)
    assert cache.flush(60)
    saved = cache.counters()["saved_tokens"]
    other = copy.deepcopy(llama)
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(2)
    cache.reset()
    assert same(ask(other, ids, cache), ask(other, ids))
    assert cache.flush(60)
    assert cache.counters()["saved_tokens"] == saved
    assert loaded(cache) == 0
    mine = make_cache(other, "of another")
    ask(other, ids, mine)
    assert mine.flush(60)
    assert mine.counters()["saved_tokens"] > 0


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_of_a_cache(name, make_cache):
    model = reference_model(name)
    begin = prompt(70)
    cache = make_cache(model)
    ask(model, begin, cache)
    other = copy.deepcopy(cache)
    longer = torch.cat([begin, prompt(20, 3)], 1)
    answers = [torch.cat([ask(model, begin).sequences, prompt(20, seed)], 1) for seed in (4, 5)]
    assert same(ask(model, answers[0], cache), ask(model, answers[0]))
    assert same(ask(model, answers[1], other), ask(model, answers[1]))
    other.close()
    assert same(ask(model, longer, cache), ask(model, longer))


def test_tokens_that_were_taken_back_are_not_saved(llama, make_cache):
    """Chunks that were saved with them are saved again with those that replaced them."""
    ids, other = prompt(100), torch.cat([prompt(70), prompt(40, 3)], 1)
    cache = make_cache(llama)
    with torch.inference_mode():
        cache.load(ids)
        llama(ids, cache=cache)
        cache.save()
        cache.crop(-(100 - 70))
        llama(other[:, 70:], cache=cache)
        cache.save()
    assert cache.flush(60)
    found = make_cache(llama)
    assert found.load(torch.cat([other, prompt(3)], 1)) == 96
