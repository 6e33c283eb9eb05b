"""One session's time, on the connection's thread: what is sent, what comes back, and what does not."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from tierstore.daemon import protocol
from tierstore.daemon.call import Call
from tierstore.daemon.greeting import Session
from tierstore.daemon.protocol import Message

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ConnectionCounters:
    """Since the connection was made."""

    sessions: int = 0
    failed_greetings: int = 0
    requests: int = 0
    failed_requests: int = 0  # the daemon was away, or went
    late_requests: int = 0  # not answered in time
    refused_requests: int = 0
    malformed_answers: int = 0
    unsent_messages: int = 0  # the daemon did not read
    failed_callbacks: int = 0  # by a bug of ours


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send, and the call it belongs to (None for one-way messages)."""

    message: Message
    id: int = 0
    call: Call[Any] | None = None
    frames: Sequence[memoryview] = ()


class Outbox:
    """Messages on their way to the thread that sends them. ``fd`` is readable when there are any."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._messages: deque[Outgoing] = deque()

    def open(self, session: Session) -> None:
        """Take messages for ``session`` from now on."""
        with self._lock:
            self._session = session

    def shut(self) -> list[Outgoing]:
        """Take no more. Returns those that nobody has sent."""
        with self._lock:
            self._session = None
            unsent = list(self._messages)
            self._messages.clear()
        return unsent

    def put(self, session: Session, outgoing: Outgoing) -> bool:
        """False when ``session`` is over."""
        with self._lock:
            if session is not self._session:
                return False
            if not self._messages:
                os.eventfd_write(self.fd, 1)
            self._messages.append(outgoing)
        return True

    def take(self) -> list[Outgoing]:
        with self._lock:
            taken = list(self._messages)
            self._messages.clear()
        return taken

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def quiet(self) -> None:
        """Take note of having been woken."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return


class Serving:
    """Ends when the daemon goes or refuses the session, or the connection is closed."""

    def __init__(
        self,
        session: Session,
        outbox: Outbox,
        ids: itertools.count[int],
        counters: ConnectionCounters,
        closing: Callable[[], bool],
    ) -> None:
        self._session = session
        self._outbox = outbox
        self._ids = ids
        self._counters = counters
        self._closing = closing
        self._pending: dict[int, Call[Any]] = {}
        self._heard = time.monotonic()
        self._pinged = self._heard
        self._over = False

    def run(self) -> None:
        session = self._session
        poller = zmq.Poller()
        poller.register(session.socket, zmq.POLLIN)
        poller.register(self._outbox.fd, zmq.POLLIN)
        poller.register(session.sign_of_life, zmq.POLLIN)
        gone = {session.sign_of_life, session.sign_of_life.fileno()}
        while not self._closing() and not self._over:
            ready = dict(poller.poll(self._timeout_ms()))
            if session.socket in ready:
                self._receive()
            if gone & ready.keys():
                return
            if self._outbox.fd in ready:
                self._outbox.quiet()
                self._send_queued()
            self._look_at_the_clock()

    def fail_all(self) -> None:
        """Nothing that is waited for will come."""
        waiting = [*self._pending.values(), *(each.call for each in self._outbox.shut())]
        self._pending.clear()
        for call in waiting:
            if call is not None:
                self._counters.failed_requests += 1
                self._end_call(call.fail)

    # -- sending -------------------------------------------------------------------------------------

    def _send_queued(self) -> None:
        for each in self._outbox.take():
            if each.call is not None:
                self._pending[each.id] = each.call
            self._put(each.message, each.frames)

    def _put(self, message: Message, frames: Sequence[memoryview] = ()) -> None:
        parts: list[bytes | memoryview] = [protocol.VERSION, protocol.encode(message), *frames]
        try:
            self._session.socket.send_multipart(parts, zmq.NOBLOCK, copy=not frames)
        except zmq.Again:
            self._counters.unsent_messages += 1  # the call it belongs to ends by its deadline

    # -- receiving -----------------------------------------------------------------------------------

    def _receive(self) -> None:
        while not self._over:
            try:
                frames = self._session.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard = time.monotonic()
            self._session.silent = False
            try:
                answer = protocol.decode_answer(frames[1].buffer)
            except (IndexError, msgspec.MsgspecError):
                self._counters.malformed_answers += 1
                self._over = True  # whatever this is, it is no daemon of ours
                return
            self._dispatch(answer, [frame.buffer for frame in frames[2:]])

    def _dispatch(self, answer: protocol.Answer, frames: Sequence[memoryview]) -> None:
        call = self._pending.pop(answer.id, None)
        if isinstance(answer, protocol.Refused):
            self._counters.refused_requests += 1
            if call is not None and answer.kind == "path" and call.otherwise is not None:
                self._resend(call)
                return
            if answer.kind in ("session", "identity", "version"):
                self._over = True  # greet again, which registers again
            _log.debug("the daemon refused a request (%s): %s", answer.kind, answer.message)
        if call is None or not self._end_call(lambda: call.answer(answer, frames)):
            self._give_back(answer)

    def _end_call(self, end: Callable[[], bool]) -> bool:
        """End a call, which calls whoever waits for it."""
        try:
            return end()
        except Exception:  # noqa: BLE001  # a bug in one of them must not stop the others
            self._counters.failed_callbacks += 1
            _log.exception("what was to follow an answer failed")
            return True

    def _resend(self, call: Call[Any]) -> None:
        assert call.otherwise is not None
        message: Any = call.otherwise()
        call.otherwise = None
        message.id = next(self._ids)
        self._pending[message.id] = call
        self._put(message)

    def _give_back(self, answer: protocol.Answer) -> None:
        """An answer that came too late for whoever asked: what it grants is not wanted."""
        if isinstance(answer, protocol.Found) and answer.lease:
            self._put(protocol.Release([answer.lease]))
        elif isinstance(answer, protocol.Reserved) and answer.reservation:
            self._put(protocol.Abort(answer.reservation))

    # -- time ----------------------------------------------------------------------------------------

    @property
    def _pings(self) -> bool:
        return self._session.silent or self._session.arena is None

    def _timeout_ms(self) -> int | None:
        ends = [call.ends for call in self._pending.values()]
        if self._pings:
            ends.append(self._pinged + protocol.PING_S)
        return max(int((min(ends) - time.monotonic()) * 1000) + 1, 0) if ends else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for id in [id for id, call in self._pending.items() if call.ends <= now]:
            self._counters.late_requests += 1
            if not self._session.silent:
                self._session.silent = True
                self._pinged = now - protocol.PING_S  # at once
            self._end_call(self._pending.pop(id).fail)
        if self._pings and now - self._pinged >= protocol.PING_S:
            self._pinged = now
            self._put(protocol.Ping(next(self._ids)))
        if self._session.arena is None and now - self._heard > protocol.SILENCE_S:
            self._over = True
