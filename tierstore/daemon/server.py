"""The server: assigns messages to client connections, sends answers, and notices dead clients.

The server trusts no data of a peer. The server counts malformed messages, and answers those whose id can be
read. Messages that are far too large for their type are not decoded.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from tierstore.backend import ForgottenPages
from tierstore.daemon.arena import ArenaListener
from tierstore.daemon.client_connections import ClientConnection, PageFrames, Reply
from tierstore.daemon.endpoint import Endpoint, Received, Url
from tierstore.daemon.service import Service
from tierstore.daemon.stats import ServerStats
from tierstore.daemon.tcp_gate import TcpConnection
from tierstore.descriptors import require_room
from tierstore.wire import messages as p
from tierstore.wire.keys import Doorkeeper, KeyPair

_log = logging.getLogger(__name__)

_IO_THREADS = 1
_DESCRIPTORS = 32  # file descriptors that libzmq and the listeners open
_MOST_SMALL_BYTES = 64 << 10  # limit of a message without a prompt
_HEAD_BYTES = 64  # the first bytes of a message, which contain its type and its id
_BULKY = {cls.__name__.encode() for cls in (p.Find, p.FindHit, p.Reserve, p.Pin, p.Commit)}
_SWEEP_S = 1.0  # interval of checks for silent clients


Listener: TypeAlias = Endpoint | ArenaListener
"""Receives messages and sends answers."""


class Server:
    """Passes messages between the sockets and the service. May be used on the event loop's thread only."""

    def __init__(self, service: Service, *, keys: KeyPair | None, tenants: dict[bytes, str]) -> None:
        self._service = service
        self._keys = keys
        require_room(_DESCRIPTORS, "the daemon")
        self._context: zmq.Context[Any] = zmq.Context(_IO_THREADS)
        self._loop = asyncio.get_running_loop()
        self._doorkeeper = Doorkeeper(self._context, tenants) if keys is not None else None
        self.endpoints: list[Endpoint] = []
        self.listeners: list[ArenaListener] = []
        self._connections_by_route: dict[tuple[Listener, bytes], ClientConnection] = {}
        self._routes: dict[int, tuple[Listener, bytes]] = {}  # by connection number
        self._by_token: dict[bytes, ClientConnection] = {}
        self._sockets: dict[int, tuple[Endpoint, TcpConnection]] = {}  # of TCP clients, by connection number
        self._seen: dict[int, float] = {}  # when each client without an arena last sent something
        self._sweeping: asyncio.TimerHandle | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._malformed = self._unsent = self._silent = 0

        service.follow_forgets(self._forgotten)

    def listen(self, url: Url, listening: socket.socket | None = None) -> Endpoint:
        """Listen at ``url``. For an ``ipc://`` address, ``listening`` is a socket that is bound to its path.
        Raise :class:`~tierstore.errors.UsageError` if the address cannot be used."""
        endpoint = Endpoint(self._context, url, self._keys, self._take, self._count_malformed, listening)
        self.endpoints.append(endpoint)
        return endpoint

    def listen_at_arena(self, path: Path, listening: socket.socket, fd: int, nbytes: int) -> None:
        """Listen for local clients at ``listening``, a socket that is bound to ``path``. ``fd`` is the
        arena's file of ``nbytes``."""
        self.listeners.append(ArenaListener(path, listening, fd, nbytes, self._take, self._arena_gone))

    def stats(self) -> ServerStats:
        """Return a snapshot. Callable from any thread."""
        listeners: list[Listener] = [*self.endpoints, *self.listeners]
        return ServerStats(
            received=sum(each.received for each in listeners),
            received_bytes=sum(each.received_bytes for each in listeners),
            sent=sum(each.sent for each in listeners),
            malformed=self._malformed,
            unsent=self._unsent,
            silent_clients=self._silent,
            denied=self._doorkeeper.denied if self._doorkeeper is not None else 0,
            arena_connections=sum(len(listener) for listener in self.listeners),
        )

    async def close(self) -> None:
        """Stop listening and end every connection. Requests that are being handled get no answer."""
        for endpoint in self.endpoints:
            endpoint.close()
        for listener in self.listeners:
            listener.close()
        if self._doorkeeper is not None:
            self._doorkeeper.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        answering = list(self._answering)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)
        self._service.close()
        self._context.term()

    # -- messages ------------------------------------------------------------------------------------

    def _count_malformed(self) -> None:
        self._malformed += 1

    def _take(self, listener: Listener, received: Received) -> None:
        if received.version != p.VERSION:
            self._malformed += 1
            self._refuse(
                listener, received.peer, 0, "version", f"this daemon uses protocol version {p.VERSION[0]}"
            )
            return
        message = self._decode(listener, received)
        if message is None:
            return
        connection = self._connections_by_route.get((listener, received.peer))
        if isinstance(message, p.Hello):
            self._hello(listener, received, message, connection)
        elif connection is None:
            if not isinstance(message, p.OneWay):
                self._refuse(listener, received.peer, message.id, "connection", "say Hello first")
        elif isinstance(listener, ArenaListener) and isinstance(message, p.Fetch | p.Write):
            self._refuse(
                listener, received.peer, message.id, "usage", "local clients must use the arena for pages"
            )
        elif isinstance(message, p.Bye):
            if not connection.local:  # a local connection ends when the client closes its arena socket
                self._end(connection)
        else:
            if not connection.local:
                self._seen[connection.number] = self._loop.time()
            self._answer(listener, received.peer, connection, message, received.frames)

    def _decode(self, listener: Listener, received: Received) -> p.Request | None:
        body = received.body
        try:
            if len(body) > _MOST_SMALL_BYTES and _tag(bytes(body[:_HEAD_BYTES])) not in _BULKY:
                raise msgspec.ValidationError("too large for its type")
            return p.decode_request(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._malformed += 1
            number = _id(bytes(body[:_HEAD_BYTES]))
            if number is not None:
                self._refuse(listener, received.peer, number, "usage", f"not a request: {error}")
            return None

    def _refuse(self, listener: Listener, peer: bytes, number: int, kind: str, message: str) -> None:
        self._send(listener, peer, self._service.refuse(number, kind, message))

    def _answer(
        self,
        listener: Listener,
        peer: bytes,
        connection: ClientConnection,
        message: p.Request,
        frames: Sequence[memoryview],
    ) -> None:
        reply = self._service.handle(connection, message, frames)
        if reply is None or isinstance(reply, p.Message | PageFrames):
            self._send(listener, peer, reply)
            return
        task = self._loop.create_task(self._answer_later(listener, peer, connection, reply))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_later(
        self, listener: Listener, peer: bytes, connection: ClientConnection, reply: Awaitable[Reply]
    ) -> None:
        answer = await reply
        if isinstance(answer, PageFrames) and connection.number not in self._routes:
            answer.sent()  # the client is gone
            return
        self._send(listener, peer, answer)

    def _send(self, listener: Listener, peer: bytes, reply: Reply) -> None:
        if reply is None:
            return
        if isinstance(reply, PageFrames):
            assert isinstance(listener, Endpoint), "clients of an arena socket may not fetch pages as frames"
            sent = listener.send_pages(peer, p.encode(reply.answer), reply.frames, reply.sent)
        else:
            sent = listener.send(peer, p.encode(reply))
        if not sent:
            self._unsent += 1

    def _forgotten(self, forgotten: ForgottenPages) -> None:
        """Inform the clients about forgotten pages, without waiting for them. Callable from any thread."""
        with suppress(RuntimeError):  # the event loop is closed, and so are all connections
            self._loop.call_soon_threadsafe(self._tell, forgotten)

    def _tell(self, forgotten: ForgottenPages) -> None:
        for (listener, peer), connection in list(self._connections_by_route.items()):
            message = connection.forgotten(forgotten)
            if message is not None and not listener.send(peer, p.encode(message)):
                self._unsent += 1
                self._end(connection)  # the answer to the client's next Hello and Register informs it

    # -- client connections -------------------------------------------------------------------------------

    def let_in(self, tenants: dict[bytes, str]) -> None:
        """Admit clients with these keys, and no others. End the connections of tenants without a key."""
        if self._doorkeeper is None:
            return
        self._doorkeeper.let_in(tenants)
        for connection in list(self._connections_by_route.values()):
            if not self._is_let_in(connection.tenant):
                self._end(connection)

    def _is_let_in(self, tenant: str) -> bool:
        """Return whether a peer's tenant still has a key. Keys may have been removed since ZMQ admitted the
        peer. Local peers have no tenant and are always admitted."""
        return not tenant or (self._doorkeeper is not None and tenant in self._doorkeeper)

    def _hello(
        self, listener: Listener, received: Received, m: p.Hello, before: ClientConnection | None
    ) -> None:
        if not self._is_let_in(received.tenant):
            self._refuse(listener, received.peer, m.id, "connection", "this key is no longer admitted")
            return
        if not m.token:
            if before is not None:
                self._end(before)
            if not self._may_serve(listener, received):
                self._refuse(
                    listener, received.peer, m.id, "busy", "the daemon serves its maximum of clients"
                )
                return
            connection = self._service.begin(m.client, local=False, tenant=received.tenant)
            self._seen[connection.number] = self._loop.time()
            self._sweep_later()
        else:
            own = isinstance(listener, Endpoint) or m.token == received.peer
            arena = next((listener for listener in self.listeners if m.token in listener), None)
            if not own or arena is None or not arena.serve(m.token):
                self._refuse(
                    listener, received.peer, m.id, "connection", "this token is unknown or has expired"
                )
                return
            known = self._by_token.get(m.token)
            if before is not None and before is not known:
                self._end(before)
            # A second Hello of a process continues its connection. Its reservations must not end, because the
            # process may be writing to their slots.
            connection = known or self._service.begin(m.client, local=True, tenant=received.tenant)
            self._by_token[m.token] = connection
            self._connections_by_route.pop(
                self._routes.get(connection.number, (listener, received.peer)), None
            )
        route = (listener, received.peer)
        self._connections_by_route[route] = connection
        self._routes[connection.number] = route
        if isinstance(listener, Endpoint) and (tcp := TcpConnection.at(received.fd)) is not None:
            self._sockets[connection.number] = listener, tcp
        _log.info("connection %d: %s", connection.number, m.client)
        self._send(listener, received.peer, self._service.welcome(connection, m.id))

    def _may_serve(self, listener: Listener, received: Received) -> bool:
        tcp = TcpConnection.at(received.fd)
        return not isinstance(listener, Endpoint) or tcp is None or listener.serve(tcp)

    def _arena_gone(self, token: bytes) -> None:
        """End the client connection whose arena socket is closed."""
        connection = self._by_token.pop(token, None)
        if connection is not None:
            self._end(connection)

    def _end(self, connection: ClientConnection) -> None:
        route = self._routes.pop(connection.number, None)
        if route is not None:
            self._connections_by_route.pop(route, None)
        self._seen.pop(connection.number, None)
        self._service.end(connection)
        endpoint, tcp = self._sockets.pop(connection.number, (None, None))
        if endpoint is not None and tcp is not None:
            endpoint.end_session(tcp, unread=connection.sending_bytes > 0)
        _log.info("connection %d has ended", connection.number)

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End the connections of TCP clients that were silent for too long. Repeat every ``_SWEEP_S`` while
        TCP clients are connected."""
        self._sweeping = None
        silent_since = self._loop.time() - p.SILENCE_S
        for number, seen in list(self._seen.items()):
            if seen < silent_since:
                self._silent += 1
                self._end(self._connections_by_route[self._routes[number]])
        if self._seen:
            self._sweep_later()


def _tag(body: bytes) -> bytes:
    """Return the type's name from the first bytes of a message. In msgpack, these are an array of fewer than
    16 entries and a string of fewer than 32 bytes."""
    return body[2 : 2 + (body[1] & 0x1F)] if len(body) > 1 and body[1] & 0xE0 == 0xA0 else b""


def _id(body: bytes) -> int | None:
    """Return the id of a malformed request; None if it cannot be read."""
    tag = _tag(body)
    start = 2 + len(tag)
    sizes = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
    if not tag or len(body) <= start or body[0] & 0xF0 != 0x90:
        return None
    first = body[start]
    if first < 0x80:
        return first
    size = sizes.get(first, 0)
    number = body[start + 1 : start + 1 + size]
    return int.from_bytes(number, "big") if size and len(number) == size else None
