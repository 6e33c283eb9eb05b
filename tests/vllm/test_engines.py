"""What these tests stand on: engines without a connector, and a daemon that comes and goes."""

from __future__ import annotations

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine, EngineDiedError, greatest_difference
from tests.vllm.models import prompt
from tierstore.errors import StoreUnavailableError


def test_an_engine_answers_the_same_cold_and_from_its_own_cache(model):
    with Engine(model(models.LLAMA)) as engine:
        cold = engine.ask(Ask(prompt(901)))
        warm = engine.ask(Ask(prompt(901)))
        assert (cold.local_hit_tokens, warm.local_hit_tokens, warm.external_hit_tokens) == (0, 896, 0)
        assert warm.answers[0].cached_tokens == 896
        assert greatest_difference(cold.answers[0], warm.answers[0]) <= 1e-5
        assert len(warm.answers[0].tokens) == len(warm.answers[0].logprobs) == 8
        assert 0 < warm.answers[0].ttft_s <= warm.answers[0].total_s
        assert engine.reset_prefix_cache()
        assert engine.ask(Ask(prompt(901))).local_hit_tokens == 0
        other, aborted = engine.ask(Ask(prompt(901, seed=1)), Ask(prompt(901), abort_after=2)).answers
        assert greatest_difference(cold.answers[0], other) == float("inf")
        assert aborted.finish == "aborted"
        assert aborted.tokens == cold.answers[0].tokens[: len(aborted.tokens)]
        assert len(aborted.tokens) < 8


def test_an_engine_that_cannot_start_says_why(model):
    with pytest.raises(EngineDiedError, match="no_such_module"):
        Engine(
            model(models.LLAMA),
            connector={
                "kv_connector": "X",
                "kv_connector_module_path": "no_such_module",
                "kv_role": "kv_both",
            },
        )


def test_a_daemon_comes_and_goes(daemon):
    first = daemon.stats().pid
    daemon.restart()
    assert daemon.stats().pid != first
    daemon.kill()
    with pytest.raises(StoreUnavailableError):
        daemon.stats()
    daemon.start()
    daemon.wait_written()
