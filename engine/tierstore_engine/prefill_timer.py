"""How fast prompts are computed, as the planner and the scheduler are told it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tierstore.planner import Prefill, PrefillEstimate
from tierstore_connectors.base import Connector
from tierstore_engine.scheduler import Work


class PrefillTimer:
    """Times prefill steps of one sequence alone: what is decoded beside it would count as slowness.

    On a GPU a step is queued when it returns, and its end is known where a token is waited for. So steps are
    timed together from there to there, and only where they are one sequence's."""

    def __init__(self, connector: Connector) -> None:
        self.prefill: Prefill | None = None  # the speed so far
        self._connector = connector
        self._estimate = PrefillEstimate()
        self._waits = connector.pool.overlaps
        self._began = 0.0
        self._first = self._stop = 0  # tokens of the steps that are under way
        self._sequence: object = None  # whose they are; None where they cannot be told

    def began(self, work: Sequence[Work]) -> None:
        """A step is about to be computed."""
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
        """Something else is computed."""
        self._sequence = None

    def queued(self) -> None:
        """It returned, and nothing of it was waited for."""
        if not self._waits:
            self.ended()

    def ended(self) -> None:
        """All that was put to work has ended."""
        if self._sequence is not None:
            seconds = time.monotonic() - self._began
            self._connector.computed(self._stop - self._first, self._first, seconds)
            self._estimate.computed(self._stop - self._first, self._first, seconds)
            self.prefill = self._estimate.prefill()
            self._sequence = None
