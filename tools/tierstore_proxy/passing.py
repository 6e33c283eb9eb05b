"""Pass an engine's answer through to the client, as long as the client is connected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import httpx
from starlette.requests import ClientDisconnect

from tierstore_engine.server.errors import ApiError
from tierstore_engine.server.http import Exchange
from tierstore_proxy.upstream import UpstreamError

HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade"),
    }
)
"""Headers that concern one connection only."""

_log = logging.getLogger(__name__)
_REPLACED = frozenset({"date", "server"})  # the proxy's own HTTP server sends these headers


def api_error(error: Exception) -> ApiError:
    """Return the answer to a request that failed. Unforeseen errors are logged."""
    match error:
        case ApiError():
            return error
        case UpstreamError():
            return ApiError(502, str(error))
    _log.error("a request failed", exc_info=error)
    return ApiError(500, "internal proxy error: see the proxy's log")


async def while_connected(
    exchange: Exchange, work: Awaitable[object], *, limit_s: float | None = None
) -> None:
    """Await ``work`` while the client is connected, at most ``limit_s`` seconds. Raises :class:`ApiError`
    (504) and :class:`ClientDisconnect`."""
    working = asyncio.ensure_future(work)
    listening = asyncio.ensure_future(exchange.hang_up())
    try:
        await asyncio.wait((working, listening), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done() or exchange.ended:  # a client that has received the whole answer may disconnect
            await working
        elif listening.done():
            raise ClientDisconnect
        else:
            raise ApiError(504, f"the request took longer than the limit of {limit_s:g} s")
    finally:
        for task in (working, listening):
            task.cancel()
        await asyncio.gather(working, listening, return_exceptions=True)


async def pass_through(
    exchange: Exchange,
    answer: httpx.Response,
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    most_bytes: int | None = None,
    begun: Callable[[], object] | None = None,
) -> None:
    """Pass an answer through, byte for byte, with more ``headers``. ``begun`` is called at its first part.

    Raises :class:`UpstreamError` if it ends too early, or is longer than ``most_bytes``. The client's
    connection is then closed in the middle of the answer.
    """
    replaced = {name for name, _ in headers}
    kept = [(name, value) for name, value in _downwards(answer) if name not in replaced]
    await exchange.start(answer.status_code, [*kept, *headers])
    total = 0
    async for part in answer.aiter_raw():
        if not total and begun is not None:
            begun()
        total += len(part)
        if most_bytes is not None and total > most_bytes:
            raise UpstreamError(f"{answer.url} answers with more than {most_bytes} bytes", sent=True)
        await exchange.part(part, more=True)
    await exchange.part(b"", more=False)


def _downwards(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    """Return an answer's headers for the client, with names in lower case."""
    named = {name.strip() for name in answer.headers.get("connection", "").lower().split(",")}
    dropped = HOP_BY_HOP | _REPLACED | named
    lowered = [(name.lower(), value) for name, value in answer.headers.raw]
    return [(name, value) for name, value in lowered if name.decode("latin-1") not in dropped]
