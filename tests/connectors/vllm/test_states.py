"""Models with recurrent states: a hit ends where one is held, and brings that one."""

from __future__ import annotations

import dataclasses

import pytest

from tests.connectors.vllm.conftest import BLOCK, CHUNK, Request, step
from tests.connectors.vllm.test_halves import equal_blocks
from tests.daemons import daemon_stats
from tests.tierstore.cluster.hosts import Host
from tierstore import groups
from tierstore.groups import GroupRule
from tierstore.keys import Identity, PageKey, encode_tokens
from tierstore.spec import KVSpec
from tierstore.testing.clock import wait_until
from tierstore_connectors.vllm.identity import ChunkNames

HYBRID = (GroupRule.state(), GroupRule.all())
TOKENS = list(range(70))  # 4 chunks, and 6 tokens
ATTENTION = [5, 6, 7, 8, 9, 10, 11, 12, 13]
OTHER = [20, 21, 22, 23, 24, 25, 26, 27, 28]


def state_of(tokens):
    """A state depends on all tokens before it."""
    return float(sum((at + 1) * token for at, token in enumerate(tokens)) % 1_000_003)


def compute(engine, request, ends, begin=0, first_state=40, kept=None):
    """Compute a request in steps that end at ``ends``. vLLM says which block holds the state of each (or of
    those ``kept``); the blocks are ``first_state`` and those after it."""
    name, tokens = request.request_id, request.all_token_ids
    states = [0] * (begin // BLOCK)
    if begin:
        states[-1] = first_state - 1
        engine.memory[0][first_state - 1] = state_of(tokens[:begin])
    for number, end in enumerate(ends):
        block = first_state + number
        states += [0] * (-(-end // BLOCK) - len(states) - 1) + [block]
        table = (list(states), ATTENTION)
        offered = [(0, block, end)] if kept is None or end in kept else []
        new = [] if number else [(name, begin, table)]
        cached = [(name, begin, ([block], []))] if number else []
        output = step(
            new, cached, scheduled={name: end - begin}, tables={name: table}, states={name: offered}
        )

        def write(block=block, end=end):
            engine.memory[0][block] = state_of(tokens[:end])
            for at in range(-(-end // BLOCK)):
                engine.memory[1][ATTENTION[at]] = state_of(tokens[: (at + 1) * BLOCK])

        engine.run(output, between=write)
        begin = end
    engine.settle()


def begin(engine, request, local=0):
    """vLLM asks, and computes it all."""
    assert engine.matched(request, local) == 0
    engine.scheduler.allocated(request, ([], []), 0)


def load(engine, request, length, local=0):
    """Take a hit of ``length`` tokens: the state is to be in block 50."""
    assert engine.matched(request, local) == length - local
    state = [0] * (length // BLOCK - 1) + [50]
    engine.scheduler.allocated(request, (state, OTHER), length - local)
    return engine.until_loaded()


@pytest.fixture
def pair(engine):
    return [engine(rules=HYBRID) for _ in range(2)]


def test_the_state_of_the_hit_is_where_vllm_reads_it(pair):
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [32, 64, 70])
    results = load(second, Request("b", TOKENS), 64)
    assert (results.finished, results.failed, results.blocks) == ({"b"}, set(), set())
    assert (second.memory[0][50] == state_of(TOKENS[:64])).all()
    assert equal_blocks(first, second, zip(ATTENTION[:8], OTHER[:8], strict=True), group=1)
    counts = second.counters.take()
    assert counts["loaded_tokens"] == counts["promised_tokens"] == 64
    # Of the states before the hit's none is loaded, of those between nothing was kept.
    assert not second.memory[0][:50].any()


@pytest.mark.parametrize(("kept", "length"), [({32}, 32), ({16, 48}, 48), ({16}, 16), (set(), 0)])
def test_a_hit_ends_where_there_is_a_state(pair, kept, length, monkeypatch):
    monkeypatch.setattr(groups, "_SCANNED", 1)
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [16, 32, 48, 64, 70], kept=kept)
    if length:
        load(second, Request("b", TOKENS), length)
        assert (second.memory[0][50] == state_of(TOKENS[:length])).all()
    else:
        assert second.matched(Request("b", TOKENS)) == 0
    second.scheduler.finished("b")
    store = second.scheduler.lookups.store
    wait_until(lambda: daemon_stats(store)["service"]["leases"] == 0)


def test_a_prompt_that_parts_before_a_state_does_not_get_it(pair):
    """Both have the same tokens in the chunk at whose end the state is."""
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [64, 70])
    other = [7, *TOKENS[1:]]
    assert second.matched(Request("b", other)) == 0
    begin(first, Request("c", other))
    compute(first, Request("c", other), [64, 70])
    load(second, Request("d", other), 64)
    assert (second.memory[0][50] == state_of(other[:64])).all()


def test_states_of_another_salt_are_not_found(pair):
    first, second = pair
    request = Request("a", TOKENS, cache_salt="one")
    begin(first, request)
    compute(first, request, [64, 70])
    assert second.matched(Request("b", TOKENS, cache_salt="two")) == 0
    load(second, Request("c", TOKENS, cache_salt="one"), 64)


def test_states_inside_of_a_chunk_are_left_alone(pair):
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [32, 40, 70])
    load(second, Request("b", TOKENS), 32)


def test_a_state_that_vllm_goes_on_from_is_saved_where_the_store_may_lack_it(pair):
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request, local=32)
    compute(first, request, [64, 70], begin=32, kept=())
    load(second, Request("b", TOKENS), 32)
    assert (second.memory[0][50] == state_of(TOKENS[:32])).all()


def test_a_state_behind_vllms_own_hit_is_loaded(pair):
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [64, 70])
    second.memory[1][OTHER[:4]] = -1.0
    load(second, Request("b", TOKENS), 64, local=32)
    assert (second.memory[0][50] == state_of(TOKENS[:64])).all()
    assert (second.memory[1][OTHER[:4]] == -1.0).all()


def test_a_request_without_its_state_is_computed_anew(engine):
    for rules in (HYBRID, HYBRID[:1]):
        first, second = engine(rules=rules, model=str(rules)), engine(rules=rules, model=str(rules))
        request = Request("a", TOKENS)
        begin(first, request)
        first.memory.append(first.on.array(first.memory[0].shape))  # of a group that only one of them has
        compute(first, request, [64, 70])
        again = Request("b", TOKENS)
        assert second.matched(again) == 64
        second.scheduler.allocated(again, ([0] * 7 + [50], OTHER), 64)
        order = second.scheduler._loads[0]
        broken = (dataclasses.replace(order.groups[0], chunks=((999,),)), *order.groups[1:])
        second.scheduler._loads[0] = dataclasses.replace(order, groups=broken)
        results = second.until_loaded()
        assert (results.finished, results.failed, results.blocks) == ({"b"}, {"b"}, set())
        assert second.matched(Request("c", TOKENS)) == 0  # not promised for a while


def test_a_state_that_has_gone_since_it_was_found_fails_the_load(pair):
    """Nothing is served of a request that was promised it, and nothing of it is believed."""
    first, second = pair
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [64, 70])
    again = Request("b", TOKENS)
    assert second.matched(again) == 64
    second.scheduler.allocated(again, ([0] * 7 + [50], OTHER), 64)
    second.scheduler._grown[0] = dataclasses.replace(  # as if it had another name
        second.scheduler._grown[0], tokens=encode_tokens([9, *TOKENS[1:64]])
    )
    results = second.until_loaded()
    assert (results.finished, results.failed) == ({"b"}, {"b"})
    assert not second.memory[0].any()
    assert second.counters.take()["failed_loads"] == 1


def test_a_model_of_states_only(engine):
    first, second = (engine(rules=HYBRID[:1]) for _ in range(2))
    for each in (first, second):
        each.memory.append(each.on.array(each.memory[0].shape))
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [32, 64, 70])
    load(second, Request("b", TOKENS), 64)
    assert (second.memory[0][50] == state_of(TOKENS[:64])).all()


def test_a_promise_is_of_what_can_be_gone_on_from(pair):
    first, _ = pair
    request = Request("a", TOKENS, kv_transfer_params={"do_remote_decode": True})
    begin(first, request)
    compute(first, request, [32, 64, 70], kept={32})
    assert first.scheduler.handed_over("a").tokens == 32


def test_promised_states_are_waited_for(pair):
    """The promise comes before anything is there, and all of it is there when the wait is over."""
    first, second = pair
    promised = {"do_remote_prefill": True, "tierstore": {"tokens": 64, "until_s": 10}}
    again = Request("b", TOKENS, kv_transfer_params=promised)
    assert second.scheduler.matched(again, 0) is None
    request = Request("a", TOKENS, kv_transfer_params={"do_remote_decode": True})
    begin(first, request)
    compute(first, request, [64, 70])
    assert first.scheduler.handed_over("a").tokens == 64
    load(second, again, 64)
    assert (second.memory[0][50] == state_of(TOKENS[:64])).all()
    counts = second.counters.take()
    assert (counts["expected_tokens"], counts.get("missing_tokens", 0)) == (64, 0)


@pytest.fixture
def hosts(tmp_path):
    hosts = [Host(f"fake://{tmp_path}", "--host-bytes=64MiB") for _ in range(2)]
    for host in hosts:
        host.wait_online()
    yield hosts
    for host in hosts:
        host.close()


def test_states_of_another_host(engine, hosts):
    """Those of a prompt that it was asked for twice, and of one that it is computing for this host's engine;
    of a prompt that parts before the state nothing is brought."""
    first, second = (engine(rules=HYBRID, url=host.url) for host in hosts)
    assert first.connected()
    assert second.connected()
    request = Request("a", TOKENS)
    begin(first, request)
    compute(first, request, [32, 64, 70])
    load(first, Request("b", TOKENS), 64)
    hosts[0].wait_for(lambda stats: stats.cluster.counts.get("published_pages", 0) >= 5)
    load(second, Request("c", TOKENS), 64)
    assert (second.memory[0][50] == state_of(TOKENS[:64])).all()
    assert equal_blocks(first, second, zip(OTHER[:8], OTHER[:8], strict=True), group=1)
    hosts[1].has_counted("fetched_pages", 5)  # four of attention, and one state
    assert second.matched(Request("d", [*TOKENS[:40], *range(200, 230)])) == 0
    hosts[1].has_counted("fetched_pages", 5)
    other = [*range(300, 370)]
    promised = {"do_remote_prefill": True, "tierstore": {"tokens": 64, "until_s": 10}}
    waits = Request("e", other, kv_transfer_params=promised)
    assert second.scheduler.matched(waits, 0) is None
    request = Request("f", other, kv_transfer_params={"do_remote_decode": True})
    begin(first, request)
    compute(first, request, [64, 70])
    assert first.scheduler.handed_over("f").tokens == 64
    load(second, waits, 64)
    assert (second.memory[0][50] == state_of(other[:64])).all()


def test_pins_hold_states(engine):
    first = engine(rules=HYBRID)
    request = Request("a", TOKENS, kv_transfer_params={"tierstore": {"pin": True}})
    begin(first, request)
    compute(first, request, [32, 64, 70])
    first.scheduler.finished("a")
    first.run(step())
    first.worker._saver.submit(lambda: None).result(30)
    pages = first.worker.shard.groups[0]
    again = Request("b", TOKENS)
    first.scheduler.matched(again, 0)
    names = ChunkNames(CHUNK)
    keys = first.scheduler.requests["b"].keys
    prompt = names.pages(pages.identity, range(4), keys, encode_tokens(TOKENS))
    store = first.worker._stores.of(pages)
    assert store.unpin(prompt) == 2 * CHUNK  # the two states that there are
    assert store.unpin(prompt) == 0


def test_a_name_stands_for_all_keys_and_tokens_before_it():
    spec = KVSpec.opaque(64, chunk_tokens=CHUNK)
    identity = Identity.of(spec, model="m")
    keys = [PageKey(bytes([at]) * 16) for at in range(4)]

    def names(keys, tokens):
        prompt = ChunkNames(CHUNK).pages(identity, range(4), keys, encode_tokens(tokens))
        return [prompt.chunk(at) for at in range(4)]

    usual = names(keys, TOKENS[:64])
    others = names(keys, [*TOKENS[:20], 99, *TOKENS[21:64]])
    assert [mine == theirs for mine, theirs in zip(usual, others, strict=True)] == [True, False, False, False]
    others = names([keys[0], keys[0], *keys[2:]], TOKENS[:64])
    assert [mine == theirs for mine, theirs in zip(usual, others, strict=True)] == [True, False, False, False]
    growing = ChunkNames(CHUNK)
    growing.pages(identity, range(2), keys, encode_tokens([9] * 64))
    growing.cut(0)
    grown = growing.pages(identity, range(2, 4), keys, encode_tokens(TOKENS[:64]))
    assert [grown.chunk(at) for at in range(2)] == usual[2:]
