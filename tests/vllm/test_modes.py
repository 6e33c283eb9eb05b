"""What else vLLM can be asked to do while the connector is there: adapters, log-probabilities of the prompt,
speculative decoding, other connectors beside it."""

from __future__ import annotations

import os
import shutil

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


def test_an_adapter_that_is_overwritten_is_another_one(model, daemon, tmp_path):
    path = tmp_path / "a"
    options = {"enable_lora": True, "max_lora_rank": 8, "connector": patient(daemon.url)}
    ask = Ask(LONG, adapter=str(path))
    with Engine(model(models.LLAMA), **options) as engine:
        adapter(path, seed=1)
        old = engine.ask(ask)
        assert same(wait_hit(engine, ask, ALIGNED), old)
        shutil.rmtree(path)
        adapter(path, seed=2)
        engine.reset_prefix_cache()
        unknown = engine.ask(ask)  # vLLM has the old one in memory still
        assert unknown.external_hit_tokens == 0
        assert same(unknown, old)
        assert "have changed since its first request" in engine.log
    with Engine(model(models.LLAMA), **options) as engine:
        new = engine.ask(ask)
        assert new.external_hit_tokens == 0
        assert greatest_difference(new.answers[0], old.answers[0]) > 0.01
        assert same(wait_hit(engine, ask, ALIGNED), new)


def test_weights_are_known_by_their_files_not_by_their_path(model, daemon, tmp_path):
    mounted = tmp_path / "elsewhere"
    shutil.copytree(model(models.LLAMA), mounted)
    with Engine(model(models.LLAMA), connector=patient(daemon.url)) as engine:
        cold = engine.ask(Ask(LONG))
        wait_hit(engine, Ask(LONG), ALIGNED)
    with Engine(mounted, connector=patient(daemon.url)) as engine:
        warm = engine.ask(Ask(LONG))
        assert warm.external_hit_tokens == ALIGNED
        assert same(warm, cold)
    weights = mounted / "model.safetensors"
    status = weights.stat()
    data = bytearray(weights.read_bytes())
    data[len(data) // 3] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # of one size and time
    with Engine(mounted, connector=patient(daemon.url)) as engine:
        assert engine.ask(Ask(LONG)).external_hit_tokens == 0


def test_a_producer_saves_and_a_consumer_loads(model, daemon):
    others = Ask(prompt(901, seed=5))
    producer = {**patient(daemon.url), "kv_role": "kv_producer"}
    with Engine(model(models.LLAMA), connector=producer) as engine:
        cold = engine.ask(Ask(LONG))
        wait_stored(daemon, 14)
        engine.reset_prefix_cache()
        again = engine.ask(Ask(LONG))
        assert again.external_hit_tokens == 0
        assert not engine.metrics().get("vllm:tierstore_lookups")
    consumer = {**patient(daemon.url), "kv_role": "kv_consumer"}
    with Engine(model(models.LLAMA), connector=consumer) as engine:
        assert same(wait_hit(engine, Ask(LONG), ALIGNED), cold)
        engine.ask(others)
        assert not engine.metrics().get("vllm:tierstore_saves")
    assert daemon.stats().store.pages == 14


def test_mla(model, daemon):
    """On processors where vLLM computes the prompts of MLA models in one piece there is no cache; on those
    with AMX (for 16-bit types) there is one."""
    with Engine(
        model(models.MLA), connector=patient(daemon.url), block_size=None, dtype="bfloat16"
    ) as engine:
        without = "prefix caching to be disabled" in engine.log
        cold = engine.ask(Ask(LONG))
        # Of our hit and vLLM's own, the rest is computed alike; a cold prompt's rounds otherwise in 16 bits.
        ours = cold if without else wait_hit(engine, Ask(LONG), ALIGNED)
        again = engine.ask(Ask(LONG))
        assert same(again, ours)
        if without:
            assert again.external_hit_tokens == 0
            assert (
                "runs without the cache: vLLM cannot continue prompts of MLA models from a cached prefix"
                in engine.log
            )
    assert (daemon.stats().store.pages == 0) == without


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
        assert not engine.metrics().get("vllm:tierstore_errors")


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
        assert not engine.metrics().get("vllm:tierstore_errors")


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
        assert not engine.metrics().get("vllm:tierstore_errors")
