"""Stop strings: the text ends before the first of them, and nothing that might begin one is shown early."""

from __future__ import annotations

import copy
from collections.abc import Sequence


class StopMatcher:
    """Watches one growing text. How the text is cut into pieces never changes the outcome.

    The stop string that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def copy(self) -> StopMatcher:
        """One in the same state, for a text that goes on from here by itself."""
        return copy.copy(self)

    def push(self, text: str) -> str:
        """The text that may be shown after ``text`` came. Sets ``stopped`` at a stop string; what follows it,
        and it, are dropped."""
        if self.stopped:
            return ""
        text = self._held + text
        start = self._first_stop(text)
        if start is not None:
            self.stopped = True
            self._held = ""
            return text[:start]
        shown = len(text) - self._could_begin(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _could_begin(self, text: str) -> int:
        """How many characters at the end of ``text`` are the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
