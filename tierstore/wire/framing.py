"""Length-prefixed messages over a stream socket, for clients on the daemon's host.

Clients on other hosts use ZMQ. Between two processes of one host, ZMQ would be the slowest part of a lookup:
each message passes through an I/O thread of both processes, so a round trip needs six hand-overs between
threads. With this module it needs two, because the sending thread writes to the socket itself and the waiting
thread reads from it.

No method blocks. If the socket's buffer is full, data is queued, up to a limit, until
:meth:`FramedSocket.flush`.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

from tierstore.wire.messages import MAX_MESSAGE_BYTES

LENGTH = struct.Struct("<I")

_READ_BYTES = 64 << 10
_BEGUN_BYTES = 1 << 20  # memory allocated for a message before its bytes have arrived
_MOST_UNSENT_BYTES = 4 << 20  # if more bytes are queued, no further message is accepted
_COPIED_BYTES = 32 << 10  # up to this size, copying length and message together is faster than two sends


class FramedSocketEnd(Exception):  # no name in -Error, because a closed connection is not an error
    """The peer has closed the connection or has sent data that cannot be a message."""


class FramedSocket:
    """Sends and receives messages over a connected socket, which the caller must close. Not thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._head = b""  # received bytes of an incomplete length
        self._begun: bytearray | None = None  # buffer of an incomplete message
        self._length = self._filled = 0  # size of the incomplete message and of its received part
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def unsent(self) -> bool:
        """Whether data is queued for :meth:`flush`."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- sending -------------------------------------------------------------------------------------

    def send(self, body: bytes) -> bool:
        """Send or queue a message. Return False if the peer does not read or is gone."""
        if self._unsent_bytes > _MOST_UNSENT_BYTES:
            return False
        head = LENGTH.pack(len(body))
        pieces = [head + body] if len(body) <= _COPIED_BYTES else [head, body]
        self._unsent.extend(map(memoryview, pieces))
        self._unsent_bytes += len(head) + len(body)
        return self.flush()

    def flush(self) -> bool:
        """Send as much queued data as fits into the socket's buffer. Return False if the peer is gone."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._socket.send(unsent[0])
                self._unsent_bytes -= sent
                if sent == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = unsent[0][sent:]
        except BlockingIOError:
            return True
        except OSError:
            return False  # the next ``receive()`` raises FramedSocketEnd
        return True

    # -- receiving -----------------------------------------------------------------------------------

    def receive(self) -> list[memoryview]:
        """Return the messages that have arrived completely. Raise :class:`FramedSocketEnd` at the end of the
        connection."""
        try:
            if self._begun is None:
                return self._cut(self._socket.recv(_READ_BYTES))
            return self._go_on(self._begun)
        except BlockingIOError:
            return []
        except OSError as error:
            raise FramedSocketEnd(str(error)) from error

    def _cut(self, data: bytes) -> list[memoryview]:
        if not data:
            raise FramedSocketEnd("hung up")
        if self._head:
            data = self._head + data
        messages = []
        view = memoryview(data)
        at = 0
        while len(data) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(data, at)
            if length > MAX_MESSAGE_BYTES:
                raise FramedSocketEnd(f"a message must not have {length} bytes")
            at += LENGTH.size
            if at + length > len(data):
                self._begin(view[at:], length)
                at = len(data)
            else:
                messages.append(view[at : at + length])
                at += length
        self._head = data[at:]
        return messages

    def _begin(self, part: memoryview, length: int) -> None:
        # The peer may send a wrong length, so memory is allocated only as bytes arrive.
        self._begun = bytearray(min(length, _BEGUN_BYTES))
        self._begun[: len(part)] = part
        self._length, self._filled = length, len(part)

    def _go_on(self, begun: bytearray) -> list[memoryview]:
        count = self._socket.recv_into(memoryview(begun)[self._filled :])
        if not count:
            raise FramedSocketEnd("hung up")
        self._filled += count
        if self._filled == self._length:
            self._begun = None
            return [memoryview(begun)]
        if self._filled == len(begun):
            begun.extend(bytes(min(len(begun), self._length - self._filled)))
        return []
