"""The messages of one connection to a daemon: requests, their answers, and messages without an answer.

Any thread sends, under a lock, so a request is not handed over to another thread. A thread that waits for an
answer can become the *leader*: it receives from the wire itself until its answer has arrived. (Two hand-overs
between threads would take as long as the daemon needs for a short prompt.) The leader passes answers for
other threads to the connection's thread. The connection's thread receives from the wire only while a request
has no leader. This thread also wakes when a request reaches its deadline and 0.1 s after a lease was
released.

Leases are released in groups: with the next lookup, before any other request, or after 0.1 s.
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
    """Decode the numbers in a message; ``kind`` is ``<u4`` or ``<u8``. Return no numbers if the length of
    ``raw`` is not a multiple of their size."""
    width = np.dtype(kind).itemsize
    return np.frombuffer(raw if len(raw) % width == 0 else b"", kind)


class Call(Transfer[R], Generic[A, R]):
    """A request. The result of a call is ``then(answer, frames)``, with the daemon's answer and the page
    frames behind it. The answer is None if the daemon is away, did not answer in time, or refused the
    request. Callbacks of ``on_end`` run on the connection's thread.

    If the daemon has forgotten the path that the request refers to, ``otherwise()`` returns a message that is
    sent instead, once.
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
        self.caller_receives = False  # whether the waiting thread receives the answer
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
        """Whether the call ended at its deadline without an answer."""
        return self.state is TransferState.EXPIRED

    def wait(self, timeout: float | None = None) -> R:
        if timeout is None and self.receive is not None and not self.done:
            self.receive(self)
        return super().wait(timeout)

    def answer(self, answer: Answer, frames: Sequence[memoryview] = ()) -> bool:
        """End the call with the daemon's answer. An answer of an unexpected type counts as no answer. Return
        False if the call has already ended."""
        if isinstance(answer, self._expected):
            self._answer = answer
            self.frames = frames
        return self._end(TransferState.DONE)

    def fail(self) -> bool:
        """End the call without an answer."""
        return self._end(TransferState.DONE)

    def _take(self, state: TransferState) -> R:
        # If an answer arrives at the deadline, the thread that received it releases the leases in it.
        then, self._then = self._then, _taken
        return then(self._answer if state is TransferState.DONE else None, self.frames)


def _taken(*_: object) -> NoReturn:
    raise AssertionError("the result of a call was computed twice")


_log = logging.getLogger(__name__)

_LOOK_S = 0.1  # longest sleep of the connection's thread while requests are open
_RELEASE_S = 0.1  # longest delay before a released lease is sent to the daemon
_MOST_RELEASED = 64  # as soon as this many released leases wait, they are sent

# Plain integers, because combining two enums takes longer than sending a message.
_READ, _WRITE = int(select.POLLIN), int(select.POLLOUT)  # poll and epoll use the same numbers


@dataclass(slots=True)
class ConnectionCounters:
    """Counters since the connection was made."""

    links: int = 0
    failed_handshakes: int = 0
    requests: int = 0
    failed_requests: int = 0  # the daemon was away, or went away before it answered
    late_requests: int = 0  # the daemon did not answer in time
    refused_requests: int = 0
    malformed_answers: int = 0
    unsent_messages: int = 0  # the daemon did not read its socket
    failed_callbacks: int = 0  # callbacks that raised an error, which is a bug in tierstore
    unpinned_arenas: int = 0  # the device's driver refused to pin these arenas: loads use plain copies


@dataclass(frozen=True, slots=True)
class _Arrived:
    """An answer and the page frames behind it."""

    answer: messages.Answer
    frames: Sequence[memoryview]


class Channel:
    """The requests over one link. A channel ends when the daemon goes away or refuses the link, or when the
    connection is closed. ``wake_fd`` is an eventfd that wakes :meth:`run`."""

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
        self._arrived: deque[_Arrived] = deque()  # answers that a leader received for other threads
        self.forgotten: Callable[[messages.PagesForgotten], None] = lambda _: None
        self._leading = threading.Lock()
        self._epoll = select.epoll()
        try:
            self._led_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # wakes the leader
        except OSError:
            self._epoll.close()
            raise
        self._lock = threading.Lock()
        # _lock guards the wire and all attributes from here to _watched.
        self._pending: dict[int, Call[Any, Any]] = {}
        self._released: list[int] = []
        self._release_by = math.inf
        self._active = False  # messages were sent since the last check of the clock, so the next is soon
        self._next_look = -math.inf  # when the connection's thread will next check the clock
        self._over = False
        self._unsent = False  # whether the wire has data that must be flushed
        self._watched = _READ  # events of the wire's descriptor that wake the connection's thread
        self._epoll.register(wake_fd, select.EPOLLIN)
        self._epoll.register(self._wire.fd, self._watched)
        if self._wire.sign_fd != self._wire.fd:
            self._epoll.register(self._wire.sign_fd, select.EPOLLIN)
        self._leader_poll = select.poll()
        for fd in (self._wire.fd, self._led_fd):
            self._leader_poll.register(fd, _READ)

    # -- the connection's thread -----------------------------------------------------------------------

    def run(self) -> None:
        """Receive until the channel ends. No message is sent afterwards. The caller must then call
        :meth:`fail_all`."""
        try:
            while not self._closing() and not self._over:
                now = time.monotonic()  # before answers are read, so that none of them counts as late
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
            os.eventfd_write(self._led_fd, 1)  # one of these answers may have been the leader's

    def _say_bye(self) -> None:
        """Tell the daemon that the connection ends. Over TCP the daemon would notice only when no ping
        arrives for some seconds."""
        if self._closing() and self.link.arena is None:
            with self._lock:
                self._give_back_released()
                self._over = True  # from here on no thread uses the wire, which is closed next
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
        """Send a message. A request that expects an answer has a ``call``. ``caller_receives``: the calling
        thread waits for the answer at once. Return False if the channel has ended."""
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
        """Release a lease, at most 0.1 s later."""
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
        """Make the connection's thread check the clock at ``time_`` or earlier."""
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
            self._counters.unsent_messages += 1  # a call without its message sent ends at its deadline
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
        """Choose which events of the wire wake the connection's thread. While all callers receive their own
        answers, no arriving message wakes the thread. The thread reads other messages at its next check of
        the clock, at most 0.1 s later."""
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
            self._epoll.modify(self._wire.fd, watched)  # a system call, so only if the events have changed

    def receive_for(self, call: Call[Any, Any]) -> None:
        """Receive on the calling thread until ``call`` has ended. If another thread already receives, leave
        the call to the connection's thread."""
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
        """Record that a thread has begun or stopped receiving for its own call."""
        with self._lock:
            if not self._over:
                self._active = True
                self._look_by(time.monotonic() + _LOOK_S)
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
                self._over = True  # the daemon has another version
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
                self._over = True  # a new handshake registers all identities again
            _log.debug("the daemon refused a request (%s): %s", answer.kind, answer.message)
        if call is None or not self._end_call(lambda: call.answer(answer, arrived.frames)):
            self._give_back(answer)

    def _end_call(self, end: Callable[[], bool]) -> bool:
        """Call ``end``, which runs a call's callbacks."""
        try:
            return end()
        except KeyboardInterrupt:  # from the user
            raise
        except BaseException:  # noqa: BLE001  # an error in one callback must not stop other calls
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
        """Release the leases and the reservation of an answer that arrived too late for its caller."""
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
        """Record late requests. The daemon then counts as hanging until its next message arrives."""
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
