"""``Llama.set_cache(TierStoreLlamaCache(llama))``: prompts come back in another ``Llama``."""

from __future__ import annotations

import pytest

from tests.llamacpp.conftest import MISSING

if MISSING:
    pytest.skip("no llama.cpp here; make test-llamacpp", allow_module_level=True)

import contextlib

from llama_cpp import Llama

from tests.llamacpp.programs import prompt
from tierstore.errors import UsageError
from tierstore_connectors.llamacpp.binding import TierStoreLlamaCache

TOKENS = prompt(300)


def load(model, **options):
    return Llama(
        str(model), **{"n_ctx": 1024, "n_threads": 1, "n_threads_batch": 1, "verbose": False, **options}
    )


@contextlib.contextmanager
def cached(model, daemon, **options):
    llama = load(model, **options)
    cache = TierStoreLlamaCache(llama, daemon.url, least_tokens=32, lookup_s=5.0)
    assert cache.wait_connected(60)
    llama.set_cache(cache)
    yield llama, cache
    assert not cache.errors.counts
    cache.close()
    llama.close()


def answer(llama, tokens):
    """The answer, and how many tokens of the prompt were computed for it."""
    computed = []
    evaluate = llama.eval

    def counted(some):
        computed.append(len(some))
        evaluate(some)

    llama.eval = counted
    text = llama.create_completion(tokens, max_tokens=12, temperature=0)["choices"][0]["text"]
    llama.eval = evaluate
    return text, computed[0]


@pytest.mark.parametrize(
    "options", [{}, {"flash_attn": True}, {"flash_attn": True, "type_k": 8, "type_v": 8}]
)
def test_a_prompt_comes_back(models, daemon, options):
    expected, _ = answer(load(models(), **options), TOKENS)
    with cached(models(), daemon, **options) as (llama, _):
        assert answer(llama, TOKENS) == (expected, len(TOKENS))
    with cached(models(), daemon, **options) as (llama, cache):
        assert TOKENS in cache
        assert answer(llama, TOKENS) == (expected, 1)
    longer = [*TOKENS, *prompt(50, 2)]
    expected, _ = answer(load(models(), **options), longer)
    with cached(models(), daemon, **options) as (llama, _):
        assert answer(llama, longer) == (expected, 50)


@pytest.mark.parametrize("change", [{"rope_freq_base": 20000.0}, {"n_ctx": 512}, {"type_k": 8}])
def test_what_differs_is_not_shared(models, daemon, change):
    with cached(models(), daemon, flash_attn=True) as (llama, _):
        answer(llama, TOKENS)
    with cached(models(), daemon, flash_attn=True, **change) as (llama, cache):
        assert TOKENS not in cache
    with cached(models(seed=1), daemon, flash_attn=True) as (llama, cache):
        assert TOKENS not in cache


def test_a_daemon_that_goes_away(models, daemon):
    with cached(models(), daemon) as (llama, _):
        expected, _ = answer(llama, TOKENS)
        daemon.kill()
        llama.reset()
        assert answer(llama, TOKENS)[0] == expected


def test_models_that_are_not_supported(models, daemon):
    with pytest.raises(UsageError, match="sliding windows"):
        TierStoreLlamaCache(load(models(windows=True)), daemon.url)
    with pytest.raises(UsageError, match="logits_all"):
        TierStoreLlamaCache(load(models(), logits_all=True), daemon.url)
