"""Run ``tierstore serve`` in a process that can be stopped, killed and started again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from tierstore.cli.operator import Operator
from tierstore.daemon.stats import DaemonStats
from tierstore.errors import StoreUnavailableError, TierStoreError
from tierstore_tools.limits import drop_page_cache

_START_S = 120.0  # imports are slow on a busy machine
_END_S = 60.0
_LOOK_S = 0.02


class ServeProcess:
    """The daemon at ``url``, not started yet. It has a directory for its ``disk`` below ``parent``. Its
    socket is in /tmp, because a unix socket's path must be short. ``options`` are flags of ``serve``. Python
    runs ``program``, by default the command line's module.
    """

    def __init__(
        self,
        parent: Path | None = None,
        *,
        host_bytes: int = 64 << 20,
        disk_bytes: int = 1 << 30,
        disk: bool = True,
        options: tuple[str, ...] = (),
        program: tuple[str, ...] = ("-m", "tierstore.cli"),
    ) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="ts-vllm-", dir="/tmp"))
        self._directory = Path(tempfile.mkdtemp(prefix="tierstore-vllm-", dir=parent))
        self.url = f"ipc://{self._sockets}/s"
        self.disk = self._directory / "disk" if disk else None
        self._log = self._directory / "log"
        self._program = program
        self._options = ["--listen", self.url, f"--host-bytes={host_bytes}", "--log-level=warning", *options]
        if disk:
            self._options += [f"--disk={self.disk}", f"--disk-bytes={disk_bytes}"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> ServeProcess:
        """Start the daemon and wait until it answers. Raises :class:`TierStoreError` if it does not."""
        self.launch()
        ends = time.monotonic() + _START_S
        while True:
            try:
                self.stats()
            except StoreUnavailableError as error:
                assert self.process is not None
                if self.process.poll() is not None or time.monotonic() > ends:
                    raise TierStoreError(f"the daemon does not start: {self.log.strip() or error}") from error
                time.sleep(_LOOK_S)
            else:
                return self

    def launch(self) -> None:
        """Start the daemon without waiting."""
        assert self.process is None, "the daemon is running"
        command = [sys.executable, *self._program, "serve", *self._options]
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def stats(self) -> DaemonStats:
        """Return its statistics. Raises :class:`StoreUnavailableError` while it does not serve."""
        with Operator(self.url) as operator:
            return operator.stats()

    def wait_written(self, timeout_s: float = 60.0) -> None:
        """Wait until no page waits for the disk. Raises :class:`TierStoreError` after ``timeout_s``."""
        ends = time.monotonic() + timeout_s
        while _waiting(self.stats()):
            if time.monotonic() > ends:
                raise TierStoreError(f"the daemon did not write all pages within {timeout_s:.0f} s")
            time.sleep(_LOOK_S)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(_END_S)
            self.process = None

    def end(self) -> None:
        """End the daemon with SIGTERM: it writes waiting pages first. Idempotent."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(_END_S)
            self.process = None

    def restart(self) -> None:
        """End the daemon with SIGTERM, drop the page cache of its files, and start it again."""
        self.end()
        if self.disk is not None:
            drop_page_cache(self.disk)
        self.start()

    def hang(self) -> None:
        """Stop the daemon with SIGSTOP: it exists and does not answer, until :meth:`go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the daemon and remove its files."""
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self.process is not None, "the daemon is not running"
        os.kill(self.process.pid, number)

    def __enter__(self) -> ServeProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _waiting(stats: DaemonStats) -> int:
    return stats.store.pending_saves + stats.store.pending_writes
