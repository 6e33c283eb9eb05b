"""Counters of a connector, which its engine collects, adds up and exports."""

from __future__ import annotations

import threading
from collections.abc import Mapping


class ConnectorCounters:
    """Amounts by counter name since the last :meth:`take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amounts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._amounts[name] = self._amounts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Return all amounts, and reset them to zero."""
        with self._lock:
            amounts, self._amounts = self._amounts, {}
        return amounts


def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of ``a`` and ``b`` for each name."""
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
