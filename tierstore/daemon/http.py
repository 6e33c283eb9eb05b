"""The daemon's HTTP port: ``/metrics``, ``/healthz``, ``/readyz``, and the dashboard at ``/dashboard/``.

The HTTP server has its own thread and event loop, so HTTP clients do not block the event loop that serves
engines. ``/healthz`` and ``/readyz`` check that the engines' event loop still runs, because an HTTP answer
from another loop does not show it.

The server answers one request per connection and closes the connection. Only the dashboard's feed stays open.
The number of connections is limited (:mod:`tierstore.wire.listener`), and connections of slow clients are
closed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import http
import http.client
import io
import logging
import socket
import threading
from collections.abc import Callable

from tierstore.daemon.metrics import MetricsText
from tierstore.daemon.stats import DaemonStats
from tierstore.dashboard.feed import Feed, TooManyViewersError
from tierstore.dashboard.site import MOST_BODY_BYTES, Site, WebAnswer, WebRequest
from tierstore.dashboard.view import Sample
from tierstore.errors import TierStoreError, UsageError
from tierstore.wire.listener import Listener, ListenerPlace, Places, tcp_sockets

_log = logging.getLogger(__name__)

_REQUEST_S = 5.0
_LOOP_S = 5.0  # time limit for an answer of the loop that serves engines
_MOST_REQUEST_BYTES = 8192
_MOST_CONNECTIONS = 64
_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})  # some connections are reserved for these
_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
_FULL = WebAnswer(503, {**_TEXT, "Retry-After": "1"}, b"too many connections\n")


class HttpServer:
    """Serves metrics of ``stats()`` and a dashboard of ``look()`` to clients that ``site`` admits. Another
    thread calls ``look``."""

    def __init__(self, stats: Callable[[], DaemonStats], look: Callable[[], Sample], site: Site) -> None:
        self._stats = stats
        self._look = look
        self._site = site
        self._metrics = MetricsText(stats)
        self._serving = asyncio.get_running_loop()  # the engines' loop
        self._own: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event
        self._feed: Feed
        self._answering: set[asyncio.Task[None]] = set()
        self._thread: threading.Thread | None = None
        self._port: concurrent.futures.Future[int] = concurrent.futures.Future()

    async def start(self, host: str, port: int) -> None:
        """Start the thread and listen. Raise :class:`UsageError` if the address cannot be used."""
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(host, port)), name="tierstore-http", daemon=True
        )
        self._thread.start()
        try:
            await asyncio.wrap_future(self._port)
        except UsageError as error:
            raise UsageError(f"cannot serve metrics: {error}") from error

    @property
    def port(self) -> int:
        return self._port.result()

    async def close(self) -> None:
        """Close all connections and end the thread."""
        if self._own is not None and self._thread is not None and self._thread.is_alive():
            self._own.call_soon_threadsafe(self._stop.set)
            await asyncio.to_thread(self._thread.join, _LOOP_S)

    # -- the thread ----------------------------------------------------------------------------------

    async def _run(self, host: str, port: int) -> None:
        self._own = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._feed = Feed(lambda: asyncio.to_thread(self._look))
        try:
            listening = tcp_sockets(host, port)
        except UsageError as error:
            self._port.set_exception(error)
            return
        port = int(listening[0].getsockname()[1])
        listener = Listener(listening, Places(_MOST_CONNECTIONS), self._enter)
        self._feed.start()
        self._port.set_result(port)
        await self._stop.wait()
        listener.close()
        await self._feed.close()  # asyncio.run cancels all other tasks

    def _enter(self, connection: socket.socket, place: ListenerPlace) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(connection, place))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _serve(self, connection: socket.socket, place: ListenerPlace) -> None:
        try:
            reader, writer = await asyncio.open_connection(sock=connection, limit=_MOST_REQUEST_BYTES)
        except OSError:
            place.leave()
            connection.close()
            return
        try:
            request = await asyncio.wait_for(_read(reader), _REQUEST_S)
            probe = request.path in _PROBES
            answer = _FULL if not place.serve(probe=probe) else await self._answer(request)
            if answer.follows:
                await self._follow(writer, answer)
            else:
                await asyncio.wait_for(_write(writer, answer), _REQUEST_S)
        except (
            OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError,
            http.client.HTTPException, TierStoreError,
        ) as error:  # fmt: skip
            _log.debug("a request by HTTP failed: %s", error)
        finally:
            place.leave()
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _follow(self, writer: asyncio.StreamWriter, answer: WebAnswer) -> None:
        async def send(event: bytes) -> None:
            writer.write(event)
            await writer.drain()

        try:
            with self._feed.place():
                await _write(writer, answer)
                await self._feed.follow(send)
        except TooManyViewersError as error:
            await _write(writer, WebAnswer(503, {**_TEXT, "Retry-After": "10"}, f"{error}\n".encode()))

    async def _answer(self, request: WebRequest) -> WebAnswer:
        """Return the answer to a request; after an error, an answer with status 500 or 503."""
        try:
            return await self._found(request)
        except TierStoreError as error:
            return WebAnswer(503, {**_TEXT, "Retry-After": "1"}, f"{error}\n".encode())
        except Exception as error:  # noqa: BLE001  # the client gets an answer after any error
            _log.error("answering %s has failed", request.path, exc_info=error)
            return WebAnswer(500, _TEXT, b"internal error: see the daemon's log\n")

    async def _found(self, request: WebRequest) -> WebAnswer:
        page = self._site.answer(request)
        if page is not None:
            return page
        if (refusal := self._site.refusal(request)) is not None:
            return refusal
        if request.method != "GET":
            return WebAnswer(405, _TEXT, b"GET only\n")
        documents = {"/metrics": self._metrics_text, "/healthz": self._health, "/readyz": self._readiness}
        document = documents.get(request.path)
        if document is None:
            return WebAnswer(404, _TEXT, b"/dashboard/, /metrics, /healthz or /readyz\n")
        return await document()

    async def _metrics_text(self) -> WebAnswer:
        text = await asyncio.to_thread(self._metrics)
        return WebAnswer(200, {"Content-Type": MetricsText.content_type}, text)

    async def _health(self) -> WebAnswer:
        if not await self._loop_goes_round():
            return WebAnswer(503, _TEXT, f"the event loop has not answered for {_LOOP_S:g} s\n".encode())
        line = (await asyncio.to_thread(self._stats)).store.health_line or "ok"
        return WebAnswer(200, _TEXT, f"{line}\n".encode())

    async def _readiness(self) -> WebAnswer:
        ready = await self._loop_goes_round() and (await asyncio.to_thread(self._stats)).ready
        return WebAnswer(200, _TEXT, b"ready\n") if ready else WebAnswer(503, _TEXT, b"not ready\n")

    async def _loop_goes_round(self) -> bool:
        """Return whether the event loop that serves engines runs a callback within ``_LOOP_S`` seconds."""
        came: concurrent.futures.Future[None] = concurrent.futures.Future()

        def come() -> None:
            if came.set_running_or_notify_cancel():  # False if the time limit has cancelled the future
                came.set_result(None)

        try:
            self._serving.call_soon_threadsafe(come)
            await asyncio.wait_for(asyncio.wrap_future(came), _LOOP_S)
        except (RuntimeError, asyncio.TimeoutError):  # the event loop is closed or hangs
            return False
        return True


async def _read(reader: asyncio.StreamReader) -> WebRequest:
    """Read one request. Raise :class:`ValueError` or another error if the request is malformed."""
    head = await reader.readuntil(b"\r\n\r\n")
    line, _, rest = head.partition(b"\r\n")
    method, target, _ = line.decode("latin-1").split(" ")
    headers = {name.lower(): value for name, value in http.client.parse_headers(io.BytesIO(rest)).items()}
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= MOST_BODY_BYTES:
        raise ValueError(f"the body has {length} bytes")
    return WebRequest(method, target, headers, await reader.readexactly(length))


async def _write(writer: asyncio.StreamWriter, answer: WebAnswer) -> None:
    headers = dict(answer.headers)
    if not answer.follows:
        headers["Content-Length"] = str(len(answer.body))
    head = [f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}"]
    head += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*head, "Connection: close", "", ""]).encode("latin-1") + answer.body)
    await writer.drain()
