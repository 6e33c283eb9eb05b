"""The parts of ``tierstore-bench vllm`` that need no vLLM; the benchmark itself runs in tests/vllm."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forked import run
from tierstore.errors import UsageError
from tierstore_tools.vllm import models
from tierstore_tools.vllm.asks import VllmAnswer, greatest_difference, prompt
from tierstore_tools.vllm.paired import ratio

ANSWER = VllmAnswer(
    [7, 3], [{7: -0.5, 1: -1.5, 2: -2.0}, {3: -0.25, 4: -2.5, 5: -3.0}], 0, 0.1, 0.2, "length"
)


def bench(*arguments):
    return run("tierstore_tools.cli", "vllm", *arguments)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_so_in_a_line():
    code, out, err = bench("--json")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "vLLM is not installed" in err


@pytest.mark.parametrize("arguments", [("--options", "[1]"), ("--dir", "/dev/null/nowhere")])
def test_bad_usage_is_exit_code_two(arguments):
    code, out, _ = bench(*arguments)
    assert (code, out) == (2, "")


def test_a_model_that_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(UsageError, match="known: tiny"):
        models.make("huge", tmp_path / "m")


PAIRS = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=20)


@settings(max_examples=20, deadline=None)  # resampling takes its time on a busy machine
@given(st.lists(PAIRS, min_size=1, max_size=4))
def test_the_median_lies_in_its_interval(series):
    found = ratio(series)
    assert found.low <= found.median <= found.high
    assert found.pairs == sum(map(len, series))
    assert len(found.series) == len(series)


def test_more_pairs_tell_more():
    spread = [(0.9, 1.0), (1.1, 1.0), (0.95, 1.0), (1.05, 1.0), (1.0, 1.0)]
    few, many = ratio([spread]), ratio([spread * 20])
    assert few.median == many.median == 1.0
    assert many.high - many.low < (few.high - few.low) / 2


def test_engines_that_differ_as_long_as_they_live_are_not_made_alike_by_many_pairs():
    one, other = [(1.1, 1.0)] * 100, [(0.9, 1.0)] * 100
    found = ratio([one, other])
    assert found.series == pytest.approx((1.1, 0.9))
    assert (found.low, found.high) == pytest.approx((0.9, 1.1))


def test_prompts_of_one_seed_are_prefixes_and_those_of_others_begin_otherwise():
    assert prompt(900)[:300] == prompt(300)
    assert len({prompt(1, seed=seed)[0] for seed in range(250)}) == 250
    assert prompt(100, seed=1) != prompt(100, seed=251)


def test_answers_differ_by_their_logprobs_and_not_only_by_their_tokens():
    assert greatest_difference(ANSWER, ANSWER) == 0
    nearly = replace(ANSWER, logprobs=[{7: -0.5, 1: -1.5, 2: -2.0}, {3: -0.3, 4: -2.5, 5: -3.0}])
    assert greatest_difference(ANSWER, nearly) == pytest.approx(0.05)
    tie = replace(ANSWER, logprobs=[{7: -0.5, 1: -1.5, 9: -2.0}, ANSWER.logprobs[1]])
    assert greatest_difference(ANSWER, tie) == 0
    for other in (
        replace(ANSWER, tokens=[7, 4]),
        replace(ANSWER, logprobs=ANSWER.logprobs[:1]),
        replace(ANSWER, logprobs=[{7: -0.5, 8: -1.5, 9: -2.0}, ANSWER.logprobs[1]]),
    ):
        assert greatest_difference(ANSWER, other) == float("inf")
