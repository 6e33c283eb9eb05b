"""Limit HTTP connections of uvicorn, by the rule of :mod:`tierstore.wire.listener`.

uvicorn takes any number of connections and lets a connection stay silent forever. This module therefore
accepts connections, and gives each connection to uvicorn with a place among the served ones. A place counts
as waiting until a whole request has arrived, including its body, and again after the answer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tierstore.descriptors import limit
from tierstore.wire.listener import Listener, ListenerPlace, Places
from tierstore_engine.server.errors import ApiError

BODY_S = 30.0  # time limit for a body
PROBES = frozenset({"/health", "/metrics"})  # these paths are answered regardless of the number of requests
_MOST_SERVED = 1024
_OTHERS = 128  # file descriptors for everything except connections
_MOST_HEAD_BYTES = 64 << 10
_RETRY_S = 1


def most_served(descriptors: int) -> int:
    """Return how many connections may be served if each takes ``descriptors`` file descriptors."""
    return max(min(_MOST_SERVED, (limit() - _OTHERS) // descriptors), 1)


class BoundedServer(uvicorn.Server):
    """A uvicorn server for connections that this module accepts. ``served`` is the number of connections that
    may have a request at the same time."""

    def __init__(self, config: uvicorn.Config, listening: Sequence[socket.socket], served: int) -> None:
        super().__init__(config)
        self._listening = listening
        self._served = served
        self._entering: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._protocol = _with_place(self.config.http_protocol_class)
        self._listener = Listener(self._listening, Places(self._served), self._enter)
        await super().startup([])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._listener.close()
        await super().shutdown([])

    def _enter(self, connection: socket.socket, place: ListenerPlace) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(connection, place))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    async def _connect(self, connection: socket.socket, place: ListenerPlace) -> None:
        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self._protocol(
                place, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
        except OSError:
            connection.close()
            place.leave()


def _with_place(base: type[Any]) -> type[Any]:
    """Return uvicorn's protocol class (of httptools or h11), extended for connections with a place."""

    class WithPlace(base):  # type: ignore[misc]
        def __init__(self, place: ListenerPlace, **options: Any) -> None:
            super().__init__(**options)
            self._place = place
            self._head_bytes = 0  # since the last request
            self._served_app: ASGIApp = options["config"].loaded_app
            self.app: ASGIApp = self._serve

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:
                self._head_bytes += len(data)
                if self._head_bytes > _MOST_HEAD_BYTES:
                    self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._place.leave()
            super().connection_lost(exc)

        async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
            self._head_bytes = 0
            probe = scope["path"] in PROBES
            body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])

            def whole() -> None:
                if not self._place.served and not self._place.serve(probe=probe):
                    raise ApiError(
                        503,
                        "the limit of served connections is reached: try again in a moment",
                        retry_after_s=_RETRY_S,
                    )

            async def received() -> Message:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body"):
                    whole()
                return message

            try:
                if body:
                    self._place.wait(BODY_S)
                else:
                    whole()
                await self._served_app(scope, received, send)
            except ApiError as error:
                headers = {"retry-after": str(_RETRY_S)}
                answer = Response(msgspec.json.encode(error.body), error.status, headers, "application/json")
                await answer(scope, receive, send)
            finally:
                if not self.transport.is_closing():
                    self._place.wait()

    return WithPlace
