"""What is not worth writing to disk, or too much of it.

**Worth.** A page that nobody would load, because computing it is faster than reading it, costs the disk's
endurance and its bandwidth for nothing. Clients plan that (:mod:`tierstore.planner`) and say what of the disk
they decline: while that is nearly all that a tenant's clients find there, what they save is not written.
Evidence fades, so writing is tried again after some minutes; a disk that has become fast shows before that,
in what is read.

**Budget.** Bytes a day, for people who count what their flash can take. It comes in evenly; what was not used
is saved up for an hour.
"""

from __future__ import annotations

from collections.abc import Callable

_HALF_LIFE_S = 300.0  # of evidence
_LEAST_TOKENS = 1 << 14  # declined: less says nothing
_DECLINED_TO_READ = 8.0  # as many times more tokens are declined than read: it is not worth writing
_DAY_S = 86400.0
_SAVED_UP_S = 3600.0


class WriteWorth:
    """What one tenant's clients find on disk, and whether they want it. Needs the state's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._declined = self._read = 0.0  # tokens, that count for half after each half-life
        self._faded_at = clock()

    def declined(self, tokens: int) -> None:
        """So many tokens were not loaded, because computing them is faster."""
        self._fade()
        self._declined += tokens

    def read(self, tokens: int) -> None:
        """So many tokens are loaded."""
        self._fade()
        self._read += tokens

    def is_given(self) -> bool:
        """Whether what is written now would be read."""
        self._fade()
        return self._declined < max(_LEAST_TOKENS, _DECLINED_TO_READ * self._read)

    def _fade(self) -> None:
        now_s = self._clock()
        share = 0.5 ** ((now_s - self._faded_at) / _HALF_LIFE_S)
        self._declined *= share
        self._read *= share
        self._faded_at = now_s


class WriteBudget:
    """Needs the state's lock.

    >>> now = [0.0]
    >>> budget = WriteBudget(lambda: now[0], bytes_per_day=86400)
    >>> budget.take(100), now.append(now.pop() + 150), budget.take(100), budget.take(100)
    (False, None, True, True)
    >>> budget.take(1)  # the last page was larger than what was left
    False
    """

    def __init__(self, clock: Callable[[], float], *, bytes_per_day: int) -> None:
        """``bytes_per_day`` may be written, 0: any number."""
        self._clock = clock
        self._bytes_per_s = bytes_per_day / _DAY_S
        self._left = 0.0  # below 0 where a page was larger than what was left
        self._filled_at = clock()

    def take(self, nbytes: int) -> bool:
        """Whether so many bytes more may be written, which then counts as done."""
        if not self._bytes_per_s:
            return True
        now_s = self._clock()
        most = self._bytes_per_s * _SAVED_UP_S
        self._left = min(self._left + (now_s - self._filled_at) * self._bytes_per_s, most)
        self._filled_at = now_s
        if self._left <= 0:
            return False
        self._left -= nbytes
        return True
