"""The engines behind the proxy: their current requests, whether they are up, and their answers as bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import httpx

from tierstore.errors import TierStoreError
from tierstore_proxy.choice import EngineLoad

_CONNECT_S = 2.0
_KEEP_ALIVE_S = (
    # shorter than an engine's own limit for idle connections, so that no engine closes a connection while the
    # proxy begins to use it
    2.0
)
_HEALTH_S = 1.0
_HEALTH_WAIT_S = 5.0  # an engine may be in the middle of a long step
_LATE_CHECKS = 2  # an engine counts as down after this many consecutive late checks

_log = logging.getLogger(__name__)

T = TypeVar("T")


class UpstreamError(TierStoreError):
    """An engine did not answer as expected. ``sent`` says whether the request may have reached the engine."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Upstream:
    """One engine. ``role`` is ``prefill`` or ``decode``. Used on one event loop."""

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.requests = 0
        self.tokens = 0
        self.problem = ""  # the reason why the engine counts as down; empty while it is up
        self.failures = 0
        self._late = 0
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEP_ALIVE_S
        )
        # only the connection has a limit here; other waits have their own deadlines
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.requests, self.tokens, not self.problem)

    @contextmanager
    def under_way(self, tokens: int) -> Iterator[None]:
        """Count a request with ``tokens`` prompt tokens while the block runs."""
        self.requests += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Send a request, and yield its answer when it begins; the caller reads the body in the block.

        Leaving the block early closes the connection. Raises :class:`UpstreamError`, also for errors in the
        block.
        """
        begun = False
        try:
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            async with self._http.stream(method, path, content=body, headers=raw) as answer:
                begun = True
                yield answer
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._note_unreachable(error)
            raise UpstreamError(f"{self.url} cannot be reached", sent=False) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            # The engine is not marked as down: a single connection may break. The next check or request finds
            # out.
            self.failures += 1
            what = "broke off" if begun else "did not answer"
            raise UpstreamError(f"{self.url} {what}: {error or type(error).__name__}", sent=True) from error

    async def check(self) -> None:
        """Check the engine's health once."""
        try:
            answer = await within(_HEALTH_WAIT_S, self._http.get("/health"))
        except asyncio.TimeoutError:
            self._note_late(f"/health did not answer within {_HEALTH_WAIT_S:g} s")
        except httpx.HTTPError as error:
            self._note_unreachable(error)
        except Exception as error:  # noqa: BLE001  # after any error it is checked again
            if not self.problem:
                _log.error("%s engine %s cannot be checked", self.role, self.url, exc_info=error)
            self._take_down(f"cannot be checked: {error or type(error).__name__}")
        else:
            self._late = 0
            if answer.is_success:
                self._put_up()
            else:
                self._take_down(f"/health answered {answer.status_code}")

    async def close(self) -> None:
        await self._http.aclose()

    def _note_unreachable(self, error: httpx.HTTPError) -> None:
        if isinstance(error, httpx.ConnectTimeout):  # a single late check may mean that this process was busy
            self._note_late(f"no connection within {_CONNECT_S:g} s")
        else:
            self._take_down(f"cannot connect: {str(error) or type(error).__name__}")

    def _note_late(self, problem: str) -> None:
        self._late += 1
        if self._late >= _LATE_CHECKS:
            self._take_down(problem)

    def _take_down(self, problem: str) -> None:
        if not self.problem:
            self.failures += 1
            _log.warning("%s engine %s is down: %s", self.role, self.url, problem)
        self.problem = problem

    def _put_up(self) -> None:
        if self.problem:
            _log.warning("%s engine %s is up again", self.role, self.url)
        self.problem = ""


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of ``work``. If the time is over or the caller is cancelled, cancel ``work`` and wait
    for its end. Raises :class:`asyncio.TimeoutError`.

    ``asyncio.wait_for`` of Python 3.11 and earlier would return a result that arrives at the moment of the
    caller's cancellation, so that a client that has left would be served on.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # the caller has got the error already, or has left


async def watch(engines: Sequence[Upstream]) -> None:
    """Check all engines repeatedly, until cancelled."""
    await asyncio.gather(*(_watch_one(engine) for engine in engines))


async def _watch_one(engine: Upstream) -> None:
    while True:
        await engine.check()
        await asyncio.sleep(_HEALTH_S)
