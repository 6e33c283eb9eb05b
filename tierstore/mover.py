"""The mover: the worker threads that carry out copies, most urgent first.

A *task* is a small piece of one transfer (a few MiB of pages). Workers spend their time in calls that release
the GIL (memory copies, preadv), so a few of them keep a disk and a memory bus busy without slowing an
engine's Python. There is no pre-emption: tasks are small instead, so that a demand load waits for
milliseconds at most.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Priority(enum.IntEnum):
    """Lower goes first."""

    LOAD = 0  # an engine waits for it
    PREFETCH = 1  # an engine will ask for it
    SAVE = 2  # write-behind: nobody waits


class Mover:
    """``threads`` workers over one priority queue; tasks of equal priority run in the order they came.

    Tasks must not raise: each handles its own I/O errors. One that does is a bug; it is logged and counted in
    ``failed_tasks`` so that the other tasks go on.
    """

    def __init__(self, threads: int) -> None:
        self._queue: list[tuple[Priority, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._work_added = threading.Condition(self._lock)
        self._work_done = threading.Condition(self._lock)
        self._running = 0
        self._closed = False
        self.failed_tasks = 0
        self._workers = [
            threading.Thread(target=self._work, name=f"tierstore-mover-{i}", daemon=True)
            for i in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, priority: Priority, task: Callable[[], None]) -> None:
        """Queue a task. After ``close()`` it is dropped."""
        with self._lock:
            if not self._closed:
                heapq.heappush(self._queue, (priority, next(self._order), task))
                self._work_added.notify()

    @property
    def pending(self) -> int:
        """Tasks queued or running."""
        with self._lock:
            return len(self._queue) + self._running

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is queued or running; False when ``timeout`` seconds pass first."""
        with self._lock:
            return self._work_done.wait_for(lambda: not self._queue and not self._running, timeout)

    def close(self) -> None:
        """Run what is queued, then stop. Idempotent."""
        with self._lock:
            self._closed = True
            self._work_added.notify_all()
        for worker in self._workers:
            worker.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._work_added.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                _, _, task = heapq.heappop(self._queue)
                self._running += 1
            try:
                task()
            except Exception:  # noqa: BLE001  # a bug in one task must not stop the others
                self.failed_tasks += 1
                _log.exception("a mover task failed")
            finally:
                with self._lock:
                    self._running -= 1
                    self._work_done.notify_all()
