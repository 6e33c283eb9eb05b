"""A request on its way, and its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.transfer import Transfer, TransferState
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
        self.led = False  # the thread that waits for it receives the answer
        self.lead: Callable[[Call[A, R]], None] | None = None
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
        if timeout is None and self.lead is not None and not self.done:
            self.lead(self)
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
