"""One connection to a daemon: requests, their answers, and requests without an answer.

Any thread sends. A lock guards the wire, so a request needs no hand-over to another thread. The connection's
thread receives answers, or the thread that waits for one does: it *leads*, and takes its own answer from the
wire. (Two hand-overs cost as much as the daemon needs for a short prompt.) A leader leaves answers for other
threads to the connection's thread. That thread watches the wire only while there are requests without a
leader. It also checks the clock: when the next request may be late, and soon after a lease was released, but
never without a reason.

Leases are released in groups: with the next lookup, before any other request, or 0.1 s later.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.client.handshake import DaemonLink
from tierstore.transfer import Transfer, TransferState
from tierstore.wire import messages
from tierstore.wire.framing import FramedSocketEnd
from tierstore.wire.messages import Answer, Message

A = TypeVar("A", bound=Message)
R = TypeVar("R")


def numbers(raw: bytes, kind: str) -> npt.NDArray[Any]:
    """Return numbers as messages carry them (``<u4``, ``<u8``); none if the length cannot be right."""
    width = np.dtype(kind).itemsize
    return np.frombuffer(raw if len(raw) % width == 0 else b"", kind)


class Call(Transfer[R], Generic[A, R]):
    """A request. Its result is what ``then`` makes of the answer and of the payload that came with it. The
    answer is None if the daemon is away, did not answer in time, or refused. Wait for the result, ``await``
    it, or use ``on_end`` (called on the connection's thread).

    ``otherwise`` makes a message to send instead, once, if the daemon has forgotten the path that the request
    refers to. ``lead`` receives on the waiting thread, if it can (see ``channel.py``).
    """

    def __init__(
        self,
        expected: type[A],
        patience_s: float,
        then: Callable[[A | None, Sequence[memoryview]], R],
        *,
        otherwise: Callable[[], Message] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self._take, pages=0, nbytes=0, deadline_s=patience_s, clock=clock)
        self.number = 0  # the request's id
        self.caller_receives = False  # the waiting thread receives the answer
        self.receive: Callable[[Call[A, R]], None] | None = None
        self.asked = clock()
        self.ends = self.asked + patience_s
        self.otherwise = otherwise
        self.frames: Sequence[memoryview] = ()
        self._expected = expected
        self._then = then
        self._answer: A | None = None

    @property
    def late(self) -> bool:
        """Whether it ended without an answer at its deadline."""
        return self.state is TransferState.EXPIRED

    def wait(self, timeout: float | None = None) -> R:
        if timeout is None and self.receive is not None and not self.done:
            self.receive(self)
        return super().wait(timeout)

    def answer(self, answer: Answer, frames: Sequence[memoryview] = ()) -> bool:
        """Take the daemon's answer. Any other message than the expected one counts as no answer. Return False
        if the answer is too late to be used."""
        if isinstance(answer, self._expected):
            self._answer = answer
            self.frames = frames
        return self._end(TransferState.DONE)

    def fail(self) -> bool:
        """End without an answer."""
        return self._end(TransferState.DONE)

    def _take(self, state: TransferState) -> R:
        # An answer that arrives at the deadline is given back by the thread that received it.
        then, self._then = self._then, _taken
        return then(self._answer if state is TransferState.DONE else None, self.frames)


def _taken(*_: object) -> NoReturn:
    raise AssertionError("an answer is taken once")


_log = logging.getLogger(__name__)

_LOOK_S = 0.1  # longest sleep of the connection's thread while there are requests
_RELEASE_S = 0.1  # longest delay of a release …
_MOST_RELEASED = 64  # … unless this many leases wait

# As plain integers: combining two enums takes longer than sending a message.
_READ, _WRITE = int(select.POLLIN), int(select.POLLOUT)  # the same for poll and epoll


@dataclass(slots=True)
class ConnectionCounters:
    """Counts since the connection was made."""

    links: int = 0
    failed_handshakes: int = 0
    requests: int = 0
    failed_requests: int = 0  # the daemon was away, or went away
    late_requests: int = 0  # not answered in time
    refused_requests: int = 0
    malformed_answers: int = 0
    unsent_messages: int = 0  # the daemon did not read
    failed_callbacks: int = 0  # bugs in tierstore
    unpinned_arenas: int = 0  # refused by the device's driver: loads from these use plain copies


@dataclass(frozen=True, slots=True)
class _Arrived:
    """An answer and the payload behind it."""

    answer: messages.Answer
    frames: Sequence[memoryview]


class Channel:
    """The use of one link. It ends when the daemon goes away or refuses the link, or when the connection is
    closed. ``wake_fd`` is an eventfd that wakes :meth:`run`."""

    def __init__(
        self,
        link: DaemonLink,
        wake_fd: int,
        ids: itertools.count[int],
        counters: ConnectionCounters,
        closing: Callable[[], bool],
    ) -> None:
        self.link = link
        self._wake_fd = wake_fd
        self._ids = ids
        self._counters = counters
        self._closing = closing
        self._wire = link.wire
        self._heard = self._pinged = time.monotonic()
        self._arrived: deque[_Arrived] = deque()  # received by a leader for other threads
        self.forgotten: Callable[[messages.PagesForgotten], None] = lambda _: None
        self._leading = threading.Lock()
        self._epoll = select.epoll()
        try:
            self._led_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the leader
        except OSError:
            self._epoll.close()
            raise
        self._lock = threading.Lock()
        # Guarded by _lock: the wire, and everything below.
        self._pending: dict[int, Call[Any, Any]] = {}
        self._released: list[int] = []
        self._release_by = math.inf
        self._active = False  # since the last check: the next one is soon and need not be requested
        self._next_look = -math.inf  # when the connection's thread will check by itself
        self._over = False
        self._unsent = False  # the wire has data that must be flushed
        self._watched = _READ  # events of the wire that the connection's thread waits for
        self._epoll.register(wake_fd, select.EPOLLIN)
        self._epoll.register(self._wire.fd, self._watched)
        if self._wire.sign_fd != self._wire.fd:
            self._epoll.register(self._wire.sign_fd, select.EPOLLIN)
        self._leader_poll = select.poll()
        for fd in (self._wire.fd, self._led_fd):
            self._leader_poll.register(fd, _READ)

    # -- the connection's thread -----------------------------------------------------------------------

    def run(self) -> None:
        """Receive until the end. Nothing is sent afterwards. Then the caller calls :meth:`fail_all`."""
        try:
            while not self._closing() and not self._over:
                now = time.monotonic()  # earlier answers are read before a request counts as late
                self._take_in()
                self._look_at_the_clock(now)
                ready = [fd for fd, _ in self._epoll.poll(self._sleep_s())]
                if self._wake_fd in ready:
                    _quiet(self._wake_fd)
                if self._wire.gone():
                    self._take_in()
                    return
            self._say_bye()
        finally:
            self._end()

    def _take_in(self) -> None:
        if self._unsent:
            self._flush()
        arrived = self._receive()
        while self._arrived:
            self._dispatch(self._arrived.popleft())
        for each in arrived:
            self._dispatch(each)
        if self._leading.locked():
            os.eventfd_write(self._led_fd, 1)  # the leader's answer may have been among them

    def _say_bye(self) -> None:
        """Tell the daemon that the connection ends. Without an arena's socket it would notice only after a
        silence."""
        if self._closing() and self.link.arena is None:
            with self._lock:
                self._give_back_released()
                self._over = True  # no thread may use a closed wire
                self._wire.close(messages.encode(messages.Bye()))

    def _end(self) -> None:
        with self._lock:
            self._over = True
        os.eventfd_write(self._led_fd, 1)
        with self._leading:  # the leader has stopped using the wire
            self._epoll.close()
            os.close(self._led_fd)

    def fail_all(self) -> None:
        """End all open requests without an answer."""
        waiting, self._pending = list(self._pending.values()), {}
        for call in waiting:
            self._counters.failed_requests += 1
            self._end_call(call.fail)

    # -- sending, from any thread ----------------------------------------------------------------------

    def send(
        self,
        message: Message,
        call: Call[Any, Any] | None = None,
        frames: Sequence[memoryview] = (),
        *,
        caller_receives: bool = False,
    ) -> bool:
        """Send a message; ``call`` is its request if it has an answer. ``caller_receives``: the caller waits
        for it at once. Return False if the connection has ended."""
        if isinstance(message, messages.Find | messages.FindHit):
            with self._lock:
                message.released = self._take_released()
        body = messages.encode(message)
        with self._lock:
            if self._over:
                return False
            self._give_back_released()
            self._put(body, frames)
            if call is not None:
                call.caller_receives = caller_receives
                self._pending[call.number] = call
                if not caller_receives:
                    self._look_after(call)
        return True

    def _look_after(self, call: Call[Any, Any]) -> None:
        """Make the connection's thread responsible for ending ``call``."""
        call.caller_receives = False
        self._watch()
        self._look_by(call.ends)

    def release(self, lease: int) -> None:
        """Release a lease, with some delay."""
        with self._lock:
            if not self._over:
                self._active = True
                if not self._released:
                    self._release_by = time.monotonic() + _RELEASE_S
                    self._look_by(self._release_by)
                self._released.append(lease)
                if len(self._released) >= _MOST_RELEASED:
                    self._give_back_released()

    def _look_by(self, time_: float) -> None:
        """Make the connection's thread check the clock by then."""
        if time_ < self._next_look:
            self._next_look = time_
            os.eventfd_write(self._wake_fd, 1)

    def _give_back_released(self) -> None:
        if self._released:
            self._put(messages.encode(messages.Release(self._take_released())))

    def _take_released(self) -> list[int]:
        leases, self._released, self._release_by = self._released, [], math.inf
        return leases

    def _put(self, body: bytes, frames: Sequence[memoryview] = ()) -> None:
        if not self._wire.send(body, frames):
            self._counters.unsent_messages += 1  # its call ends at its deadline
        if self._wire.flush():
            self._unsent = True
            self._watch()
        if self._wire.hidden():
            os.eventfd_write(self._wake_fd, 1)

    def _flush(self) -> None:
        with self._lock:
            if not self._over:
                self._unsent = self._wire.flush()

    # -- receiving -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Choose what wakes the connection's thread: requests without another receiver. While callers receive
        their own answers, it is not woken. It finds other messages at its next check, which is soon."""
        watched = 0
        if not self._leading.locked():
            if (
                not self._active
                or self._pings
                or any(not call.caller_receives for call in self._pending.values())
            ):
                watched = _READ
            if self._unsent:
                watched |= _WRITE
        if watched != self._watched:
            self._watched = watched
            self._epoll.modify(self._wire.fd, watched)  # the most expensive step here

    def receive_for(self, call: Call[Any, Any]) -> None:
        """Receive on the waiting thread until ``call`` has ended. If another thread leads already, the
        connection's thread takes care of the call."""
        if not self._leading.acquire(blocking=False):
            with self._lock:
                if not self._over:
                    self._look_after(call)
            return
        try:
            if self._watched:
                self._leads()
            self._lead(call)
        finally:
            self._leading.release()
            self._leads()

    def _leads(self) -> None:
        """Record that a thread has begun or stopped leading."""
        with self._lock:
            if not self._over:
                self._active = True
                self._look_by(time.monotonic() + _LOOK_S)  # free if a check is due earlier anyway
                self._watch()

    def _lead(self, call: Call[Any, Any]) -> None:
        while not call.done and not self._over:
            self._leader_poll.modify(self._wire.fd, _READ | _WRITE if self._unsent else _READ)
            left = max(call.ends - time.monotonic(), 0.0)
            for fd, _ in self._leader_poll.poll(math.ceil(left * 1e3)):
                if fd == self._led_fd:
                    _quiet(fd)
            if self._unsent:
                self._flush()
            for each in self._receive():
                if each.answer.id == call.number or isinstance(each.answer, messages.PagesForgotten):
                    self._dispatch(each)
                else:
                    self._arrived.append(each)
            if self._arrived or self._over:
                os.eventfd_write(self._wake_fd, 1)
        if call.late:
            self._note_late([call.number])

    def _receive(self) -> list[_Arrived]:
        with self._lock:
            if self._over:
                return []
            try:
                received = self._wire.receive()
            except FramedSocketEnd:
                self._over = True
                return []
        if received:
            self._heard = time.monotonic()
            self.link.silent = False
        arrived = []
        for frames in received:
            try:
                answer = messages.decode_answer(frames[0])
            except (IndexError, msgspec.MsgspecError):
                self._counters.malformed_answers += 1
                self._over = True  # the peer is not a daemon of this version
                break
            arrived.append(_Arrived(answer, frames[1:]))
        return arrived

    def _dispatch(self, arrived: _Arrived) -> None:
        answer = arrived.answer
        if isinstance(answer, messages.PagesForgotten):
            self._end_call(partial(self._told, answer))
            return
        with self._lock:
            call = self._pending.pop(answer.id, None)
        if isinstance(answer, messages.Refused):
            self._counters.refused_requests += 1
            if call is not None and answer.kind == "path" and call.otherwise is not None:
                self._resend(call)
                return
            if answer.kind in ("connection", "identity", "version"):
                self._over = True  # greet again, which also registers again
            _log.debug("the daemon refused a request (%s): %s", answer.kind, answer.message)
        if call is None or not self._end_call(lambda: call.answer(answer, arrived.frames)):
            self._give_back(answer)

    def _end_call(self, end: Callable[[], bool]) -> bool:
        """End a call, which runs its callbacks."""
        try:
            return end()
        except KeyboardInterrupt:  # from the user
            raise
        except BaseException:  # noqa: BLE001  # an error in one callback must not stop the others
            self._counters.failed_callbacks += 1
            _log.exception("the callback of an answer failed")
            return True

    def _told(self, m: messages.PagesForgotten) -> bool:
        self.forgotten(m)
        return True

    def _resend(self, call: Call[Any, Any]) -> None:
        assert call.otherwise is not None
        message: Any = call.otherwise()
        call.otherwise = None
        call.number = message.id = next(self._ids)
        if not self.send(message, call):
            self._end_call(call.fail)

    def _give_back(self, answer: messages.Answer) -> None:
        """Release what an answer grants if it came too late for its caller."""
        if isinstance(answer, messages.Found) and answer.lease:
            self.release(answer.lease)
        elif isinstance(answer, messages.HitFound):
            for group in (*answer.chains, *answer.named):
                if group.lease:
                    self.release(group.lease)
        elif isinstance(answer, messages.Reserved) and answer.reservation:
            self.send(messages.Abort(answer.reservation))

    # -- time ----------------------------------------------------------------------------------------

    @property
    def _pings(self) -> bool:
        return self.link.silent or self.link.arena is None

    def _sleep_s(self) -> float | None:
        with self._lock:
            if self._over:
                return 0.0
            self._watch()
            times = [self._release_by, *(call.ends for call in self._pending.values())]
            if self._pings:
                times.append(self._pinged + messages.PING_S)
            now = time.monotonic()
            if self._active:
                self._active = False
                times.append(now + _LOOK_S)
            self._next_look = min(times)
            return None if math.isinf(self._next_look) else max(self._next_look - now, 0.0)

    def _look_at_the_clock(self, now: float) -> None:
        with self._lock:
            if self._release_by <= now:
                self._give_back_released()
            late = {number: call for number, call in self._pending.items() if call.ends <= now}
        if late:
            self._note_late(list(late))
            for call in late.values():
                self._end_call(call.fail)
        with self._lock:
            if self._pings and now - self._pinged >= messages.PING_S:
                self._pinged = now
                self._put(messages.encode(messages.Ping(next(self._ids))))
            if self.link.arena is None and now - self._heard > messages.SILENCE_S:
                self._over = True

    def _note_late(self, numbers: Sequence[int]) -> None:
        """Record that requests were late. The daemon counts as hanging until it sends anything."""
        with self._lock:
            for number in numbers:
                if self._pending.pop(number, None) is not None:
                    self._counters.late_requests += 1
            if not self.link.silent:
                self.link.silent = True
                self._pinged = -math.inf  # ping at once
                self._look_by(time.monotonic())


def _quiet(fd: int) -> None:
    """Clear an eventfd after a wake-up."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return
