"""An engine on a thread of its own: asyncio code hands requests in, and outputs come back to its event loop.

Nothing of the engine is touched by any other thread. What the others want is a function that the thread calls
between two steps; what a step gives is handed to each event loop in one call. So the loop never waits for a
step, and a step never for the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from tierstore.errors import TierStoreError
from tierstore_engine.outputs import EngineStats, RequestId, StepOutput


class Stepped(Protocol):
    """What the thread needs of an engine: see :class:`tierstore_engine.engine.Engine`."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> list[StepOutput]: ...

    def cancel(self, request_id: RequestId) -> bool: ...

    def cancel_all(self) -> None: ...

    def discard(self, *request_ids: RequestId) -> None: ...

    def stats(self) -> EngineStats: ...


T = TypeVar("T")
E = TypeVar("E", bound=Stepped)
Delivery: TypeAlias = StepOutput | Exception

_log = logging.getLogger(__name__)


class EngineClosedError(TierStoreError):
    """The engine's thread has ended: nothing can be asked of it any more."""


class StepJob:
    """The requests that were submitted together. ``ids`` are in the order in which they were added.

    Iterate it for their outputs, as they come, until all have ended. Belongs to one event loop.
    """

    def __init__(self, thread: EngineThread[Any]) -> None:
        self.ids: list[RequestId] = []
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._open: set[RequestId] = set()

    def cancel(self) -> None:
        """End what has not ended; completions with what there is by then come out of the iteration. From any
        thread; repeating it is harmless."""
        self._thread.post(lambda engine: [engine.cancel(request_id) for request_id in self.ids])

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        while self._open:
            delivery = await self._arrived.get()
            if isinstance(delivery, Exception):
                raise delivery
            if delivery.finished:
                self._open.discard(delivery.request_id)
            yield delivery

    # -- the thread's side ---------------------------------------------------------------------------

    def begin(self, ids: list[RequestId]) -> None:
        self.ids, self._open = ids, set(ids)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def deliver(self, delivery: Delivery) -> None:
        """On the event loop."""
        self._arrived.put_nowait(delivery)


class EngineThread(Generic[E]):
    """Runs ``engine`` until :meth:`close`. All methods may be called from any thread.

    An error in a step ends all requests with it, and is counted in ``errors``; the next ones may succeed (a
    device that ran out of memory has it again). ``failed`` is set where not even ending them worked.

    ``stats`` are the engine's, from before the step that it computes now: reading them waits for nothing.
    ``stepping_since`` is when that step began, by the monotonic clock; None between two steps.
    """

    def __init__(self, engine: E) -> None:
        self.errors = 0
        self.failed: Exception | None = None
        self.stats: EngineStats = engine.stats()
        self.stepping_since: float | None = None
        self._engine = engine
        self._jobs: dict[RequestId, StepJob] = {}  # the thread's own
        self._changed = threading.Condition()
        # Guarded by _changed: both below.
        self._calls: deque[Callable[[E], object]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tierstore-engine", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[E], object]) -> bool:
        """Have the thread call ``call(engine)`` before its next step, without waiting for it. False when it
        has ended."""
        with self._changed:
            if self._closing:
                return False
            self._calls.append(call)
            self._changed.notify()
            return True

    async def call(self, call: Callable[[E], T]) -> T:
        """The result of ``call(engine)``, or what it raised. Raises :class:`EngineClosedError`."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def answer(set_it: Callable[[], None]) -> None:
            if not result.done():  # nobody waits any more
                set_it()

        def run(engine: E) -> None:
            try:
                value = call(engine)
            except Exception as error:  # noqa: BLE001  # it is the caller's
                _call_soon(loop, answer, lambda error=error: result.set_exception(error))
            else:
                _call_soon(loop, answer, lambda: result.set_result(value))

        if not self.post(run):
            raise EngineClosedError("the engine is closed")
        return await result

    async def submit(self, add: Callable[[E], list[RequestId]]) -> StepJob:
        """Add requests: ``add(engine)`` does, and returns their ids. Raises what it raises."""
        job = StepJob(self)

        def begin(engine: E) -> None:
            job.begin(add(engine))
            self._jobs.update((request_id, job) for request_id in job.ids)

        try:
            await self.call(begin)
        except asyncio.CancelledError:
            job.cancel()  # it may have been added by now, or be about to be
            raise
        return job

    async def stream(self, add: Callable[[E], RequestId]) -> AsyncIterator[StepOutput]:
        """The outputs of the request that ``add(engine)`` adds. Closing the iterator early cancels it."""
        job = await self.submit(lambda engine: [add(engine)])
        try:
            async for output in job:
                yield output
        finally:
            with contextlib.suppress(EngineClosedError):
                await self.call(lambda engine: engine.discard(*job.ids))

    def close(self) -> None:
        """End the thread, after what it is in the midst of. The engine is the caller's again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                while not (self._calls or self._closing or self._engine.has_work):
                    self._changed.wait()
                closing, calls = self._closing, list(self._calls)
                self._calls.clear()
            try:
                for call in calls:
                    call(self._engine)
                if calls:
                    self.stats = self._engine.stats()
                if self._engine.has_work and not closing:
                    self.stepping_since = time.monotonic()
                    outputs = self._engine.step()
                    self.stepping_since = None
                    self.stats = self._engine.stats()  # before anybody hears of what is counted in them
                    self._deliver([(output.request_id, output) for output in outputs])
            except Exception as error:  # noqa: BLE001  # whatever it is, those who wait must hear of it
                self.stepping_since = None
                self.errors += 1
                _log.error("a step failed, and its requests end", exc_info=error)
                self._end_all(error)
                self._recover()
        self._end_all(EngineClosedError("the engine was closed before this was done"))

    def _recover(self) -> None:
        """Leave nothing in the engine that would fail again."""
        try:
            self._engine.cancel_all()
            while self._engine.has_work:
                self._engine.step()
        except Exception as error:  # noqa: BLE001  # kept, and said by whoever asks
            _log.error("the engine cannot go on", exc_info=error)
            self.failed = error
            with self._changed:
                self._closing = True

    def _end_all(self, error: Exception) -> None:
        self._deliver([(request_id, error) for request_id in list(self._jobs)])
        self._jobs.clear()

    def _deliver(self, deliveries: list[tuple[RequestId, Delivery]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[StepJob, Delivery]]] = {}
        for request_id, delivery in deliveries:
            job = self._jobs.get(request_id)
            if job is not None:
                by_loop.setdefault(job.loop, []).append((job, delivery))
                if isinstance(delivery, StepOutput) and delivery.finished:
                    del self._jobs[request_id]
        for loop, some in by_loop.items():
            if not _call_soon(loop, _hand_out, some):
                for job, _ in some:  # its event loop has ended: nobody listens
                    for request_id in job.ids:
                        self._engine.cancel(request_id)


def _hand_out(deliveries: list[tuple[StepJob, Delivery]]) -> None:
    for job, delivery in deliveries:
        job.deliver(delivery)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> bool:
    """False when the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
        return True
    return False
