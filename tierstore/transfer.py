"""A transfer: one asynchronous movement of pages between tiers. It can be polled, awaited and cancelled.

Producers (the store's jobs) call :meth:`Transfer.advance` as pages arrive, and :meth:`Transfer.finish` at the
end. Consumers poll ``done`` or ``progress``, block in ``wait()``, ``await`` the transfer, or ``cancel()`` it.

A transfer **always ends**. After its deadline or ``cancel()``, its result is what has arrived. A failing tier
never makes a transfer raise: it gives a short result, which is a miss. The caller compares the result with
its request.

The deadline needs no timer thread. Any access to a transfer (``done``, ``wait``, ``await``) ends it if its
deadline has passed; an overdue transfer that no thread accesses does no harm. A producer can have other
reasons to end a transfer early (a disk that does not answer), which each access checks in the same way.
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
    """The progress of a transfer. Pages that need no copy count as done from the start."""

    pages_done: int
    pages: int
    bytes_done: int
    nbytes: int


class Transfer(Generic[T]):
    """One movement of ``pages`` pages (``nbytes`` bytes) whose result is a ``T``. Thread-safe.

    The thread that ends the transfer calls ``settle(state)``, which returns the result. It is called exactly
    once. It may take the store's lock, so no thread may end a transfer while it holds that lock.

    Each access to a running transfer calls ``look()``. It must be cheap, may end the transfer, and returns
    the seconds until it should be called again.
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
        # The lock _changed guards all attributes below.
        self._pages_done = 0
        self._bytes_done = 0
        self._state = TransferState.RUNNING
        self._ending = False
        self._result: T | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._watched: list[Transfer[Any]] = []

    @classmethod
    def completed(cls, result: T) -> Transfer[T]:
        """Return a transfer that has ended with ``result``."""
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
        """Whether the transfer has ended: after the last page, ``cancel()`` or the deadline."""
        return self.state is not TransferState.RUNNING

    @property
    def progress(self) -> Progress:
        with self._changed:
            return Progress(self._pages_done, self._pages, self._bytes_done, self._nbytes)

    def wait(self, timeout: float | None = None) -> T:
        """Block until the end and return the result. Raise :class:`TimeoutError` if ``timeout`` seconds pass
        first; the transfer then continues. Raise :class:`StoreClosedError` in a forked child, in which the
        transfer would never end."""
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
        """End the transfer now, with what has arrived as its result. Return False if it had already ended."""
        return self._end(TransferState.CANCELLED)

    def __await__(self) -> Generator[object, None, T]:
        return self._wait_async().__await__()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the transfer ends, on the thread that ends it, without a lock. If the
        transfer has ended already, call ``callback`` now."""
        with self._changed:
            if self._state is TransferState.RUNNING:
                self._callbacks.append(callback)
                return
        callback()

    # -- for producers -------------------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether the producer should move no further pages. Cheap, so that it can be checked before every
        copy."""
        return self.done or self._ending

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline (0 after it has passed); None without one."""
        return None if self._ends is None else max(self._ends - self._clock(), 0.0)

    def expect(self, pages: int, nbytes: int) -> None:
        """Add pages to the number of pages to move."""
        with self._changed:
            self._pages += pages
            self._nbytes += nbytes

    def advance(self, pages: int, nbytes: int) -> None:
        """Count pages that have arrived."""
        with self._changed:
            self._pages_done += pages
            self._bytes_done += nbytes

    def finish(self) -> None:
        """End the transfer, because all pages that can arrive have arrived."""
        self._end(TransferState.DONE)

    def watch(self, part: Transfer[Any]) -> None:
        """Make each access to this transfer check ``part``, too, until ``part`` has ended."""
        with self._changed:
            self._watched = [each for each in self._watched if each._state is TransferState.RUNNING]
            if part._state is TransferState.RUNNING:
                self._watched.append(part)
                self._changed.notify_all()  # the part may be due before a running wait() would look again

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
        self._settle = _settled  # breaks the reference cycle between job and transfer
        with self._changed:
            self._result = result
            self._state = state
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        raised: BaseException | None = None
        for callback in callbacks:
            try:
                callback()
            except BaseException as error:  # noqa: BLE001  # all other callbacks must be called, too
                raised = raised or error
        if raised is not None:
            raise raised
        return True

    def _next_look_s(self) -> float | None:
        """Return the seconds until the next access is needed; None if no access is needed before the end."""
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
    """Return one transfer that ends when all of ``transfers`` have ended."""
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
