"""Which weights an engine computes with, as far as SGLang says it.

SGLang flushes its own caches after an update of the weights and tells a storage backend nothing. Where the
update names a version, that is found in SGLang's configuration, and looked at in every call. A page that was
computed before the update may still wait to be saved then. SGLang flushes by ending its storage threads and
starting new ones, so threads that were there before the new version have pages of the old one: they save
nothing any more.
"""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path


class WeightsWatch:
    """Which weights the engine computes with: the version that updates have named, and the epoch that
    :meth:`begin_epoch` began. ``version`` reads the first from SGLang. Thread-safe."""

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
        """What stands for the weights of this moment in an identity."""
        version = self._read()
        with self._lock:
            if version != self._version:
                self._version = version
                self._behind = self._alive  # those that had work of the version before
            else:
                self._alive = _alive()
            return f"{self._version}/{self._epoch}"

    def may_save(self) -> bool:
        """Whether this thread's pages were computed with the weights of this moment. After :meth:`look`."""
        with self._lock:
            return threading.current_thread() not in self._behind

    def begin_epoch(self) -> None:
        """Nothing that was saved so far is to be found any more."""
        with self._lock:
            self._epochs += 1
            self._epoch = self._make_epoch(self._epochs)


def _alive() -> weakref.WeakSet[threading.Thread]:
    return weakref.WeakSet(threading.enumerate())


def epoch_of(number: int, *, shared: bool, seed: object) -> str:
    """A name for an epoch that no other has. Ranks that share pages come to the same one: it is made from
    what they have in common, the process that started them. (On several hosts they do not, and miss.)"""
    if not shared:
        return os.urandom(8).hex()
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except (OSError, IndexError):
        return os.urandom(8).hex()
    return hashlib.sha256(f"{boot} {parent} {started} {seed} {number}".encode()).hexdigest()[:16]
