"""``tierstore serve`` on a slow disk: ``python -m tierstore_tools.throttled_daemon BYTES_PER_S serve …``.

Reads of payloads take the time that a device of this rate needs, one read after the other. If ``BYTES_PER_S``
is the name of a file, the rate is read from it, and may be changed while the daemon runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierstore import cli
from tierstore.tiers.disk.io import FileIO, Landed, QueuedIO, QueuedRead


class _Device:
    """A device that serves one read after the other."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate()
            left_s = self._free_at - time.monotonic()
        time.sleep(max(left_s, 0.0))


def throttle(rate: Callable[[], float]) -> None:
    """Let all reads of this process share a device of ``rate()`` bytes per second."""
    device = _Device(rate)
    preadv, read_many = FileIO.preadv, QueuedIO.read_many

    def slow_preadv(self: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        device.take(sum(buffer.nbytes for buffer in buffers))
        return preadv(self, fd, buffers, offset)

    def slow_read_many(self: QueuedIO, reads: Sequence[QueuedRead], landed: Landed) -> None:
        device.take(sum(read.view.nbytes for read in reads))
        read_many(self, reads, landed)

    FileIO.preadv, QueuedIO.read_many = slow_preadv, slow_read_many  # type: ignore[method-assign]


def main() -> None:
    what = sys.argv.pop(1)
    path = Path(what)
    throttle(lambda: float(path.read_text() if path.is_file() else what))
    cli.main()


if __name__ == "__main__":
    main()
