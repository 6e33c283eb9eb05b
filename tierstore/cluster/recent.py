from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)


class Recent(Generic[_Key]):
    """Keys that were recorded less than ``seconds`` ago, at most ``most`` of them. It remembers observations
    of a shared store, which are valid only for a short time: pages may disappear at any time, and a restarted
    Mooncake master has no pages.

    >>> at = [0.0]
    >>> seen: Recent[str] = Recent(60.0, 2, clock=lambda: at[0])
    >>> seen.note("a")
    >>> "a" in seen, "b" in seen
    (True, False)
    >>> at[0] = 60.0
    >>> "a" in seen
    False
    """

    def __init__(self, seconds: float, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._ends: OrderedDict[_Key, float] = OrderedDict()

    def __contains__(self, key: _Key) -> bool:
        return self._ends.get(key, 0.0) > self._clock()

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, key: _Key) -> None:
        """Record a key now. If there are too many keys, forget the one that was recorded longest ago."""
        self._ends[key] = self._clock() + self._seconds
        self._ends.move_to_end(key)
        if len(self._ends) > self._most:
            self._ends.popitem(last=False)
