"""What two bare ZMQ sockets get over TCP on this machine: the limit for pages that go as frames."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from types import TracebackType
from typing import Any

import zmq

from tierstore.memory import Memory

_HWM = 64  # messages under way
_WAIT_MS = 60_000


class ZmqPair:
    """A process that sends ``nbytes`` in frames of ``frame_bytes``, from memory where they are, and this one
    that receives and drops them. A context manager."""

    def __init__(self, frame_bytes: int, nbytes: int) -> None:
        self._count = nbytes // frame_bytes
        self._nbytes = self._count * frame_bytes
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.rcvhwm = _HWM
        self._socket.rcvtimeo = _WAIT_MS
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        spawn = multiprocessing.get_context("spawn")
        self._sender = spawn.Process(target=_send, args=(port, frame_bytes, self._count), daemon=True)
        self._sender.start()

    def __enter__(self) -> ZmqPair:
        self._socket.recv()  # it is ready
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.send(b"")
        self._sender.join(5)
        self._sender.kill()
        self._socket.close()
        self._context.term()

    def gb_per_s(self, passes: int = 3) -> float:
        """The median of some passes."""
        rates = []
        for _ in range(passes):
            start = time.perf_counter()
            self._socket.send(b"again")
            for _ in range(self._count):
                self._socket.recv(copy=False)
            rates.append(self._nbytes / (time.perf_counter() - start) / 1e9)
        return statistics.median(rates)


def _send(port: int, frame_bytes: int, count: int) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.sndhwm = _HWM
    socket.connect(f"tcp://127.0.0.1:{port}")
    memory = Memory(frame_bytes * count, shared=True)
    memory.populate()
    socket.send(b"ready")
    while socket.recv():
        for number in range(count):
            socket.send(memory.view(number * frame_bytes, frame_bytes), copy=False)
    socket.close(0)
    context.term()
