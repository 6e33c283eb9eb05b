"""What cannot be had here is skipped, with one line that says why."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cluster.dynamo import Indexer, Selector
from tests.cluster.network import MASTER, Network, inside, why_not
from tests.tierstore.cluster.hosts import Host


def _start(kind):
    if importlib.util.find_spec("dynamo") is None:
        pytest.skip("Dynamo is not installed; make test-cluster")
    return kind()


@pytest.fixture
def indexer():
    process = _start(Indexer)
    yield process
    process.end()


@pytest.fixture
def selector():
    process = _start(Selector)
    yield process
    process.end()


def _three_hosts():
    """Three hosts, a master and a lender."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Network()
    yield made
    made.close()


network = pytest.fixture(_three_hosts)
"""Of the test's own."""

shared_network = pytest.fixture(_three_hosts, scope="module")
"""For tests that leave it as it was."""


@pytest.fixture
def start(network):
    """``start(2, "--option")``: a daemon on the second host that has reached the pool."""
    hosts = []

    def start_(number, *options):
        hosts.append(Host(f"mooncake://{MASTER}", *options, prefix=inside(number)))
        hosts[-1].wait_online()
        return hosts[-1]

    yield start_
    for host in hosts:
        host.close()
