"""Transports of a client's messages: the arena's unix socket on the same host, ZMQ to another host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import zmq

from tierstore.wire.framing import FramedSocket
from tierstore.wire.messages import VERSION

_BYE_MS = 200  # time limit for the last message

# Plain integers, because combining two of ZMQ's enums takes longer than sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE) | _NOBLOCK
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


class Transport(ABC):
    """A transport of messages. Not thread-safe. No method blocks.

    ``fd`` becomes readable when a message may have arrived, ``sign_fd`` when the daemon may be gone.
    """

    fd: int
    sign_fd: int

    @abstractmethod
    def send(self, body: bytes, frames: Sequence[memoryview] = ()) -> bool:
        """Send a message with page frames behind it. Return False if the daemon does not read its socket."""

    @abstractmethod
    def receive(self) -> list[Sequence[memoryview]]:
        """Return the received messages, each with the page frames behind it. Raise
        :class:`~tierstore.wire.framing.FramedSocketEnd` if the daemon has closed the connection."""

    @abstractmethod
    def gone(self) -> bool:
        """Return whether the daemon has gone since its ``Welcome``. A transport whose :meth:`receive` notices
        this returns False."""

    @abstractmethod
    def welcomed(self) -> None:
        """Ignore earlier events of the connection, which a previous daemon may have caused."""

    @abstractmethod
    def flush(self) -> bool:
        """Send queued data. Return True if data is left, to be sent when ``fd`` is writable."""

    @abstractmethod
    def hidden(self) -> bool:
        """Return whether a message has arrived that does not make ``fd`` readable."""

    @abstractmethod
    def close(self, last: bytes = b"") -> None:
        """Close the transport, after sending ``last``. Idempotent."""


class SocketTransport(Transport):
    """The arena's socket, which :class:`~tierstore.client.arena.Arena` closes. No page frames are sent over
    it."""

    def __init__(self, line: FramedSocket) -> None:
        self._line = line
        self.fd = self.sign_fd = line.fileno()

    def send(self, body: bytes, frames: Sequence[memoryview] = ()) -> bool:
        assert not frames, "pages must be copied through the arena"
        return self._line.send(body)

    def receive(self) -> list[Sequence[memoryview]]:
        return [(body,) for body in self._line.receive()]

    def gone(self) -> bool:
        return False

    def welcomed(self) -> None:
        pass

    def flush(self) -> bool:
        return self._line.flush() and self._line.unsent

    def hidden(self) -> bool:
        return False

    def close(self, last: bytes = b"") -> None:
        """Do nothing: the owner of the socket closes it."""


class ZmqTransport(Transport):
    """A ZMQ DEALER socket and its monitor socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.fd = int(socket.fd)
        self.sign_fd = int(self._monitor.fd)

    def send(self, body: bytes, frames: Sequence[memoryview] = ()) -> bool:
        socket = self._socket
        try:
            socket.send(VERSION, _MORE)
            socket.send(body, _MORE if frames else _NOBLOCK)
            for left, frame in zip(range(len(frames), 0, -1), frames, strict=True):
                socket.send(frame, _MORE if left > 1 else _NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[Sequence[memoryview]]:
        messages: list[Sequence[memoryview]] = []
        socket = self._socket
        while int(socket.get(_EVENTS)) & _POLLIN:
            frames = [socket.recv(_NOBLOCK, copy=False)]
            while frames[-1].more:
                frames.append(socket.recv(_NOBLOCK, copy=False))
            messages.append([frame.buffer for frame in frames[1:]])
        return messages

    def gone(self) -> bool:
        return bool(int(self._monitor.get(_EVENTS)) & _POLLIN)

    def welcomed(self) -> None:
        # ZMQ may have connected to a dying daemon before it connected to its successor.
        while self.gone():
            self._monitor.recv_multipart(_NOBLOCK)

    def flush(self) -> bool:
        return False  # ZMQ's own threads send queued data

    def hidden(self) -> bool:
        # ZMQ's descriptor is edge-triggered, and any use of the socket may clear it.
        return bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def close(self, last: bytes = b"") -> None:
        if self._socket.closed:
            return
        if last:
            self._socket.linger = _BYE_MS
            self.send(last)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()  # waits for ``linger``: 0, or _BYE_MS after a last message
