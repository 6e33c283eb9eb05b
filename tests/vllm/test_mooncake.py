"""vLLM computes a prompt on one host and goes on with it on another: two daemons, and between them a real
Mooncake with its master and its lender. Mooncake's environment is another one: ``make test-vllm-cluster``."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.cluster.network import MASTER, PYTHON, Network, inside, why_not
from tests.tierstore.cluster.hosts import Host
from tests.vllm import models
from tests.vllm.engines import Ask, Engine
from tests.vllm.harness import patient, same
from tests.vllm.models import prompt
from tests.vllm.test_handover import ALIGNED, ASKS, CHUNK, TOKENS, ours, promise, wait_promised

pytestmark = pytest.mark.timeout(1200)
LONG, LONG_ALIGNED = 3900, 3840


@pytest.fixture(scope="module")
def network():
    if reason := why_not():
        pytest.skip(f"{reason}, and vLLM beside it: make test-vllm-cluster")
    made = Network()
    yield made
    made.close()


@pytest.fixture(scope="module")
def hosts(network):
    """The first one computes, the second one goes on. Both publish what they publish by default."""
    with ExitStack() as stack:
        yield started(stack)


def started(stack):
    """A daemon on each of two hosts."""
    made = []
    for at in (1, 2):
        made.append(Host(f"mooncake://{MASTER}", "--host-bytes=64MiB", prefix=inside(at), python=PYTHON))
        stack.callback(made[-1].close)
    for host in made:
        host.wait_online()
    return made


@pytest.fixture(scope="module")
def decode(model, hosts):
    with Engine(model(models.LLAMA), connector=patient(hosts[1].url)) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(model):
    """``reference(prompt)``: what one engine without a connector answers."""
    with Engine(model(models.LLAMA), max_num_batched_tokens=128) as engine:

        def answers(tokens):
            engine.reset_prefix_cache()
            return engine.ask(Ask(tokens))

        yield answers


@pytest.fixture
def prefill(model, hosts):
    with Engine(model(models.LLAMA), connector=patient(hosts[0].url), max_num_batched_tokens=128) as engine:
        yield engine


def ask_before(hosts, decode, tokens, promised):
    """The second engine is asked, and waits for what the first one has not begun to compute."""
    waited = hosts[1].stats().service.promised_lookups
    decode.begin([Ask(tokens, params=promised)])
    wait_promised(hosts[1], waited + 1)


def test_one_host_computes_the_other_goes_on(hosts, prefill, decode, reference):
    brought = hosts[1].counts().get("fetched_pages", 0)
    for seed in range(2):
        tokens = prompt(TOKENS, seed=seed)
        [first] = prefill.ask(Ask(tokens, 1, params=ASKS)).answers
        assert ours(first) == promise(until_s=1.0)
        answers = decode.ask(Ask(tokens, params=promise()))
        assert answers.external_hit_tokens == ALIGNED
        assert same(answers, reference(tokens))
    for seed in range(2, 4):
        tokens = prompt(TOKENS, seed=seed)
        ask_before(hosts, decode, tokens, promise())
        prefill.ask(Ask(tokens, 1, params=ASKS))
        answers = decode.finish()
        assert answers.external_hit_tokens == ALIGNED
        assert same(answers, reference(tokens))
    # What it has computed for somebody else before is handed over as well.
    tokens = prompt(TOKENS, seed=4)
    prefill.ask(Ask(tokens, 1))
    prefill.ask(Ask(tokens, 1, params=ASKS))
    answers = decode.ask(Ask(tokens, params=promise()))
    assert answers.external_hit_tokens == ALIGNED
    assert same(answers, reference(tokens))
    stats = hosts[1].stats()
    assert stats.cluster.counts["fetched_pages"] == brought + 5 * ALIGNED // CHUNK
    assert stats.service.broken_promises == 0
    assert prefill.metrics()["vllm:kv_cache_usage_perc"] == 0
    assert decode.metrics()["vllm:kv_cache_usage_perc"] == 0
    for host in hosts:
        host.wait_for(lambda stats: (stats.service.reservations, stats.service.reserved_bytes) == (0, 0))


def test_a_promise_that_is_not_kept_costs_what_was_said(decode, reference):
    tokens = prompt(TOKENS, seed=20)
    answers = decode.ask(Ask(tokens, params=promise(until_s=2.0)))
    assert answers.external_hit_tokens == 0
    assert answers.answers[0].ttft_s >= 2.0
    assert same(answers, reference(tokens))


def test_the_engine_that_computes_is_killed_in_the_middle(hosts, prefill, decode, reference):
    tokens = prompt(LONG, seed=30)
    pages = hosts[1].stats().store.pages
    ask_before(hosts, decode, tokens, promise(LONG_ALIGNED, until_s=5.0))
    prefill.begin([Ask(tokens, 1, params=ASKS)])
    hosts[1].wait_for(lambda stats: stats.store.pages >= pages + 2)
    prefill.kill()
    answers = decode.finish()
    assert 2 * CHUNK <= answers.external_hit_tokens < LONG_ALIGNED
    assert same(answers, reference(tokens), tolerance=1e-4)  # computed in steps of another size
    hosts[0].wait_for(lambda stats: not stats.service.reserved_bytes)


def test_the_first_hosts_daemon_is_killed_in_the_middle(hosts, prefill, decode, reference):
    tokens = prompt(LONG, seed=40)
    pages = hosts[1].stats().store.pages
    ask_before(hosts, decode, tokens, promise(LONG_ALIGNED, until_s=5.0))
    prefill.begin([Ask(tokens, 1, params=ASKS)])
    hosts[1].wait_for(lambda stats: stats.store.pages >= pages + 2)
    hosts[0].kill()
    assert prefill.finish().answers[0].tokens
    answers = decode.finish()
    assert answers.external_hit_tokens >= 2 * CHUNK
    assert same(answers, reference(tokens), tolerance=1e-4)
    # Without its daemon the first engine promises nothing.
    [first] = prefill.ask(Ask(prompt(TOKENS, seed=41), 1, params=ASKS)).answers
    assert ours(first) == promise(0, until_s=1.0)


def test_two_hosts_behind_the_proxy(model, network, reference, tmp_path):
    """vLLM's own servers, one on each host; at the end both daemons are killed."""
    pytest.importorskip("httpx")
    pytest.importorskip("starlette")
    from tests.vllm.test_handover_http import behind_the_proxy

    def logprobs(tokens):
        [answer] = reference(tokens).answers
        return [place[token] for token, place in zip(answer.tokens, answer.logprobs, strict=True)]

    with ExitStack() as stack:
        hosts = started(stack)
        connectors = [patient(host.url, handover_s=10.0) for host in hosts]
        behind_the_proxy(stack, model(models.LLAMA), tmp_path, logprobs, hosts, connectors)
