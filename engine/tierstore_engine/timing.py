"""How long a small piece of work takes on a device, when putting it there takes about as long."""

from __future__ import annotations

import statistics
from collections.abc import Callable

ROUND_S = 0.01
MOST_CALLS = 200


def per_call(seconds_of: Callable[[int], float], repetitions: int) -> float:
    """Seconds of one call, where ``seconds_of(n)`` measures ``n`` calls in a row, from before the first.

    The device waits for the first call to be put there, and while it computes one the next is. So each round
    is of as many calls as take about ``ROUND_S``, and the median of ``repetitions`` rounds counts. What the
    very first call pays for (libraries that set themselves up) is not in it.
    """
    seconds_of(1)
    once = max(seconds_of(1), ROUND_S / MOST_CALLS)
    calls = max(round(ROUND_S / once), 1)
    return statistics.median(seconds_of(calls) for _ in range(repetitions)) / calls
