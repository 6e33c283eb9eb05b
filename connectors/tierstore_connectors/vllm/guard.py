"""The one place where errors stop: whatever a connector raises would end vLLM's engine for all its users."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("vllm.tierstore")  # below vLLM's, so that it is formatted and shown like vLLM's own


class Faults:
    """Errors that were caught, by where; each kind is logged once, with where it came from."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[tuple[str, str]] = set()

    def note(self, where: str, error: BaseException) -> None:
        """Count an error and log it if its like has not been."""
        self.counts[where] += 1
        kind = (where, type(error).__name__)
        if kind not in self._logged:
            self._logged.add(kind)
            _log.error(
                "tierstore: %s failed, and the cache goes on without it: %r", where, error, exc_info=error
            )

    def say(self, where: str, message: str) -> None:
        """Something a person should know, once."""
        self.counts[where] += 1
        if (where, message) not in self._logged:
            self._logged.add((where, message))
            _log.warning("tierstore: %s", message)


def guarded(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """A method that never raises. ``otherwise`` is called with the same arguments when it would have, and
    gives the answer of a cache that has nothing; it has to be something that cannot fail."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def entry(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # see the module's first line
                self.faults.note(method.__name__, error)
            return otherwise(self, *args, **kwargs)

        return cast(F, entry)

    return wrap
