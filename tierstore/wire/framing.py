"""Length-prefixed messages over a stream socket, for clients on the daemon's host.

Clients on other hosts use ZMQ. Between two processes of one host, ZMQ would be the most expensive part of a
lookup: each message passes through an I/O thread on both sides. That makes six hand-overs for a round trip
instead of two. Here the sending thread writes, and the waiting thread reads.

No method blocks. Data that the socket does not take at once is kept, up to a limit, until
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
_MOST_UNSENT_BYTES = 4 << 20  # plus one message of any size
_COPIED_BYTES = 32 << 10  # up to this size, sending one joined string is faster than sending two


class FramedSocketEnd(Exception):  # not an error: every connection has an end
    """The peer has closed the connection, or sent something that cannot be a message."""


class FramedSocket:
    """One end of a connection. Not thread-safe. The socket belongs to the caller."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._head = b""  # the beginning of an incomplete length
        self._begun: bytearray | None = None  # an incomplete message …
        self._length = self._filled = 0  # … its size, and the size of the received part
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def unsent(self) -> bool:
        """Whether there is data for :meth:`flush`."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- sending -------------------------------------------------------------------------------------

    def send(self, body: bytes) -> bool:
        """Send a message. Return False if the peer does not read or is gone."""
        if self._unsent_bytes > _MOST_UNSENT_BYTES:
            return False
        head = LENGTH.pack(len(body))
        pieces = [head + body] if len(body) <= _COPIED_BYTES else [head, body]
        self._unsent.extend(map(memoryview, pieces))
        self._unsent_bytes += len(head) + len(body)
        return self.flush()

    def flush(self) -> bool:
        """Send queued data as far as the socket takes it. Return False if the peer is gone."""
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
            return False  # receiving fails as well and raises
        return True

    # -- receiving -----------------------------------------------------------------------------------

    def receive(self) -> list[memoryview]:
        """Return the complete messages. Raise :class:`FramedSocketEnd` at the end of the connection."""
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
        # The length may be wrong: memory is allocated as bytes arrive.
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
