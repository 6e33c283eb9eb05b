"""Measure how long a small piece of work takes on a device, if launching it takes about as long."""

from __future__ import annotations

import statistics
from collections.abc import Callable

ROUND_S = 0.01
MOST_CALLS = 200


def per_call(seconds_of: Callable[[int], float], repetitions: int) -> float:
    """Return the seconds of one call. ``seconds_of(n)`` measures ``n`` calls in a row.

    The device waits for the launch of the first call, and launches overlap with computing afterwards. So each
    round has as many calls as take about ``ROUND_S``. The result is the median of ``repetitions`` rounds. The
    very first call is not counted, because libraries initialize themselves in it.
    """
    seconds_of(1)
    once = max(seconds_of(1), ROUND_S / MOST_CALLS)
    calls = max(round(ROUND_S / once), 1)
    return statistics.median(seconds_of(calls) for _ in range(repetitions)) / calls
