"""Every listener of the daemon under attack: too many connections, silent ones, few descriptors."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import socket
import subprocess
import sys
import time

import pytest
import zmq

import tierstore
from tests.portions import diagonal
from tests.tierstore.daemon.server.client import page_bytes, part, prompt_of, sums_of
from tierstore import KVSpec
from tierstore.cli.operator import Operator
from tierstore.testing.processes import free_port
from tierstore.wire import messages as p

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")
DESCRIPTORS = 256


class Process:
    """``tierstore serve`` with few descriptors, at every kind of address."""

    def __init__(self, directory, *options):
        self.path = f"{directory}/s"
        self.url = f"ipc://{self.path}"
        self.events = f"{directory}/events"
        self.tcp, self.http, self.told = free_port(), free_port(), free_port()
        self.log = directory / "log"
        command = [sys.executable, "-m", "tierstore.daemon", "--host-bytes=4MiB", "--page-bytes=64KiB"]
        command += ["--listen", self.url, "--listen", f"tcp://127.0.0.1:{self.tcp}"]
        command += [f"--events=ipc://{self.events},m=tcp://127.0.0.1:{self.told}"]
        command += [f"--metrics-port={self.http}", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stderr=log,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
            )
        while " serves " not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def connect(self, where, timeout=5.0):
        if where.startswith("tcp"):
            port = {"tcp": self.tcp, "tcp http": self.http, "tcp events": self.told}[where]
            return socket.create_connection(("127.0.0.1", port), timeout)
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(timeout)
        paths = {"ipc": self.path, "ipc arena": f"{self.path}.arena", "ipc events": self.events}
        try:
            made.connect(paths[where])
        except OSError:
            made.close()
            raise
        return made

    def health(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=30)
        connection.request("GET", "/healthz")
        status = connection.getresponse().status
        connection.close()
        return status

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@pytest.fixture
def daemon(tmp_path):
    running = Process(tmp_path)
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
    assert "Traceback" not in running.log.read_text()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
SAID = {"nothing": b"", "half a greeting": GREETING[:20], "a greeting": GREETING}
LISTENERS = ["ipc", "ipc arena", "ipc events", "tcp", "tcp http", "tcp events"]


@pytest.mark.parametrize(*diagonal(where=LISTENERS, said=SAID))
def test_a_flood_of_connections_keeps_nobody_out(daemon, where, said):
    held = []
    for _ in range(3 * DESCRIPTORS):
        with contextlib.suppress(OSError):  # hung up on, or no room in the backlog, which has no answer
            held.append(daemon.connect(where, timeout=0.02))
            held[-1].sendall(SAID[said])
        if len(held) > 600:  # there are limits to what this process may have, too
            held.pop(0).close()
    assert daemon.health() == 200
    assert daemon.descriptors() < DESCRIPTORS
    with tierstore.connect(daemon.url, SPEC, wait_s=60) as store:
        assert store.save(range(64), [bytes(SPEC.page_bytes)]).wait(30) == 64
    with Operator(f"tcp://127.0.0.1:{daemon.tcp}") as operator:
        assert operator.stats().ready
    for each in held:
        each.close()
    assert daemon.process.poll() is None
    assert len(daemon.log.read_text().splitlines()) < 200


def test_silent_connections_are_hung_up_on(daemon):
    began = time.monotonic()
    for silent in [daemon.connect(where, timeout=60) for where in LISTENERS]:
        with silent, contextlib.suppress(ConnectionResetError):
            while silent.recv(4096):  # a greeting, or the arena
                pass
    assert time.monotonic() - began < 30


def test_pages_on_their_way_are_given_up_with_their_session(start, connect):
    """Of a client over TCP that asks for pages, does not read, and goes on sending signs of life."""
    daemon = start(listen=("tcp://127.0.0.1:0",), pages=2048, lease_s=1.0)
    writer = connect(daemon.address)
    writer.register()
    tokens = list(range(16 * 1024))
    reserved = writer.ask(p.Reserve(0, part(prompt_of(tokens)), 0, 1024))
    pages = [page_bytes(tokens[: 16 * (n + 1)]) for n in range(1024)]
    writer.ask(p.Write(0, reserved.reservation, 0), *pages)
    reader = connect(daemon.address, rcvhwm=1, rcvbuf=4096)
    reader.register()
    committed = writer.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of(pages)), timeout=60)
    assert committed.pages == 1024
    found = reader.lookup(prompt_of(tokens))
    for first in (0, 256, 512, 768):
        reader.tell(p.Fetch(100 + first, found.lease, first, 256, 1.0))
    daemon.wait_for(lambda stats: stats.store.tiers["host"].leased_pages > 0)
    reader.tell(p.Bye())
    daemon.wait_for(lambda stats: stats.store.tiers["host"].leased_pages == 0)
    assert daemon.daemon.server.endpoints[0].places.served  # the writer's


# -- whose sockets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("removed", ["s.lock", "events.lock"])
def test_a_living_daemons_sockets_stay_when_a_lock_file_is_removed(daemon, tmp_path, removed):
    (tmp_path / removed).unlink()
    listen = daemon.url if removed == "s.lock" else f"ipc://{tmp_path}/other"
    command = [sys.executable, "-m", "tierstore.daemon", "--host-bytes=4MiB", "--listen", listen]
    if removed == "events.lock":
        command.append(f"--events=ipc://{daemon.events}")
    second = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert second.returncode in (1, 2)
    assert "another process listens" in second.stderr
    with Operator(daemon.url) as operator:
        assert operator.stats().ready
    context = zmq.Context()
    with context.socket(zmq.SUB) as follower:
        follower.subscribe(b"")
        follower.connect(f"ipc://{daemon.events}")
        assert follower.poll(30_000)
    context.term()


@pytest.mark.parametrize("option", ["--listen", "--events"])
@pytest.mark.parametrize("kind", ["file", "link", "lock link"])
def test_what_is_no_socket_stays(tmp_path, option, kind):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    path = mine
    if kind != "file":
        path = tmp_path / "s"
        (path if kind == "link" else tmp_path / "s.lock").symlink_to(mine)
    command = [sys.executable, "-m", "tierstore.daemon", "--host-bytes=4MiB"]
    command += ["--listen", f"ipc://{tmp_path}/d"] * (option == "--events")
    done = subprocess.run([*command, option, f"ipc://{path}"], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert mine.read_text() == "mine"
