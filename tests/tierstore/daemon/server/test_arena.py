"""The arena's socket: a process that maps the arena is killed while it writes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.tierstore.daemon.server.client import ArenaConnection, page_bytes, part, prompt_of
from tierstore.cli.operator import Operator
from tierstore.wire import messages as p

# Reserves, says so, and then writes to its slots for ever, holding a lease on what was there before.
WRITER = """
    import sys
    from tests.tierstore.daemon.server.client import Client, offsets, part, prompt_of
    from tierstore.wire import messages as p

    client = Client(sys.argv[1])
    client.register()
    found = client.lookup(prompt_of(range(64)))
    assert found.tokens == 64
    reserved = client.ask(p.Reserve(0, part(prompt_of(range(1000, 1160))), 0, 10))
    places = offsets(reserved.offsets)
    print(len(places), flush=True)
    while True:
        for place in places:
            client.arena.map[place : place + 8192] = b"?" * 8192
"""


@pytest.fixture
def writer():
    running = []

    def start(url):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), url], stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_writers_slots_and_leases_are_back_at_once(start, connect, writer):
    daemon = start(pages=16)
    client = connect(daemon.url)
    client.register()
    client.save(list(range(64)))
    process = writer(daemon.url)
    assert process.stdout.readline() == "10\n"
    stats = daemon.stats()
    assert (stats.service.reserved_bytes, stats.service.leases) == (10 * 8192, 1)
    os.kill(process.pid, signal.SIGKILL)
    daemon.wait_for(lambda stats: stats.service.connections == 1)
    stats = daemon.stats()
    assert stats.server.silent_clients == 0  # its end was seen, not its silence
    assert (stats.service.reserved_bytes, stats.service.leases) == (0, 0)
    assert stats.store.tiers["host"].used_bytes == 4 * 8192
    assert client.lookup(prompt_of(range(1000, 1160))).tokens == 0
    reserved = client.save(list(range(1000, 1160)))
    assert reserved.stored_tokens == 160
    found = client.lookup(prompt_of(range(1000, 1160)))
    ends = range(16, 161, 16)
    assert client.load(found.lease, 10) == [page_bytes(range(1000, 1000 + end)) for end in ends]
    client.tell(p.Release([found.lease]))
    daemon.wait_for(lambda stats: not stats.service.leases)
    daemon.check()


def test_many_killed_writers_leave_nothing_behind(start, connect, writer):
    daemon = start(pages=64)
    client = connect(daemon.url)
    client.register()
    client.save(list(range(64)))
    processes = {process.stdout: process for process in (writer(daemon.url) for _ in range(3))}
    while processes:  # one writes, and the others wait for its end
        [told] = select.select(list(processes), [], [], 60)[0]
        assert told.readline() == "10\n"
        os.kill(processes.pop(told).pid, signal.SIGKILL)
    daemon.wait_for(lambda stats: stats.service.connections == 1)
    assert daemon.stats().server.silent_clients == 0
    daemon.check()


def test_a_stopped_process_is_not_taken_for_a_dead_one(start, connect, writer):
    daemon = start(pages=16)
    client = connect(daemon.url)
    client.register()
    client.save(list(range(64)))
    process = writer(daemon.url)
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.5)
    assert daemon.stats().service.reserved_bytes == 10 * 8192
    assert client.ask(p.Reserve(0, part(prompt_of(range(2000, 2160))), 0, 10)).stored_tokens == 2 * 16


def test_who_speaks_on_the_arenas_socket_is_hung_up_on(start, connect):
    daemon = start()
    client = connect(daemon.url)
    rude = ArenaConnection(daemon.url.removeprefix("ipc://") + ".arena")
    daemon.wait_for(lambda stats: stats.server.arena_connections == 2)
    rude.socket.send(b"hello")
    daemon.wait_for(lambda stats: stats.server.arena_connections == 1)
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    rude.close()


def test_the_arena_is_what_the_header_says(start):
    daemon = start(pages=16)
    connection = ArenaConnection(daemon.url.removeprefix("ipc://") + ".arena")
    assert connection.nbytes == 16 * 8192
    assert len(connection.token) == 16
    connection.close()


ATTACKER = """
    import os, socket, sys
    from tierstore.wire import messages as p

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    _, fds, _, _ = socket.recv_fds(connection, p.ARENA_HEADER.size, 1)
    for size in (0, 1 << 30):
        try:
            os.ftruncate(fds[0], size)
        except PermissionError:
            print("refused", flush=True)
"""


def test_a_client_cannot_cut_the_arena_short_for_the_others(start, connect):
    daemon = start(pages=16)
    client = connect(daemon.url)
    client.register()
    tokens = list(range(64))
    client.save(tokens)
    path = daemon.url.removeprefix("ipc://") + ".arena"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ATTACKER), path],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.split() == ["refused", "refused"]
    found = client.lookup(prompt_of(tokens))
    assert client.load(found.lease, 4) == [page_bytes(tokens[: 16 * n]) for n in (1, 2, 3, 4)]


def test_an_operator_needs_none_of_the_connections_that_engines_have_taken(start, connect, monkeypatch):
    monkeypatch.setattr("tierstore.daemon.arena._MOST_CONNECTIONS", 3)
    daemon = start(pages=16)
    for _ in range(3):
        connect(daemon.url, line=True)
    with Operator(daemon.url) as operator:
        stats = operator.stats()
    assert stats.server.arena_connections == 3
    assert stats.ready
