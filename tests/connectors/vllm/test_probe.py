"""What the daemon is asked about a prompt, when a model has several groups: how often, and what is held."""

from __future__ import annotations

import pytest

from tests.connectors.vllm.conftest import CHUNK, Request, step
from tests.connectors.vllm.test_halves import OTHER, TABLE, TOKENS, equal_blocks, load
from tests.tierstore.daemon.client.conftest import (  # noqa: F401  # fixtures
    daemon_stats,
    make_daemon,
    shared_daemon,
    short_directory,
    wait_until,
)

GROUPS = 5


def groups(value):
    """One for each group."""
    return (value,) * GROUPS


@pytest.fixture
def pair(engine):
    """Two engines of a model with several groups."""
    return [engine(windowed=groups(False)) for _ in range(2)]


def store_of(engine):
    return next(iter(engine.scheduler.finder._stores._stores.values()))


def asked(engine):
    return daemon_stats(store_of(engine))["service"]["requests"].get("Lookup", 0)


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


def test_a_prompt_that_all_have_costs_one_for_each(pair):
    first, second = pair
    first.save(Request("a", TOKENS), groups(TABLE[0]), len(TOKENS))
    before = asked(second)
    assert second.matched(Request("b", TOKENS)) == 64
    assert asked(second) == before + GROUPS
    assert leases(second) == GROUPS
    second.scheduler.finished("b")
    wait_until(lambda: leases(second) == 0)


def test_a_load_holds_its_pages_no_longer_than_it_takes(pair):
    first, second = pair
    first.save(Request("a", TOKENS), groups(TABLE[0]), len(TOKENS))
    results = load(second, Request("b", TOKENS), groups(OTHER[0]))
    assert (results.finished, results.failed) == ({"b"}, set())
    for group in range(GROUPS):
        assert equal_blocks(first, second, zip(TABLE[0][:8], OTHER[0][:8], strict=True), group=group)
    wait_until(lambda: leases(second) == 0)


def test_the_shortest_decides_and_nothing_is_brought_for_nothing(engine, make_daemon):  # noqa: F811
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
    assert asked(second) - lookups == GROUPS + GROUPS - 1  # those that had more were asked again
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


def test_what_was_released_while_it_was_asked_holds_nothing(pair, shared_daemon):  # noqa: F811
    first, second = pair
    first.save(Request("a", TOKENS), groups(TABLE[0]), len(TOKENS))
    sent = store_of(second).connection.counters
    lookups = asked(second)
    before = sent.requests
    shared_daemon.signal(19)  # SIGSTOP: the answer comes after the release
    try:
        second.scheduler.arrived(Request("b", TOKENS))
        probe = second.scheduler.requests["b"].probe
        wait_until(lambda: sent.requests > before)
        second.scheduler.finished("b")
    finally:
        shared_daemon.signal(18)
    wait_until(lambda: probe.answered)
    wait_until(lambda: leases(second) == 0)
    assert probe.tokens() == 0
    assert asked(second) == lookups + 1  # for the others it was too late
