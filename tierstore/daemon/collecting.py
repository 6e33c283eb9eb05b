"""Python's collector of cyclic garbage, kept from making anybody wait.

A full collection looks at every object that may be part of a cycle while it holds the interpreter. Pages are
none of them (index/page.py), but one list of each is: 40 ms for 49,000 pages. Python begins one whenever the
number of such objects has grown by a quarter. But pages, jobs and transfers go when the last who refers to
them does; what is left to collect is little (300 objects after five minutes of saves and lookups). So a full
collection runs while nobody asks for anything, or after hours.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

_YOUNG = 2000  # objects between two collections of those that are new: a millisecond
_YOUNGER = 5  # of those between two of the ones that survived one: some milliseconds
_NEVER = 1 << 30
_LOOK_S = 5.0  # without a request: then nobody is there to wait
_EVERY_S = 600.0
_LATEST_S = 6 * 3600.0


class Collecting:
    """``requests`` says how many there have been of those that somebody waits for."""

    def __init__(
        self,
        requests: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        self._requests = requests
        self._clock = clock
        self._collect = collect
        self._seen = -1
        self._last_s = clock()

    async def run(self) -> None:
        """Take over from Python, for as long as the process lasts."""
        gc.set_threshold(_YOUNG, _YOUNGER, _NEVER)
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Collect, if it is time. To be called every few seconds."""
        requests = self._requests()
        quiet, self._seen = requests == self._seen, requests
        passed_s = self._clock() - self._last_s
        if passed_s >= (_EVERY_S if quiet else _LATEST_S):
            self._collect()
            self._last_s = self._clock()
