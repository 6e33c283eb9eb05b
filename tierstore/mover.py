"""The mover: worker threads that copy pages, most urgent copies first.

A *task* is a small part of one transfer (a few MiB of pages). Workers spend their time in calls that release
the GIL (memory copies, preadv), so a few workers keep a disk and a memory bus busy without slowing an
engine's Python. Running tasks are not preempted. Instead, tasks are small, so that an urgent load waits for
milliseconds at most.

There are two *lanes*, each with its own queue and workers: one for tasks that only copy memory and always
end, and one for tasks that read from disk and may hang. Even if many disk reads hang, pages in memory are
served.
"""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Priority(enum.IntEnum):
    """The priority of a task. Lower values run first."""

    LOAD = 0  # an engine waits for the pages
    PREFETCH = 1  # an engine will request the pages
    SAVE = 2  # no engine waits


class Lane(enum.Enum):
    """The resource that a task may wait for."""

    MEMORY = "memory"
    DISK = "disk"


class Mover:
    """``threads`` workers for tasks in memory, and ``disk_threads`` workers for tasks that may wait for the
    disk. Within a lane, tasks of equal priority run in order of arrival.

    Tasks must not raise: each task handles its own I/O errors. An exception is a bug. It is logged and
    counted in ``failed_tasks``, and all other tasks continue.
    """

    def __init__(self, threads: int, *, disk_threads: int = 0) -> None:
        self._lanes = {
            Lane.MEMORY: _Workers(threads, "tierstore-mover"),
            Lane.DISK: _Workers(disk_threads, "tierstore-disk-mover"),
        }

    def submit(self, priority: Priority, task: Callable[[], None], *, lane: Lane = Lane.MEMORY) -> None:
        """Queue a task. After ``close()``, tasks are dropped."""
        self._lanes[lane].submit(priority, task)

    @property
    def pending(self) -> int:
        """Number of tasks queued or running."""
        return sum(workers.pending for workers in self._lanes.values())

    @property
    def failed_tasks(self) -> int:
        """Number of tasks that raised an exception."""
        return sum(workers.failed_tasks for workers in self._lanes.values())

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until no task is queued or running. Return False when ``timeout`` seconds pass first."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while self.pending:  # a task may submit another one to the other lane
            for workers in self._lanes.values():
                left = None if give_up is None else max(give_up - time.monotonic(), 0.0)
                if not workers.drain(left):
                    return False
        return True

    def close(self) -> None:
        """Run the queued tasks, then stop the workers. Repeated calls do nothing. Does not return while a
        task hangs."""
        self.drain()
        for workers in self._lanes.values():
            workers.close()


class _Workers:
    """The workers and the queue of one lane."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue: list[tuple[Priority, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._work_added = threading.Condition(self._lock)
        self._work_done = threading.Condition(self._lock)
        self._running = 0
        self._closed = False
        self.failed_tasks = 0
        self._workers = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, priority: Priority, task: Callable[[], None]) -> None:
        with self._lock:
            assert self._workers or self._closed, "a task was submitted to a lane without workers"
            if not self._closed:
                heapq.heappush(self._queue, (priority, next(self._order), task))
                self._work_added.notify()

    @property
    def pending(self) -> int:
        with self._lock:
            return len(self._queue) + self._running

    def drain(self, timeout: float | None) -> bool:
        with self._lock:
            return self._work_done.wait_for(lambda: not self._queue and not self._running, timeout)

    def close(self) -> None:
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
            # a failed task, or a failed callback at its end, must not stop the worker
            except BaseException:  # noqa: BLE001
                self.failed_tasks += 1
                _log.exception("a mover task failed")
            finally:
                del task  # release its references, because the next task may come much later
                with self._lock:
                    self._running -= 1
                    self._work_done.notify_all()
