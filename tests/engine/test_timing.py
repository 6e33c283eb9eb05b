"""Timing work that takes about as long to launch as to compute."""

from __future__ import annotations

import pytest

from tierstore_engine.choices import MOST_CALLS, ROUND_S, per_call

LAUNCH_S = 30e-6


@pytest.mark.parametrize("work_s", [1e-6, 300e-6, 2e-3, 0.5])
def test_what_launching_costs_is_hardly_in_it(work_s: float) -> None:
    """The first of a round is waited for; the others are launched while the device computes."""
    rounds: list[int] = []

    def seconds_of(calls: int) -> float:
        rounds.append(calls)
        setting_up = 0.2 if len(rounds) == 1 else 0.0
        return setting_up + LAUNCH_S + calls * work_s

    measured = per_call(seconds_of, 3)
    assert work_s <= measured <= work_s * 1.01 + LAUNCH_S / MOST_CALLS
    assert len(rounds) == 5
    assert rounds[-1] * work_s <= max(1.1 * ROUND_S, work_s)


def test_the_median_counts() -> None:
    times = iter([0.1, 1.0, 5.0, 2.0, 1.0])
    assert per_call(lambda calls: next(times) * calls, 3) == 2.0
