"""What all tests share."""

import gc
import os
import shutil
import sys
import tempfile

import hypothesis
import pytest

pytest.register_assert_rewrite("tierstore.testing")  # the conformance suites say what they compared

# A busy machine makes any case slow. Tests do not depend on clocks.
hypothesis.settings.register_profile("tierstore", deadline=None)
hypothesis.settings.load_profile("tierstore")

# Where these are set, pytest looks for the best alignment of two things that ought to be equal. For two pages
# of random bytes that takes longer than any test may; without it the first difference is said, at once.
for _name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(_name, None)

# The models of the tests are so small that a second thread of torch only costs. On a busy machine its threads
# wait for one another most of the time. Set before anything imports torch, and inherited by every process.
os.environ["OMP_NUM_THREADS"] = "1"

# The suite starts a thousand processes. Each would compile all of its modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What is there before the first test stays: tests that ask for a collection (to see that something has
    gone) need not look through all of torch each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def forked_daemons():
    """Hundreds of tests start a daemon, and few are about how one starts."""
    from tests.forked import spawn
    from tierstore.testing.processes import DaemonProcess

    DaemonProcess.spawn = staticmethod(spawn)


@pytest.fixture
def short_directory():
    """A path short enough for a unix socket."""
    directory = tempfile.mkdtemp(prefix="ts")
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def make_daemon(short_directory):
    """Start daemons, each with ``DaemonProcess``'s arguments. They are killed at the end of the test."""
    from tierstore.testing.processes import DaemonProcess

    daemons = []

    def make(*options, **kwargs):
        daemons.append(DaemonProcess(short_directory, *options, **kwargs).start())
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.kill()


@pytest.fixture(scope="session")
def shared_daemon():
    """One daemon for all tests that leave it unchanged. Each of them uses an identity of its own."""
    from tierstore.testing.processes import DaemonProcess

    directory = tempfile.mkdtemp(prefix="ts")
    daemon = DaemonProcess(directory, host_bytes=32 << 20, disk=True).start()
    yield daemon
    daemon.end()
    shutil.rmtree(directory, ignore_errors=True)
