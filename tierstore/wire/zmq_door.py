"""Accepts connections for a listening ZMQ socket, and forwards their bytes to it.

libzmq aborts the process if its listener at ``ipc://PATH`` finds no free file descriptor. libzmq also accepts
any number of silent connections. So the ZMQ socket is bound to a private address that only this process may
connect to, and :class:`~tierstore.wire.listener.Listener` accepts the clients' connections. Each connection
needs two more descriptors, and each byte one more copy. So a door serves events and operators, but no pages.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from typing import Any

import zmq

from tierstore.descriptors import in_reserve
from tierstore.wire.listener import Listener, ListenerPlace, Places, shut_down

_GREETING_BYTES = 64  # of ZMTP 3, ZMQ's protocol
_LONG = 0x02  # flag of a frame whose length field has 8 bytes
_LOOK_S = 0.005
_FRAMES = 2  # the handshake's command frame and the first frame after it


class ZmqDoor:
    """Forwards at most ``most`` connections from the sockets ``listening`` to ``socket_``. Uses the running
    event loop. Raises :class:`zmq.ZMQError` if the private address cannot be used."""

    def __init__(self, socket_: zmq.Socket[Any], listening: list[socket.socket], most: int) -> None:
        socket_.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
        name = f"tierstore-{secrets.token_hex(16)}"
        socket_.bind(f"ipc://@{name}")
        self._inside = f"\0{name}"
        self._loop = asyncio.get_running_loop()
        self._passing: set[asyncio.Task[None]] = set()
        self._sides: set[_Side] = set()
        self.places = Places(most)
        self._listener = Listener(listening, self.places, self._enter)

    async def finish(self, wait_s: float) -> None:
        """Stop accepting, and forward the last bytes of the ZMQ socket, which the caller has closed. Wait at
        most ``wait_s`` seconds."""
        self._listener.close()
        deadline = self._loop.time() + wait_s
        while self._sides and self._loop.time() < deadline:
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop accepting and close all connections."""
        self._listener.close()
        for task in self._passing:
            task.cancel()
        for side in list(self._sides):
            if side.transport is not None:
                side.transport.abort()

    def _enter(self, connection: socket.socket, place: ListenerPlace) -> None:
        inside = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if in_reserve(inside.fileno()):
                raise OSError("too few file descriptors are free (ulimit -n)")
            inside.setblocking(False)
            inside.connect(self._inside)
        except OSError:
            inside.close()
            raise
        task = self._loop.create_task(self._pass_on(connection, inside, place))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def _pass_on(self, connection: socket.socket, inside: socket.socket, place: ListenerPlace) -> None:
        outer, inner = _Side(self._sides, place), _Side(self._sides)
        outer.other, inner.other = inner, outer
        try:
            await self._loop.connect_accepted_socket(lambda: outer, connection)
            await self._loop.connect_accepted_socket(lambda: inner, inside)
            outer.start()
        except (OSError, asyncio.CancelledError):
            for each in (connection, inside):
                shut_down(each)
                each.close()
            place.leave()


class _Side(asyncio.Protocol):
    """One connection of a pair: the outer one to the client, which has a ``place`` and is made first, or the
    inner one to the ZMQ socket."""

    def __init__(self, sides: set[_Side], place: ListenerPlace | None = None) -> None:
        self.other: _Side
        self._sides = sides  # all open connections of the door
        self.transport: asyncio.Transport | None = None
        self._place = place
        self._frames = _Frames() if place is not None else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._sides.add(self)
        if self._place is not None:
            transport.pause_reading()

    def start(self) -> None:
        """Start reading, now that the other connection exists. If this one has already ended, end the
        other."""
        if self.transport is not None:
            self.transport.resume_reading()
        else:
            self.other.end()

    def data_received(self, data: bytes) -> None:
        if self._frames is not None and self._place is not None and self._frames.enough(data):
            self._frames = None
            if not self._place.serve():
                self.other.end()
                self.end()
                return
        if self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._sides.discard(self)
        if self._place is not None:
            self._place.leave()
        self.other.end()

    def end(self) -> None:
        """Close this connection. A client may still read pending data for some seconds."""
        if self.transport is None:
            return
        if self._place is not None:
            self.transport.close()
            self._place.wait()
        else:
            self.transport.abort()


class _Frames:
    """Detects the end of a client's first request: counts the frames after the ZMTP greeting."""

    def __init__(self) -> None:
        self._skip = _GREETING_BYTES
        self._head = b""
        self._ended = -1  # number of complete frames; the greeting counts as one before the first frame

    def enough(self, data: bytes) -> bool:
        """Add received bytes. Return whether the first request is complete."""
        while data:
            if self._skip:
                taken = min(self._skip, len(data))
                self._skip -= taken
                data = data[taken:]
                if self._skip:
                    return False
                self._ended += 1
            else:
                self._head += data[:1]
                data = data[1:]
                size = 8 if self._head[0] & _LONG else 1
                if len(self._head) <= size:
                    continue
                self._skip = int.from_bytes(self._head[1:], "big")
                self._head = b""
                if not self._skip:
                    self._ended += 1
            if self._ended >= _FRAMES:
                return True
        return False
