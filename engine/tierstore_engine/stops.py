"""Stop strings: the text ends before the first of them, and text that might begin one is held back."""

from __future__ import annotations

import copy
from collections.abc import Sequence


class StopMatcher:
    """A matcher for one growing text. Its result does not depend on how the text is split.

    The stop string that is complete first wins. If several are complete at the same character, the longest
    wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def copy(self) -> StopMatcher:
        """Return a matcher in the same state, for a text that continues independently."""
        return copy.copy(self)

    def push(self, text: str) -> str:
        """Add ``text``. Return the text that may be shown now. At a stop string, set ``stopped`` and drop the
        stop string and everything after it."""
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
        """Return the text that was held back, because it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Return where the stop string that ends first begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _could_begin(self, text: str) -> int:
        """Return how many characters at the end of ``text`` are the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
