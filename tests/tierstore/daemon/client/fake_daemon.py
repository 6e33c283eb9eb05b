"""A daemon that says what a test tells it to say: wrong, late, or nothing."""

from __future__ import annotations

import os
import socket
import threading
import time

import zmq

from tierstore.daemon import protocol as p
from tierstore.memory import Memory


class FakeDaemon:
    """Listens at ``ipc://PATH`` and ``PATH.arena``. ``answers`` maps a message type to a function from the
    message to an answer (None: none); without one there are harmless defaults. ``received`` is all it got."""

    def __init__(self, path, *, arena_bytes=1 << 20, header_bytes=None, magic=p.ARENA_MAGIC):
        self.url = f"ipc://{path}"
        self.answers = {}
        self.received = []
        self.arena = Memory(arena_bytes, shared=True)
        self._header = p.ARENA_HEADER.pack(magic, header_bytes or self.arena.nbytes, b"t" * 16)
        self._held = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{path}.arena")
        self._listener.listen()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(self.url)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._accept, self._serve)]
        for thread in self._threads:
            thread.start()

    def of(self, kind):
        """The messages of one type that have come."""
        return [message for message in self.received if isinstance(message, kind)]

    def close(self):
        self._stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for connection in self._held:
            connection.close()
        self._router.close(0)
        self._context.term()
        self.arena.close()

    def _accept(self):
        while not self._stop.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            socket.send_fds(connection, [self._header], [self.arena.fd])
            self._held.append(connection)

    def _serve(self):
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            peer, _, body, *_ = self._router.recv_multipart()
            message = p.decode_request(body)
            self.received.append(message)
            answer = self.answers.get(type(message), self._default)(message)
            if answer is not None:
                raw = answer if isinstance(answer, bytes) else p.encode(answer)
                self._router.send_multipart([peer, p.VERSION, raw])

    def _default(self, m):
        match m:
            case p.Hello():
                return p.Welcome(m.id, 1, "fake", 60.0, 1 << 20)
            case p.Register():
                return p.Registered(m.id, 0)
            case p.Ping():
                return p.Pong(m.id)
            case p.Lookup():
                return p.Found(m.id, 0, 0, 0, [], 0, 0)
            case _:
                return None


def slowly(seconds, answer):
    """An answer that takes its time."""

    def late(message):
        time.sleep(seconds)
        return answer(message)

    return late


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))
