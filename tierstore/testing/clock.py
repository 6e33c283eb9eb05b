"""Time in tests: a clock that is moved by hand, and waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

_GIVE_UP_S = 120.0  # a test that waits this long has failed, on a busy machine too


def wait_until(condition: Callable[[], object]) -> None:
    """Return when ``condition()`` is true. Raises :class:`AssertionError` if it does not become true."""
    give_up = time.monotonic() + _GIVE_UP_S
    while not condition():
        assert time.monotonic() < give_up, f"did not become true within {_GIVE_UP_S:.0f} s"
        time.sleep(0.005)


class ManualClock:
    """Call it for the time in seconds; ``advance`` it. Stands in for ``time.monotonic``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
