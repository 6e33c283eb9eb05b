"""A daemon on a thread of its own, and clients that speak the bare protocol."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.tierstore.daemon.server.client import PAGE_BYTES, Client, LineClient
from tierstore.daemon.daemon import Daemon
from tierstore.daemon.settings import Settings
from tierstore.testing.clock import wait_until
from tierstore.wire import keys


class RunningDaemon:
    """``daemon`` on the event loop of a thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.daemon = self.run(self._make())
        self.run(self.daemon.start())

    async def _make(self) -> Daemon:
        return Daemon(self.settings)

    def run(self, awaitable):
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result()

    @property
    def url(self) -> str:
        return self.settings.listen[0]

    @property
    def address(self) -> str:
        """Where the last endpoint really listens."""
        return self.daemon.server.endpoints[-1].address

    def stats(self):
        return self.daemon.stats()

    def wait_for(self, condition) -> None:
        """Until ``condition(stats)`` holds."""
        wait_until(lambda: condition(self.stats()))

    def check(self) -> None:
        """Nothing is held by anybody, and everything agrees."""
        self.daemon.core.flush(10)
        self.daemon.core.check()
        stats = self.stats()
        assert stats.store.tiers["host"].leased_pages == 0
        assert stats.store.open_hits == 0
        assert stats.service.failed_requests == 0
        assert stats.store.failed_tasks == 0
        state = self.daemon.core.state
        with state.lock:
            cached = sum(page.nbytes for page in state.index.tree.walk() if page.copies[1] is not None)
            assert state.host.used_bytes == cached
            assert sum(state.residency.host_bytes.values()) == cached

    def stop(self) -> None:
        if self.thread.is_alive():
            self.run(self.daemon.stop())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


@pytest.fixture
def start(tmp_path):
    """Starts daemons; all of them are checked and stopped at the end of the test."""
    running = []

    def start_(*, disk=False, listen=None, pages=64, **settings):
        settings = {
            "listen": listen or (f"ipc://{tmp_path}/s",),
            "host_bytes": pages * 8192,
            "reserve_bytes": pages * 8192,
            "page_bytes": 8192,
            "disk_bytes": 8 << 20,
            "disk": tmp_path / "disk" if disk else None,
        } | settings
        running.append(RunningDaemon(Settings(**settings)))
        return running[-1]

    yield start_
    for daemon in running:
        daemon.stop()


@pytest.fixture
def connect():
    clients = []

    def connect_(url, *, line=False, **kwargs):
        clients.append((LineClient if line else Client)(url, **kwargs))
        return clients[-1]

    yield connect_
    for client in clients:
        client.close()


@pytest.fixture
def curve(request, tmp_path, start, connect):
    """A daemon with keys for bob and eve, and a function that connects with somebody's."""
    server, _ = keys.generate(tmp_path / "server", "server")
    for name in ("bob", "eve"):
        keys.generate(tmp_path / "tenants", name)
    with_socket = getattr(request, "param", None) == "with a socket"
    daemon = start(
        disk=getattr(request, "param", None) == "with a disk",
        listen=(*[f"ipc://{tmp_path}/s"] * with_socket, "tcp://127.0.0.1:0"),
        server_key=server,
        tenants=tmp_path / "tenants",
        quotas={"bob": 8 * PAGE_BYTES},
    )
    public = keys.read_pair(server).public

    def connect_as(name, **kwargs):
        pair, _ = (
            keys.generate(tmp_path, name) if name == "mallory" else (tmp_path / f"tenants/{name}.secret", 0)
        )
        mine = keys.read_pair(pair)
        return connect(
            daemon.address,
            curve_publickey=mine.public,
            curve_secretkey=mine.secret,
            curve_serverkey=public,
            **kwargs,
        )

    return daemon, connect_as
