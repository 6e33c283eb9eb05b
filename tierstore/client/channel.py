"""One connection's time: what is sent, what comes back, and what does not.

Any thread sends: the wire is guarded by a lock, and a request costs no hand-over to another thread. What
comes back is received by the connection's thread, or by the thread that waits for it: that one *leads*, and
takes its own answer from the wire. (Two hand-overs cost as much as the daemon needs for a short prompt.)
Answers to others that a leader comes across are left to the connection's thread. That one watches the wire
only while there are requests that nobody leads for. It also looks at the clock: when the next request could
be late, and soon after something was given back, but never without a reason.

Leases are given back several at once: with the next lookup, before any other request, or 0.1 s later.
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
    """Numbers as messages carry them (``<u4``, ``<u8``); none where the length cannot be right."""
    width = np.dtype(kind).itemsize
    return np.frombuffer(raw if len(raw) % width == 0 else b"", kind)


class Call(Transfer[R], Generic[A, R]):
    """Ends with what ``then`` makes of the answer (None where there is none to be had: the daemon is away,
    did not answer in time, or refused) and of the payload that came with it. Wait for it, ``await`` it, or be
    called by ``on_end`` (on the connection's thread).

    ``otherwise`` makes the message to send instead, once, if the daemon has forgotten the path that the
    request refers to. ``lead`` receives on the thread
    that waits, if it can (see ``channel.py``).
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
        self.caller_receives = False  # the thread that waits for it receives the answer
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
        """Whether it ended without an answer, because its time was over."""
        return self.state is TransferState.EXPIRED

    def wait(self, timeout: float | None = None) -> R:
        if timeout is None and self.receive is not None and not self.done:
            self.receive(self)
        return super().wait(timeout)

    def answer(self, answer: Answer, frames: Sequence[memoryview] = ()) -> bool:
        """What the daemon said; anything but the expected answer counts as none. False when it came too
        late: nobody will make use of it."""
        if isinstance(answer, self._expected):
            self._answer = answer
            self.frames = frames
        return self._end(TransferState.DONE)

    def fail(self) -> bool:
        """There will be no answer."""
        return self._end(TransferState.DONE)

    def _take(self, state: TransferState) -> R:
        # An answer that comes in the moment the time is over is given back by whoever received it.
        then, self._then = self._then, _taken
        return then(self._answer if state is TransferState.DONE else None, self.frames)


def _taken(*_: object) -> NoReturn:
    raise AssertionError("an answer is taken once")


_log = logging.getLogger(__name__)

_LOOK_S = 0.1  # how long the connection's thread sleeps at most, while there are requests
_RELEASE_S = 0.1  # a lease is given back this late at most …
_MOST_RELEASED = 64  # … and earlier when there are so many

# As bare numbers: combining two enums takes longer than sending a message.
_READ, _WRITE = int(select.POLLIN), int(select.POLLOUT)  # the same for poll and epoll


@dataclass(slots=True)
class ConnectionCounters:
    """Since the connection was made."""

    links: int = 0
    failed_handshakes: int = 0
    requests: int = 0
    failed_requests: int = 0  # the daemon was away, or went
    late_requests: int = 0  # not answered in time
    refused_requests: int = 0
    malformed_answers: int = 0
    unsent_messages: int = 0  # the daemon did not read
    failed_callbacks: int = 0  # by a bug of ours
    unpinned_arenas: int = 0  # refused by the device's driver: loads from them go up by plain copies


@dataclass(frozen=True, slots=True)
class _Arrived:
    """An answer, and the payload behind it."""

    answer: messages.Answer
    frames: Sequence[memoryview]


class Channel:
    """Ends when the daemon goes or refuses the link, or the connection is closed. ``wake_fd`` is an
    eventfd that makes :meth:`run` look at once."""

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
        self._arrived: deque[_Arrived] = deque()  # received by a leader, for others
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
        self._active = False  # since the last look: the next one is soon, and nobody has to ask for it
        self._next_look = -math.inf  # when the connection's thread will look by itself
        self._over = False
        self._unsent = False  # what the wire has not taken yet is to be flushed
        self._watched = _READ  # what the connection's thread watches the wire for
        self._epoll.register(wake_fd, select.EPOLLIN)
        self._epoll.register(self._wire.fd, self._watched)
        if self._wire.sign_fd != self._wire.fd:
            self._epoll.register(self._wire.sign_fd, select.EPOLLIN)
        self._leader_poll = select.poll()
        for fd in (self._wire.fd, self._led_fd):
            self._leader_poll.register(fd, _READ)

    # -- the connection's thread -----------------------------------------------------------------------

    def run(self) -> None:
        """Receive until the end. Nothing is sent afterwards, and :meth:`fail_all` is to be called."""
        try:
            while not self._closing() and not self._over:
                now = time.monotonic()  # what has come by then is read before any request counts as late
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
            os.eventfd_write(self._led_fd, 1)  # its answer may have been among them

    def _say_bye(self) -> None:
        """Without an arena's socket to hang up, our end would only be noticed after a silence."""
        if self._closing() and self.link.arena is None:
            with self._lock:
                self._give_back_released()
                self._over = True  # nobody may touch a closed wire
                self._wire.close(messages.encode(messages.Bye()))

    def _end(self) -> None:
        with self._lock:
            self._over = True
        os.eventfd_write(self._led_fd, 1)
        with self._leading:  # the leader has left the wire
            self._epoll.close()
            os.close(self._led_fd)

    def fail_all(self) -> None:
        """Nothing that is waited for will come."""
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
        """Send a message, the request that ``call`` stands for if there is one. ``caller_receives``: the
        caller waits for it at once. False when the session is over."""
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
        """Have the connection's thread see to it that ``call`` ends."""
        call.caller_receives = False
        self._watch()
        self._look_by(call.ends)

    def release(self, lease: int) -> None:
        """Give a lease back, soon."""
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
        """Have the connection's thread look at the clock by then."""
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
            self._counters.unsent_messages += 1  # the call it belongs to ends by its deadline
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
        """Have the connection's thread woken by what nobody else waits for. While callers receive their own
        answers it is left alone; what comes all the same is found when it looks again, which is soon."""
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
            self._epoll.modify(self._wire.fd, watched)  # which costs more than the rest of this

    def receive_for(self, call: Call[Any, Any]) -> None:
        """Receive until ``call`` has ended, on the thread that waits for it. While another thread leads, the
        connection's thread looks after it."""
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
        """Somebody has begun to lead, or has ended it."""
        with self._lock:
            if not self._over:
                self._active = True
                self._look_by(time.monotonic() + _LOOK_S)  # costs nothing where a look is due by then anyhow
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
                if each.answer.id == call.number:
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
                self._over = True  # whatever this is, it is no daemon of ours
                break
            arrived.append(_Arrived(answer, frames[1:]))
        return arrived

    def _dispatch(self, arrived: _Arrived) -> None:
        answer = arrived.answer
        with self._lock:
            call = self._pending.pop(answer.id, None)
        if isinstance(answer, messages.Refused):
            self._counters.refused_requests += 1
            if call is not None and answer.kind == "path" and call.otherwise is not None:
                self._resend(call)
                return
            if answer.kind in ("connection", "identity", "version"):
                self._over = True  # greet again, which registers again
            _log.debug("the daemon refused a request (%s): %s", answer.kind, answer.message)
        if call is None or not self._end_call(lambda: call.answer(answer, arrived.frames)):
            self._give_back(answer)

    def _end_call(self, end: Callable[[], bool]) -> bool:
        """End a call, which calls whoever waits for it."""
        try:
            return end()
        except KeyboardInterrupt:  # a person's
            raise
        except BaseException:  # noqa: BLE001  # whatever one of them raises, the others go on
            self._counters.failed_callbacks += 1
            _log.exception("what was to follow an answer failed")
            return True

    def _resend(self, call: Call[Any, Any]) -> None:
        assert call.otherwise is not None
        message: Any = call.otherwise()
        call.otherwise = None
        call.number = message.id = next(self._ids)
        if not self.send(message, call):
            self._end_call(call.fail)

    def _give_back(self, answer: messages.Answer) -> None:
        """An answer that came too late for whoever asked: what it grants is not wanted."""
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
        """These were not answered in time: until anything comes, the daemon is taken to hang."""
        with self._lock:
            for number in numbers:
                if self._pending.pop(number, None) is not None:
                    self._counters.late_requests += 1
            if not self.link.silent:
                self.link.silent = True
                self._pinged = -math.inf  # ask at once
                self._look_by(time.monotonic())


def _quiet(fd: int) -> None:
    """Take note of having been woken."""
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return
