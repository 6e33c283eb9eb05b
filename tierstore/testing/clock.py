"""A clock that is moved by hand."""

from __future__ import annotations


class ManualClock:
    """Call it for the time in seconds; ``advance`` it. Stands in for ``time.monotonic``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
