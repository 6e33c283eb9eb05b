"""A real daemon in a process of its own, that can be killed, stopped and started again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.tierstore.daemon.client.fake_daemon import FakeDaemon
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing import pages as testing_pages
from tierstore.testing.clock import wait_until as wait_until
from tierstore.testing.opening import connect_store
from tierstore.tiers.hbm import PagePool
from tierstore.wire import messages

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages
TOKENS = list(range(100, 170))  # 4 full chunks and 6 tokens


def pages_of(tokens):
    return testing_pages.pages_of(tokens, SPEC)


def load_bytes(store, hit, **kwargs):
    """Load a hit into fresh buffers: the tokens that came, and the bytes of their pages."""
    count = -(-hit.tokens // SPEC.chunk_tokens)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(count)]
    loaded = store.load(hit, buffers, **kwargs).wait(30)
    full = -(-loaded.tokens // SPEC.chunk_tokens)
    return loaded.tokens, [bytes(buffer) for buffer in buffers[:full]]


def right_bytes(tokens, count, pages):
    """Whether these are the pages of the first ``count`` tokens of a prompt."""
    for at, (page, expected) in enumerate(zip(pages, pages_of(tokens), strict=False)):
        left = min(count - at * SPEC.chunk_tokens, SPEC.chunk_tokens)
        got = testing_pages.leading_tokens(page, left, SPEC)
        if got != testing_pages.leading_tokens(expected, left, SPEC):
            return False
    return len(pages) * SPEC.chunk_tokens >= count


class DaemonProcess:
    """``python -m tierstore.daemon`` at ``url``."""

    def __init__(self, directory, *options, listen=(), host_bytes=4 << 20, disk=True):
        self.socket = Path(directory) / "s"
        self.url = f"ipc://{self.socket}"
        self.options = [f"--host-bytes={host_bytes}", "--log-level=warning", *options]
        for each in (self.url, *listen):
            self.options += ["--listen", each]
        if disk:
            self.options += [f"--disk={directory}/disk", f"--disk-bytes={256 << 20}", "--page-bytes=8KiB"]
        self.process = None

    def start(self):
        self.process = subprocess.Popen([sys.executable, "-m", "tierstore.daemon", *self.options])
        return self

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def end(self):
        self.process.terminate()
        self.process.wait(30)
        self.process = None


@pytest.fixture
def short_directory():
    """A path short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="ts")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_daemon(short_directory):
    """Starts daemons that are killed at the end of the test."""
    daemons = []

    def make(*options, **kwargs):
        daemons.append(DaemonProcess(short_directory, *options, **kwargs).start())
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.kill()


@pytest.fixture
def fake(short_directory):
    """Makes daemons that say what they are told to."""
    daemons = []

    def make(**kwargs):
        daemons.append(FakeDaemon(f"{short_directory}/s", **kwargs))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.close()


@pytest.fixture(scope="session")
def shared_daemon():
    """One daemon for all tests that leave it as it was: each has an identity of its own."""
    directory = tempfile.mkdtemp(prefix="ts")
    daemon = DaemonProcess(directory, host_bytes=32 << 20, disk=True).start()
    yield daemon
    daemon.end()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def connect(request):
    """Connects stores that are checked and closed at the end of the test."""
    stores = []

    def connect_(url, *, hbm_pages=0, connected=True, identity=None, spec=SPEC, **kwargs):
        store = connect_store(
            url,
            spec,
            identity=identity or Identity.of(spec, model=request.node.nodeid),
            pools=PagePool(spec, hbm_pages) if hbm_pages else None,
            **{"lookup_s": 30.0, **kwargs},  # a slow machine is not a hung daemon
        )
        stores.append(store)
        assert not connected or store.wait_connected(30)
        return store

    yield connect_
    close_all(stores)


def close_all(stores):
    """Close those that are open, after seeing that all is where it belongs in them."""
    for store in stores:
        if not store.closed:
            store.check()
        store.close()
        assert store.stats().failed_tasks == 0


def daemon_stats(store):
    """All that the daemon tells of itself."""
    answer = store.backend.connection.ask(messages.Stats(0), messages.StatsAnswer)
    return json.loads(answer.json)


@pytest.fixture
def stopped():
    """Stops a daemon (SIGSTOP); it goes on at the end."""
    held = []

    def stop(daemon):
        daemon.signal(signal.SIGSTOP)
        held.append(daemon)

    yield stop
    for daemon in held:
        if daemon.process is not None:
            daemon.signal(signal.SIGCONT)


def in_threads(*functions):
    """Run them at the same time; whatever one of them raises is raised."""
    raised = []

    def run(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # raised again below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error
