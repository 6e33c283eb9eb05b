from __future__ import annotations

import math

import pytest

from tierstore import Hint, UsageError
from tierstore.policy import NO_HINT, PageHint, Reuse
from tierstore.types import LIKELY_S, MOST_SESSION_CHARS, checked_session, inferred


def test_a_hint_that_says_nothing_is_none():
    assert Hint().facts(5.0) == NO_HINT


@pytest.mark.parametrize(
    ("hint", "facts"),
    [
        (Hint(reuse="likely"), PageHint(Reuse.LIKELY, 0, 5.0 + LIKELY_S)),
        (Hint(reuse="likely", ttl_s=7), PageHint(Reuse.LIKELY, 0, 12.0)),
        (Hint(reuse="unlikely", priority=-100), PageHint(Reuse.UNLIKELY, -100, math.inf)),
        (Hint(reuse="done"), PageHint(Reuse.DONE, 0, math.inf)),
        (Hint(ttl_s=0, priority=3), PageHint(Reuse.UNKNOWN, 3, 5.0)),
    ],
)
def test_what_a_policy_gets(hint, facts):
    assert hint.facts(5.0) == facts


def test_one_that_only_says_who_asks_next_is_not_for_the_policy():
    assert not Hint(elsewhere=True).for_policy
    assert Hint(elsewhere=True, priority=1).for_policy
    assert Hint().for_policy, "it takes back what was said before"


@pytest.mark.parametrize(
    "values",
    [
        {"ttl_s": -1},
        {"ttl_s": math.nan},
        {"ttl_s": math.inf},
        {"ttl_s": "soon"},
        {"ttl_s": True},
        {"reuse": "maybe"},
        {"reuse": ["likely"]},
        {"priority": 101},
        {"priority": -101},
        {"priority": 0.5},
        {"priority": "high"},
        {"priority": True},
        {"elsewhere": 1},
    ],
)
def test_values_that_mean_nothing_are_refused(values):
    with pytest.raises(UsageError, match="a hint's"):
        Hint(**values)


def test_names_of_sessions():
    assert checked_session(None) is None
    assert checked_session("a") == "a"
    for name in ("", "x" * (MOST_SESSION_CHARS + 1)):
        with pytest.raises(UsageError, match="1 to 256 characters"):
            checked_session(name)


def test_what_an_engine_knows_when_a_request_ends():
    assert inferred("tool_calls").reuse == "likely"
    assert inferred("parked").reuse == "likely"
    assert inferred("abort") == inferred("cancelled") == Hint(reuse="unlikely")
    assert inferred("stop") is inferred("length") is None
