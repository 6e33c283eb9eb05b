"""A clock that tests advance, and a function that waits for other threads or processes."""

from __future__ import annotations

import time
from collections.abc import Callable

_GIVE_UP_S = 120.0  # a test that waits this long has failed, even on a busy machine


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true. Raise :class:`AssertionError` after ``_GIVE_UP_S`` seconds."""
    give_up = time.monotonic() + _GIVE_UP_S
    while not condition():
        assert time.monotonic() < give_up, f"did not become true within {_GIVE_UP_S:.0f} s"
        time.sleep(0.005)


class ManualClock:
    """A replacement for ``time.monotonic``: a call returns the time in seconds, which only :meth:`advance`
    changes."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
