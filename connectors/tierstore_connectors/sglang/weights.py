"""Track changes of the weights, as far as SGLang reports them.

SGLang flushes its own caches after an update of the weights, and does not report the update to a storage
backend. If the update names a version, the version appears in SGLang's configuration, which every call reads.
Pages computed before the update may still wait to be saved then. SGLang's flush ends its storage threads and
starts new ones. So threads from before the new version have pages of the old one, and may no longer save.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path


class WeightsWatch:
    """The weights that the engine computes with: the version named by updates, and the epoch started by
    :meth:`begin_epoch`. ``version`` reads the version from SGLang. Thread-safe."""

    def __init__(self, version: Callable[[], str], epoch: Callable[[int], str]) -> None:
        self._read = version
        self._make_epoch = epoch
        self._lock = threading.Lock()
        self._version = version()
        self._epoch = ""
        self._epochs = 0
        self._alive = _alive()
        self._behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def look(self) -> str:
        """Return the current weights' part of an identity."""
        version = self._read()
        with self._lock:
            if version != self._version:
                self._version = version
                self._behind = self._alive  # they had work of the earlier version
            else:
                self._alive = _alive()
            return f"{self._version}/{self._epoch}"

    def may_save(self) -> bool:
        """Return whether this thread's pages were computed with the current weights. Call it after
        :meth:`look`."""
        with self._lock:
            return threading.current_thread() not in self._behind

    def begin_epoch(self) -> None:
        """Make all pages saved so far unfindable."""
        with self._lock:
            self._epochs += 1
            self._epoch = self._make_epoch(self._epochs)


def _alive() -> weakref.WeakSet[threading.Thread]:
    return weakref.WeakSet(threading.enumerate())


def epoch_of(number: int, *, shared: bool, seed: object) -> str:
    """Return a unique name for an epoch.

    Ranks that share pages compute the same name: it is made from the process that started them. On several
    hosts their names differ, and they miss.
    """
    if not shared:
        return os.urandom(8).hex()
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (OSError, IndexError):
        return os.urandom(8).hex()
    return hashlib.sha256(f"{boot} {parent} {started} {seed} {number}".encode()).hexdigest()[:16]
