"""Fixtures for tests of the command line."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

import tierstore
from tests.daemons import SPEC, pages_of
from tests.tierstore.cli.commands import TOKENS
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess


@pytest.fixture
def directory():
    """A path short enough for a unix socket."""
    path = tempfile.mkdtemp(prefix="ts")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def daemon(directory):
    """A daemon, and one client that has saved ``TOKENS``."""
    process = DaemonProcess(directory).start()
    try:
        identity = Identity.of(SPEC, model="m")
        with tierstore.connect(process.url, SPEC, identity=identity, lookup_s=5.0) as store:
            assert store.wait_connected(30)
            assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
            assert store.flush(30)
            process.store = store
            yield process
    finally:
        process.kill()
