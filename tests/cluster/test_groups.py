"""Models with windows and with states on two hosts: two daemons, a real master and a real lender between
them, the bundled engine on both. What one host has computed the other one goes on with."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("openai", reason="make test-cluster")
pytest.importorskip("torch")

import httpx

from tests.cluster.network import MASTER, inside
from tests.cluster.test_handover import LONG, TwoHosts, engine, nothing_is_held, waiting
from tests.engine.server.handing import ASKS, WHOLE, a_prompt, ask, cached, check_same, promise
from tests.engine.server.live import WAIT_S
from tests.tierstore.cluster.hosts import Host

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["tiny-gemma3", "tiny-qwen3-next"])
def two(request, shared_network):
    hosts, engines = [], []
    model = (f"--model={request.param}", "--served-model-name=tiny")
    try:
        for number in (1, 2):
            hosts.append(Host(f"mooncake://{MASTER}", "--host-bytes=64MiB", prefix=inside(number)))
        for host in hosts:
            host.wait_online()
            engines.append(engine(*model, f"--store={host.url}"))
        engines.append(engine(*model))
        made = TwoHosts(*hosts, *engines, options=model)
        yield made
        engines[0] = made.prefill
    finally:
        for each in (*engines, *hosts):
            each.close()


def test_what_one_host_serves_twice_the_other_one_goes_on_with(two):
    prompt = a_prompt(0)
    cold = ask(two.alone, prompt)
    for held in (0, WHOLE - 16 * (len(prompt) % 16 == 0)):
        published = two.one.counts().get("published_pages", 0)
        answer = ask(two.prefill, prompt)
        assert cached(answer) == held
        check_same(answer, cold)
    two.one.wait_for(lambda stats: stats.cluster.counts.get("published_pages", 0) > published + WHOLE // 16)
    brought = two.other.counts().get("fetched_pages", 0)
    answer = ask(two.decode, prompt)
    assert cached(answer) == WHOLE
    check_same(answer, cold)
    assert two.other.counts()["fetched_pages"] > brought + WHOLE // 16, "chains, and what goes with them"
    nothing_is_held(two.one)
    nothing_is_held(two.other)


def test_what_one_host_computes_the_other_goes_on_with(two):
    """As a proxy asks; then with the second one waiting before the first one has begun; then of a prompt that
    was computed before, for somebody else."""
    prompt = a_prompt(1)
    first = ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    assert first["kv_transfer_params"] == promise(until_s=1.0)
    answer = ask(two.decode, prompt, kv_transfer_params=promise())
    assert cached(answer) == WHOLE
    check_same(answer, ask(two.alone, prompt))
    prompt = a_prompt(2)
    asked = waiting(two, prompt)
    ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    answer = asked.answer()
    assert cached(answer) == WHOLE
    check_same(answer, ask(two.alone, prompt))
    prompt = a_prompt(3)
    ask(two.prefill, prompt, max_tokens=1)
    ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    answer = ask(two.decode, prompt, kv_transfer_params=promise())
    assert cached(answer) == WHOLE
    check_same(answer, ask(two.alone, prompt))
    assert two.other.stats().service.broken_promises == 0
    nothing_is_held(two.one)
    nothing_is_held(two.other)


def test_the_engine_that_computes_is_killed_in_the_middle(two):
    """Of what it has published by then that is taken which makes a hit, the rest is computed."""
    pages = two.other.stats().store.pages
    prompt = a_prompt(10, LONG)
    asked = waiting(two, prompt, until_s=3.0)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASKS}
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(two.prefill.http.post, "/v1/completions", json=body)
        two.other.wait_for(lambda stats: stats.store.pages >= pages + 2)
        two.prefill.popen.send_signal(signal.SIGKILL)
        assert isinstance(begun.exception(WAIT_S), httpx.HTTPError), "it was done"
    check_same(asked.answer(), ask(two.alone, prompt))
    nothing_is_held(two.one)
    nothing_is_held(two.other)
    two.restart_prefill()


def test_the_first_hosts_daemon_is_killed_in_the_middle(two):
    """While it publishes what the other one brings: the answer is the same, and so is the next one."""
    pages = two.other.stats().store.pages
    prompt = a_prompt(20, LONG)
    asked = waiting(two, prompt, until_s=3.0)
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(ask, two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
        two.other.wait_for(lambda stats: stats.store.pages >= pages + 2)
        two.one.kill()
        assert begun.result(WAIT_S)["choices"]
    expected = ask(two.alone, prompt)
    check_same(asked.answer(), expected)
    check_same(ask(two.decode, prompt), expected)
    nothing_is_held(two.other)
    two.one.start()
    two.one.wait_online()
    prompt = a_prompt(21)
    ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    answer = ask(two.decode, prompt, kv_transfer_params=promise())
    check_same(answer, ask(two.alone, prompt))


def test_prompts_that_part_and_go_on(two):
    """Another host's end of a turn is where the next turn goes on; a prompt that parts before it finds
    nothing there."""
    turn = a_prompt(30)
    answer = ask(two.prefill, turn, max_tokens=40)
    longer = [*turn, *a_prompt(31, 300)]
    for prompt in (longer, [*turn[:300], *a_prompt(32, 300)]):
        ask(two.prefill, prompt)
        ask(two.prefill, prompt)
        check_same(ask(two.decode, prompt), ask(two.alone, prompt))
    assert cached(answer) == 0
