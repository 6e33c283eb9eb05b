"""A real daemon in a process of its own, that can be killed, stopped and started again."""

from __future__ import annotations

import signal

import pytest

from tests.daemons import SPEC, close_all
from tests.tierstore.daemon.client.fake_daemon import FakeDaemon
from tierstore.keys import Identity
from tierstore.testing.clock import wait_until as wait_until
from tierstore.testing.opening import connect_store
from tierstore.tiers.hbm import PagePool


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
