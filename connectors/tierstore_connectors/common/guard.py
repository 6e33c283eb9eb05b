"""Guards that keep a cache from harming its engine.

Errors are caught and counted, a daemon that hangs gets no requests for a while, and chunks whose loads failed
recently are not loaded again. :class:`Breaker` and :class:`RecentKeys` get the current time from the caller.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from tierstore.keys import PageKey

F = TypeVar("F", bound=Callable[..., Any])

_FAILURES = 2  # unanswered requests in a row that open the breaker
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRIES_S = 1.0


class ErrorLog:
    """Counts of caught errors by the action that failed; each kind is logged once. ``logger`` is a logger
    whose messages the engine shows."""

    def __init__(self, logger: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._reported = 0
        self._logger = logger
        self._logged: set[tuple[str, str]] = set()

    def caught(self, where: str, error: BaseException) -> None:
        """Count an error of the action ``where``, and log the first error of each type with its traceback."""
        self.counts[where] += 1
        kind = (where, type(error).__name__)
        if kind not in self._logged:
            self._logged.add(kind)
            self._logger.error("tierstore: %s failed and was skipped: %r", where, error, exc_info=error)

    def warn(self, where: str, message: str) -> None:
        """Count a problem that the operator should know, and log each ``message`` once."""
        self.counts[where] += 1
        if (where, message) not in self._logged:
            self._logged.add((where, message))
            self._logger.warning("tierstore: %s", message)

    def unreported(self) -> int:
        """Return the number of errors and problems counted since the last call of this method."""
        before, self._reported = self._reported, self.counts.total()
        return self._reported - before


def guarded(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a method so that it never raises: an exception from a connector would end some engines.

    After an error, ``otherwise`` is called with the same arguments. ``otherwise`` returns the result of an
    empty cache and must not raise. The method's object has an :class:`ErrorLog` named ``errors``.
    """

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # errors stop here
                self.errors.caught(method.__name__, error)
            return otherwise(self, *args, **kwargs)

        return cast(F, entry)

    return wrap


def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Return None, the result of many methods with an empty cache."""


class Breaker:
    """A circuit breaker for requests to the daemon.

    A closed breaker allows every request. Two unanswered requests in a row open the breaker: for half a
    second no request is allowed, and for twice as long after each further failure, up to eight seconds.
    After that an open breaker allows one request per second, and the first answer closes the breaker.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"Breaker({self._failures} failures)"

    def allows(self, now: float) -> bool:
        """Return whether a request is allowed at the time ``now`` (monotonic, in seconds)."""
        if self._failures < _FAILURES:
            return True
        if now < self._quiet_until:
            return False
        self._quiet_until = now + _TRIES_S
        return True

    def failed(self, now: float) -> None:
        """Record that the daemon did not answer a request."""
        self._failures += 1
        if self._failures >= _FAILURES:
            pause = _PAUSES_S[min(self._opened, len(_PAUSES_S) - 1)]
            self._opened += 1
            self._quiet_until = now + pause

    def succeeded(self) -> None:
        """Record that the daemon answered a request."""
        self._failures = self._opened = 0


class RecentKeys:
    """A set of chunk keys. A key expires after ``seconds``, and only the last ``most`` keys are kept."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[PageKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: PageKey, now: float) -> None:
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        while len(self._until) > self._most:
            self._until.popitem(last=False)

    def discard(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()

    def before_first(self, keys: Sequence[PageKey], now: float) -> int:
        """Return how many of ``keys`` precede the first key that is in this set."""
        self._expire(now)
        if not self._until:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self._until), len(keys))

    def to_last(self, keys: Sequence[PageKey], now: float) -> int:
        """Return how many of ``keys`` there are up to and including the last key that is in this set."""
        self._expire(now)
        if not self._until:
            return 0
        return next((at for at in range(len(keys), 0, -1) if keys[at - 1] in self._until), 0)

    def _expire(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
