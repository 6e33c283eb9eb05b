"""The server: which message belongs to which session, what is answered to whom, and who is dead.

Nothing a peer sends is trusted. What is not a message is counted, and answered if at least its id can be
read. What is far too large for what it claims to be is not decoded at all."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq

from tierstore.daemon.arena import ArenaListener
from tierstore.daemon.endpoint import Endpoint, Received, Url
from tierstore.daemon.service import Service
from tierstore.daemon.sessions import PageFrames, Reply, Session
from tierstore.daemon.stats import ServerStats
from tierstore.daemon.tcp_gate import Connection
from tierstore.descriptors import require_room
from tierstore.wire import messages as p
from tierstore.wire.keys import Doorkeeper, KeyPair

_log = logging.getLogger(__name__)

_IO_THREADS = 1
_DESCRIPTORS = 32  # that libzmq and the listeners take
_MOST_SMALL_BYTES = 64 << 10  # of messages without a prompt
_HEAD_BYTES = 64  # with the name and the id
_BULKY = {cls.__name__.encode() for cls in (p.Lookup, p.FindHit, p.Reserve, p.Pin, p.Commit)}
_SWEEP_S = 1.0  # how often clients without an arena are looked after


Listener: TypeAlias = Endpoint | ArenaListener
"""How messages come, and answers go."""


class Server:
    """Sockets in, service out. Belongs to the event loop's thread."""

    def __init__(self, service: Service, *, keys: KeyPair | None, tenants: dict[bytes, str]) -> None:
        self._service = service
        self._keys = keys
        require_room(_DESCRIPTORS, "the daemon")
        self._context: zmq.Context[Any] = zmq.Context(_IO_THREADS)
        self._loop = asyncio.get_running_loop()
        self._doorkeeper = Doorkeeper(self._context, tenants) if keys is not None else None
        self.endpoints: list[Endpoint] = []
        self.listeners: list[ArenaListener] = []
        self._sessions: dict[tuple[Listener, bytes], Session] = {}
        self._routes: dict[int, tuple[Listener, bytes]] = {}  # by the session's number
        self._by_token: dict[bytes, Session] = {}
        self._connections: dict[int, tuple[Endpoint, Connection]] = {}  # of sessions over ZMQ, by number
        self._seen: dict[int, float] = {}  # when sessions without an arena were last heard of
        self._sweeping: asyncio.TimerHandle | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._malformed = self._unsent = self._silent = 0

    def listen(self, url: Url, listening: socket.socket | None = None) -> Endpoint:
        """``listening`` is bound to the path of an ``ipc://`` address. Raises
        :class:`~tierstore.errors.UsageError`."""
        endpoint = Endpoint(self._context, url, self._keys, self._take, self._count_malformed, listening)
        self.endpoints.append(endpoint)
        return endpoint

    def listen_at_arena(self, path: Path, listening: socket.socket, fd: int, nbytes: int) -> None:
        """Hand over the arena (a file of ``nbytes``) at ``listening``, which is bound to ``path``."""
        self.listeners.append(ArenaListener(path, listening, fd, nbytes, self._take, self._arena_gone))

    def stats(self) -> ServerStats:
        """A snapshot. From any thread."""
        ways: list[Listener] = [*self.endpoints, *self.listeners]
        return ServerStats(
            received=sum(way.received for way in ways),
            received_bytes=sum(way.received_bytes for way in ways),
            sent=sum(way.sent for way in ways),
            malformed=self._malformed,
            unsent=self._unsent,
            silent_sessions=self._silent,
            denied=self._doorkeeper.denied if self._doorkeeper is not None else 0,
            arena_connections=sum(len(listener) for listener in self.listeners),
        )

    async def close(self) -> None:
        """Stop listening, end every session. What is being answered is not waited for."""
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

    def _take(self, way: Listener, received: Received) -> None:
        if received.version != p.VERSION:
            self._malformed += 1
            self._refuse(way, received.peer, 0, "version", f"this daemon speaks version {p.VERSION[0]}")
            return
        message = self._decode(way, received)
        if message is None:
            return
        session = self._sessions.get((way, received.peer))
        if isinstance(message, p.Hello):
            self._hello(way, received, message, session)
        elif session is None:
            if not isinstance(message, p.OneWay):
                self._refuse(way, received.peer, message.id, "session", "say Hello first")
        elif isinstance(way, ArenaListener) and isinstance(message, p.Fetch | p.Write):
            self._refuse(way, received.peer, message.id, "usage", "pages go through the arena here")
        elif isinstance(message, p.Bye):
            if not session.local:  # who has mapped the arena may be writing there until it hangs up
                self._end(session)
        else:
            if not session.local:
                self._seen[session.number] = self._loop.time()
            self._answer(way, received.peer, session, message, received.frames)

    def _decode(self, way: Listener, received: Received) -> p.Request | None:
        body = received.body
        try:
            if len(body) > _MOST_SMALL_BYTES and _tag(bytes(body[:_HEAD_BYTES])) not in _BULKY:
                raise msgspec.ValidationError("too large for what it is")
            return p.decode_request(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._malformed += 1
            number = _id(bytes(body[:_HEAD_BYTES]))
            if number is not None:
                self._refuse(way, received.peer, number, "usage", f"not a request: {error}")
            return None

    def _refuse(self, way: Listener, peer: bytes, number: int, kind: str, message: str) -> None:
        self._send(way, peer, self._service.refuse(number, kind, message))

    def _answer(
        self,
        way: Listener,
        peer: bytes,
        session: Session,
        message: p.Request,
        frames: Sequence[memoryview],
    ) -> None:
        reply = self._service.handle(session, message, frames)
        if reply is None or isinstance(reply, p.Message | PageFrames):
            self._send(way, peer, reply)
            return
        task = self._loop.create_task(self._answer_later(way, peer, session, reply))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_later(
        self, way: Listener, peer: bytes, session: Session, reply: Awaitable[Reply]
    ) -> None:
        answer = await reply
        if isinstance(answer, PageFrames) and session.number not in self._routes:
            answer.sent()  # the session has ended: nobody reads them
            return
        self._send(way, peer, answer)

    def _send(self, way: Listener, peer: bytes, reply: Reply) -> None:
        if reply is None:
            return
        if isinstance(reply, PageFrames):
            assert isinstance(way, Endpoint), "refused on the others"
            sent = way.send_pages(peer, p.encode(reply.answer), reply.frames, reply.sent)
        else:
            sent = way.send(peer, p.encode(reply))
        if not sent:
            self._unsent += 1

    # -- sessions ------------------------------------------------------------------------------------

    def let_in(self, tenants: dict[bytes, str]) -> None:
        """From now on the clients with these keys are let in. Sessions of tenants without one end."""
        if self._doorkeeper is None:
            return
        self._doorkeeper.let_in(tenants)
        for session in list(self._sessions.values()):
            if not self._is_let_in(session.tenant):
                self._end(session)

    def _is_let_in(self, tenant: str) -> bool:
        """Whether a peer still is: ZMQ has let it in once, and keys may have gone since. Local ones have no
        tenant."""
        return not tenant or (self._doorkeeper is not None and tenant in self._doorkeeper)

    def _hello(self, way: Listener, received: Received, m: p.Hello, before: Session | None) -> None:
        if not self._is_let_in(received.tenant):
            self._refuse(way, received.peer, m.id, "session", "this key is not let in any more")
            return
        if not m.token:
            if before is not None:
                self._end(before)
            if not self._may_serve(way, received):
                self._refuse(way, received.peer, m.id, "busy", "as many clients are served as may be")
                return
            session = self._service.begin(m.client, local=False, tenant=received.tenant)
            self._seen[session.number] = self._loop.time()
            self._sweep_later()
        else:
            own = isinstance(way, Endpoint) or m.token == received.peer
            arena = next((listener for listener in self.listeners if m.token in listener), None)
            if not own or arena is None or not arena.serve(m.token):
                self._refuse(way, received.peer, m.id, "session", "this token is not (any more) known")
                return
            known = self._by_token.get(m.token)
            if before is not None and before is not known:
                self._end(before)
            # Once more from the same process: what it holds it still holds, it may be writing there.
            session = known or self._service.begin(m.client, local=True, tenant=received.tenant)
            self._by_token[m.token] = session
            self._sessions.pop(self._routes.get(session.number, (way, received.peer)), None)
        route = (way, received.peer)
        self._sessions[route] = session
        self._routes[session.number] = route
        if isinstance(way, Endpoint) and (connection := Connection.at(received.fd)) is not None:
            self._connections[session.number] = way, connection
        _log.info("session %d: %s", session.number, m.client)
        self._send(way, received.peer, self._service.welcome(session, m.id))

    def _may_serve(self, way: Listener, received: Received) -> bool:
        connection = Connection.at(received.fd)
        return not isinstance(way, Endpoint) or connection is None or way.serve(connection)

    def _arena_gone(self, token: bytes) -> None:
        """The process behind an arena connection has ended: so has its session."""
        session = self._by_token.pop(token, None)
        if session is not None:
            self._end(session)

    def _end(self, session: Session) -> None:
        route = self._routes.pop(session.number, None)
        if route is not None:
            self._sessions.pop(route, None)
        self._seen.pop(session.number, None)
        self._service.end(session)
        endpoint, connection = self._connections.pop(session.number, (None, None))
        if endpoint is not None and connection is not None:
            endpoint.end_session(connection, unread=session.sending_bytes > 0)
        _log.info("session %d has ended", session.number)

    def _sweep_later(self) -> None:
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End the sessions of clients that have not been heard of. Runs only while there are such clients."""
        self._sweeping = None
        silent_since = self._loop.time() - p.SILENCE_S
        for number, seen in list(self._seen.items()):
            if seen < silent_since:
                self._silent += 1
                self._end(self._sessions[self._routes[number]])
        if self._seen:
            self._sweep_later()


def _tag(body: bytes) -> bytes:
    """The name of a message, from its first bytes (an array of fewer than 16, a text of fewer than 32)."""
    return body[2 : 2 + (body[1] & 0x1F)] if len(body) > 1 and body[1] & 0xE0 == 0xA0 else b""


def _id(body: bytes) -> int | None:
    """The id of a request that is none, if it can be read."""
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
