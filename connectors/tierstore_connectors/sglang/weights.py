"""Detect changes of the weights, as far as SGLang reports them.

SGLang flushes its own caches after an update of the weights, but does not report the update to a storage
backend. If the update sets a version, the version appears in SGLang's configuration, which every call reads.
At that time, pages computed before the update may still wait to be saved. SGLang's flush ends its storage
threads and starts new ones. So threads that existed before the new version have pages of the old version, and
may no longer save.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path


class WeightsWatch:
    """The identification of the engine's current weights: the version set by updates, and the epoch started
    by :meth:`begin_epoch`. ``version`` reads the version from SGLang. Thread-safe."""

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
        """Return the identification of the current weights, which is part of pages' identities."""
        version = self._read()
        with self._lock:
            if version != self._version:
                self._version = version
                self._behind = self._alive  # these threads may have pages of the earlier version
            else:
                self._alive = _alive()
            return f"{self._version}/{self._epoch}"

    def may_save(self) -> bool:
        """Return whether the calling thread has only pages of the current weights. Call it after
        :meth:`look`."""
        with self._lock:
            return threading.current_thread() not in self._behind

    def begin_epoch(self) -> None:
        """Start a new epoch, in which no earlier page is found."""
        with self._lock:
            self._epochs += 1
            self._epoch = self._make_epoch(self._epochs)


def _alive() -> weakref.WeakSet[threading.Thread]:
    return weakref.WeakSet(threading.enumerate())


def epoch_of(number: int, *, shared: bool, seed: object) -> str:
    """Return a unique name for an epoch.

    If ``shared``, all ranks with the same parent process compute the same name, because they share pages. On
    several hosts the names differ, so the ranks find no pages of one another.
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
