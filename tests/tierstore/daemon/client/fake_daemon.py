"""A daemon that says what a test tells it to say: wrong, late, or nothing."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from tierstore.memory import Memory
from tierstore.wire import messages as p
from tierstore.wire.framing import FramedSocket, FramedSocketEnd


class FakeDaemon:
    """Listens at ``PATH.arena``. ``answers`` maps a message type to a function from the message to an answer
    (None: none) or a list of them; without one there are harmless defaults. ``received`` is all it got."""

    def __init__(self, path, *, arena_bytes=1 << 20, header_bytes=None, magic=p.ARENA_MAGIC):
        self.url = f"ipc://{path}"
        self.answers = {}
        self.received = []
        self.arena = Memory(arena_bytes, shared=True)
        self._header = p.ARENA_HEADER.pack(magic, header_bytes or self.arena.nbytes, b"t" * 16)
        self._lines = {}  # with their sockets, by descriptor
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.arena")
        self._listener.listen()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def of(self, kind):
        """The messages of one type that have come."""
        return [message for message in self.received if isinstance(message, kind)]

    def close(self):
        """Hang up. Idempotent."""
        self._stop.set()
        self._thread.join()
        self._listener.close()
        for connection, _ in self._lines.values():
            connection.close()
        self._lines.clear()
        self.arena.close()

    def _serve(self):
        while not self._stop.is_set():
            ready, _, _ = select.select([self._listener, *self._lines], [], [], 0.02)
            for each in ready:
                if each is self._listener:
                    self._accept()
                else:
                    self._hear(each)

    def _accept(self):
        connection, _ = self._listener.accept()
        socket.send_fds(connection, [self._header], [self.arena.fd])
        self._lines[connection.fileno()] = connection, FramedSocket(connection)

    def _hear(self, number):
        connection, line = self._lines[number]
        try:
            bodies = line.receive()
        except FramedSocketEnd:
            del self._lines[number]
            connection.close()
            return
        for body in bodies:
            message = p.decode_request(body)
            self.received.append(message)
            answer = self.answers.get(type(message), self._default)(message)
            for each in answer if isinstance(answer, list) else [answer]:
                if each is not None:
                    line.send(each if isinstance(each, bytes) else p.encode(each))

    def _default(self, m):
        match m:
            case p.Hello():
                return p.Welcome(m.id, 1, "fake", 60.0, 1 << 20)
            case p.Register():
                return p.Registered(m.id, 0)
            case p.Ping():
                return p.Pong(m.id)
            case p.Find():
                return p.Found(m.id, 0, 0, 0, [], 0, 0)
            case p.FindHit():
                return hit_found(m)
            case p.Stats():
                return p.Refused(m.id, "busy", "ask later")
            case _:
                return None


def hit_found(m, tokens=0, tiers=(), lease=0, path=0, known=0):
    """The answer to a lookup of one chain."""
    return p.HitFound(m.id, tokens, tokens, [p.GroupFound(lease, tokens, list(tiers), path, known)], [])


def slowly(seconds, answer):
    """An answer that takes its time."""

    def late(message):
        time.sleep(seconds)
        return answer(message)

    return late


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))
