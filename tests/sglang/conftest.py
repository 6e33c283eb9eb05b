"""A real SGLang on a CPU (its hierarchical cache, and whole engines) over a real daemon. Without SGLang all
of this is skipped; ``make test-sglang`` has an environment with it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tierstore
from tierstore import KVSpec
from tierstore.testing.processes import DaemonProcess

_HERE = Path(__file__).parent
MISSING = importlib.util.find_spec("sglang") is None


def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))  # SGLang's imports warn, and are not ours
            if MISSING:
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed; make test-sglang"))


class Daemon(DaemonProcess):
    """With 128 MiB of host memory and a disk."""

    def __init__(self, directory):
        super().__init__(directory, host_bytes=128 << 20, disk=True)
        self.disk = Path(directory) / "disk"

    def start(self):
        super().start()
        with self._store() as store:
            assert store.wait_connected(60)

    def flush(self):
        """Wait until all that was saved is on disk."""
        with self._store() as store:
            assert store.wait_connected(60)
            assert store.flush(60)

    def _store(self):
        return tierstore.connect(self.url, KVSpec.opaque(4096, chunk_tokens=8))


def _running():
    directory = tempfile.mkdtemp(prefix="ts")
    daemon = Daemon(directory)
    daemon.start()
    yield daemon
    daemon.kill()
    shutil.rmtree(directory, ignore_errors=True)


daemon = pytest.fixture(_running)
"""A daemon of the test's own."""

shared_daemon = pytest.fixture(_running, scope="session")
"""One for all tests that leave it as it was: each has a namespace of its own."""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A Llama with random weights, whose pages are large enough to be kept in extents."""
    folder = tmp_path_factory.mktemp("model")
    program = "import sys; from tests.sglang.engine import write_model; write_model(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    return folder
