"""What another host has computed this host's engine does not compute."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.tierstore.cluster.hosts import Host
from tierstore.testing.fake_shared_store import set_faults
from tierstore.types import MOST_HANDOVER_S, Hint, Promise
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)
ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)
ELSEWHERE = Hint(elsewhere=True)
LOADING = EngineSettings(plan="load")  # on a busy machine "both-ends" computes what is slow to come
PROMISE = Promise(640, MOST_HANDOVER_S)


def complete(engine, request):
    """Step until it is done."""
    while True:
        for output in engine.step():
            if output.completion is not None and output.completion.request_id == request:
                return output.completion


def test_an_engine_takes_another_hosts_pages(tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    draw = random.Random(1)
    prompts = [[draw.randrange(250) for _ in range(700)] for _ in range(2)]
    hosts = [Host(f"fake://{pool}", "--cluster-publish=all") for _ in range(2)]
    try:
        for host in hosts:
            host.wait_online()
        model = load_model("tiny", device="cpu")
        first = build_engine(model, pool_pages=64, store=hosts[0].url, settings=LOADING)
        expected = first.generate(prompts, PARAMS)
        first.close()
        hosts[0].wait_for(lambda stats: stats.cluster.counts.get("published_pages", 0) >= 20)
        second = build_engine(model, pool_pages=64, store=hosts[1].url, settings=LOADING)
        [brought] = second.generate(prompts[:1], PARAMS)
        assert brought.tokens == expected[0].tokens
        assert second.stats().computed_tokens < 700 - 640 + 8
        # And with a pool that lies it computes.
        set_faults(pool, flip=True)
        [computed] = second.generate(prompts[1:], PARAMS)
        assert computed.tokens == expected[1].tokens
        assert second.stats().computed_tokens > 700
        second.close()
    finally:
        for host in hosts:
            host.close()


@pytest.fixture
def hosts(tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    hosts = [Host(f"fake://{pool}", "--host-bytes=64MiB") for _ in range(2)]
    for host in hosts:
        host.wait_online()
    yield hosts
    for host in hosts:
        host.close()


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-qwen3-next"])
def test_windows_and_states_of_another_host(hosts, name):
    """What it has been asked for twice, what it computes for this host's engine, and what had been there by
    then: tokens are those of an engine without a store."""
    draw = random.Random(3)
    twice, handed, known = ([draw.randrange(250) for _ in range(700)] for _ in range(3))
    model = load_model(name, device="cpu")
    alone = build_engine(model, pool_pages=64, store=None)
    first, second = (build_engine(model, pool_pages=64, store=each.url, settings=LOADING) for each in hosts)
    expected = alone.generate([twice, handed, known], PARAMS)
    for _ in range(2):
        [answer] = first.generate([twice], PARAMS)
        assert answer.tokens == expected[0].tokens
    hosts[0].wait_for(lambda stats: stats.cluster.counts.get("published_pages", 0) >= 11)
    answer = complete(second, second.add(twice, PARAMS))
    assert answer.tokens == expected[0].tokens
    assert answer.metrics.reused_tokens == 640
    [answer] = first.generate([known], ONE)
    for prompt, cold in ((handed, expected[1]), (known, expected[2])):
        request = second.add(prompt, PARAMS, promise=PROMISE)
        complete(first, first.add(prompt, ONE, hint=ELSEWHERE))
        answer = complete(second, request)
        assert answer.tokens == cold.tokens
        assert answer.metrics.reused_tokens == 640
    assert hosts[1].stats().service.broken_promises == 0
    for engine in (alone, first, second):
        engine.close()


def test_an_engine_waits_for_what_another_hosts_engine_has_promised(tmp_path):
    """The pages come while they are computed, in the other host's steps of 128 tokens. They are given to
    others because the request says so; another prompt's stay, until it is handed over as well."""
    pool = tmp_path / "pool"
    pool.mkdir()
    draw = random.Random(2)
    tokens, others = ([draw.randrange(250) for _ in range(700)] for _ in range(2))
    hosts = [Host(f"fake://{pool}") for _ in range(2)]
    try:
        for host in hosts:
            host.wait_online()
        model = load_model("tiny", device="cpu")
        settings = replace(LOADING, prefill_chunk=128)
        first, second = (
            build_engine(model, pool_pages=64, store=each.url, settings=settings) for each in hosts
        )
        request = second.add(tokens, PARAMS, promise=PROMISE)
        second.step()
        hosts[1].wait_for(lambda stats: stats.service.promised_lookups == 1)
        expected = complete(first, first.add(tokens, PARAMS, hint=ELSEWHERE))
        answer = complete(second, request)
        assert answer.tokens == expected.tokens
        assert answer.metrics.reused_tokens == 640
        stats = hosts[1].wait_for(lambda stats: stats.cluster.counts.get("promised_fetches") == 1)
        assert stats.cluster.counts["fetched_pages"] == 10
        assert stats.service.broken_promises == 0
        hosts[0].wait_for(lambda stats: stats.cluster.counts["published_pages"] == 11)
        complete(first, first.add(others, PARAMS))
        hosts[0].wait_for(lambda stats: stats.store.pages >= 22)
        hosts[0].has_counted("published_pages", 11)
        expected = complete(first, first.add(others, ONE, hint=ELSEWHERE))
        answer = complete(second, second.add(others, PARAMS, promise=PROMISE))
        assert answer.metrics.reused_tokens == 640
        assert answer.tokens[:1] == expected.tokens
        for engine in (first, second):
            engine.close()
    finally:
        for host in hosts:
            host.close()
