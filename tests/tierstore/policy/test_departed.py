from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tierstore.policy.departed import FINGERPRINTS, Departed, fingerprint


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 400)), max_size=100), st.integers(0, 3000))
def test_what_is_recalled_is_what_was_remembered_last(pages, room):
    departed = Departed()
    last = {}
    for page, hits in pages:
        departed.remember(fingerprint(page), hits)
        last[page] = min(hits, 255)
    departed.make_room(room)
    for page, hits in last.items():
        assert departed.recall(fingerprint(page)) in (hits, None)
    known = sum(departed.recall(fingerprint(page)) is not None for page in last)
    assert known >= 0.7 * len(last) - 2  # any two may share a slot
    assert departed.recall(fingerprint(-1)) is None


def test_most_of_what_left_within_a_turnover_is_known_and_it_takes_few_bytes_a_page():
    departed = Departed()
    departed.make_room(10_000)
    for page in range(100_000):
        departed.remember(fingerprint(page), 3)
    recent = sum(departed.recall(fingerprint(page)) == 3 for page in range(90_000, 100_000))
    assert recent > 8_000
    assert sum(departed.recall(fingerprint(page)) is not None for page in range(10_000)) < 3_000
    assert len(departed) * 8 <= 64 * 10_000 * 1.7  # a power of two
    departed.make_room(60_000)
    assert sum(departed.recall(fingerprint(page)) == 3 for page in range(90_000, 100_000)) == recent


def test_fingerprints_are_spread_evenly():
    draw = random.Random(0)
    for numbers in (range(8000), [draw.getrandbits(64) for _ in range(8000)]):
        prints = [fingerprint(number) for number in numbers]
        assert max(prints) < FINGERPRINTS
        for parts in (8, 64):
            counts = [0] * parts
            for each in prints:
                counts[each * parts // FINGERPRINTS] += 1
            assert max(counts) < 1.5 * 8000 / parts
