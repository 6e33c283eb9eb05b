"""Streams for asyncio: one thread steps the engine, the event loop hands out what it produced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tierstore_engine.outputs import RequestId, StepOutput

if TYPE_CHECKING:
    from tierstore_engine.engine import Engine, PromptInput
    from tierstore_engine.sampling import SamplingParams


class StepThread:
    """Runs every call on an engine, ``step`` above all, on one thread of its own.

    While any stream is open a task on the event loop keeps stepping. An error in a step ends all streams
    with it. Used from one event loop at a time.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tierstore-engine")
        self._queues: dict[RequestId, asyncio.Queue[StepOutput | BaseException]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def stream(self, prompt: PromptInput, params: SamplingParams | None) -> AsyncIterator[StepOutput]:
        """The outputs of one request. Closing the iterator early cancels it."""
        loop = asyncio.get_running_loop()
        request_id = await loop.run_in_executor(self._thread, self._engine.add, prompt, params)
        queue = self._queues[request_id] = asyncio.Queue()
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._step_until_idle())
        try:
            while True:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            del self._queues[request_id]
            await loop.run_in_executor(self._thread, self._engine.cancel, request_id)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def _step_until_idle(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queues:
            try:
                outputs = await loop.run_in_executor(self._thread, self._engine.step)
            except Exception as error:  # noqa: BLE001  # whatever it is, those who wait must hear of it
                for queue in self._queues.values():
                    queue.put_nowait(error)
                return
            for output in outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
