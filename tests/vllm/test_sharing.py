"""Pages computed by vLLM are hits in the bundled engine, and the other way round."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import tierstore
from tests.vllm import models
from tests.vllm.engines import Ask, Engine, greatest_difference
from tests.vllm.harness import patient, wait_hit, wait_stored
from tests.vllm.models import prompt
from tierstore.spec import KVSpec
from tierstore_connectors.common.sharing import shared_identity

CHUNK = 64
TOKENS, WHOLE = 4_100, 4_096
SAME_LOGITS = 1e-4  # float32
SAME_KV = 1e-3


@contextlib.contextmanager
def bundled(folder, store=None, *, share=True):
    """The bundled engine, over a daemon or with pages of its own pool only."""
    from tierstore_engine.build import build_engine, load_model
    from tierstore_engine.settings import EngineSettings

    engine = build_engine(
        load_model(str(folder), device="cpu"),
        pool_pages=300,
        store=store,
        chunk_tokens=CHUNK,
        settings=EngineSettings(plan="load"),
        share_engines=share,
    )
    try:
        yield engine
    finally:
        engine.close()


def answer(engine, tokens):
    """The bundled engine's answer, with logits."""
    from tierstore_engine.sampling import SamplingParams

    [completion] = engine.generate(
        [tokens], SamplingParams(max_new_tokens=8, keep_logits=True, ignore_eos=True)
    )
    return completion


def own_pages(engine, tokens):
    """The KV that the bundled engine has of these tokens, one page per group and chunk, as bytes."""
    store = engine.connector.store
    hit = store.lookup(tokens)
    assert hit.tokens // CHUNK == len(tokens) // CHUNK
    loaded = store.load(hit).wait()
    found = []
    for group, kept in enumerate(loaded.groups or [loaded]):
        pool = store.pools[group]
        pages = np.zeros((len(tokens) // CHUNK, pool.spec.page_bytes), np.uint8)
        numbers = list(kept.pages)[-len(pages) :]
        targets = [(number, page.ctypes.data) for number, page in zip(numbers, pages, strict=False)]
        pool.read_pages(targets)
        found.append(pages[: len(targets)])
        store.release_hbm(kept.pages, group=group)
    return found


def stored_pages(url, folder, tokens):
    """The KV of these tokens that the daemon has from any engine."""
    identity = shared_identity(folder, dtype="float32", chunk_tokens=CHUNK)
    spec = KVSpec.parse(identity.layout)
    with tierstore.connect(url, spec, identity=identity) as store:
        hit = store.lookup(tokens)
        assert hit.tokens == len(tokens) // CHUNK * CHUNK
        into = [[bytearray(group.page_bytes) for _ in hit.chunks(group.number)] for group in store.groups]
        assert store.load(hit, into if len(into) > 1 else into[0]).wait().tokens == hit.tokens
    return [np.frombuffer(b"".join(pages), np.uint8).reshape(len(pages), -1) for pages in into]


def kv_difference(one, other):
    """The greatest difference between two sets of pages in float32."""
    greatest = 0.0
    for mine, theirs in zip(one, other, strict=True):
        last = min(len(mine), len(theirs))
        mine, theirs = mine[-last:].view(np.float32), theirs[-last:].view(np.float32)
        greatest = max(greatest, float(np.abs(mine - theirs).max()))
    return greatest


@pytest.mark.parametrize("kind", [models.LLAMA, models.LLAMA3, models.QWEN2, models.QWEN3, models.GEMMA])
def test_both_directions(model, daemon, kind):
    folder = model(kind)
    from_vllm, from_ours = prompt(TOKENS, seed=1), prompt(TOKENS, seed=2)
    options = patient(daemon.url, share_engines=True, chunk_tokens=CHUNK)
    lengths = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    with bundled(folder, share=False) as alone:
        expected, pages = answer(alone, from_vllm), own_pages(alone, from_vllm[:WHOLE])
        with Engine(folder, connector=options, **lengths) as vllm:
            computed = vllm.ask(Ask(from_vllm))
            assert computed.external_hit_tokens == 0
            wait_stored(daemon, WHOLE // CHUNK)
            stored = stored_pages(daemon.url, folder, from_vllm[:WHOLE])
            with bundled(folder, daemon.url) as ours:
                warm = answer(ours, from_vllm)
                assert warm.metrics.reused_tokens >= WHOLE
                answer(ours, from_ours)
            # A salted request goes without the store.
            cold = vllm.ask(Ask(from_ours, salt="cold"))
            assert cold.external_hit_tokens == 0
            hit = wait_hit(vllm, Ask(from_ours), WHOLE)
    differences = {
        "KV": kv_difference(stored, pages),
        "bundled engine's logits after vLLM's pages": float(np.abs(warm.logits - expected.logits).max()),
        "vLLM's log-probabilities after the bundled engine's": greatest_difference(
            hit.answers[0], cold.answers[0]
        ),
    }
    times = {"vLLM cold": cold.answers[0].ttft_s, "vLLM warm": hit.answers[0].ttft_s}
    times |= {"bundled cold": expected.metrics.ttft_s, "bundled warm": warm.metrics.ttft_s}
    print(kind, differences, times)  # noqa: T201
    assert warm.tokens == expected.tokens
    assert differences.pop("KV") <= SAME_KV
    assert max(differences.values()) <= SAME_LOGITS, differences


def test_what_cannot_be_shared_says_so_and_runs_without_the_cache(model, daemon):
    options = patient(daemon.url, share_engines=True, chunk_tokens=CHUNK)
    with Engine(model(models.LLAMA), connector=options, hf_overrides={"rope_theta": 1.0}) as vllm:
        assert vllm.ask(Ask(prompt(200))).external_hit_tokens == 0
        assert "share_engines: --hf-overrides may change KV" in vllm.log
        assert "leave share_engines out" in vllm.log
    assert daemon.stats().store.pages == 0
