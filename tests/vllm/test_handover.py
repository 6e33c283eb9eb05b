"""One engine computes a prompt, another goes on with it, by vLLM's contract. Whatever becomes of the first
one, of the daemon or the client, the answer is that of one engine that does both."""

from __future__ import annotations

import time

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine
from tests.vllm.harness import patient, same, wait_stored
from tests.vllm.models import prompt
from tierstore_tools.vllm.daemon import ServeProcess

pytestmark = pytest.mark.timeout(1200)
CHUNK = 64
TOKENS, ALIGNED = 901, 896
NULLS = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, **NULLS}  # as vLLM's proxies say it


def promise(tokens=ALIGNED, until_s=10.0):
    told = {"tokens": tokens, "until_s": until_s}
    return {"do_remote_prefill": True, "do_remote_decode": False, "tierstore": told}


def ours(answer):
    """What the connector has answered: vLLM adds how many of the tokens it did not compute."""
    return {name: value for name, value in answer.params.items() if name in promise()}


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    """A daemon, an engine that computes prompts and one that goes on with them."""
    with ServeProcess(tmp_path_factory.mktemp("daemon"), disk=False) as daemon:
        options = {"connector": patient(daemon.url)}
        with (
            Engine(model(models.LLAMA), **options) as prefill,
            Engine(model(models.LLAMA), **options) as decode,
        ):
            yield daemon, prefill, decode


@pytest.fixture(scope="module")
def reference(model):
    """``reference(prompt)``: what one engine without a connector answers."""
    with Engine(model(models.LLAMA)) as engine:

        def answers(tokens):
            engine.reset_prefix_cache()
            return engine.ask(Ask(tokens))

        yield answers


def wait_promised(daemon, count):
    """Until so many lookups have waited for what was promised."""
    ends = time.monotonic() + 60
    while daemon.stats().service.promised_lookups < count:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_one_computes_the_other_goes_on(pair, reference):
    daemon, prefill, decode = pair
    for seed in range(3):
        tokens = prompt(TOKENS, seed=seed)
        [first] = prefill.ask(Ask(tokens, 1, params=ASKS)).answers
        assert ours(first) == promise(until_s=1.0)
        second = decode.ask(Ask(tokens, params=first.params))
        expected = reference(tokens)
        assert second.external_hit_tokens == ALIGNED
        assert same(second, expected)
        assert first.tokens == expected.answers[0].tokens[:1]
        assert second.answers[0].params is None
    service = daemon.stats().service
    assert service.broken_promises == 0
    # Nothing is held for anybody any more.
    assert prefill.metrics()["vllm:kv_cache_usage_perc"] == 0
    assert (service.reservations, service.reserved_bytes) == (0, 0)
    assert prefill.metrics()["vllm:tierstore_handed_over_tokens"] == 3 * ALIGNED
    assert decode.metrics()["vllm:tierstore_expected_tokens"] == 3 * ALIGNED


def test_promised_pages_are_waited_for(pair, reference):
    daemon, prefill, decode = pair
    waited = daemon.stats().service.promised_lookups
    tokens = prompt(TOKENS, seed=10)
    decode.begin([Ask(tokens, params=promise())])
    wait_promised(daemon, waited + 1)
    prefill.ask(Ask(tokens, 1, params=ASKS))
    answers = decode.finish()
    assert answers.external_hit_tokens == ALIGNED
    assert same(answers, reference(tokens))


def test_promised_pages_that_never_come_cost_what_was_said_and_nobody_else_anything(pair, reference):
    daemon, _, decode = pair
    broken = daemon.stats().service.broken_promises
    missing = decode.metrics().get("vllm:tierstore_missing_tokens", 0)
    tokens, other = prompt(TOKENS, seed=20), prompt(200, seed=21)
    answers = decode.ask(Ask(tokens, params=promise(until_s=3.0)), Ask(other))
    waiting, served = answers.answers
    assert served.total_s < waiting.ttft_s
    assert waiting.ttft_s >= 3.0
    assert same_one(waiting, reference(tokens))
    assert same_one(served, reference(other))
    assert daemon.stats().service.broken_promises == broken + 1
    assert decode.metrics()["vllm:tierstore_missing_tokens"] == missing + ALIGNED


def same_one(answer, expected):
    from tests.vllm.engines import greatest_difference

    return greatest_difference(answer, expected.answers[0]) <= 1e-5


def test_a_part_of_what_was_promised_is_taken(pair, reference):
    daemon, prefill, decode = pair
    tokens = prompt(TOKENS, seed=30)
    before = daemon.stats().store.pages
    prefill.ask(Ask(tokens[:448], 1))
    wait_stored(daemon, before + 448 // CHUNK)
    answers = decode.ask(Ask(tokens, params=promise(until_s=0.3)))
    assert answers.external_hit_tokens == 448
    assert same(answers, reference(tokens))


def test_a_client_that_hangs_up_while_pages_are_waited_for(pair, reference):
    _, _, decode = pair
    tokens, other = prompt(TOKENS, seed=40), prompt(300, seed=41)
    [aborted] = decode.ask(Ask(tokens, params=promise(), abort_after=0)).answers
    assert (aborted.finish, aborted.tokens) == ("aborted", [])
    assert same(decode.ask(Ask(other)), reference(other))
    assert same(decode.ask(Ask(tokens)), reference(tokens))
    assert decode.metrics()["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": -1},
        {"tokens": TOKENS + 1},
        {"tokens": "896"},
        {"tokens": ALIGNED, "until_s": 1e9},
        {"tokens": ALIGNED, "until_s": -1},
        {"tokens": ALIGNED, "until_s": "long"},
        [ALIGNED],
    ],
)
def test_what_makes_no_sense_is_passed_over_and_counted(pair, reference, wrong):
    daemon, _, decode = pair
    waited = daemon.stats().service.promised_lookups
    errors = decode.metrics().get("vllm:tierstore_errors", 0)
    tokens = prompt(200, seed=50)
    decode.reset_prefix_cache()
    answers = decode.ask(Ask(tokens, params={"do_remote_prefill": True, "tierstore": wrong}))
    assert same(answers, reference(tokens))
    assert daemon.stats().service.promised_lookups == waited
    assert decode.metrics()["vllm:tierstore_errors"] == errors + 1


def test_the_first_engine_is_killed_in_the_middle(model, pair, reference):
    daemon, _, decode = pair
    tokens = prompt(3900, seed=60)
    before = daemon.stats().store.pages
    with Engine(model(models.LLAMA), connector=patient(daemon.url), max_num_batched_tokens=128) as prefill:
        prefill.begin([Ask(tokens, 1, params=ASKS)])
        wait_stored(daemon, before + 2)
        prefill.kill()
    stored = daemon.stats().store.pages - before
    answers = decode.ask(Ask(tokens, params=promise(3840, until_s=0.5)))
    assert answers.external_hit_tokens == min(stored * CHUNK, 3840)
    assert same(answers, reference(tokens), tolerance=1e-4)  # the reference was computed in one long step


def test_a_save_only_and_a_load_only_engine(model, pair, reference):
    daemon, _, _ = pair
    tokens, own = prompt(TOKENS, seed=70), prompt(TOKENS, seed=71)
    with (
        Engine(model(models.LLAMA), connector={**patient(daemon.url), "kv_role": "kv_producer"}) as prefill,
        Engine(model(models.LLAMA), connector={**patient(daemon.url), "kv_role": "kv_consumer"}) as decode,
    ):
        [first] = prefill.ask(Ask(tokens, 1, params=ASKS)).answers
        assert ours(first) == promise(until_s=1.0)
        answers = decode.ask(Ask(tokens, params=first.params))
        assert answers.external_hit_tokens == ALIGNED
        assert same(answers, reference(tokens))
        # The one takes nothing out of the store …
        prefill.reset_prefix_cache()
        again = prefill.ask(Ask(tokens, 1, params=ASKS))
        assert again.external_hit_tokens == 0
        assert ours(again.answers[0]) == ours(first)
        # … and the other puts nothing in, and promises what is there.
        before = daemon.stats().store.counters["saved_pages"]
        [nothing] = decode.ask(Ask(own, 1, params=ASKS)).answers
        assert ours(nothing) == promise(0, until_s=1.0)
        assert same(decode.ask(Ask(own)), reference(own))
        assert daemon.stats().store.counters["saved_pages"] == before


def test_the_daemon_is_killed_while_pages_are_waited_for(model, reference, make_daemon):
    daemon = make_daemon(disk=False)
    tokens = prompt(TOKENS, seed=80)
    with Engine(model(models.LLAMA), connector=patient(daemon.url)) as decode:
        decode.begin([Ask(tokens, params=promise(until_s=10.0))])
        wait_promised(daemon, 1)
        daemon.kill()
        answers = decode.finish()
        assert answers.answers[0].ttft_s < 10.0
        assert same(answers, reference(tokens))
        # Without a daemon nothing is promised.
        [first] = decode.ask(Ask(prompt(TOKENS, seed=81), 1, params=ASKS)).answers
        assert ours(first) == promise(0, until_s=1.0)


def test_two_hosts_and_a_pool(model, reference, make_daemon, tmp_path):
    """Pages come while they are computed: the second engine asks before the first one has begun."""
    pool = tmp_path / "pool"
    pool.mkdir()
    options = (f"--cluster=fake://{pool}",)
    one, other = (make_daemon(disk=False, options=options) for _ in range(2))
    for daemon in (one, other):
        wait_cluster(daemon, lambda cluster: cluster.online and not cluster.trouble)
    with (
        Engine(model(models.LLAMA), connector=patient(one.url), max_num_batched_tokens=128) as prefill,
        Engine(model(models.LLAMA), connector=patient(other.url)) as decode,
    ):
        for seed in (90, 91):
            tokens = prompt(TOKENS, seed=seed)
            decode.begin([Ask(tokens, params=promise())])
            wait_promised(other, seed - 89)
            [first] = prefill.ask(Ask(tokens, 1, params=ASKS)).answers
            answers = decode.finish()
            assert ours(first) == promise(until_s=1.0)
            assert answers.external_hit_tokens == ALIGNED
            assert same(answers, reference(tokens), 1e-4)  # computed in pieces, which round differently
        assert other.stats().cluster.counts["fetched_pages"] == 2 * ALIGNED // CHUNK
        # With the daemon of the first one killed nothing comes any more, and the second one computes.
        one.kill()
        tokens = prompt(TOKENS, seed=92)
        [first] = prefill.ask(Ask(tokens, 1, params=ASKS)).answers
        assert ours(first) == promise(0, until_s=1.0)
        answers = decode.ask(Ask(tokens, params=promise(until_s=0.5)))
        assert answers.external_hit_tokens == 0
        assert same(answers, reference(tokens))


def wait_cluster(daemon, condition):
    ends = time.monotonic() + 60
    while not condition(daemon.stats().cluster):
        assert time.monotonic() < ends, daemon.stats().cluster
        time.sleep(0.05)
