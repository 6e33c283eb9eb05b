"""A daemon under everything at once: prompts and identities that come and go, clients that are killed in the
middle, and messages that are none. Its memory beyond the arena, descriptors and threads stay within what the
documents state."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from tests.tierstore.daemon.server.client import LineClient, offsets, part, positions, prompt_of, sums_of
from tests.tierstore.daemon.server.test_fuzz import mutated
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess
from tierstore.wire import messages as p

MIB = 1 << 20
HOST_BYTES = 64 * MIB
DISK_BYTES = 256 * MIB
CHUNK = 128  # tokens, the most that a page of a slot may have: what costs most beside its bytes
PAGE = 4096
BYTES = b"k" * PAGE
CLIENTS = 24  # at once, at most
DESCRIPTORS = 64 + CLIENTS
THREADS = 48

# Reserves, leases, and writes to its slots until it is killed.
VICTIM = """
    import sys
    from dataclasses import asdict
    from tests.tierstore.daemon.server.client import LineClient, offsets, part, prompt_of
    from tierstore.keys import Identity
    from tierstore.wire import messages as p

    client = LineClient(sys.argv[1])
    identity = Identity(model="victim " + sys.argv[2], layout="chunk=128")
    client.register(identity, page_bytes=4096, chunk_tokens=128)
    prompt = prompt_of(range(int(sys.argv[2]), int(sys.argv[2]) + 128 * 200), identity, 128)
    client.lookup(prompt)
    places = offsets(client.ask(p.Reserve(0, part(prompt), 0, 200)).offsets)
    print(len(places), flush=True)
    while True:
        for place in places:
            client.arena.map[place : place + 4096] = b"?" * 4096
"""


def stated_bound(host_bytes: int, pages_on_disk: int, clients: int) -> int:
    """Bytes beyond the arena, as docs/operations.md has them."""
    in_the_arena = host_bytes // 4096 * (1536 + 8 * CHUNK)
    return 192 * MIB + in_the_arena + 256 * MIB + 84 * pages_on_disk + 64 * MIB + 24 * MIB + 8 * MIB * clients


class Watched:
    """A daemon's process, and the most that it has taken."""

    def __init__(self, pid: int) -> None:
        self._directory = Path(f"/proc/{pid}")
        self.most_bytes = self.most_descriptors = self.most_threads = 0

    def look(self) -> None:
        status = dict(
            line.split(":", 1)
            for line in (self._directory / "status").read_text().splitlines()
            if ":" in line
        )
        self.most_bytes = max(self.most_bytes, int(status["RssAnon"].split()[0]) * 1024)
        self.most_threads = max(self.most_threads, int(status["Threads"]))
        self.most_descriptors = max(self.most_descriptors, len(list((self._directory / "fd").iterdir())))


class Soak:
    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.rng = random.Random(seed)
        self.clients: list[tuple[LineClient, list[Identity]]] = []
        self.prompts: list[tuple[Identity, int, int]] = []
        self.saved = self.found = self.identities = 0

    def prompt(self, identity, start, chunks):
        return prompt_of(np.arange(start, start + chunks * CHUNK, dtype=np.uint32), identity, CHUNK)

    def come(self) -> None:
        client = LineClient(self.url)
        known = []
        for _ in range(self.rng.randrange(1, 20)):
            self.identities += 1
            known.append(Identity(model=f"model {self.identities}", layout=f"chunk={CHUNK}"))
            assert client.register(known[-1], PAGE, CHUNK) == len(known) - 1
        self.clients.append((client, known))

    def go(self) -> None:
        self.clients.pop(self.rng.randrange(len(self.clients)))[0].close()

    def save(self) -> None:
        client, known = self.rng.choice(self.clients)
        number = self.rng.randrange(len(known))
        start, chunks = self.rng.randrange(1 << 30), self.rng.choice([1, 4, 16, 64, 200])
        self.prompts.append((known[number], start, chunks))
        reserved = client.ask(
            p.Reserve(0, part(self.prompt(known[number], start, chunks), number), 0, chunks)
        )
        assert isinstance(reserved, p.Reserved), reserved
        count = len(positions(reserved))
        if not count:
            return
        if self.rng.random() < 0.1:
            client.tell(p.Abort(reserved.reservation))
            return
        for offset in offsets(reserved.offsets):
            client.arena.map[offset : offset + PAGE] = BYTES
        client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of([BYTES] * count)))
        self.saved += 1

    def look_up(self) -> None:
        identity, start, chunks = self.rng.choice(self.prompts[-2000:])
        client, known = self.rng.choice(self.clients)
        if identity not in known:
            known.append(identity)
            client.register(identity, PAGE, CHUNK)
        found = client.lookup(self.prompt(identity, start, chunks), known.index(identity), wait_s=0.5)
        if not isinstance(found, p.Found) or not found.lease:
            return
        self.found += 1
        if self.rng.random() < 0.2:
            client.ask(p.Prefetch(0, found.lease, 0.5))
        if self.rng.random() < 0.9:  # the others are left to their end
            client.tell(p.Release([found.lease]))

    def fuzz(self) -> None:
        client = LineClient(self.url, hello=self.rng.random() < 0.5)
        for _ in range(200):
            client.tell(mutated(self.rng))
            client.drain()
        client.close()


def connect_when_ready(daemon: DaemonProcess) -> LineClient:
    path = f"{daemon.socket}.arena"
    while True:
        assert daemon.process.poll() is None, "the daemon has ended"
        with socket.socket(socket.AF_UNIX) as probe:
            if not probe.connect_ex(path):
                return LineClient(daemon.url)
        time.sleep(0.02)


def stats_when_alone(client: LineClient) -> dict:
    """The daemon's statistics once it has noticed that the others hung up: their last messages may still be
    on their way when they have closed."""
    deadline = time.monotonic() + 30
    while True:
        stats = json.loads(client.ask(p.Stats(0)).json)
        if stats["service"]["connections"] == 1:
            return stats
        assert time.monotonic() < deadline, f"sessions that never end: {stats['service']}"


def soak(directory: str, seconds: float, prompts: int, seed: int = 1) -> tuple[Soak, Watched, dict]:
    """For at least so long, and with at least so many prompts."""
    daemon = DaemonProcess(directory, "--lease-s=2", host_bytes=HOST_BYTES)
    daemon.options += [f"--disk-bytes={DISK_BYTES}"]
    daemon.start()
    victims = []
    try:
        ready = connect_when_ready(daemon)
        watched = Watched(daemon.process.pid)
        run = Soak(daemon.url, seed)
        run.come()
        deadline = time.monotonic() + seconds
        turns = 0
        while time.monotonic() < deadline or run.saved < prompts:
            turns += 1
            if len(run.clients) < 2 or (run.rng.random() < 0.05 and len(run.clients) < CLIENTS - 4):
                run.come()
            elif run.rng.random() < 0.05:
                run.go()
            run.save()
            run.look_up()
            if turns % 50 == 0:
                run.fuzz()
                watched.look()
            if turns % 500 == 1:
                command = [sys.executable, "-c", textwrap.dedent(VICTIM), daemon.url, str(turns)]
                victims.append(subprocess.Popen(command, stdout=subprocess.PIPE))
                assert victims[-1].stdout.readline()
                victims[-1].kill()
                victims.pop().communicate()
        watched.look()
        while run.clients:
            run.go()
        stats = stats_when_alone(ready)
        ready.close()
        return run, watched, stats
    finally:
        for victim in victims:
            victim.kill()
        daemon.kill()


def check(run: Soak, watched: Watched, stats: dict) -> None:
    pages = stats["store"]["tiers"]["disk"]["pages"]
    bound = stated_bound(HOST_BYTES, pages, CLIENTS)
    assert watched.most_bytes < bound, f"{watched.most_bytes / MIB:.0f} MiB of {bound / MIB:.0f}"
    assert run.found > run.saved / 10
    assert watched.most_descriptors < DESCRIPTORS
    assert watched.most_threads < THREADS
    assert stats["service"]["failed_requests"] == 0
    assert stats["store"]["failed_tasks"] == 0
    assert stats["service"]["leases"] == stats["service"]["reserved_bytes"] == 0


@pytest.fixture
def directory():
    """A path short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="ts") as path:
        yield path


def test_a_short_soak_stays_within_the_stated_bounds(directory):
    check(*soak(directory, 5.0, 200))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_churn_stay_within_the_stated_bounds(directory):
    check(*soak(directory, 600.0, 10_000))
