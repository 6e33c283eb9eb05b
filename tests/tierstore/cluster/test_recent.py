"""What has been seen of late, against the list of all that was noted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore.cluster.recent import Recent
from tierstore.testing.clock import ManualClock


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 6)), max_size=40), st.integers(1, 5))
def test_what_was_noted_less_than_so_long_ago(steps, most):
    clock = ManualClock()
    recent = Recent(10.0, most, clock=clock)
    noted = {}
    for seconds, key in steps:
        clock.advance(seconds)
        recent.note(key)
        noted.pop(key, None)
        noted[key] = clock()
        noted = dict(list(noted.items())[-most:])
        assert len(recent) <= most
        for other in range(7):
            assert (other in recent) == (other in noted and noted[other] + 10.0 > clock())
