"""The command line in processes of its own, against a daemon in another."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tierstore.daemon.client.conftest import SPEC, DaemonProcess, pages_of
from tierstore.daemon.connected import ConnectedStore
from tierstore.keys import Identity

PAGES = 20
TOKENS = list(range(PAGES * SPEC.chunk_tokens))


def command(*arguments):
    return [sys.executable, "-m", "tierstore.cli", *map(str, arguments)]


def run(*arguments):
    """(exit code, stdout, stderr)."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout, done.stderr


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
        with ConnectedStore.connect(process.url, SPEC, identity=identity, lookup_s=5.0) as store:
            assert store.wait_connected(30)
            assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == len(TOKENS)
            assert store.flush(30)
            process.store = store
            yield process
    finally:
        process.kill()
