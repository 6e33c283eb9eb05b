"""The engines behind the proxy: what each has under way, whether it is up, and its answers as bytes."""

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
    2.0  # less than an engine's, so that an idle connection is not closed in the moment of its use
)
_HEALTH_S = 1.0
_HEALTH_WAIT_S = 5.0  # an engine may be in the midst of a long step
_LATE_CHECKS = 2  # in a row, then the engine counts as down

_log = logging.getLogger(__name__)

T = TypeVar("T")


class UpstreamError(TierStoreError):
    """An engine did not answer as it should. ``sent``: the request may have reached it."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Upstream:
    """One engine. ``role`` is ``prefill`` or ``decode``. On one event loop."""

    def __init__(self, url: str, role: str) -> None:
        self.url = url
        self.role = role
        self.requests = 0
        self.tokens = 0
        self.problem = ""  # why it is taken for down; empty while it is up
        self.failures = 0
        self._late = 0
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=64, keepalive_expiry=_KEEP_ALIVE_S
        )
        timeout = httpx.Timeout(None, connect=_CONNECT_S)  # the rest have deadlines of their own
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout, trust_env=False)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self.requests, self.tokens, not self.problem)

    @contextmanager
    def under_way(self, tokens: int) -> Iterator[None]:
        """Count a request with so many prompt tokens."""
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
        """The beginning of an answer; its body is read in the block. Leaving the block ends the connection if
        there is more of it. Raises :class:`UpstreamError`, also for what goes wrong in the block."""
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
            # Not taken down for it: a connection may break. The next check, or request, finds out.
            self.failures += 1
            what = "broke off" if begun else "did not answer"
            raise UpstreamError(f"{self.url} {what}: {error or type(error).__name__}", sent=True) from error

    async def check(self) -> None:
        """Ask once how it is."""
        try:
            answer = await within(_HEALTH_WAIT_S, self._http.get("/health"))
        except asyncio.TimeoutError:
            self._note_late(f"/health did not answer within {_HEALTH_WAIT_S:g} s")
        except httpx.HTTPError as error:
            self._note_unreachable(error)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is asked again
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
        if isinstance(error, httpx.ConnectTimeout):  # once, also because this process was busy
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
    """What ``work`` gives; it is cancelled, and has ended, when the time is over or the caller is cancelled.
    Raises :class:`asyncio.TimeoutError`. (``asyncio.wait_for`` of Python 3.11 and before gives the result to
    a caller that is cancelled in the moment in which it comes: whoever has left would be served on.)"""
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
            task.exception()  # the caller has it, or has left


async def watch(engines: Sequence[Upstream]) -> None:
    """Check all of them again and again, until cancelled."""
    await asyncio.gather(*(_watch_one(engine) for engine in engines))


async def _watch_one(engine: Upstream) -> None:
    while True:
        await engine.check()
        await asyncio.sleep(_HEALTH_S)
