"""Limits the TCP connections that libzmq accepts, by the rules of :mod:`tierstore.wire.listener`.

libzmq accepts TCP connections itself, so that its thread sends pages without another copy. The socket's
monitor reports the accepted connections. The gate ends a connection by shutting down its socket, which looks
to libzmq as if the client had closed it. The number of a descriptor may be reused at any time, so a
connection is identified by its descriptor and its inode.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Any, NamedTuple

import zmq

from tierstore.descriptors import in_reserve
from tierstore.wire.listener import ListenerPlace, Places, SlowLog, shut_down

_EVENT = struct.Struct("=hi")
# Without EVENT_ACCEPT_FAILED: if no descriptor is free, libzmq retries continuously with one such event for
# each attempt. The events would fill the memory faster than they are read.
_MONITORED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
_BATCH = 256  # events that are read before the event loop runs other callbacks


class TcpConnection(NamedTuple):
    """A TCP connection that libzmq serves."""

    fd: int
    inode: int

    @classmethod
    def at(cls, fd: int) -> TcpConnection | None:
        """Return the connection with this descriptor; None if it has ended."""
        try:
            return cls(fd, os.fstat(fd).st_ino)
        except OSError:
            return None

    def hang_up(self) -> None:
        """End the connection if it has not ended."""
        if TcpConnection.at(self.fd) == self:
            with contextlib.suppress(OSError):
                end = socket.socket(fileno=self.fd)
                shut_down(end)
                end.detach()  # libzmq closes the descriptor


class TcpGate:
    """Limits the TCP connections of a ZMQ socket to ``most``. Must be made before the socket is bound. Uses
    the running event loop."""

    def __init__(self, context: zmq.Context[Any], socket_: zmq.Socket[Any], most: int) -> None:
        self.places = Places(most)
        self._entered: dict[TcpConnection, ListenerPlace] = {}
        self._by_fd: dict[int, TcpConnection] = {}
        self._logs = SlowLog()
        self._loop = asyncio.get_running_loop()
        address = f"inproc://tierstore-monitor-{id(self)}"
        self._monitored = socket_
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # libzmq's thread must never wait for this socket
        socket_.monitor(address, _MONITORED)
        self._monitor.connect(address)
        self._fd = self._monitor.fd
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)

    def place(self, connection: TcpConnection) -> ListenerPlace:
        """Return the :class:`ListenerPlace` of a connection."""
        self._read()  # a connection's first message may arrive before the monitor's event
        known = self._entered.get(connection)
        return known if known is not None else self._enter(connection)

    def close(self) -> None:
        """Stop limiting. Must be called before the ZMQ socket is closed."""
        self._loop.remove_reader(self._fd)
        self._monitored.disable_monitor()
        self._monitor.close(0)
        for place in self._entered.values():
            place.leave()
        self._entered.clear()

    def _read(self) -> None:
        for _ in range(_BATCH):
            try:
                event, *_ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing to read, or closed
                return
            kind, value = _EVENT.unpack(event[: _EVENT.size])
            if kind == zmq.EVENT_ACCEPTED:
                if (connection := TcpConnection.at(value)) is not None:
                    self._enter(connection)
            else:
                self._leave(value)
        self._loop.call_soon(self._read)  # the descriptor is edge-triggered, and more events may wait

    def _enter(self, connection: TcpConnection) -> ListenerPlace:
        known = self._entered.get(connection)
        if known is not None:
            return known
        self._leave(connection.fd)
        if in_reserve(connection.fd) and not self.places.make_room():
            self._logs.warning("refused a connection: too few file descriptors are free (ulimit -n)")
            connection.hang_up()
        place = self._entered[connection] = self.places.enter(connection.hang_up)
        self._by_fd[connection.fd] = connection
        return place

    def _leave(self, fd: int) -> None:
        connection = self._by_fd.pop(fd, None)
        if connection is not None:
            self._entered.pop(connection).leave()
