"""Run ``tierstore serve`` in a process that can be stopped, killed and started again."""

from __future__ import annotations

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
from tierstore.testing.processes import DaemonProcess
from tierstore_tools.limits import drop_page_cache

_START_S = 120.0  # imports are slow on a busy machine
_LOOK_S = 0.02


class ServeProcess(DaemonProcess):
    """A daemon with a log and a directory for its ``disk`` below ``parent``. Its socket is in /tmp, because a
    unix socket's path must be short. ``options`` are flags of ``serve``. Python runs ``program`` instead of
    the daemon's module.
    """

    def __init__(
        self,
        parent: Path | None = None,
        *,
        host_bytes: int = 64 << 20,
        disk_bytes: int = 1 << 30,
        disk: bool = True,
        options: tuple[str, ...] = (),
        program: tuple[str, ...] = (),
    ) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="ts-vllm-", dir="/tmp"))
        super().__init__(self._sockets, *options, host_bytes=host_bytes, disk=False)
        self._directory = Path(tempfile.mkdtemp(prefix="tierstore-vllm-", dir=parent))
        self.disk = self._directory / "disk" if disk else None
        self._log = self._directory / "log"
        self._program = program
        if disk:
            self.options += [f"--disk={self.disk}", f"--disk-bytes={disk_bytes}"]

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
        with open(self._log, "ab") as log:
            if self._program:
                command = [sys.executable, *self._program, "serve", *self.options]
                self.process = subprocess.Popen(command, stdout=log, stderr=log)
            else:
                self.process = self.spawn("tierstore.daemon", self.options, log.fileno())

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

    def restart(self) -> None:
        """End the daemon with SIGTERM, drop the page cache of its files, and start it again."""
        self.end()
        if self.disk is not None:
            drop_page_cache(self.disk)
        self.start()

    def hang(self) -> None:
        """Stop the daemon with SIGSTOP: it exists and does not answer, until :meth:`go_on`."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill the daemon and remove its files."""
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> ServeProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _waiting(stats: DaemonStats) -> int:
    return stats.store.pending_saves + stats.store.pending_writes
