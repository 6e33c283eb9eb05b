"""Decide which saves are not written to disk: those that are not worth it, and those beyond the daily budget.

**Worth.** If computing a page is faster than loading it from disk, no client loads it, and writing it wastes
the disk's endurance and bandwidth. Clients decide between loading and computing (:mod:`tierstore.planner`),
and report how many tokens of a hit on disk they decline. While a tenant's clients decline nearly everything
that they find on disk, the tenant's saves are not written. Reports lose weight with time, so writing is tried
again after several minutes. If the disk becomes faster before that, clients load more, and writing starts
again.

**Budget.** A limit in bytes per day, for flash with limited endurance. The budget is granted evenly over
time. Unused budget is saved up for at most an hour.
"""

from __future__ import annotations

from collections.abc import Callable

_HALF_LIFE_S = 300.0  # time after which a report has half its weight
_LEAST_TOKENS = 1 << 14  # with fewer declined tokens, saves are always written
_DECLINED_TO_READ = 8.0  # saves are not written if clients decline at least this many times what they read
_DAY_S = 86400.0
_SAVED_UP_S = 3600.0  # most unused budget that is saved up, as the seconds in which it is granted


class WriteWorth:
    """The share of a tenant's hits on disk that its clients load. Needs the state's lock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._declined = self._read = 0.0  # tokens, with half their weight after each half-life
        self._faded_at = clock()

    def declined(self, tokens: int) -> None:
        """Count tokens that a client did not load because computing them is faster."""
        self._fade()
        self._declined += tokens

    def read(self, tokens: int) -> None:
        """Count tokens that a client loads from disk."""
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
        self._left = 0.0  # may be negative after a page larger than the remaining budget
        self._filled_at = clock()

    def take(self, nbytes: int) -> bool:
        """Subtract ``nbytes`` from the budget. If the budget is used up, return False and do not subtract."""
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
