"""One host's engine computes a prompt, another host's goes on with it: two daemons, a real master and a real
lender between them, the bundled engine on both."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

pytest.importorskip("openai", reason="make test-cluster")
pytest.importorskip("torch")

import httpx

from tests.cluster.network import MASTER, inside
from tests.engine.server.handing import (
    ASKS,
    CHUNK,
    WHOLE,
    Asked,
    a_prompt,
    ask,
    cached,
    check_same,
    promise,
)
from tests.engine.server.live import WAIT_S
from tests.engine.server.processes import Process
from tests.tierstore.cluster.hosts import Host

pytestmark = pytest.mark.timeout(300)
LONG = 4000  # tokens, in 250 steps: an engine can be killed in the midst of them


@dataclass
class TwoHosts:
    """``one`` computes prompts, ``other`` goes on with them; ``alone`` does both, without a store."""

    one: Host
    other: Host
    prefill: Process
    decode: Process
    alone: Process
    options: tuple[str, ...] = ()

    def restart_prefill(self) -> None:
        self.prefill.close()
        self.prefill = engine(*self.options, f"--store={self.one.url}")


def engine(*options: str) -> Process:
    return Process("--chunk-tokens=16", "--prefill-chunk=16", "--plan=load", *options)


@pytest.fixture(scope="module")
def two(shared_network):
    hosts, engines = [], []
    try:
        for number in (1, 2):
            hosts.append(Host(f"mooncake://{MASTER}", prefix=inside(number)))
        for host in hosts:
            host.wait_online()
            engines.append(engine(f"--store={host.url}"))
        engines.append(engine())
        made = TwoHosts(*hosts, *engines)
        yield made
        engines[0] = made.prefill
    finally:
        for each in (*engines, *hosts):
            each.close()


def waiting(two, prompt, *, until_s=10.0):
    """The second host's engine has been asked, and waits for pages."""
    before = two.other.stats().service.promised_lookups
    asked = Asked(two.decode, prompt, kv_transfer_params=promise(len(prompt) // CHUNK * CHUNK, until_s))
    two.other.wait_for(lambda stats: stats.service.promised_lookups > before)
    return asked


def nothing_is_held(host):
    host.wait_for(
        lambda stats: (
            not (
                stats.service.leases
                or stats.service.reservations
                or stats.service.reserved_bytes
                or stats.store.open_hits
            )
        )
    )


def test_what_one_host_computes_the_other_goes_on_with(two):
    """As a proxy asks, and then with the second one waiting before the first one has begun. By default a host
    gives others what is used twice: these pages it gives them because the request says who goes on."""
    brought = two.other.counts().get("fetched_pages", 0)
    for number in range(2):
        prompt = a_prompt(number)
        first = ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
        assert first["kv_transfer_params"] == promise(until_s=1.0)
        params = promise()  # a machine that is too busy may need more than a second
        second = ask(two.decode, prompt, kv_transfer_params=params)
        assert cached(second) == WHOLE
        check_same(second, ask(two.alone, prompt))
    for number in range(2, 4):
        prompt = a_prompt(number)
        asked = waiting(two, prompt)
        ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
        answer = asked.answer()
        assert cached(answer) == WHOLE
        check_same(answer, ask(two.alone, prompt))
    stats = two.other.stats()
    assert stats.cluster.counts["fetched_pages"] == brought + 4 * WHOLE // CHUNK
    assert stats.service.broken_promises == 0
    nothing_is_held(two.one)
    nothing_is_held(two.other)


def test_what_was_computed_before_is_handed_over_too(two):
    prompt = a_prompt(5)
    ask(two.prefill, prompt, max_tokens=1)
    ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    answer = ask(two.decode, prompt, kv_transfer_params=promise())
    assert cached(answer) == WHOLE
    check_same(answer, ask(two.alone, prompt))


def test_the_engine_that_computes_is_killed_in_the_middle(two):
    """What it has published by then is taken, the rest is computed."""
    before = two.other.stats()
    prompt = a_prompt(10, LONG)
    asked = waiting(two, prompt, until_s=3.0)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASKS}
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(two.prefill.http.post, "/v1/completions", json=body)
        two.other.wait_for(lambda stats: stats.store.pages >= before.store.pages + 2)
        two.prefill.popen.send_signal(signal.SIGKILL)
        assert isinstance(begun.exception(WAIT_S), httpx.HTTPError), "it was done"
    answer = asked.answer()
    assert 2 * CHUNK <= cached(answer) < LONG // CHUNK * CHUNK
    check_same(answer, ask(two.alone, prompt))
    assert two.other.stats().service.broken_promises == before.service.broken_promises + 1
    nothing_is_held(two.one)
    nothing_is_held(two.other)
    two.restart_prefill()


def test_the_first_hosts_daemon_is_killed_in_the_middle(two):
    pages = two.other.stats().store.pages
    prompt = a_prompt(20, LONG)
    asked = waiting(two, prompt, until_s=3.0)
    with ThreadPoolExecutor() as threads:
        begun = threads.submit(ask, two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
        two.other.wait_for(lambda stats: stats.store.pages >= pages + 2)
        two.one.kill()
        assert begun.result(WAIT_S)["choices"]
    answer = asked.answer()
    assert cached(answer) >= 2 * CHUNK
    check_same(answer, ask(two.alone, prompt))
    nothing_is_held(two.other)
    # Without its daemon the first engine promises nothing, and the second one does not wait.
    other = a_prompt(21)
    first = ask(two.prefill, other, max_tokens=1, kv_transfer_params=ASKS)
    assert first["kv_transfer_params"] == promise(0, until_s=1.0)
    answer = ask(two.decode, other, kv_transfer_params=first["kv_transfer_params"])
    assert cached(answer) == 0
    check_same(answer, ask(two.alone, other))
    two.one.start()
    two.one.wait_online()


@pytest.mark.parametrize(("number", "missing"), [(30, "pages"), (31, "lender"), (32, "master")])
def test_a_promise_that_is_not_kept_costs_what_was_said(two, shared_network, number, missing):
    """The pages are not computed, or what is between the hosts has gone."""
    broken = two.other.stats().service.broken_promises
    prompt, other = a_prompt(number), a_prompt(number + 10)
    if missing == "lender":
        shared_network.kill_lender()
    elif missing == "master":
        shared_network.kill_master()
    asked = waiting(two, prompt, until_s=2.0)
    if missing != "pages":
        ask(two.prefill, prompt, max_tokens=1, kv_transfer_params=ASKS)
    check_same(ask(two.decode, other), ask(two.alone, other))  # is served meanwhile
    answer = asked.answer()
    assert cached(answer) == 0
    check_same(answer, ask(two.alone, prompt))
    assert two.other.stats().service.broken_promises == broken + 1
    nothing_is_held(two.other)
    if missing == "lender":
        shared_network.start_lender()
    elif missing == "master":
        shared_network.start_master()
