"""HTTP without an engine: a request and its answer, OpenAI's error format, listening, and orderly shutdown.

The engine's server and ``tierstore-proxy`` use this module. It imports neither torch nor the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO, TypeAlias, TypeVar

import msgspec
import uvicorn
from prometheus_client import Counter
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierstore.wire.listener import tcp_sockets
from tierstore.wire.local_address import foreign_host
from tierstore_engine.heap import freeze_heap
from tierstore_engine.server.connections import BODY_S, BoundedServer, most_served
from tierstore_engine.server.errors import ApiError, bad_request

JSON = "application/json"

T = TypeVar("T")

# how much of a body that is too large is read, so that its sender still receives the answer
_DISCARDED_BODIES = 32


class Exchange:
    """One HTTP request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = Request(scope, receive)
        self.status = 0  # the status of the answer; 0 until it has been sent
        self.ended = False  # whether the last part of the answer has been sent
        self._receive = receive
        self._asgi_send = send
        self._scope = scope
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    async def body(self, limit: int) -> bytes:
        """Return the body. Raises :class:`ApiError` for a body that is too large (413), too slow (408) or not
        JSON (415)."""
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await self.any_body(limit)
        if kind != JSON:
            raise ApiError(415, f"the body must be JSON: send Content-Type: {JSON}")
        return body

    async def _read(self, limit: int) -> bytes | None:
        parts, total = [], 0
        async for part in self.request.stream():
            total += len(part)
            if total <= limit:
                parts.append(part)
            elif total > _DISCARDED_BODIES * limit:
                return None
            else:
                parts.clear()
        return b"".join(parts) if total <= limit else None

    async def any_body(self, limit: int) -> bytes:
        """Return a body of any type. Raises :class:`ApiError` for a body that is too large (413) or too slow
        (408)."""
        try:
            body = await asyncio.wait_for(self._read(limit), BODY_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
        if body is None:
            raise ApiError(413, f"the body is larger than the {limit} bytes that are allowed")
        return body

    async def hang_up(self) -> None:
        """Wait until the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        await self.send(Response(msgspec.json.encode(document), status, headers, JSON))

    async def fail(self, error: ApiError) -> None:
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        if error.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        await self.reply(error.status, error.body, headers)

    async def _send(self, message: Message) -> None:
        """Send an ASGI message. Raises :class:`ClientDisconnect`.

        An ASGI server may raise :class:`OSError` here when the client has disconnected. An ``OSError`` from
        any other place is an error of the handler.
        """
        try:
            await self._asgi_send(message)
        except OSError as error:
            raise ClientDisconnect from error

    async def send(self, response: Response) -> None:
        self.status, self.ended = response.status_code, True
        await response(self._scope, self._receive, self._send)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Start an answer of several parts. Names of headers must be in lower case."""
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def part(self, data: bytes, *, more: bool) -> None:
        """Send a part. ``more`` is False for the last part."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.ended = not more

    async def start_events(self) -> None:
        await self.start(
            200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        )

    async def event(self, document: Mapping[str, object] | None) -> None:
        if document is not None:
            await self.part(b"data: " + msgspec.json.encode(document) + b"\n\n", more=True)

    async def end_events(self) -> None:
        await self.part(b"data: [DONE]\n\n", more=False)


Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


class Counts(Protocol):
    """Counters: ``requests`` by endpoint and status, and ``hang_ups``, the clients that disconnected
    early."""

    requests: Counter
    hang_ups: Counter


class MeteredRoute:
    """An ASGI application for one route. It answers the client after every error, and counts every answer.

    With ``api_key`` a request must carry the key. With ``host``, the address that the server listens at, a
    request for another host gets 421 (:func:`~tierstore.wire.local_address.foreign_host`). ``error_of``
    converts an exception of ``handler`` into an error for the client.
    """

    def __init__(
        self,
        name: str,
        handler: Handler,
        counts: Counts,
        *,
        api_key: str | None,
        error_of: Callable[[Exception], ApiError],
        host: str | None = None,
    ) -> None:
        self._host = host
        self._name = name
        self._handler = handler
        self._counts = counts
        self._api_key = api_key
        self._error_of = error_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if self._host is not None:
                require_host(exchange.request, self._host)
            if self._api_key is not None:
                require_key(exchange.request, self._api_key)
            await self._handler(exchange)
        except ClientDisconnect:
            self._counts.hang_ups.inc()
        except Exception as error:  # noqa: BLE001  # every error must be answered
            if not exchange.status:
                await exchange.fail(self._error_of(error))
        self._counts.requests.labels(self._name, str(exchange.status or 499)).inc()


def has_key(request: Request, api_key: str) -> bool:
    """Return whether the request has the right key."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), api_key.encode())


def require_key(request: Request, api_key: str) -> None:
    """Raise :class:`ApiError` (401) if the request does not have the right key."""
    if not has_key(request, api_key):
        raise ApiError(401, "this server needs an API key: send Authorization: Bearer KEY")


def require_host(request: Request, served_at: str) -> None:
    """Raise :class:`ApiError` (421) for a request to another host."""
    for host in request.headers.getlist("host"):
        name = foreign_host(served_at, host)
        if name is not None:
            raise ApiError(421, f"this server is not {name}: send requests to localhost or 127.0.0.1")


def decode_json(body: bytes, kind: type[T]) -> T:
    """Decode ``body`` into the type ``kind``. Raises :class:`ApiError` (400) if it is not JSON in UTF-8, and
    :class:`msgspec.ValidationError` for JSON of another type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None


async def not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = "does not exist" if error.status_code == 404 else f"does not take {request.method}"
    body = ApiError(error.status_code, f"{request.url.path} {what}").body
    return Response(msgspec.json.encode(body), error.status_code, error.headers, JSON)


@contextmanager
def listening_at(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Return sockets that are bound to an address. Call this before any other work, so that an address in use
    is reported at once. Port 0 means any free port. Raises :class:`UsageError`."""
    sockets = tcp_sockets(host, port)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


async def serve_app(
    app: ASGIApp,
    listening: Sequence[socket.socket],
    *,
    drain: Callable[[], Awaitable[None]],
    announce: str,
    err: TextIO,
    descriptors: int = 1,
    failed: asyncio.Event | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then wait for ``drain``; a second signal ends at once. End without
    draining when ``failed`` is set.

    Write a line to ``err`` that begins with ``announce`` and has the address. A request needs ``descriptors``
    file descriptors, including that of its connection.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1, ws="none"
    )
    http = BoundedServer(config, listening, most_served(descriptors))
    ending: list[asyncio.Task[None]] = []

    async def end() -> None:
        await drain()
        http.should_exit = True

    def on_signal() -> None:
        if ending:
            http.should_exit = http.force_exit = True  # the second signal ends at once
        else:
            ending.append(asyncio.create_task(end()))

    async def announce_address() -> None:
        while not http.started:
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # this replaces uvicorn's handler, which does not wait for running requests
            loop.add_signal_handler(number, on_signal)
        freeze_heap()
        host, port = listening[0].getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        print(f"{announce} http://{name}:{port}/v1", file=err, flush=True)

    async def end_when_failed(failed: asyncio.Event) -> None:
        await failed.wait()
        http.should_exit = True

    beside = [asyncio.create_task(announce_address())]
    if failed is not None:
        beside.append(asyncio.create_task(end_when_failed(failed)))
    try:
        await http.serve()
    finally:
        for each in beside:
            each.cancel()
