"""A ZMQ ROUTER socket on the event loop.

``zmq.asyncio`` needs a future and a poll for each message. Instead, this module receives a batch of messages
each time ZMQ's descriptor is readable. The descriptor is edge-triggered, and a send may clear it. So after a
send, or if a batch has left messages in the socket, another batch is scheduled.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from tierstore.daemon.tcp_gate import TcpConnection, TcpGate
from tierstore.errors import UsageError
from tierstore.wire.keys import ZAP_DOMAIN, KeyPair
from tierstore.wire.listener import Places
from tierstore.wire.local_address import is_loopback
from tierstore.wire.messages import MAX_MESSAGE_BYTES, VERSION
from tierstore.wire.zmq_door import ZmqDoor

_BATCH = 32  # messages of one socket that are handled before those of other sockets
_MOST_FRAMES = 4096 + 4
_RECEIVE_HWM = 64  # unread messages of one peer; further ones wait on the peer's side
_SEND_HWM = 1000
_HEARTBEAT_MS = 2000
_MOST_CONNECTIONS = 1024  # served at the same time

# Plain integers, because combining two of ZMQ's enums takes longer than sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_RCVMORE = int(zmq.RCVMORE)
_SRCFD = int(zmq.SRCFD)


@dataclass(frozen=True, slots=True)
class Url:
    """An address ``ipc://PATH`` or ``tcp://HOST:PORT``."""

    text: str
    path: Path | None  # None for tcp
    loopback: bool

    @classmethod
    def parse(cls, text: str) -> Url:
        """Parse an address. Raise :class:`UsageError` for anything else."""
        kind, _, rest = text.partition("://")
        if kind == "ipc" and rest:
            path = Path(os.path.abspath(rest))
            return cls(f"ipc://{path}", path, True)
        host, colon, port = rest.rpartition(":")
        if kind == "tcp" and host and colon and port.isdigit() and int(port) < 1 << 16:
            return cls(text, None, is_loopback(host.strip("[]")))
        raise UsageError(f"cannot listen at {text!r}: write ipc://PATH or tcp://HOST:PORT")


@dataclass(frozen=True, slots=True)
class Received:
    """A received message, with the page frames behind it. ``tenant`` is the tenant of the peer's key. ``fd``
    is the descriptor of the TCP connection that the message arrived over (-1: not a TCP connection)."""

    peer: bytes
    version: bytes
    body: bytes | memoryview
    frames: Sequence[memoryview]
    tenant: str
    fd: int = -1


class Endpoint:
    """Receives and sends messages. Calls ``take(endpoint, message)`` for each well-formed message and
    ``malformed()`` for any other. May be used on the event loop's thread only."""

    def __init__(
        self,
        context: zmq.Context[Any],
        url: Url,
        keys: KeyPair | None,
        take: Callable[[Endpoint, Received], None],
        malformed: Callable[[], None],
        listening: socket.socket | None = None,
    ) -> None:
        """Bind a TCP address, or accept connections at ``listening``, a unix socket that is already bound.
        Raise :class:`UsageError` if binding fails."""
        if url.path is None and not url.loopback and keys is None:
            raise UsageError(
                f"{url.text} is reachable from other machines, which requires keys: make them with "
                "`tierstore keygen`, then give --server-key and --tenants"
            )
        self.url = url
        self.received = self.received_bytes = self.sent = 0
        self._take = take
        self._malformed = malformed
        self._curve = url.path is None and keys is not None
        self._socket = context.socket(zmq.ROUTER)
        self._configure(keys)
        self._gate = TcpGate(context, self._socket, _MOST_CONNECTIONS) if listening is None else None
        self._door: ZmqDoor | None = None
        try:
            if listening is None:
                self._socket.bind(url.text)
            else:
                self._door = ZmqDoor(self._socket, [listening], _MOST_CONNECTIONS)
        except zmq.ZMQError as error:
            self._close_socket()
            raise UsageError(f"cannot listen at {url.text}: {error.strerror}") from error
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._fd = self._socket.fd
        self._loop.add_reader(self._fd, self._drain)
        self._look_again()

    def _configure(self, keys: KeyPair | None) -> None:
        socket = self._socket
        socket.linger = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.rcvhwm = _RECEIVE_HWM
        socket.sndhwm = _SEND_HWM
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self.url.path is None:
            socket.ipv6 = "[" in self.url.text
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        if self._curve:
            assert keys is not None
            socket.curve_server = True
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
            socket.zap_domain = ZAP_DOMAIN

    @property
    def address(self) -> str:
        """The address that clients connect to. If port 0 was requested, it contains the actual port."""
        return self.url.text if self._door is not None else str(self._socket.get_string(zmq.LAST_ENDPOINT))

    @property
    def places(self) -> Places:
        """The limit of this endpoint's connections."""
        listening = self._gate or self._door
        assert listening is not None
        return listening.places

    def serve(self, connection: TcpConnection) -> bool:
        """Record that the peer of a connection is a client. Return False if the limit of clients is
        reached."""
        return self._gate is None or self._gate.place(connection).serve()

    def end_session(self, connection: TcpConnection, *, unread: bool) -> None:
        """Record that a client has said Bye or was silent for too long. If the client has ``unread`` data,
        end its TCP connection, which discards pages that are not sent yet. Without unread data, the client
        may send a new Hello over the connection within some seconds."""
        if unread:
            connection.hang_up()
        elif self._gate is not None:
            self._gate.place(connection).wait()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._close_socket()

    def _close_socket(self) -> None:
        if self._gate is not None:
            self._gate.close()
        if self._door is not None:
            self._door.close()
        self._socket.close(0)

    # -- sending -------------------------------------------------------------------------------------

    def send(self, peer: bytes, body: bytes) -> bool:
        """Send an answer. Return False if the peer is gone or has too many unread answers."""
        socket = self._socket
        try:
            socket.send(peer, _MORE)
            socket.send(VERSION, _MORE)
            socket.send(body, _NOBLOCK)
        except zmq.ZMQError:  # raised for the first frame only
            return False
        self.sent += 1
        self._look_again()
        return True

    def send_pages(
        self, peer: bytes, body: bytes, pages: Sequence[memoryview], sent: Callable[[], None]
    ) -> bool:
        """Send an answer with pages behind it, without copying the pages. ``sent`` is called when ZMQ does
        not need their memory any more. If the message cannot be sent, call it at once and return False."""
        socket = self._socket
        try:
            socket.send(peer, _MORE)
        except zmq.ZMQError:
            sent()
            return False
        socket.send(VERSION, _MORE)
        socket.send(body, _MORE)
        left = len(pages)

        def one_sent() -> None:
            nonlocal left
            left -= 1
            if not left:
                sent()

        for position, page in enumerate(pages):
            flags = _MORE if position + 1 < len(pages) else _NOBLOCK
            # The frame keeps a reference to the array until ZMQ's own thread has sent the frame.
            array = np.frombuffer(page, np.uint8)
            weakref.finalize(array, _call_soon, self._loop, one_sent).atexit = False
            socket.send(zmq.Frame(array, copy=False, copy_threshold=0), flags, copy=False)
            del array
        self.sent += 1
        self._look_again()
        return True

    # -- receiving -----------------------------------------------------------------------------------

    def _look_again(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain_again)

    def _drain_again(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        self._scheduled = more = True  # sends during this batch need not schedule another one
        try:
            more = self._take_batch()
        finally:
            self._scheduled = False
            if more:
                self._look_again()

    def _take_batch(self) -> bool:
        """Handle a batch of messages. Return whether more messages may be waiting."""
        for _ in range(_BATCH):
            # Checked before receiving: an exception for "no message" takes as long as a short message.
            if self._socket.closed or not int(self._socket.get(_EVENTS)) & _POLLIN:
                return False
            message = self._receive()
            self.received += 1
            if message is None:
                self._malformed()
            else:
                self._take(self, message)
        return True

    def _receive(self) -> Received | None:
        """Receive a message. Return None if it is malformed."""
        socket = self._socket
        peer = socket.recv(_NOBLOCK)
        if not socket.get(_RCVMORE):
            return None
        version = socket.recv()
        if not socket.get(_RCVMORE):
            return None if version == VERSION else Received(peer, version[:1], b"", (), "")
        body = socket.recv(copy=False)
        tenant = str(body.get("User-Id")) if self._curve else ""
        self.received_bytes += len(body.buffer)
        frames: list[memoryview] = []
        frame = body
        while frame.more:
            frame = socket.recv(copy=False)
            self.received_bytes += frame.buffer.nbytes
            if len(frames) <= _MOST_FRAMES:
                frames.append(frame.buffer)
        if len(frames) > _MOST_FRAMES:
            return None
        return Received(peer, version, body.buffer, frames, tenant, body.get(_SRCFD))


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Schedule a callback on the event loop, from ZMQ's thread, unless the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
