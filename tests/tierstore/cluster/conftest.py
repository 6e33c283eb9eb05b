"""Hosts that share a fake shared store."""

from __future__ import annotations

import pytest

from tests.tierstore.cluster.hosts import Host


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
