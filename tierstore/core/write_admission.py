"""Decide which saves are not written to disk: those that are not worth it, and those beyond the daily budget.

**Worth.** If computing a page is faster than reading it, no client loads it, and writing it wastes the disk's
endurance and bandwidth. Clients plan this (:mod:`tierstore.planner`) and report how much of a hit on disk
they decline. While a tenant's clients decline nearly everything that they find on disk, its saves are not
written. The evidence fades, so writing is tried again after some minutes. If the disk becomes faster before
that, clients read more, which also ends it.

**Budget.** A limit in bytes per day, for flash with limited endurance. It is granted evenly over time. Unused
budget is saved for up to an hour.
"""

from __future__ import annotations

from collections.abc import Callable

_HALF_LIFE_S = 300.0  # after which evidence counts half
_LEAST_TOKENS = 1 << 14  # declined tokens below which there is no decision
_DECLINED_TO_READ = 8.0  # saves are not written if this many times more tokens are declined than read
_DAY_S = 86400.0
_SAVED_UP_S = 3600.0


class WriteWorth:
    """How much of a tenant's hits on disk its clients load. Needs the state's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._declined = self._read = 0.0  # tokens, halved after each half-life
        self._faded_at = clock()

    def declined(self, tokens: int) -> None:
        """Count tokens that were not loaded because computing them is faster."""
        self._fade()
        self._declined += tokens

    def read(self, tokens: int) -> None:
        """Count tokens that are loaded."""
        self._fade()
        self._read += tokens

    def is_given(self) -> bool:
        """Return whether pages written now are likely to be read."""
        self._fade()
        return self._declined < max(_LEAST_TOKENS, _DECLINED_TO_READ * self._read)

    def _fade(self) -> None:
        now_s = self._clock()
        share = 0.5 ** ((now_s - self._faded_at) / _HALF_LIFE_S)
        self._declined *= share
        self._read *= share
        self._faded_at = now_s


class WriteBudget:
    """A limit on the bytes written per day. Needs the state's lock."""

    def __init__(self, clock: Callable[[], float], *, bytes_per_day: int) -> None:
        """Allow ``bytes_per_day``; 0 means no limit."""
        self._clock = clock
        self._bytes_per_s = bytes_per_day / _DAY_S
        self._left = 0.0  # below 0 after a page that was larger than the rest
        self._filled_at = clock()

    def take(self, nbytes: int) -> bool:
        """Take ``nbytes`` from the budget. Return False, without taking them, if it is used up."""
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
