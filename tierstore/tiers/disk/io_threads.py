"""A thread pool for calls that may never return.

With ``ThreadPoolExecutor``, the interpreter waits at exit for the pool's threads, and so for a disk that has
stopped responding. A call through it also takes twice as long, which delays lookups. The threads of this pool
are daemon threads, and get their jobs through a queue implemented in C.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class IOThreads:
    """Up to ``threads`` daemon threads, started as needed. Thread-safe."""

    def __init__(self, threads: int, *, name: str) -> None:
        self._most = threads
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # its value is the number of idle threads
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def post(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise. Raise :class:`OSError` after :meth:`close`."""
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the disk tier is closed")
            self._jobs.put(job)
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run ``job``. The returned future can be cancelled until the job has started. Raise :class:`OSError`
        after :meth:`close`."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:  # noqa: BLE001  # the future raises it
                    future.set_exception(error)

        self.post(run)
        return future

    def ask(self, job: Callable[[], T], timeout_s: float) -> T:
        """Run ``job``, and return its result or raise its error. Raise :class:`TimeoutError` after
        ``timeout_s`` seconds; a job that is running then continues. Raise :class:`OSError` after
        :meth:`close`."""
        answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()
        wanted = True

        def run() -> None:
            if wanted:
                try:
                    answer.put((job(), None))
                except Exception as error:  # noqa: BLE001  # the caller gets it
                    answer.put((None, error))

        self.post(run)
        try:
            result, error = answer.get(timeout=timeout_s)
        except queue.Empty:
            wanted = False
            raise TimeoutError(errno.ETIMEDOUT, f"no answer within {timeout_s:g} s") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # None only if T allows it

    def close(self) -> None:
        """Wait until all submitted jobs were run, and end the threads."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # the job may refer to a caller's memory
            self._idle.release()
