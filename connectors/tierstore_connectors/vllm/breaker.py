"""When to leave the daemon alone, and which keys not to promise again. Pure: the caller says what time it
is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tierstore.keys import PageKey

_FAILURES = 2  # in a row, before the daemon is left alone
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
_TRIES_S = 1.0
_REFUSED_S = 30.0
_MOST_REFUSED = 4096


class Breaker:
    """Closed: everything is asked. After two answers in a row that did not come it is open: nothing is asked
    for half a second, and twice as long each time until eight. Then one question a second is let through, and
    the first answer closes it."""

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
        """An answer did not come."""
        self._failures += 1
        if self._failures >= _FAILURES:
            pause = _PAUSES_S[min(self._opened, len(_PAUSES_S) - 1)]
            self._opened += 1
            self._quiet_until = now + pause

    def succeeded(self) -> None:
        """An answer came."""
        self._failures = self._opened = 0


class RefusedKeys:
    """Chunks that were promised and could not be loaded. For half a minute nothing is promised from them on,
    so that a page which cannot be had is not asked for in a circle."""

    def __init__(self) -> None:
        self._until: OrderedDict[PageKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: PageKey, now: float) -> None:
        self._until[key] = now + _REFUSED_S
        self._until.move_to_end(key)
        while len(self._until) > _MOST_REFUSED:
            self._until.popitem(last=False)

    def allowed(self, keys: Sequence[PageKey], now: float) -> int:
        """How many leading keys may be promised."""
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if not self._until:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self._until), len(keys))
