"""The adapter to vLLM's own OffloadingConnector: vLLM decides, our daemon keeps. And with it as an oracle our
own connector, which decides for itself."""

from __future__ import annotations

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine, EngineDiedError, connector_options, greatest_difference
from tests.vllm.harness import EXACT, same, wait_hit
from tests.vllm.models import prompt

PROMPT = prompt(901)
BRANCH = [*PROMPT[:480], *prompt(200, seed=7)]  # 680 tokens
SHORT = Ask(prompt(40, seed=99), max_tokens=2)


def offloading_options(url, **extra):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TierStoreOffloadingSpec",
            "spec_module_path": "tierstore_connectors.vllm_offloading",
            "store": url,
            "wait_s": 30,  # a slow machine is not a hung daemon
            **extra,
        },
    }


def cold_and_warm(engine, expected):
    """Both prompts answered with as many tokens from the store as ``expected``, and as they were cold."""
    cold = [engine.ask(Ask(PROMPT)), engine.ask(Ask(BRANCH))]
    engine.ask(SHORT)  # vLLM begins to store what a step has computed with the step after it
    warm = [
        wait_hit(engine, Ask(tokens), hit) for tokens, hit in zip((PROMPT, BRANCH), expected, strict=True)
    ]
    assert all(map(same, warm, cold))
    return [answers.answers[0] for answers in warm]


def test_blocks_are_there_for_the_next_engine_and_a_dead_daemon_is_a_miss(model, daemon):
    with Engine(model(models.LLAMA), connector=offloading_options(daemon.url)) as engine:
        first = cold_and_warm(engine, [896, 672])
        engine.ask(SHORT)
        daemon.wait_written()
        daemon.kill()
        engine.reset_prefix_cache()
        answered = engine.ask(Ask(PROMPT))
        assert answered.external_hit_tokens == 0
        assert greatest_difference(answered.answers[0], first[0]) <= EXACT
    daemon.start()
    with Engine(model(models.LLAMA), connector=offloading_options(daemon.url)) as engine:
        answered = wait_hit(engine, Ask(PROMPT), 896)
        assert greatest_difference(answered.answers[0], first[0]) <= EXACT
    other = offloading_options(daemon.url, namespace="other weights")
    with Engine(model(models.LLAMA), connector=other) as engine:
        assert engine.ask(Ask(PROMPT)).external_hit_tokens == 0


def test_windows_and_our_own_connector_beside_the_oracle(model, daemon):
    with Engine(model(models.GEMMA), connector=offloading_options(daemon.url)) as engine:
        oracle = cold_and_warm(engine, [896, 672])
    with Engine(model(models.GEMMA), connector=connector_options(daemon.url)) as engine:
        ours = cold_and_warm(engine, [896, 640])  # chunks of 64 tokens
    assert max(map(greatest_difference, ours, oracle)) <= EXACT


def test_more_blocks_to_a_chunk_are_refused(model):
    options = offloading_options("ipc:///nowhere/s", blocks_per_chunk=2)
    with pytest.raises(EngineDiedError, match="leave blocks_per_chunk at 1"):
        Engine(model(models.LLAMA), connector=options)
