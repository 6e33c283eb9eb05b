"""The routing benchmark: the order of its turns, and a small run with real engines and daemons."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore_tools.routing import Workload, run, turns_of

SMALL = Workload(
    model="tiny", engines=2, sessions=3, turns=2, first=200, more=100, room=2.0, at_once=1, seed=3
)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 100))
def test_a_turn_is_what_was_said_so_far_and_something_new(sessions, turns, seed):
    workload = Workload("tiny", 2, sessions, turns, 20, 10, 1.0, 1, seed)
    so_far: dict[int, tuple[int, ...]] = {}
    order = turns_of(workload)
    for turn in order:
        before = so_far.get(turn.session, ())
        assert turn.tokens[: len(before)] == before
        assert len(turn.tokens) == 20 + turn.number * 10
        assert turn.number == (len(before) - 10) // 10 if before else turn.number == 0
        so_far[turn.session] = turn.tokens
    assert len(order) == sessions * turns
    assert turns_of(workload) == order, "the same for all routers"


def test_a_session_that_stays_is_held_and_one_that_moves_is_not(tmp_path):
    target = tmp_path / "routing.json"
    run(SMALL, routers="sticky,round-robin", json=str(target))
    measured = {each["router"]: each for each in json.loads(target.read_text())["routers"]}
    # Of 300 tokens the first 192 are whole pages, and the hit goes on into the page that follows.
    assert 0.6 < measured["sticky"]["hit_rate_later"] < 0.7
    assert measured["round-robin"]["hit_rate_later"] < measured["sticky"]["hit_rate_later"]
    assert all(each["ttft_mean"] > 0 for each in measured.values())


def test_what_cannot_be_run_is_said_in_a_line(monkeypatch):
    with pytest.raises(UsageError, match="no router 'best'"):
        run(SMALL, routers="best", json=None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Dynamo is not installed"):
        run(SMALL, routers="dynamo", json=None)
