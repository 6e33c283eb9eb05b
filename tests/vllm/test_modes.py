"""What else vLLM can be asked to do while the connector is there: adapters, log-probabilities of the prompt,
speculative decoding, other connectors beside it."""

from __future__ import annotations

import pytest

from tests.vllm import models
from tests.vllm.adapters import adapter
from tests.vllm.engines import Ask, Engine, greatest_difference
from tests.vllm.harness import patient, same, wait_hit, wait_stored
from tests.vllm.models import prompt

pytestmark = pytest.mark.timeout(900)
LONG = prompt(901)
ALIGNED = 896


def test_adapters_do_not_see_each_others_pages(model, daemon, tmp_path):
    adapters = [str(adapter(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]
    lora = {"enable_lora": True, "max_lora_rank": 8}
    with Engine(model(models.LLAMA), connector=patient(daemon.url), **lora) as engine:
        seen = []
        for path in (None, *adapters):
            engine.reset_prefix_cache()
            cold = engine.ask(Ask(LONG, adapter=path))
            assert cold.external_hit_tokens == 0, path
            assert same(wait_hit(engine, Ask(LONG, adapter=path), ALIGNED), cold)
            assert all(greatest_difference(cold.answers[0], other.answers[0]) > 0.01 for other in seen)
            seen.append(cold)


def test_log_probabilities_of_the_prompt_are_computed(model, daemon):
    """vLLM reads no cache for them, and what it computes is saved."""
    with Engine(model(models.LLAMA), connector=patient(daemon.url)) as engine:
        cold = engine.ask(Ask(LONG, prompt_logprobs=True))
        warm = wait_hit(engine, Ask(LONG), ALIGNED)
        assert same(warm, cold)
        engine.reset_prefix_cache()
        again = engine.ask(Ask(LONG, prompt_logprobs=True))
        assert again.external_hit_tokens == 0
        assert same(again, cold)
        assert not engine.metrics().get("vllm:tierstore_faults")


def test_drafts_that_are_rejected_are_not_saved(model, daemon):
    """Speculative decoding: what is found of an answer is what an engine without drafts computes."""
    question = Ask((prompt(40) * 30)[:901], 100)
    with Engine(model(models.LLAMA)) as engine:
        plain = engine.ask(question)
        followed = Ask([*question.tokens, *plain.answers[0].tokens, 5])
        engine.reset_prefix_cache()
        expected = engine.ask(followed)
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with Engine(model(models.LLAMA), connector=patient(daemon.url), speculative_config=drafts) as engine:
        assert engine.ask(question).answers[0].tokens == plain.answers[0].tokens
        metrics = engine.metrics()
        rejected = (
            metrics["vllm:spec_decode_num_draft_tokens"] - metrics["vllm:spec_decode_num_accepted_tokens"]
        )
        assert rejected > 0
        wait_stored(daemon, 15)
        engine.reset_prefix_cache()
        answers = engine.ask(followed)
        assert answers.external_hit_tokens == 960  # 64 of them were decoded, with drafts
        assert same(answers, expected, 1e-3)
        assert not engine.metrics().get("vllm:tierstore_faults")


def test_beside_another_connector(model, daemon, tmp_path):
    """Inside of vLLM's MultiConnector, which loads from the first connector that has something."""
    both = [
        patient(daemon.url),
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
        },
    ]
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": both},
    }
    with Engine(model(models.LLAMA), connector=connector) as engine:
        cold = engine.ask(Ask(LONG))
        assert same(wait_hit(engine, Ask(LONG), ALIGNED), cold)
        assert not engine.metrics().get("vllm:tierstore_faults")
