"""Where a prompt agrees again with the one that it diverges from."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.explanation import CONTEXT_TOKENS, LEAST_AGREEING, MOST_EDITED, Miss, MissReason, Rejoin

BEGINNING = list(range(1000, 1050))
SHARED = list(range(2000, 2400))


def diverged(held, at=len(BEGINNING)):
    """A miss of a prompt that diverges at ``at`` from one that continues with ``held``."""
    return Miss(MissReason.DIVERGED, 48, 100, at=at, held_tokens=tuple(held[:CONTEXT_TOKENS]))


@pytest.mark.parametrize(
    ("own", "held", "rejoin", "text"),
    [
        ([7] * 6, [8] * 6, Rejoin(6, 6, 400, False), "6 tokens differ, then the same 400 follow"),
        ([7], [8], Rejoin(1, 1, 400, False), "1 token differs, then the same 400 follow"),
        ([7] * 3, [], Rejoin(3, 0, 400, False), "3 tokens inserted, then the same 400 follow"),
        ([], [8], Rejoin(0, 1, 400, False), "1 token left out, then the same 400 follow"),
        ([7, 7], [8], Rejoin(2, 1, 400, False), "2 tokens in place of 1, then the same 400 follow"),
        ([7] * MOST_EDITED, [8], Rejoin(MOST_EDITED, 1, 400, False), None),
        ([7] * (MOST_EDITED + 1), [8], None, None),
    ],
)
def test_an_edit_before_a_shared_end(own, held, rejoin, text):
    found = diverged([*held, *SHARED]).rejoins([*BEGINNING, *own, *SHARED])
    assert found == rejoin
    if text is not None:
        assert str(found) == text


def test_only_the_beginning_of_a_long_held_prompt_is_compared():
    long = list(range(5000, 5000 + 3 * CONTEXT_TOKENS))
    found = diverged([8, 8, *long]).rejoins([*BEGINNING, 7, 7, *long])
    assert found == Rejoin(2, 2, CONTEXT_TOKENS - 2, True)
    assert "then the same at least 1,022 follow" in str(found)
    whole = long[: CONTEXT_TOKENS - 2]  # the prompt ends there, so the number is exact
    assert not diverged([8, 8, *long]).rejoins([*BEGINNING, 7, 7, *whole]).more


def test_too_few_equal_tokens_are_no_agreement():
    few = SHARED[: LEAST_AGREEING - 1]
    assert diverged([8, *few, 8]).rejoins([*BEGINNING, 7, *few, 7]) is None
    enough = SHARED[:LEAST_AGREEING]
    assert diverged([8, *enough, 8]).rejoins([*BEGINNING, 7, *enough, 7]) == Rejoin(1, 1, 16, False)


def test_a_divergence_whose_held_prompt_is_not_known():
    assert diverged([], at=None).rejoins([*BEGINNING, *SHARED]) is None
    assert diverged([]).rejoins([*BEGINNING, *SHARED]) is None


def smallest(own, held):
    """The smallest edit by trying all."""
    agreeing = [
        (new, old)
        for new, old in itertools.product(range(len(own)), range(len(held)))
        if max(new, old) <= MOST_EDITED
        and len(own[new : new + LEAST_AGREEING]) == LEAST_AGREEING
        and own[new : new + LEAST_AGREEING] == held[old : old + LEAST_AGREEING]
    ]
    return min(agreeing, key=lambda edit: (max(edit), sum(edit)), default=None)


few_tokens = st.lists(st.integers(0, 2), max_size=40)


@settings(deadline=None)
@given(few_tokens, few_tokens, few_tokens, few_tokens)
def test_it_is_the_smallest_edit_of_all(ours, theirs, shared, rest):
    """With three kinds of tokens, runs occur at several places and agree by chance."""
    own, held = [5, *ours, *shared, *shared], [6, *theirs, *shared, *shared, *rest]
    found = diverged(held).rejoins([*BEGINNING, *own])
    assert (found and (found.prompt_tokens, found.held_tokens)) == smallest(own, held)
    if found is not None:
        new, old, count = found.prompt_tokens, found.held_tokens, found.agreeing_tokens
        assert own[new : new + count] == held[old : old + count]
        assert own[new + count : new + count + 1] != held[old + count : old + count + 1] or (
            new + count == len(own) and old + count == len(held)
        )
