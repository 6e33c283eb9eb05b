"""Prefixes come back from the store, exactly; and only where they are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine, greatest_difference
from tests.vllm.harness import EXACT, patient, same, wait_hit, wait_stored
from tests.vllm.models import prompt
from tierstore.testing.clock import wait_until

pytestmark = pytest.mark.timeout(900)
NEEDS_AVX512 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM has fp8 KV on processors with AVX-512 only",
)
LONG = prompt(901)
ALIGNED = 896


@pytest.fixture(scope="module")
def reference(model):
    """LONG, computed by an engine that has no connector."""
    with Engine(model(models.LLAMA)) as engine:
        return engine.ask(Ask(LONG))


class TestOneModel:
    """One engine after another, with one daemon."""

    def test_across_engines(self, model, reference, daemon):
        options = patient(daemon.url)
        with Engine(model(models.LLAMA), connector=options) as first:
            cold = first.ask(Ask(LONG))
            assert (cold.external_hit_tokens, cold.local_hit_tokens) == (0, 0)
            assert same(cold, reference)
            wait_hit(first, Ask(LONG), ALIGNED)
            with Engine(model(models.LLAMA), connector=options) as second:  # both live
                warm = second.ask(Ask(LONG))
                assert (warm.external_hit_tokens, warm.local_hit_tokens) == (ALIGNED, 0)
                assert warm.answers[0].cached_tokens == ALIGNED
                assert same(warm, reference)
                fresh = prompt(700, seed=11)
                computed = second.ask(Ask(fresh))
                other = wait_hit(first, Ask(fresh), 640)
                assert same(other, computed)
        daemon.wait_written()
        daemon.restart()
        with Engine(model(models.LLAMA), connector=options) as third:
            warm = third.ask(Ask(LONG))
            assert warm.external_hit_tokens == ALIGNED
            assert same(warm, reference)

    def test_with_a_process_for_each_part(self, model, reference, daemon):
        options = patient(daemon.url)
        for expected in (0, ALIGNED):
            with Engine(model(models.LLAMA), connector=options, processes=True) as engine:
                answers = engine.ask(Ask(LONG))
                assert answers.answers[0].cached_tokens == expected
                assert same(answers, reference)
                wait_cached(engine, LONG, ALIGNED)


def wait_cached(engine, tokens, expected):
    """Like ``wait_hit``, by what each answer says (metrics stay in another process)."""
    for _ in range(100):
        engine.reset_prefix_cache()
        if engine.ask(Ask(tokens)).answers[0].cached_tokens == expected:
            return
    raise AssertionError(f"{expected} tokens never came from the store")


@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        (models.LLAMA, {}, EXACT),
        (models.LLAMA, {"dtype": "bfloat16"}, EXACT),
        pytest.param(models.LLAMA, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, EXACT, marks=NEEDS_AVX512),
        (models.GEMMA, {"blocks": 1024}, EXACT),
        (models.GEMMA, {"blocks": 1024, "prefix_match_unit": 8}, EXACT),
        (models.LLAMA4, {"blocks": 1024}, EXACT),
        # Needs the cores to itself: vLLM's ranks wait for each other in sched_yield(), and where others want
        # to compute, too, everything else stands still for longer than patient() waits: the daemon, and a
        # shell's `sleep 1` (41 s on Linux 6.18). Those lookups are misses.
        (models.LLAMA, {"tensor_parallel_size": 2}, EXACT),
    ],
    ids=[
        "llama-float32",
        "llama-bfloat16",
        "llama-fp8-kv",
        "gemma-windows",
        "gemma-finer-hashes",
        "llama4-chunks",
        "llama-tp2",
    ],
)
def test_what_comes_back_is_what_was_computed(model, daemon, kind, options, tolerance):
    with Engine(model(kind), connector=patient(daemon.url), **options) as engine:

        def ask(tokens, **more):
            """Without vLLM's own cache: the answer, and the tokens that came from the store."""
            engine.reset_prefix_cache()
            answers = engine.ask(Ask(tokens, **more))
            return answers, answers.answers[0].cached_tokens

        def stored(tokens, expected, **more):
            for _ in range(200):
                answers, cached = ask(tokens, **more)
                if cached == expected:
                    return answers
            raise AssertionError(f"{cached} of {expected} tokens came from the store")

        cold, cached = ask(LONG)
        assert cached == 0
        assert same(stored(LONG, ALIGNED), cold, tolerance)

        # A prefix of it, with a new tail; then that tail, too.
        tailed = LONG[:640] + prompt(290, seed=7)
        begun, cached = ask(tailed)
        assert cached == 640
        engine_alone = stored(tailed, 896)
        assert same(engine_alone, begun, tolerance)

        # A part of it is vLLM's own already (and with blocks of half a chunk, it may end inside of one).
        engine.reset_prefix_cache()
        engine.ask(Ask(LONG[:360]))
        mixed = engine.ask(Ask(LONG))
        assert mixed.answers[0].cached_tokens == ALIGNED
        assert same(mixed, cold, tolerance)

        # Many at once, more than fit in one step.
        together = [LONG, tailed, LONG[:500], LONG[:300] + prompt(400, seed=8)]
        alone = [ask(tokens)[0] for tokens in together]
        engine.reset_prefix_cache()
        batch = engine.ask(*[Ask(tokens) for tokens in together])
        for answer, expected in zip(batch.answers, alone, strict=True):
            assert answer.cached_tokens > 0
            assert answer.tokens == expected.answers[0].tokens

        # Tenants do not see each other's pages, nor those of nobody in particular.
        assert ask(LONG, salt="a")[1] == 0
        assert same(stored(LONG, ALIGNED, salt="a"), cold, tolerance)
        assert ask(LONG, salt="b")[1] == 0

        # What the weights have changed for is not found any more.
        assert engine.reset_prefix_cache(connector=True)
        assert engine.ask(Ask(LONG)).answers[0].cached_tokens == 0
        assert same(stored(LONG, ALIGNED), cold, tolerance)


def test_other_models_and_formats_do_not_see_each_other(model, daemon):
    options = patient(daemon.url)
    with Engine(model(models.LLAMA), connector=options) as engine:
        engine.ask(Ask(LONG))
        wait_hit(engine, Ask(LONG), ALIGNED)
    others = [
        (models.LLAMA_6_LAYERS, {}, options),
        (models.LLAMA, {"dtype": "bfloat16"}, options),
        (models.LLAMA, {"block_size": 64}, options),
        (models.LLAMA, {}, patient(daemon.url, namespace="other weights")),
        (models.LLAMA, {}, patient(daemon.url, chunk_tokens=128)),
    ]
    for kind, more, connector in others:
        with Engine(model(kind), connector=connector, **more) as engine:
            assert engine.ask(Ask(LONG)).external_hit_tokens == 0, (kind, more)


def test_the_daemon_is_not_asked_for_what_vllm_has_itself(model, daemon):
    with Engine(model(models.LLAMA), connector=patient(daemon.url)) as engine:
        cold = engine.ask(Ask(LONG))
        wait_stored(daemon, 14)
        daemon.hang()
        try:
            warm = engine.ask(*[Ask(LONG) for _ in range(8)])
        finally:
            daemon.go_on()
        assert [each.cached_tokens for each in warm.answers] == [ALIGNED] * 8
        assert all(greatest_difference(each, cold.answers[0]) <= EXACT for each in warm.answers)
        counts = engine.metrics()
        assert counts["vllm:tierstore_lookups"] == 1
        assert counts["vllm:tierstore_saves"] == 1
        assert not counts.get("vllm:tierstore_late_lookups")


def test_a_request_may_ask_not_to_be_saved(model, daemon):
    with Engine(model(models.LLAMA), connector=patient(daemon.url)) as engine:
        private = Ask(LONG, params={"tierstore": {"no_save": True}})
        for _ in range(3):
            engine.reset_prefix_cache()
            assert engine.ask(private).external_hit_tokens == 0
        assert daemon.stats().store.pages == 0
        engine.ask(Ask(LONG))  # vLLM has it: its blocks are saved from there
        assert wait_hit(engine, Ask(LONG), ALIGNED)
        assert wait_hit(engine, private, ALIGNED)
        nonsense = Ask(prompt(300, seed=4), params={"tierstore": {"ttl_s": "soon", "colour": 1}})
        assert engine.ask(nonsense).answers[0].finish == "length"
        assert "colour, ttl_s not understood" in engine.log


def test_missed_tokens_have_reasons_in_the_metrics_and_the_log(model, daemon):
    changed = [*LONG[:600], LONG[600] + 1, *LONG[601:]]
    with Engine(model(models.LLAMA), connector=patient(daemon.url, explain=True)) as engine:
        engine.ask(Ask(LONG))
        assert wait_hit(engine, Ask(LONG), ALIGNED)
        engine.reset_prefix_cache()
        assert engine.ask(Ask(changed)).external_hit_tokens == 576
        wait_until(lambda: "diverges from a held prompt at token 600" in engine.log)
        assert f"{ALIGNED} from token 0 on: never saved" in engine.log
        engine.ask(Ask(prompt(40, seed=5)))  # a step, whose statistics have the last counts
        prompts = [line for line in engine.log.splitlines() if " reused; missed: " in line]
        assert engine.metrics()["vllm:tierstore_missed_tokens"] >= len(LONG) + len(changed) - 576
        assert len(prompts) >= 2
    with Engine(model(models.LLAMA), connector=patient(daemon.url)) as engine:
        engine.ask(Ask(prompt(300, seed=6)))
        assert "missed:" not in engine.log


def test_what_is_wrong_at_the_start_is_said_and_costs_the_cache_only(model, daemon):
    for extra, said in (({"sore": 1}, "has no 'sore'"), ({"chunk_tokens": 48}, "a multiple of 32")):
        with Engine(model(models.LLAMA), connector=patient(daemon.url, **extra)) as engine:
            assert engine.ask(Ask(LONG)).answers[0].finish == "length"
            assert said in engine.log
    assert daemon.stats().store.pages == 0


def test_preempted_requests_and_blocks_that_are_used_again(model, daemon):
    """28 blocks for 8 requests: blocks go from one to another while they are being saved."""
    prompts = [prompt(150, seed=seed) for seed in range(20, 28)]
    with Engine(model(models.LLAMA), blocks=200) as engine:
        alone = []
        for tokens in prompts:
            engine.reset_prefix_cache()
            alone.append(engine.ask(Ask(tokens, 120)))
    connector = patient(daemon.url)
    with Engine(model(models.LLAMA), connector=connector, blocks=28, max_model_len=512) as engine:
        for _ in range(4):
            engine.reset_prefix_cache()
            batch = engine.ask(*[Ask(tokens, 120) for tokens in prompts])
            for answer, expected in zip(batch.answers, alone, strict=True):
                assert answer.tokens == expected.answers[0].tokens
        assert engine.metrics()["vllm:num_preemptions"] > 0
        assert batch.external_hit_tokens > 0
        for tokens, expected in zip(prompts, alone, strict=True):
            engine.reset_prefix_cache()
            answers = engine.ask(Ask(tokens, 120))
            assert answers.external_hit_tokens == 128
            assert same(answers, expected)
        assert not engine.metrics().get("vllm:tierstore_errors")
