"""Measure the speed of prefill for the planner and the scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tierstore.planner import Prefill, PrefillEstimate
from tierstore_connectors.base import Connector
from tierstore_engine.batch import Work


class PrefillTimer:
    """Time prefill steps of one sequence alone. Sequences decoded beside it would make it look slow.

    On a GPU a step is only queued when it returns, and its end is known when a token is waited for. So steps
    of one sequence are timed together, from one such point to the next.
    """

    def __init__(self, connector: Connector) -> None:
        self.prefill: Prefill | None = None  # None before a measurement
        self._connector = connector
        self._estimate = PrefillEstimate()
        self._waits = connector.pool.overlaps
        self._began = 0.0
        self._first = self._stop = 0  # tokens of the steps in flight
        self._sequence: object = None  # the sequence of these steps; None if they cannot be attributed

    def began(self, work: Sequence[Work]) -> None:
        """Note that a step begins."""
        item = work[0]
        alone = len(work) == 1 and item.tokens > 1 and not item.draft and not item.sequence.arriving
        if not alone:
            self._sequence = None
        elif self._sequence is item.sequence and self._stop == item.start:
            self._stop = item.stop
        else:
            self._sequence, self._first, self._stop = item.sequence, item.start, item.stop
            self._began = time.monotonic()

    def forget(self) -> None:
        """Note that something else is computed."""
        self._sequence = None

    def queued(self) -> None:
        """Note that a step has returned without a wait."""
        if not self._waits:
            self.ended()

    def ended(self) -> None:
        """Note that all queued work has ended."""
        if self._sequence is not None:
            seconds = time.monotonic() - self._began
            self._connector.computed(self._stop - self._first, self._first, seconds)
            self._estimate.computed(self._stop - self._first, self._first, seconds)
            self.prefill = self._estimate.prefill()
            self._sequence = None
