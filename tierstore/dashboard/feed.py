"""The feed of a dashboard: one sample per second, shared by all viewers.

For any number of viewers, the server's state is read at most once a second, and each event is encoded once. A
slow viewer misses events, and a viewer that does not read for some seconds is disconnected, so no events
queue up. Without viewers, a sample is made every ten seconds, so that the plots have a history for the next
viewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec

from tierstore.dashboard.view import Number, Sample
from tierstore.errors import TierStoreError

_log = logging.getLogger(__name__)

MOST_VIEWERS = 16
_WATCHED_S = 1.0
_UNWATCHED_S = 10.0
_PAST_S = 900.0
_SLOW_S = 5.0
_RETRY_MS = 1000


class TooManyViewersError(TierStoreError):
    """The maximum of viewers is connected."""


class SlowViewerError(TierStoreError):
    """A viewer has not read for some seconds."""


class Feed:
    """Server-sent events with the results of ``look()``. Uses the event loop on which it was started.

    ``look`` may take any time: the next call begins after it has returned. The exceptions of ``look`` are
    counted in ``failures``, and the first of consecutive ones is logged. Until ``look`` succeeds again, no
    event is sent.

    Example::

        feed = Feed(look)
        feed.start()
        with feed.place():  # raises TooManyViewersError
            await feed.follow(send)  # until send fails, or the feed is closed
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[Sample]],
        *,
        most_viewers: int = MOST_VIEWERS,
        slow_s: float = _SLOW_S,
        unwatched_s: float = _UNWATCHED_S,
    ) -> None:
        self.viewers = 0
        self.failures = 0
        self._look = look
        self._most_viewers = most_viewers
        self._slow_s = slow_s
        self._unwatched_s = unwatched_s
        self._past: deque[tuple[float, dict[str, tuple[Number, ...]]]] = deque()
        self._latest = b""
        self._number = 0  # number of the latest event
        self._changed = asyncio.Event()  # an event that the next sample sets and replaces by a new event
        self._came = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to make samples on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Make no further sample. Callable from any thread."""
        self._closed = True

    async def close(self) -> None:
        """Make no further sample, and end :meth:`follow` for all viewers."""
        self.stop()
        self._changed.set()
        self._came.set()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a viewer while the block runs. Raise :class:`TooManyViewersError` if there are too many."""
        if self.viewers >= self._most_viewers:
            raise TooManyViewersError(
                f"{self.viewers} viewers are connected, which is the maximum: close a dashboard"
            )
        self.viewers += 1
        self._came.set()
        try:
            yield
        finally:
            self.viewers -= 1

    async def follow(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send the history and then every new sample, until the feed is closed. Raise the exceptions of
        ``send``, and :class:`SlowViewerError` if a ``send`` takes longer than ``slow_s``."""
        await self._send(send, f"retry: {_RETRY_MS}\n".encode() + _event("history", list(self._past)))
        seen = 0
        while not self._closed:
            changed = self._changed
            if self._number == seen:
                await changed.wait()
                continue
            seen = self._number
            await self._send(send, self._latest)

    async def _send(self, send: Callable[[bytes], Awaitable[None]], event: bytes) -> None:
        sending = asyncio.ensure_future(send(event))
        try:
            # Not asyncio.wait_for: up to Python 3.11 it loses a cancellation that occurs when the send ends.
            await asyncio.wait({sending}, timeout=self._slow_s)
            if not sending.done():
                raise SlowViewerError(f"a dashboard has not read for {self._slow_s:g} s")
            sending.result()
        finally:
            sending.cancel()

    async def _run(self) -> None:
        failed = False
        while not self._closed:
            began = time.monotonic()
            try:
                self._note(await self._look())
                failed = False
            except Exception as error:  # noqa: BLE001  # an error of one sample must not end the feed
                self.failures += 1
                if not failed:
                    _log.warning("the dashboard has no new sample: %s", error, exc_info=error)
                failed = True
            await asyncio.sleep(max(began + _WATCHED_S - time.monotonic(), 0.05))
            self._came.clear()
            if not self.viewers:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._came.wait(), self._unwatched_s - _WATCHED_S)

    def _note(self, sample: Sample) -> None:
        values = {key: tuple(map(_rounded, numbers)) for key, numbers in sample.values.items()}
        self._past.append((sample.at_s, values))
        while self._past[0][0] < sample.at_s - _PAST_S:
            self._past.popleft()
        self._latest = _event("sample", (sample.at_s, values, sample.view))
        self._number += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _event(name: str, document: object) -> bytes:
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(document) + b"\n\n"


def _rounded(number: Number) -> Number:
    """Round to the digits that a plot can show, because long numbers would make the events large."""
    if number is None or not math.isfinite(number):
        return None
    return float(f"{number:.4g}")
