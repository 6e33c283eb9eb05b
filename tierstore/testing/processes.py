"""Daemons in processes of their own, for tests, and free ports for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_END_S = 60.0


def free_port() -> int:
    """Return a loopback port at which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process(Protocol):
    """A running program, for example a :class:`subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program. Return its exit code; after a signal, minus the signal's
        number."""
        ...

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class DaemonProcess:
    """A process ``python -m tierstore.daemon`` that listens at the unix socket ``s`` in ``directory``. The
    path of ``directory`` must be short.

    The constructor does not start the process. ``options`` are flags of ``tierstore serve``, and ``listen``
    are further addresses. With ``disk`` the daemon has a disk tier in ``directory/disk``.

    Example::

        daemon = DaemonProcess("/tmp/ts1").start()
        store = tierstore.connect(daemon.url, spec)
        daemon.kill()
        daemon.start()  # the same socket, and the same disk
    """

    def __init__(
        self,
        directory: str | Path,
        *options: str,
        listen: Sequence[str] = (),
        host_bytes: int = 4 << 20,
        disk: bool = True,
    ) -> None:
        self.socket = Path(directory) / "s"
        self.url = f"ipc://{self.socket}"
        self.options = [f"--host-bytes={host_bytes}", "--log-level=warning", *options]
        for address in (self.url, *listen):
            self.options += ["--listen", address]
        if disk:
            self.options += [f"--disk={directory}/disk", f"--disk-bytes={256 << 20}", "--page-bytes=8KiB"]
        self.process: Process | None = None

    @staticmethod
    def spawn(module: str, arguments: Sequence[str], output: int | None = None) -> Process:
        """Start ``python -m module``. ``output`` is the descriptor for stdout and stderr (None: those of this
        process). Tests may replace this method to start all daemons in another way."""
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output)

    def start(self) -> DaemonProcess:
        """Start the daemon without waiting until it listens."""
        self.process = self.spawn("tierstore.daemon", self.options)
        return self

    def signal(self, number: signal.Signals | int) -> None:
        """Send a signal to the running process."""
        assert self.process is not None, "the daemon is not running"
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended. Do nothing if the daemon is not running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(_END_S)
            self.process = None

    def end(self) -> None:
        """Send SIGTERM and wait until the daemon has ended in order. Do nothing if it is not running."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(_END_S)
            self.process = None
