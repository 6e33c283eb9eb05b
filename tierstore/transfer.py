"""A transfer: one asynchronous movement of pages between tiers, and how to wait for it.

Producers (the store's jobs) call :meth:`Transfer.advance` as pages arrive, and :meth:`Transfer.finish` at the
end. Consumers poll ``done``/``progress``, block in ``wait()``, ``await`` it, or ``cancel()`` it.

A transfer **always ends**. If the deadline passes or ``cancel()`` is called, its result is what has arrived.
A failing tier never makes it raise: a short result is a miss. The caller compares the result with what it
requested.

The deadline needs no timer thread. Any access to the transfer (``done``, ``wait``, ``await``) ends it when
its time is over; an overdue transfer that is not accessed does no harm. A producer with other reasons to end
early (a disk that does not answer) has them checked in the same way.
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from tierstore.arguments import optional_seconds
from tierstore.errors import StoreClosedError

T = TypeVar("T")
R = TypeVar("R")


class TransferState(str, enum.Enum):
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # the deadline passed first


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a transfer. Pages that needed no copy count as done from the start."""

    pages_done: int
    pages: int
    bytes_done: int
    nbytes: int


class Transfer(Generic[T]):
    """One movement of ``pages`` pages (``nbytes`` bytes) whose result is a ``T``. Thread-safe.

    ``settle(state)`` is called exactly once, by the thread that ends the transfer, and returns the result. It
    may take the store's lock, so no thread may end a transfer while it holds that lock.

    ``look()`` is called on each access to a running transfer. It may end the transfer, must be cheap, and
    returns the seconds until it should be called again.
    """

    def __init__(
        self,
        settle: Callable[[TransferState], T],
        *,
        pages: int,
        nbytes: int,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        look: Callable[[], float] | None = None,
    ) -> None:
        self._settle = settle
        self._clock = clock
        self._look = look
        self._ends = None if deadline_s is None else clock() + deadline_s
        self._pages = pages
        self._nbytes = nbytes
        self._pid = os.getpid()
        self._changed = threading.Condition()
        # Guarded by _changed: everything below.
        self._pages_done = 0
        self._bytes_done = 0
        self._state = TransferState.RUNNING
        self._ending = False
        self._result: T | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._watched: list[Transfer[Any]] = []

    @classmethod
    def completed(cls, result: T) -> Transfer[T]:
        """Return a transfer that has nothing to move."""
        transfer = cls(lambda _: result, pages=0, nbytes=0)
        transfer.finish()
        return transfer

    def __repr__(self) -> str:
        return f"Transfer({self._state.value}, {self._pages_done}/{self._pages} pages)"

    # -- for consumers -------------------------------------------------------------------------------

    @property
    def state(self) -> TransferState:
        self._end_if_due()
        return self._state

    @property
    def done(self) -> bool:
        """Whether the result is there (after the last page, ``cancel()`` or the deadline)."""
        return self.state is not TransferState.RUNNING

    @property
    def progress(self) -> Progress:
        with self._changed:
            return Progress(self._pages_done, self._pages, self._bytes_done, self._nbytes)

    def wait(self, timeout: float | None = None) -> T:
        """Block until the end and return the result. Raise :class:`TimeoutError` when ``timeout`` seconds
        pass first; the transfer then continues. Raise :class:`StoreClosedError` in a forked child, where it
        would never end."""
        if self._state is TransferState.RUNNING and os.getpid() != self._pid:
            raise StoreClosedError("this transfer was started by another process and can only end there")
        timeout = optional_seconds("timeout", timeout)
        give_up = None if timeout is None else self._clock() + timeout
        while not self.done:
            now = self._clock()
            if give_up is not None and now >= give_up:
                raise TimeoutError(f"transfer not finished after {timeout} s: {self!r}")
            ends = [t - now for t in (give_up,) if t is not None]
            if (next_look_s := self._next_look_s()) is not None:
                ends.append(next_look_s)
            with self._changed:
                if self._state is TransferState.RUNNING:
                    self._changed.wait(max(min(ends), 0) if ends else None)
        return self._value()

    def cancel(self) -> bool:
        """End now and release what has arrived. Return False if it had already ended."""
        return self._end(TransferState.CANCELLED)

    def __await__(self) -> Generator[object, None, T]:
        return self._wait_async().__await__()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end (at once if it has ended), on the thread that ends it, without a
        lock."""
        with self._changed:
            if self._state is TransferState.RUNNING:
                self._callbacks.append(callback)
                return
        callback()

    # -- for producers -------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether moving further pages is pointless. Cheap: checked before every copy."""
        return self.done or self._ending

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline (0 after it has passed); None without one."""
        return None if self._ends is None else max(self._ends - self._clock(), 0.0)

    def expect(self, pages: int, nbytes: int) -> None:
        """Add pages that were not known to be needed before."""
        with self._changed:
            self._pages += pages
            self._nbytes += nbytes

    def advance(self, pages: int, nbytes: int) -> None:
        """Count pages that have arrived."""
        with self._changed:
            self._pages_done += pages
            self._bytes_done += nbytes

    def finish(self) -> None:
        """End the transfer: everything that will arrive has arrived."""
        self._end(TransferState.DONE)

    def watch(self, part: Transfer[Any]) -> None:
        """Wait for ``part``: each access to this transfer also checks ``part``, until it has ended."""
        with self._changed:
            self._watched = [each for each in self._watched if each._state is TransferState.RUNNING]
            if part._state is TransferState.RUNNING:
                self._watched.append(part)
                self._changed.notify_all()  # it may be due earlier than the present wait ends

    # -- inside --------------------------------------------------------------------------------------

    def _end_if_due(self) -> None:
        if self._watched and self._state is TransferState.RUNNING and not self._ending:
            for part in self._watched:
                part._end_if_due()
        if self._look is not None and self._state is TransferState.RUNNING and not self._ending:
            self._look()
        if self._ends is not None and self._state is TransferState.RUNNING and self._clock() >= self._ends:
            self._end(TransferState.EXPIRED)

    def _end(self, state: TransferState) -> bool:
        with self._changed:
            if self._ending:
                return False
            self._ending = True
        result = self._settle(state)
        self._watched = []
        # breaks the cycle between job and transfer, so that neither waits for the garbage collector
        self._settle = _settled
        with self._changed:
            self._result = result
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        raised: BaseException | None = None
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # noqa: BLE001  # call the other callbacks in any case
                raised = raised or error
        if raised is not None:
            raise raised
        return True

    def _next_look_s(self) -> float | None:
        """Return the seconds until the next check, if nothing happens before."""
        times = [self.remaining_s, self._look() if self._look is not None else None]
        times += [part._next_look_s() for part in self._watched if part._state is TransferState.RUNNING]
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _value(self) -> T:
        with self._changed:
            return self._result  # type: ignore[return-value]  # set before the state left RUNNING

    async def _wait_async(self) -> T:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

        self.on_end(wake)
        while not self.done:
            try:
                await asyncio.wait_for(ended.wait(), self._next_look_s())
            except (asyncio.TimeoutError, TimeoutError):
                self._end_if_due()
        return self._value()


def joined(
    transfers: Sequence[Transfer[Any]],
    settle: Callable[[TransferState], R],
    *,
    deadline_s: float | None,
    clock: Callable[[], float],
) -> Transfer[R]:
    """Return one transfer that ends when all of these have ended."""
    progress = [transfer.progress for transfer in transfers]
    whole: Transfer[R] = Transfer(
        settle,
        pages=sum(each.pages for each in progress),
        nbytes=sum(each.nbytes for each in progress),
        deadline_s=deadline_s,
        clock=clock,
    )
    lock = threading.Lock()
    left = len(transfers)

    def ended() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            whole.finish()

    for transfer in transfers:
        whole.watch(transfer)
        transfer.on_end(ended)
    if not transfers:
        whole.finish()
    return whole


def _settled(_: TransferState) -> NoReturn:
    raise AssertionError("a transfer ends once")
