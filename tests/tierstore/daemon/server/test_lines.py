"""The daemon over the arena's own socket: the same answers, and what one client does costs no other one."""

from __future__ import annotations

import secrets

import pytest

from tests.tierstore.daemon.server.client import page_bytes, part, prompt_of
from tierstore.wire import messages as p
from tierstore.wire.framing import LENGTH

TOKENS = list(range(80))


def test_what_comes_over_a_line_is_served(start, connect):
    daemon = start()
    client = connect(daemon.url, line=True)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    assert found.tokens == 80
    assert client.load(found.lease, 5) == [page_bytes(TOKENS[:end]) for end in range(16, 81, 16)]
    client.tell(p.Release([found.lease]))
    daemon.wait_for(lambda stats: not stats.service.leases)
    server = daemon.stats().server
    assert server.received >= 7
    assert server.received_bytes > 0
    assert server.sent >= 6
    daemon.check()


def test_lines_and_zmq_share_one_store(start, connect):
    daemon = start()
    over_zmq, over_line = connect(daemon.url), connect(daemon.url, line=True)
    for client in (over_zmq, over_line):
        client.register()
    over_zmq.save(TOKENS)
    assert over_line.lookup(prompt_of(TOKENS)).tokens == 80


def test_a_session_is_opened_with_the_token_of_its_own_line(start, connect):
    daemon = start()
    other = connect(daemon.url, line=True)
    client = connect(daemon.url, line=True, hello=False)
    assert client.ask(p.Ping(0)).kind == "connection"
    for token in (other.arena.token, secrets.token_bytes(16)):
        assert client.ask(p.Hello(0, token, "thief")).kind == "connection"
    client.hello()
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    assert isinstance(other.ask(p.Ping(0)), p.Pong)


def test_pages_do_not_go_over_a_line(start, connect):
    daemon = start()
    client = connect(daemon.url, line=True)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    assert client.ask(p.Fetch(0, found.lease, 0, 5, 1.0)).kind == "usage"
    assert client.ask(p.Write(0, 1, 0)).kind == "usage"
    assert daemon.stats().service.failed_requests == 0


def test_who_hangs_up_has_nothing_left(start, connect):
    daemon = start()
    client = connect(daemon.url, line=True)
    client.register()
    client.save(TOKENS)
    client.lookup(prompt_of(TOKENS))
    client.ask(p.Reserve(0, part(prompt_of(range(1000, 1160))), 0, 10))
    client.close()
    daemon.wait_for(lambda stats: not stats.service.connections)
    daemon.check()


def test_unread_answers_are_kept_within_a_limit_and_the_others_are_served(start, connect):
    daemon = start()
    deaf, client = connect(daemon.url, line=True), connect(daemon.url, line=True)
    asked = 0
    while not daemon.stats().server.unsent:
        for _ in range(500):
            deaf.tell(p.Stats(asked))
            asked += 1
        assert isinstance(client.ask(p.Ping(0)), p.Pong)
        assert asked < 100_000
    # What it then reads are whole answers, in order, and it is served again.
    client.ask(p.Ping(0))
    heard = []
    while (answer := deaf.hear(0.5)[0]) is not None:
        heard.append(answer.id)
    assert len(heard) < asked
    assert isinstance(deaf.ask(p.Ping(0)), p.Pong)


def test_a_flood_on_one_line_lets_the_others_have_their_turn(start, connect):
    """More messages in one go than are taken in one go."""
    daemon = start()
    flood, client = connect(daemon.url, line=True), connect(daemon.url, line=True)
    ping = p.encode(p.Ping(7))
    flood.send_bytes((LENGTH.pack(len(ping)) + ping) * 3000)
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    heard = [flood.hear()[0] for _ in range(3000)]
    assert heard == [p.Pong(7)] * 3000


def test_who_hangs_up_in_the_middle_of_a_flood_is_gone(start, connect):
    daemon = start()
    flood = connect(daemon.url, line=True)
    ping = p.encode(p.Ping(7))
    flood.send_bytes((LENGTH.pack(len(ping)) + ping) * 3000)
    flood.close()
    daemon.wait_for(lambda stats: not stats.server.arena_connections and not stats.service.connections)


@pytest.mark.parametrize("nbytes", [1, 7, 100, 100_000])
def test_noise_ends_its_own_line_only(start, connect, nbytes):
    daemon = start()
    noise, client = connect(daemon.url, line=True), connect(daemon.url, line=True)
    noise.send_bytes(b"\xff" * nbytes)
    noise.close()
    daemon.wait_for(lambda stats: stats.server.arena_connections == 1)
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    assert daemon.stats().service.failed_requests == 0
