"""Time in tests: a clock that the test advances, and waiting for other threads or processes."""

from __future__ import annotations

import time
from collections.abc import Callable

_GIVE_UP_S = 120.0  # a test that waits this long has failed, even on a busy machine


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition()`` is true. Raise :class:`AssertionError` if it does not become true."""
    give_up = time.monotonic() + _GIVE_UP_S
    while not condition():
        assert time.monotonic() < give_up, f"did not become true within {_GIVE_UP_S:.0f} s"
        time.sleep(0.005)


class ManualClock:
    """A replacement of ``time.monotonic``. Call it for the time in seconds, and ``advance`` it."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
