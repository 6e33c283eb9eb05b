"""The command line in processes of its own, against a daemon in another."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tierstore
from tests.tierstore.daemon.client.conftest import SPEC, DaemonProcess, pages_of
from tierstore.keys import Identity

PAGES = 20
TOKENS = list(range(PAGES * SPEC.chunk_tokens))


def command(*arguments):
    return [sys.executable, "-m", "tierstore.cli", *map(str, arguments)]


def run(*arguments):
    """(exit code, stdout, stderr)."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments):
        self.fd, there = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=there,
            stdout=there,
            stderr=there,
            env=environment,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # tests in the background ignore it
        )
        os.close(there)

    def wait_for(self, text):
        """All that is written up to ``text``. Raises :class:`OSError` when the command ends before."""
        seen = b""
        while text not in seen:
            seen += os.read(self.fd, 65536)
        return seen

    def has_ended(self):
        self.wait_for(b"\x1b[?1049l")  # the screen is what it was
        assert self.process.wait() == 0

    def end(self):
        self.process.kill()
        self.process.wait(10)
        os.close(self.fd)


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
