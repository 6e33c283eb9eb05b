"""An engine on its own thread: asyncio code adds requests, and outputs return to its event loop.

No other thread touches the engine. Other threads post functions, which the engine's thread calls between two
steps. The outputs of a step are passed to each event loop in one call. The event loop therefore never waits
for a step, and a step never waits for the event loop.
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
from tierstore_engine.errors import RankLostError
from tierstore_engine.outputs import EngineStats, RequestId, StepOutput


class Stepped(Protocol):
    """The part of an engine that the thread uses: see :class:`tierstore_engine.engine.Engine`."""

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
    """The engine's thread has ended and accepts no calls."""


class StepJob:
    """Requests that were submitted together. ``ids`` are in the order in which they were added.

    Iterate it for their outputs as they arrive, until all requests have ended. Belongs to one event loop.
    """

    def __init__(self, thread: EngineThread[Any]) -> None:
        self.ids: list[RequestId] = []
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._open: set[RequestId] = set()

    def cancel(self) -> None:
        """End the requests that have not ended. Their completions, with the tokens so far, then come out of
        the iteration. Can be called from any thread, and repeatedly."""
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
        """Pass outputs to the iteration, on its event loop."""
        self._arrived.put_nowait(delivery)


class EngineThread(Generic[E]):
    """Run ``engine`` until :meth:`close`. All methods may be called from any thread.

    An error in a step ends all requests, and is counted in ``errors``. Later requests may succeed, for
    example after a device ran out of memory. ``failed`` is set if even ending them failed, or if the engine
    cannot continue (:class:`~tierstore_engine.errors.RankLostError`). The thread then calls ``when_failed``,
    and ends.

    ``stats`` are the engine's statistics from before its current step, so that reading them waits for
    nothing. ``stepping_since`` is when that step began, by the monotonic clock; None between two steps.
    """

    def __init__(self, engine: E) -> None:
        self.errors = 0
        self.failed: Exception | None = None
        self.when_failed: Callable[[], object] = lambda: None
        self.stats: EngineStats = engine.stats()
        self.stepping_since: float | None = None
        self._engine = engine
        self._jobs: dict[RequestId, StepJob] = {}  # only the thread uses it
        self._changed = threading.Condition()
        # _changed guards both of these attributes.
        self._calls: deque[Callable[[E], object]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tierstore-engine", daemon=True)
        self._thread.start()

    def post(self, call: Callable[[E], object]) -> bool:
        """Call ``call(engine)`` on the thread before its next step, without waiting for it. Return False if
        the thread has ended."""
        with self._changed:
            if self._closing:
                return False
            self._calls.append(call)
            self._changed.notify()
            return True

    async def call(self, call: Callable[[E], T]) -> T:
        """Return the result of ``call(engine)``, or raise its error. Raises :class:`EngineClosedError`."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def answer(set_it: Callable[[], None]) -> None:
            if not result.done():  # the caller no longer waits
                set_it()

        def run(engine: E) -> None:
            try:
                value = call(engine)
            except Exception as error:  # noqa: BLE001  # raised at the caller
                _call_soon(loop, answer, lambda error=error: result.set_exception(error))
            else:
                _call_soon(loop, answer, lambda: result.set_result(value))

        if not self.post(run):
            raise EngineClosedError("the engine is closed")
        return await result

    async def submit(self, add: Callable[[E], list[RequestId]]) -> StepJob:
        """Add requests through ``add(engine)``, which returns their ids. Raises its errors."""
        job = StepJob(self)

        def begin(engine: E) -> None:
            job.begin(add(engine))
            self._jobs.update((request_id, job) for request_id in job.ids)

        try:
            await self.call(begin)
        except asyncio.CancelledError:
            job.cancel()  # the requests of this job may have been added by now, or may be added soon
            raise
        return job

    async def stream(self, add: Callable[[E], RequestId]) -> AsyncIterator[StepOutput]:
        """Yield the outputs of the request that ``add(engine)`` adds. Closing the iterator early cancels the
        request."""
        job = await self.submit(lambda engine: [add(engine)])
        try:
            async for output in job:
                yield output
        finally:
            with contextlib.suppress(EngineClosedError):
                await self.call(lambda engine: engine.discard(*job.ids))

    def close(self) -> None:
        """End the thread after its current step, and return the engine to the caller."""
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
                    self.stats = self._engine.stats()  # counters change before callers see the outputs
                    self._deliver([(output.request_id, output) for output in outputs])
            except Exception as error:  # noqa: BLE001  # waiting callers must learn of every error
                self.stepping_since = None
                self.errors += 1
                _log.error("a step failed and its requests were ended", exc_info=error)
                self._end_all(error)
                if isinstance(error, RankLostError):
                    self._fail(error)
                else:
                    self._recover()
        self._end_all(EngineClosedError("the engine was closed before this was done"))

    def _recover(self) -> None:
        """End all requests of the engine, so that none of them fails again."""
        try:
            self._engine.cancel_all()
            while self._engine.has_work:
                self._engine.step()
        except Exception as error:  # noqa: BLE001  # kept, and reported to callers
            _log.error("the engine has failed and stops", exc_info=error)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failed = error
        with self._changed:
            self._closing = True
        self.when_failed()

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
                for job, _ in some:  # its event loop has ended
                    for request_id in job.ids:
                        self._engine.cancel(request_id)


def _hand_out(deliveries: list[tuple[StepJob, Delivery]]) -> None:
    for job, delivery in deliveries:
        job.deliver(delivery)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> bool:
    """Schedule a call on the loop. Return False if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
        return True
    return False
