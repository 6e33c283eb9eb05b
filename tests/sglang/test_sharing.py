"""Pages computed by SGLang are hits in the bundled engine, and the other way round; and in vLLM, if
``VLLM_PYTHON`` names the interpreter of an environment with it (``make test-sglang-vllm``)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.serving import make_daemon
from tests.sharing import (
    CHUNK,
    GROUPS,
    LONG,
    MODELS,
    SAME_KV,
    SAME_LOGITS,
    answer,
    bundled,
    kv_difference,
    own_pages,
    stored_pages,
)
from tests.vllm import models
from tests.vllm.engines import Engine
from tests.vllm.harness import patient, wait_hit, wait_stored
from tests.vllm.models import prompt
from tierstore_tools.sglang import SglangEngine, storage_options
from tierstore_tools.vllm.asks import Ask, greatest_difference

__all__ = ["make_daemon"]

pytestmark = pytest.mark.timeout(1500)
STAND_INS = Path(__file__).parent / "cpu"
VLLM = os.environ.get("VLLM_PYTHON")


def sglang(folder, daemon, **extra):
    options = storage_options(daemon.url, share_engines=True, lookup_s=20.0, load_s=60.0, save_s=60.0)
    return SglangEngine(folder, stand_ins=STAND_INS, **{**options, **extra})


def vllm(folder, daemon):
    """vLLM, which the daemon's pages reach as any engine's."""
    lengths = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    options = patient(daemon.url, share_engines=True, chunk_tokens=CHUNK)
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [each for each in path if Path(each).resolve() != STAND_INS]  # vLLM needs none of them
    environment = {"PYTHONPATH": os.pathsep.join(path)}
    return Engine(folder, connector=options, blocks=2048, python=VLLM, environment=environment, **lengths)


def from_store(engine, tokens, whole):
    """The answer of SGLang with ``whole`` tokens of the store, and its own answer."""
    cold = engine.ask(Ask(tokens, salt="cold"))
    assert (cold.external_hit_tokens, cold.local_hit_tokens) == (0, 0)
    warm = engine.ask(Ask(tokens))
    assert warm.external_hit_tokens == whole
    return warm.answers[0], cold.answers[0]


@pytest.fixture
def daemon(make_daemon):
    return make_daemon()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    return lambda kind: models.model(kind, cache)


@pytest.mark.parametrize(("kind", "whole"), MODELS)
def test_both_directions(folder, daemon, kind, whole):
    folder, theirs, ours = folder(kind), prompt(whole + 4, seed=1), prompt(whole + 4, seed=2)
    groups = GROUPS[kind]
    with bundled(folder, share=False) as alone, sglang(folder, daemon) as engine:
        expected, pages = answer(alone, theirs), own_pages(alone, theirs[:whole])
        assert engine.ask(Ask(theirs)).external_hit_tokens == 0
        wait_stored(daemon, groups * whole // CHUNK)
        kept = stored_pages(daemon.url, folder, theirs[:whole])
        with bundled(folder, daemon.url, whole_windows=True) as other:
            warm = answer(other, theirs)
            assert warm.metrics.reused_tokens >= whole
            answer(other, ours)
        hit, cold = from_store(engine, ours, whole)
        longer = [*ours[:whole], *prompt(4 * CHUNK + 1, seed=3)]
        assert engine.ask(Ask(longer)).answers[0].cached_tokens == whole
        wait_stored(daemon, groups * (2 * whole + 4 * CHUNK) // CHUNK)
        assert engine.reset()
        assert engine.ask(Ask(longer)).external_hit_tokens == whole + 4 * CHUNK
    differences = {
        "KV": kv_difference(kept, pages),
        "bundled engine's logits after SGLang's pages": float(np.abs(warm.logits - expected.logits).max()),
        "SGLang's log-probabilities after the bundled engine's": greatest_difference(hit, cold),
    }
    times = {"SGLang cold": cold.ttft_s, "SGLang warm": hit.ttft_s}
    times |= {"bundled cold": expected.metrics.ttft_s, "bundled warm": warm.metrics.ttft_s}
    print(kind, differences, times)  # noqa: T201
    assert warm.tokens == expected.tokens
    assert differences.pop("KV") <= SAME_KV
    assert max(differences.values()) <= SAME_LOGITS, differences


@pytest.mark.skipif(VLLM is None, reason="VLLM_PYTHON is not set: make test-sglang-vllm")
@pytest.mark.parametrize(("kind", "whole"), [(models.LLAMA, LONG), (models.GEMMA, LONG)])
def test_with_vllm(folder, daemon, kind, whole):
    """vLLM keeps all pages of windows, so Gemma's pages go both ways."""
    folder, theirs, ours = folder(kind), prompt(whole + 4, seed=1), prompt(whole + 4, seed=2)
    pages = GROUPS[kind] * whole // CHUNK
    with vllm(folder, daemon) as other, sglang(folder, daemon) as engine:
        engine.ask(Ask(theirs))
        wait_stored(daemon, pages)
        vllm_cold = other.ask(Ask(theirs, salt="cold")).answers[0]
        vllm_warm = wait_hit(other, Ask(theirs), whole).answers[0]
        other.ask(Ask(ours))
        wait_stored(daemon, 2 * pages)
        hit, cold = from_store(engine, ours, whole)
    differences = {
        "vLLM's log-probabilities after SGLang's": greatest_difference(vllm_warm, vllm_cold),
        "SGLang's log-probabilities after vLLM's": greatest_difference(hit, cold),
    }
    times = {"SGLang cold": cold.ttft_s, "SGLang warm": hit.ttft_s}
    times |= {"vLLM cold": vllm_cold.ttft_s, "vLLM warm": vllm_warm.ttft_s}
    print(differences, times)  # noqa: T201
    assert max(differences.values()) <= SAME_LOGITS, differences
