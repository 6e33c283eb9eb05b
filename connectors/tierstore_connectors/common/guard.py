"""What keeps a cache from hurting its engine: errors stop here, a daemon that hangs is left alone, and what
failed a moment ago is not tried again.

Everything is pure but :class:`ErrorLog`: callers say what time it is.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from tierstore.keys import PageKey

F = TypeVar("F", bound=Callable[..., Any])

_FAILURES = 2  # in a row, before the daemon is left alone
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRIES_S = 1.0


class ErrorLog:
    """Counts caught errors by place, and logs each kind once. ``logger`` is one that the engine shows."""

    def __init__(self, logger: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._logger = logger
        self._logged: set[tuple[str, str]] = set()

    def caught(self, where: str, error: BaseException) -> None:
        """Count an error, and log the first of its kind with its traceback."""
        self.counts[where] += 1
        kind = (where, type(error).__name__)
        if kind not in self._logged:
            self._logged.add(kind)
            self._logger.error(
                "tierstore: %s failed, and the cache goes on without it: %r", where, error, exc_info=error
            )

    def warn(self, where: str, message: str) -> None:
        """Count something that a person should know, and log it once."""
        self.counts[where] += 1
        if (where, message) not in self._logged:
            self._logged.add((where, message))
            self._logger.warning("tierstore: %s", message)


def guarded(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """Make a method that never raises: whatever a connector raises ends many an engine for all its users.

    After an error ``otherwise`` is called with the same arguments, and returns the answer of a cache that has
    nothing; it must not be able to fail. The method's object has an :class:`ErrorLog` named ``errors``.
    """

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # this is where errors stop
                self.errors.caught(method.__name__, error)
            return otherwise(self, *args, **kwargs)

        return cast(F, entry)

    return wrap


class Breaker:
    """Closed: everything is asked. Two missing answers in a row open it: nothing is asked for half a second,
    and twice as long each time until eight. Then one question a second is let through, and the first answer
    closes it."""

    def __init__(self) -> None:
        self._failures = 0
        self._opened = 0
        self._quiet_until = 0.0

    def __repr__(self) -> str:
        return f"Breaker({self._failures} failures)"

    def allows(self, now: float) -> bool:
        """Whether to ask."""
        if self._failures < _FAILURES:
            return True
        if now < self._quiet_until:
            return False
        self._quiet_until = now + _TRIES_S
        return True

    def failed(self, now: float) -> None:
        """Take in that an answer did not come."""
        self._failures += 1
        if self._failures >= _FAILURES:
            pause = _PAUSES_S[min(self._opened, len(_PAUSES_S) - 1)]
            self._opened += 1
            self._quiet_until = now + pause

    def succeeded(self) -> None:
        """Take in that an answer came."""
        self._failures = self._opened = 0


class RecentKeys:
    """Keys of chunks, each for ``seconds`` after it was added; the latest ``most`` of them."""

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
        """How many keys come before the first that is here."""
        self._expire(now)
        if not self._until:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self._until), len(keys))

    def to_last(self, keys: Sequence[PageKey], now: float) -> int:
        """How many keys there are up to the last that is here, with it."""
        self._expire(now)
        if not self._until:
            return 0
        return next((at for at in range(len(keys), 0, -1) if keys[at - 1] in self._until), 0)

    def _expire(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
