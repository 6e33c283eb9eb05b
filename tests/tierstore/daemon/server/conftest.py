"""A daemon on a thread of its own, and clients that speak the bare protocol."""

from __future__ import annotations

import pytest

from tests.tierstore.daemon.server.client import PAGE_BYTES, Client, LineClient
from tests.tierstore.daemon.server.running import RunningDaemon
from tierstore.daemon.settings import Settings
from tierstore.wire import keys


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
