from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tierstore.policy import GhostTable, fingerprint


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 400)), max_size=100), st.integers(0, 3000))
def test_what_is_recalled_is_what_was_remembered_last(pages, room):
    ghosts = GhostTable()
    last = {}
    for page, hits in pages:
        ghosts.remember(fingerprint(page), hits)
        last[page] = min(hits, 255)
    ghosts.make_room(room)
    for page, hits in last.items():
        assert ghosts.recall(fingerprint(page)) in (hits, None)
    known = sum(ghosts.recall(fingerprint(page)) is not None for page in last)
    assert known >= 0.7 * len(last) - 2  # any two may share a slot
    assert ghosts.recall(fingerprint(-1)) is None


def test_most_of_what_left_within_a_turnover_is_known_and_it_takes_few_bytes_a_page():
    ghosts = GhostTable()
    ghosts.make_room(10_000)
    for page in range(100_000):
        ghosts.remember(fingerprint(page), 3)
    recent = sum(ghosts.recall(fingerprint(page)) == 3 for page in range(90_000, 100_000))
    assert recent > 8_000
    assert sum(ghosts.recall(fingerprint(page)) is not None for page in range(10_000)) < 3_000
    assert len(ghosts) * 8 <= 64 * 10_000 * 1.7  # a power of two
    ghosts.make_room(60_000)
    assert sum(ghosts.recall(fingerprint(page)) == 3 for page in range(90_000, 100_000)) == recent


def test_fingerprints_are_spread_evenly():
    draw = random.Random(0)
    for numbers in (range(8000), [draw.getrandbits(64) for _ in range(8000)]):
        prints = [fingerprint(number) for number in numbers]
        assert max(prints) < 1 << 60
        for parts in (8, 64):
            counts = [0] * parts
            for each in prints:
                counts[each * parts // (1 << 60)] += 1
            assert max(counts) < 1.5 * 8000 / parts
