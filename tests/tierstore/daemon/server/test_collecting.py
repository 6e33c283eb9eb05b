from __future__ import annotations

from tierstore.daemon.daemon import Collecting
from tierstore.testing.clock import ManualClock

MINUTE = 60.0


def test_full_collections_wait_until_nobody_asks_but_not_for_ever():
    clock, collected = ManualClock(), []
    requests = 0
    collecting = Collecting(lambda: requests, clock=clock, collect=lambda: collected.append(clock()))

    def pass_time(seconds, *, busy):
        nonlocal requests
        for _ in range(int(seconds / 5)):
            requests += busy
            clock.advance(5)
            collecting.look()

    pass_time(9 * MINUTE, busy=False)
    assert collected == []
    pass_time(60 * MINUTE, busy=True)
    assert collected == []
    pass_time(5, busy=False)
    assert len(collected) == 1
    pass_time(9 * MINUTE, busy=False)
    assert len(collected) == 1
    pass_time(2 * MINUTE, busy=False)
    assert len(collected) == 2
    pass_time(7 * 60 * MINUTE, busy=True)
    assert len(collected) == 3
