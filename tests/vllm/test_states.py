"""A model with recurrent states beside full attention (Qwen3-Next), with a real vLLM: a hit ends at a block's
end at which vLLM has kept the states, and what is computed behind it equals what is computed without a cache,
and with vLLM's own."""

from __future__ import annotations

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine, connector_options
from tests.vllm.harness import patient, same, wait_hit, wait_stored
from tests.vllm.models import prompt

pytestmark = pytest.mark.timeout(900)
LONG = prompt(901)
BLOCK = 384  # tokens: vLLM makes blocks of attention as large as a state
STATES = 3  # groups: each of the three layers has one of its own
ATTENTION_BYTES = BLOCK * 2 * 2 * 128 * 2  # K and V of two heads of 128 in bfloat16
STATE_BYTES = 3 * 1024 * 2 + 4 * 128 * 128 * 4  # of a convolution in bfloat16, of four heads in float32
LAST = 2 * BLOCK  # at whose end vLLM keeps the states of LONG


@pytest.fixture
def engine_of(model):
    """``engine_of(connector)``: vLLM computes states on a processor in bfloat16 only. The sizes above are
    those of states that are kept in float32. Otherwise the model's configuration says in what they are kept,
    and versions of transformers differ in that."""

    def make(connector, **options):
        options = {"block_size": None, "dtype": "bfloat16", "blocks": 256, **options}
        options["mamba_ssm_cache_dtype"] = "float32"
        return Engine(model(models.QWEN3_NEXT), connector=connector, **options)

    return make


def test_states_come_back_and_what_is_computed_behind_them_is_the_same(engine_of, daemon):
    options = patient(daemon.url)
    with engine_of(options) as engine:

        def ask(tokens, **more):
            """Without vLLM's own cache."""
            engine.reset_prefix_cache()
            answers = engine.ask(Ask(tokens, **more))
            return answers, answers.answers[0].cached_tokens

        cold, cached = ask(LONG)
        assert cached == 0
        wait_stored(daemon, 2 + STATES)
        local = engine.ask(Ask(LONG))
        assert (local.local_hit_tokens, local.external_hit_tokens) == (LAST, 0)
        warm, _ = ask(LONG)
        assert (warm.local_hit_tokens, warm.external_hit_tokens) == (0, LAST)
        assert same(local, cold)
        assert same(warm, cold)
        assert same(warm, local)
        metrics = engine.metrics()
        assert metrics["vllm:tierstore_loaded_tokens"] == LAST
        assert metrics["vllm:tierstore_loaded_bytes"] == 2 * ATTENTION_BYTES + STATES * STATE_BYTES

        # Attention is held up to a place at which there are no states: a miss, and then there are some.
        tailed = LONG[:640] + prompt(290, seed=7)
        begun, cached = ask(tailed)
        assert cached == 0
        wait_stored(daemon, 2 + STATES + 1 + STATES)
        again, cached = ask(tailed)
        assert cached == LAST
        assert same(again, begun)

        # With another tail behind the states.
        other = LONG[:800] + prompt(150, seed=9)
        branched, cached = ask(other)
        assert cached == LAST
        engine.reset_prefix_cache()
        engine.ask(Ask(LONG))
        assert same(branched, engine.ask(Ask(other)))

        # A part of it is vLLM's own already.
        engine.reset_prefix_cache()
        engine.ask(Ask(LONG[:500], params={"tierstore": {"no_save": True}}))
        mixed = engine.ask(Ask(LONG))
        assert (mixed.local_hit_tokens, mixed.external_hit_tokens) == (BLOCK, BLOCK)
        assert same(mixed, cold)

        # Many at once.
        together = [LONG, tailed, other, prompt(500, seed=8)]
        alone = [ask(tokens)[0] for tokens in together]
        engine.reset_prefix_cache()
        batch = engine.ask(*[Ask(tokens) for tokens in together])
        for answer, expected in zip(batch.answers, alone, strict=True):
            assert answer.cached_tokens > 0 or len(answer.tokens) == 8
            assert answer.tokens == expected.answers[0].tokens
        assert [answer.cached_tokens for answer in batch.answers[:3]] == [LAST] * 3

        # Tenants do not see each other's states.
        assert ask(LONG, salt="a")[1] == 0
        assert ask(LONG, salt="b")[1] == 0
        assert same(wait_hit(engine, Ask(LONG, salt="a"), LAST), cold)

        # What the weights have changed for is not found any more.
        assert engine.reset_prefix_cache(connector=True)
        assert engine.ask(Ask(LONG)).answers[0].cached_tokens == 0
        assert same(wait_hit(engine, Ask(LONG), LAST), cold)
        assert not engine.metrics().get("vllm:tierstore_errors")
        assert not engine.metrics().get("vllm:tierstore_failed_loads")


def test_states_outlive_the_engine_and_the_daemon(engine_of, daemon):
    options = patient(daemon.url)
    question = Ask(prompt(700), 120)
    # vLLM keeps the states of a prompt's last block only, unless it is told otherwise.
    with engine_of(options, prefix_cache_retention_interval=BLOCK) as first:
        cold = first.ask(Ask(LONG))
        answered = first.ask(question)
        # It goes on over a block's end: the states there were computed token by token.
        followed = Ask([*question.tokens, *answered.answers[0].tokens, *prompt(60, seed=3)])
        expected = first.ask(followed)
        assert expected.local_hit_tokens == LAST
        assert same(wait_hit(first, followed, LAST), expected)
    daemon.wait_written()
    daemon.restart()
    with engine_of(options) as second:
        for ask, reference in ((Ask(LONG), cold), (followed, expected)):
            answers = second.ask(ask)
            assert answers.external_hit_tokens == LAST
            assert same(answers, reference)
        # The daemon is killed: the engine goes on without it, and with it again.
        daemon.kill()
        second.reset_prefix_cache()
        answers = second.ask(Ask(LONG))
        assert answers.external_hit_tokens == 0
        assert same(answers, cold)
        daemon.start()
        assert same(wait_hit(second, Ask(LONG), LAST), cold)
        assert not second.metrics().get("vllm:tierstore_errors")


def test_preempted_requests_and_blocks_that_are_used_again(engine_of, daemon):
    """Few blocks for many requests: those with states go from one to another while they are being saved."""
    prompts = [prompt(420, seed=seed) for seed in range(20, 26)]
    with engine_of(None) as engine:
        alone = []
        for tokens in prompts:
            engine.reset_prefix_cache()
            alone.append(engine.ask(Ask(tokens, 380)))
    with engine_of(connector_options(daemon.url), blocks=26, max_model_len=1024) as engine:
        for _ in range(3):
            engine.reset_prefix_cache()
            batch = engine.ask(*[Ask(tokens, 380) for tokens in prompts])
            assert [answer.finish for answer in batch.answers] == ["length"] * len(prompts)
        assert engine.metrics()["vllm:num_preemptions"] > 0
        for tokens, expected in zip(prompts, alone, strict=True):
            engine.reset_prefix_cache()
            answers = engine.ask(Ask(tokens, 8))
            assert answers.external_hit_tokens == BLOCK
            assert answers.answers[0].tokens == expected.answers[0].tokens[:8]
        assert not engine.metrics().get("vllm:tierstore_errors")
