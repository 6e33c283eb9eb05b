"""Messages over a stream socket, each behind its length: what a client and the daemon on one host talk over.

ZMQ is for clients on other hosts. Between two processes of one host it costs more than everything else about
a lookup: a message passes through an I/O thread on either side, which is six hand-overs for a round trip
instead of two. Here whoever sends is the one that writes, and whoever waits reads.

Nothing blocks. What the socket does not take at once is kept, up to a limit, until
:meth:`FramedSocket.flush`.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

from tierstore.wire.messages import MAX_MESSAGE_BYTES

LENGTH = struct.Struct("<I")

_READ_BYTES = 64 << 10
_BEGUN_BYTES = 1 << 20  # of memory for a message of which only the length has come
_MOST_UNSENT_BYTES = 4 << 20  # and one message, however long
_COPIED_BYTES = 32 << 10  # up to here, one string of both is sent more quickly than two


class FramedSocketEnd(Exception):  # not an error: every line has one
    """The other side has hung up, or sends what no message can be."""


class FramedSocket:
    """One end. Not thread-safe. The socket belongs to whoever made this."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._head = b""  # of a message whose length has not come to its end
        self._begun: bytearray | None = None  # a message that has not come to its end …
        self._length = self._filled = 0  # … how long it will be, and how much of it is there
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def unsent(self) -> bool:
        """Whether :meth:`flush` has something to do."""
        return bool(self._unsent)

    def fileno(self) -> int:
        return self._socket.fileno()

    # -- sending -------------------------------------------------------------------------------------

    def send(self, body: bytes) -> bool:
        """Send a message. False when the other side does not read, or has gone."""
        if self._unsent_bytes > _MOST_UNSENT_BYTES:
            return False
        head = LENGTH.pack(len(body))
        pieces = [head + body] if len(body) <= _COPIED_BYTES else [head, body]
        self._unsent.extend(map(memoryview, pieces))
        self._unsent_bytes += len(head) + len(body)
        return self.flush()

    def flush(self) -> bool:
        """Send what is unsent, as far as the socket takes it. False when the other side has gone."""
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
            return False  # whoever receives hears of it, too
        return True

    # -- receiving -----------------------------------------------------------------------------------

    def receive(self) -> list[memoryview]:
        """The messages that have come to their end. Raises :class:`FramedSocketEnd`."""
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
                raise FramedSocketEnd(f"a message of {length} bytes")
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
        # A length is a claim: memory for it comes with the bytes.
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
