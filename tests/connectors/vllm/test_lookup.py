"""What the daemon is asked about a prompt, when a model has several groups: how often, and what is held."""

from __future__ import annotations

import pytest

from tests.connectors.vllm.conftest import CHUNK, Request, step
from tests.connectors.vllm.test_halves import OTHER, TABLE, TOKENS, equal_blocks, load
from tests.daemons import daemon_stats
from tierstore.testing.clock import wait_until
from tierstore_connectors.vllm.scheduler import SchedulerHalf

GROUPS = 5


def groups(value):
    """One for each group."""
    return (value,) * GROUPS


@pytest.fixture
def pair(engine):
    """Two engines of a model with several groups."""
    return [engine(windowed=groups(False)) for _ in range(2)]


def store_of(engine):
    return engine.scheduler.lookups.store


def asked(engine):
    return daemon_stats(store_of(engine))["service"]["requests"].get("FindHit", 0)


def leases(engine):
    return daemon_stats(store_of(engine))["service"]["leases"]


def tables(*rows):
    """The first row for as many groups as lack one."""
    return (rows[0],) * (GROUPS - len(rows) + 1) + rows[1:]


def save_all_but(engine, last):
    """Store four chunks in all groups; in the last one the first ``last`` only."""
    request = Request("a", TOKENS)
    whole = tables(TABLE[0])
    engine.save(Request("short", TOKENS[: last * CHUNK + 1]), whole, last * CHUNK + 1)
    engine.matched(request)
    engine.scheduler.allocated(request, whole, 0)
    engine.fill(whole, 1.0)
    missing = tables(TABLE[0], [0] * 6 + TABLE[0][6:])
    done = last * CHUNK
    engine.run(
        step(new=[("a", done, whole)], scheduled={"a": len(TOKENS) - done}, tables={"a": missing}),
        between=lambda: engine.fill(whole, 1.0),
    )
    engine.settle()


def test_a_prompt_that_nobody_has_costs_one_question(pair):
    _, second = pair
    before = asked(second)
    assert second.matched(Request("b", TOKENS)) == 0
    assert asked(second) == before + 1


def test_a_prompt_that_nobody_has_costs_one_question_where_windows_come_first(engine):
    second = engine(windowed=(True, True, False))
    before = asked(second)
    assert second.matched(Request("b", TOKENS)) == 0
    assert asked(second) == before + 1


def test_a_prompt_that_all_have_costs_one_question(pair):
    first, second = pair
    first.save(Request("a", TOKENS), groups(TABLE[0]), len(TOKENS))
    before = asked(second)
    assert second.matched(Request("b", TOKENS)) == 64
    assert asked(second) == before + 1
    assert leases(second) == GROUPS
    second.scheduler.finished("b")
    wait_until(lambda: leases(second) == 0)


def test_a_hit_needs_the_pages_of_all_workers(engine):
    """Tensor parallelism: each worker has a part of every block, under an identity of its own."""
    rank0, rank1 = (engine(model=f"rank {rank}", windowed=(False, True)) for rank in range(2))
    finder = SchedulerHalf(rank0.settings, rank0.groups, rank0.errors, rank0.counters)
    finder.connect([rank0.worker.shard, rank1.worker.shard])
    try:
        assert finder.lookups.store.wait_connected(30)

        def matched(name):
            while (tokens := finder.matched(Request(name, TOKENS), 0)) is None:
                finder.work(step())
            return tokens

        before = asked(rank0)
        rank0.save(Request("a", TOKENS), (TABLE[0], TABLE[0]), len(TOKENS))
        assert matched("b") == 0
        rank1.save(Request("c", TOKENS[:40]), (TABLE[0], TABLE[0]), 40)
        assert matched("d") == 32
        rank1.save(Request("e", TOKENS), (TABLE[0], TABLE[0]), len(TOKENS))
        assert matched("f") == 64
        assert asked(rank0) == before + 6  # one for each of these
    finally:
        finder.close()


def test_the_pages_of_a_window_come_from_disk_before_anything_is_promised(engine, make_daemon):
    url = make_daemon().url
    first, second = (engine(url=url, windowed=(False, True)) for _ in range(2))
    assert first.connected()
    assert second.connected()
    first.save(Request("a", TOKENS), (TABLE[0], TABLE[0]), len(TOKENS))
    store = store_of(second)
    assert store.flush(30)
    assert store.evict("host") > 0
    before = daemon_stats(store)["store"]["counters"]["disk_read_pages"]
    assert second.matched(Request("b", TOKENS)) == 64
    read = daemon_stats(store)["store"]["counters"]["disk_read_pages"] - before
    assert read == 4 + 2  # all four of full attention, and those that the last 20 tokens lie in
    assert second.scheduler.from_disk("b") == 64


def test_a_load_holds_its_pages_no_longer_than_it_takes(pair):
    first, second = pair
    first.save(Request("a", TOKENS), groups(TABLE[0]), len(TOKENS))
    results = load(second, Request("b", TOKENS), groups(OTHER[0]))
    assert (results.finished, results.failed) == ({"b"}, set())
    for group in range(GROUPS):
        assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True), group=group)
    wait_until(lambda: leases(second) == 0)


def test_the_shortest_decides_and_nothing_is_brought_for_nothing(engine, make_daemon):
    url = make_daemon().url
    first, second = (engine(url=url, windowed=groups(False)) for _ in range(2))
    assert first.connected()
    assert second.connected()
    save_all_but(first, 2)
    wait_until(lambda: leases(second) == 0)
    store = store_of(second)
    assert store.flush(30)
    assert store.evict("host") > 0
    before, lookups = daemon_stats(store), asked(second)
    assert second.matched(Request("b", TOKENS)) == 32
    after = daemon_stats(store)
    read = [each["store"]["counters"]["disk_read_pages"] for each in (before, after)]
    assert read[1] - read[0] == GROUPS * 2
    assert asked(second) - lookups == 1
    wait_until(lambda: leases(second) == GROUPS)
    assert second.scheduler.from_disk("b") == 32
    second.scheduler.finished("b")
    wait_until(lambda: leases(second) == 0)


def test_a_load_that_one_group_cannot_serve_gives_everything_back(pair):
    first, second = pair
    save_all_but(first, 2)
    request = Request("b", TOKENS)
    assert second.matched(request) == 32
    second.scheduler.allocated(request, groups(OTHER[0]), 64)  # more than was found
    results = second.until_loaded()
    assert (results.finished, results.failed) == ({"b"}, {"b"})
    wait_until(lambda: leases(second) == 0)
    assert not any(array.any() for array in second.memory)


def test_what_was_released_while_it_was_asked_holds_nothing(pair, shared_daemon):
    first, second = pair
    first.save(Request("a", TOKENS), groups(TABLE[0]), len(TOKENS))
    sent = store_of(second).backend.connection.counters
    lookups = asked(second)
    before = sent.requests
    shared_daemon.signal(19)  # SIGSTOP: the answer comes after the release
    try:
        second.scheduler.arrived(Request("b", TOKENS))
        second.scheduler.work(step())
        lookup = second.scheduler.requests["b"].lookup
        wait_until(lambda: sent.requests > before)
        second.scheduler.finished("b")
    finally:
        shared_daemon.signal(18)
    wait_until(lambda: lookup.answered)
    wait_until(lambda: leases(second) == 0)
    assert lookup.tokens() == 0
    assert asked(second) == lookups + 1


def test_prompts_that_come_together_are_asked_for_together(engine):
    first, second = engine(), engine()
    requests = [Request(f"b{at}", [at, *TOKENS]) for at in range(8)]
    first.save(Request("a", requests[3].all_token_ids), TABLE, len(TOKENS) + 1)
    before = asked(second)
    for request in requests:
        second.scheduler.arrived(request)
    assert asked(second) == before  # vLLM may have them all
    assert second.matched(requests[0]) == 0
    assert len({second.scheduler.requests[each.request_id].lookup.batch for each in requests}) == 1
    # The others have their answers now, without another step.
    assert [second.scheduler.matched(each, 0) for each in requests] == [0, 0, 0, 64, 0, 0, 0, 0]
    assert asked(second) == before + 8


def test_what_vllm_has_itself_is_not_asked_for(engine, shared_daemon):
    first = engine()
    request = Request("a", TOKENS)
    before = asked(first)
    shared_daemon.signal(19)
    try:
        first.scheduler.arrived(request)
        assert first.scheduler.matched(request, 64) == 0  # at once
        first.scheduler.allocated(request, TABLE, 0)
        first.scheduler.work(step(new=[("a", 64, TABLE)], scheduled={"a": 6}, tables={"a": TABLE}))
    finally:
        shared_daemon.signal(18)
    assert asked(first) == before
    assert first.matched(Request("b", [*TOKENS, *range(20)]), 64) == 0  # one chunk more
    assert asked(first) == before + 1


def test_what_vllm_has_itself_is_saved_again_after_a_minute_only(engine):
    now = [0.0]
    first = engine(clock=lambda: now[0])

    def saved(name, local=64):
        """The chunks that are to be saved of a prompt of which vLLM has a part."""
        request = Request(name, TOKENS)
        assert first.scheduler.matched(request, local) == 0
        first.scheduler.allocated(request, TABLE, 0)
        done = {"new": [(name, local, TABLE)], "scheduled": {name: 70 - local}, "tables": {name: TABLE}}
        work = first.scheduler.work(step(**done))
        return [(each.first, each.end) for order in work.saves for each in order.groups]

    assert saved("a") == [(0, 4)]  # nobody knows who has it
    assert saved("b") == []
    now[0] = 59.0
    assert saved("c") == []
    now[0] = 61.0
    assert saved("d") == [(0, 4)]
    first.forget_everything("1")
    assert saved("e") == [(0, 4)]


def test_what_vllm_has_no_room_for_is_looked_up_meanwhile(engine):
    first, second = engine(), engine(ahead=2)
    first.save(Request("a", TOKENS), TABLE, 70)
    names = ("b", "c", "d")
    for name in names:
        second.scheduler.arrived(Request(name, TOKENS))
    second.run(step())
    looked_up = [second.scheduler.requests[name].lookup for name in names]
    assert looked_up[2] is None  # two at a time
    wait_until(lambda: all(each.answered for each in looked_up[:2]))
    assert [each.tokens() for each in looked_up[:2]] == [64, 64]
    second.scheduler.finished("b")
    second.run(step())
    third = second.scheduler.requests["d"].lookup
    wait_until(lambda: third.answered)
    assert third.tokens() == 64


def test_a_batch_that_is_late_counts_once(engine, shared_daemon):
    first = engine(lookup_s=0.05)
    requests = [Request(f"late{at}", [at, *TOKENS]) for at in range(8)]
    for request in requests:
        first.scheduler.arrived(request)
    shared_daemon.signal(19)
    try:
        assert [first.matched(each) for each in requests] == [0] * 8
    finally:
        shared_daemon.signal(18)
    assert repr(first.scheduler.lookups.breaker) == "Breaker(1 failures)"


def test_what_was_looked_up_long_ago_is_looked_up_anew(engine):
    now = [0.0]
    first = engine(clock=lambda: now[0])
    request = Request("a", TOKENS)
    first.scheduler.arrived(request)
    first.run(step())  # vLLM has no room for it
    before = first.scheduler.requests["a"].lookup
    wait_until(lambda: before.answered)
    now[0] = 30.0
    asked_before = asked(first)
    assert first.matched(request) == 0
    assert asked(first) == asked_before + 1


def test_requests_that_wait_while_the_daemon_is_away_are_looked_up_when_it_is_back(engine, make_daemon):
    daemon = make_daemon()
    first, second = (engine(url=daemon.url) for _ in range(2))
    assert first.connected()
    assert second.connected()
    first.save(Request("a", TOKENS), TABLE, 70)
    assert store_of(first).flush(30)
    daemon.end()
    wait_until(lambda: not second.scheduler.lookups.reachable)
    waiting = Request("b", TOKENS)
    second.scheduler.arrived(waiting)
    assert second.matched(Request("c", TOKENS)) == 0
    second.run(step())
    daemon.start()
    assert second.connected()
    assert second.matched(waiting) == 64
