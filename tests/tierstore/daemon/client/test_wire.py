"""Who receives which answer, on a socket that takes little at a time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.daemons import TOKENS, in_threads, pages_of
from tests.tierstore.daemon.client.fake_daemon import hit_found, slowly
from tierstore.client import arena
from tierstore.testing.clock import wait_until
from tierstore.wire import messages as p

LONG = list(range(60_000))  # 240 KB of tokens, many times what the socket takes


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(arena, "_SEND_BYTES", 1)  # the kernel makes a few KiB of it


@pytest.fixture
def store(make_daemon, connect, small_buffers):
    store = connect(make_daemon(disk=False).url, lookup_s=20.0)
    assert store.save(TOKENS, pages_of(TOKENS)).wait(10) == len(TOKENS)
    return store


def test_a_message_that_the_socket_does_not_take_at_once_is_sent_by_who_waits(store):
    for number in range(5):
        assert store.lookup([*TOKENS[:64], number, *LONG]).tokens == 64


def test_and_by_the_connections_thread_where_nobody_waits(store):
    async def ask():
        prompts = [[*TOKENS[:64], number, *LONG] for number in range(5)]
        return await asyncio.gather(*(store.lookup_async(prompt) for prompt in prompts))

    assert [hit.tokens for hit in asyncio.run(ask())] == [64] * 5


def test_threads_that_wait_for_different_answers_all_get_theirs(store):
    """Short and long ones, led and not led, on one connection."""
    barrier = threading.Barrier(6)

    def look_up(number):
        barrier.wait(10)
        for turn in range(40):
            more = LONG if (turn + number) % 10 == 0 else LONG[:100]
            with store.lookup([*TOKENS[:64], number, *more]) as hit:
                assert hit.tokens == 64

    def look_up_async():
        async def ask():
            for _ in range(40):
                hit = await store.lookup_async(TOKENS)
                assert hit.tokens == len(TOKENS)
                hit.release()

        barrier.wait(10)
        asyncio.run(ask())

    in_threads(*(lambda number=number: look_up(number) for number in range(4)), look_up_async, look_up_async)
    assert store.backend.connection.counters.late_requests == 0
    assert store.backend.connection.counters.unsent_messages == 0


def test_an_answer_that_nobody_waits_for_any_more_is_received_soon(make_daemon, connect):
    """Between requests of threads that receive for themselves, the connection's thread does not listen, and
    after them it does again."""
    store = connect(make_daemon(disk=False).url, lookup_s=120.0)  # or the request ends on a slow machine
    connection = store.backend.connection

    def send_and_do_not_wait():
        return connection.call(
            connection.link, p.Ping(0), p.Pong, lambda answer, _: answer, caller_receives=True
        )

    store.lookup(TOKENS).release()
    call = send_and_do_not_wait()
    wait_until(lambda: call._answer is not None)
    wait_until(lambda: connection._channel._watched)
    call = send_and_do_not_wait()
    wait_until(lambda: call._answer is not None)


def test_after_a_slow_answer_the_next_that_nobody_waits_for_is_still_received_soon(fake, connect):
    """A thread receives its own answer for so long that the connection's thread has gone to sleep."""
    daemon = fake()
    daemon.answers[p.FindHit] = slowly(0.4, hit_found)
    store = connect(daemon.url, lookup_s=120.0)
    connection = store.backend.connection
    store.lookup(TOKENS)
    call = connection.call(connection.link, p.Ping(0), p.Pong, lambda answer, _: answer, caller_receives=True)
    wait_until(lambda: call._answer is not None)


def test_who_waits_while_another_receives_is_not_forgotten_when_that_one_ends(fake, connect):
    """The first receives for itself until long after the connection's thread has gone to sleep, and the
    second's answer comes when nobody receives any more."""
    daemon = fake()
    daemon.answers[p.FindHit] = slowly(0.4, hit_found)
    store = connect(daemon.url, lookup_s=20.0)

    def look_up(after_s):
        time.sleep(after_s)
        store.lookup(TOKENS).release()

    in_threads(lambda: look_up(0.0), lambda: look_up(0.2))
    assert store.backend.connection.counters.late_requests == 0
