"""What is noted is worked off by a thread that takes little time, and never more than there is room for."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tierstore.curve.exact import keys_of
from tierstore.curve import ReuseCurve, Worker
from tierstore.curve.groups import (
    ABOVE_ALL,
    CELL_GROUPS,
    CELL_PAGES,
    cell_groups,
    group_counts,
    group_sizes,
    groups,
    groups_behind,
    least_key,
    some_cell_below,
)
from tierstore.curve.notes import MOST, Notes
from tierstore.curve.worker import Budget
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.store import Store

SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=8, dtype="float16")


class Watched(ReuseCurve):
    """Says when some of it has been worked off."""

    def __init__(self):
        super().__init__()
        self.worked = threading.Event()

    def work(self):
        super().work()
        self.worked.set()


class Held(ReuseCurve):
    """Begins to work, and goes on when it may."""

    def __init__(self):
        super().__init__()
        self.began = threading.Event()
        self.goes_on = threading.Event()

    def work(self):
        self.began.set()
        assert self.goes_on.wait(30)
        super().work()


def note(notes: Notes, number: int) -> None:
    notes.looked_up([b"%016d" % number], 64, 0, 64, 4096)


def test_notes_that_find_no_room_are_left_out_and_counted():
    notes = Notes()
    for number in range(MOST + 10):
        note(notes, number)
    assert notes.left_out == 10
    assert notes.enough.is_set()
    taken = notes.take(1e9).notes
    assert [keys for keys, *_ in taken] == [[b"%016d" % number] for number in range(MOST)]
    assert not notes.enough.is_set()


def keys_of_pages(*numbers: int) -> list[bytes]:
    return [b"%016d" % number for number in numbers]


@pytest.mark.parametrize("by_groups", [True, False])
def test_under_load_a_note_is_made_of_prompts_that_the_sample_has_a_cell_of_and_of_some_others(by_groups):
    notes = Notes()
    notes.sample_below(int.from_bytes(b"00000001", "big"))

    def look_up(keys):
        if by_groups:
            notes.looked_up(groups(keys), 64 * len(keys), 0, 64, 4096)
        else:
            notes.prompt_looked_up(keys, 64 * len(keys), 0, 64, 4096, ABOVE_ALL)

    for number in range(3 * MOST):
        note(notes, number)
    assert notes.take(1e9).left_out == 2 * MOST
    few, most = 10**7, 10**9  # the first is in the sample, the other is not
    sampled = [
        keys_of_pages(most, most, few),  # in the middle of the first cell
        keys_of_pages(*[most] * 7, few, most),  # in that of the second
        keys_of_pages(*[most] * CELL_PAGES[9], few, *[most] * 400),
    ]
    others = [
        keys_of_pages(),
        keys_of_pages(few),  # groups that stand for no cell
        keys_of_pages(*[few, few, most] * 2),
        keys_of_pages(*[few] * 2, most, *[few] * 4, most),
        keys_of_pages(*[most] * CELL_PAGES[9]),
    ]
    for _ in range(10):
        for keys in others * 4 + sampled:
            look_up(keys)
    taken = notes.take(1e9)
    assert (taken.came, taken.left_out) == (230, 0)
    kept = [keys for keys, *_, stands_for in taken.notes if not stands_for]
    checked = [stands_for for *_, stands_for in taken.notes if stands_for]
    assert all(keys in [groups(each) for each in sampled] for keys in kept)
    assert 20 <= len(kept) <= 30  # those that were spot checks stand for others
    assert 230 / 8 < len(checked) < 230 / 2  # about one in four
    assert set(checked) == {4}


def test_when_there_is_time_again_every_prompt_is_noted():
    notes = Notes()
    notes.sample_below(0)
    for number in range(3 * MOST):
        note(notes, number)
    made = 0
    for _ in range(10):
        notes.take(1e9)
        while not notes.enough.is_set():
            note(notes, made)
            made += 1
    notes.take(1e9)
    for number in range(10):
        note(notes, number)
    taken = notes.take(1e9)
    assert [stands_for for *_, stands_for in taken.notes] == [1] * 10
    assert notes.left_out == 2 * MOST


def test_some_are_taken_at_a_time_and_nobody_is_called_for_a_few():
    notes = Notes()
    for number in range(MOST // 2):
        note(notes, number)
    assert not notes.enough.is_set()
    note(notes, 0)
    assert notes.enough.is_set()
    assert len(notes.take(0.5).notes) == 1
    assert notes.enough.is_set()
    assert len(notes.take(3).notes) == 3
    assert not notes.enough.is_set()


def test_the_thread_works_off_what_waits_and_stops():
    curve = Watched()
    worker = Worker(curve)
    prompts = [keys for (keys,) in (keys_of([[number]]) for number in range(MOST))]
    for keys in prompts:
        curve.notes.looked_up(groups(keys), 64, 0, 64, 4096)
    assert curve.worked.wait(30), "nobody works it off"
    worker.stop()
    assert not any(thread.name == "tierstore-curve" for thread in threading.enumerate())
    curve.worked.clear()
    for keys in prompts:
        curve.notes.saved(groups(keys), 64, 64, 4096)
    assert not curve.worked.is_set()
    curve.stats({}, 0.0)
    curve.notes.looked_up(groups(prompts[0]), 64, 0, 64, 4096)
    stats = curve.stats({}, 0.0)
    assert (stats.asked_tokens, stats.left_out) == (64 * (MOST + 1), 0)
    assert stats.ceiling == pytest.approx(1 / (MOST + 1))


def test_the_thread_stops_also_when_it_was_told_to_in_the_middle_of_its_work():
    curve = Held()
    worker = Worker(curve)
    curve.notes.enough.set()
    assert curve.began.wait(30)
    stopping = threading.Thread(target=worker.stop, daemon=True)
    stopping.start()
    assert worker._stopped.wait(30)
    curve.goes_on.set()
    stopping.join(30)
    assert not stopping.is_alive()


def test_a_store_is_measured_until_it_is_closed():
    identity = Identity.of(SPEC, model="measured")
    with Store.open(None, SPEC, identity=identity, host_bytes=1 << 20) as store:
        assert any(thread.name == "tierstore-curve" for thread in threading.enumerate())
        prompt = Prompt(identity, range(64 * 40 + 7), chunk_tokens=64)
        with store.lookup(prompt) as hit:
            assert hit.tokens == 0
        store.save(prompt, [bytes(SPEC.page_bytes)] * 40).wait(30)
        with store.lookup(prompt, max_tokens=64 * 39) as hit:
            assert hit.tokens == 64 * 39
        curve = store.stats().curve
        assert curve.asked_tokens == 64 * 79 + 7
        # The last five of forty pages are one group, of which the middle one was asked for.
        assert curve.ceiling == pytest.approx(64 * 39 / (64 * 79 + 7), abs=0.03)
    assert not any(thread.name == "tierstore-curve" for thread in threading.enumerate())


def under_load(notes: Notes, border: bytes) -> None:
    """As it is when more has come than was worked off: the next spot check is far."""
    notes.sample_below(int.from_bytes(border[:8], "big"))
    notes.take(1e9)
    notes._check(1 << 40)


@pytest.mark.parametrize("cell", [0, 1, 5, 9])
def test_under_load_a_store_notes_the_lookups_that_the_sample_has_a_cell_of(cell):
    """Wherever the cell is: in what is found, or in what is not."""
    identity = Identity.of(SPEC, model="measured")
    pages = CELL_PAGES[cell] + 4
    prompts = (Prompt(identity, [n, *range(64 * pages + 6)], chunk_tokens=64) for n in itertools.count())
    prompt = next(  # no other cell of it is in a sample that has this one
        each
        for each in prompts
        if min(each.keys[page] for page in CELL_PAGES[: cell + 1]) == each.keys[CELL_PAGES[cell]]
    )
    sampled = prompt.keys[CELL_PAGES[cell]]
    for held in sorted({0, 1, CELL_PAGES[cell], CELL_PAGES[cell] + 1, pages}):
        with Store.open(None, SPEC, identity=identity, host_bytes=1 << 20) as store:
            if held:
                store.save(prompt, [bytes(SPEC.page_bytes)] * held).wait(30)
            notes = store._notes
            for border, expected in ((sampled, 0), (sampled[:7] + bytes([255]) * 9, 1)):
                under_load(notes, border)
                with store.lookup(prompt) as hit:
                    assert hit.tokens == 64 * held
                assert len(notes.take(1e9).notes) == expected, f"{held} pages held"


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=80), st.integers(0, 80))
def test_the_last_page_knows_the_smallest_key_of_all_cells_up_to_it(keys, known):
    least = ABOVE_ALL
    for number, key in enumerate(keys[:known]):
        least = least_key(least, number, PageKey(key))
    of_cells = [keys[page] for page in CELL_PAGES if page < len(keys)]
    for border in [*keys, bytes(16), b"\xff" * 17]:
        found = least < border or some_cell_below(border, keys, known, len(keys))
        assert found == any(key < border for key in of_cells)


def test_a_prompt_may_grow_while_its_note_waits():
    curve = ReuseCurve()
    keys = keys_of_pages(*range(200))
    curve.notes.prompt_looked_up(keys, 200 * 64, 0, 64, 4096, ABOVE_ALL)
    keys += keys_of_pages(*range(1000, 2000))
    curve.notes.saved(groups(keys), len(keys) * 64, 64, 4096)
    curve.notes.prompt_looked_up(keys, len(keys) * 64, len(keys) * 64, 64, 4096, ABOVE_ALL)
    stats = curve.stats({}, 0.0)
    assert stats.asked_tokens == 64 * (200 + 1200)
    assert stats.ceiling == pytest.approx(1200 / 1400, abs=0.01)  # the last group is not all there


@given(st.lists(st.floats(1e-5, 0.05), min_size=1, max_size=200), st.floats(0, 100))
def test_it_works_for_a_small_share_of_the_time(pieces, idle_s):
    """However long it was idle before: a twentieth of a second, and a share of what has passed."""
    now_s = 1000.0
    budget = Budget(now_s)
    now_s += idle_s
    worked_s = 0.0
    began_s = now_s
    for piece_s in pieces:
        worked_s += piece_s
        now_s += piece_s
        rest_s = budget.rest_s(piece_s, now_s)
        assert rest_s >= 9 * piece_s
        now_s += rest_s
    assert worked_s <= 0.05 + max(pieces) + (now_s - began_s) / 390


@given(st.integers(0, 1500), st.integers(0, 1500))
def test_groups_are_the_same_in_one_piece_and_in_two(pages, known):
    known = min(known, pages)
    whole = groups(range(pages))
    assert [*groups(range(known)), *groups_behind(known, range(known, pages))] == list(whole)
    assert group_counts(np.array([pages])) == [len(whole)]


def test_cells_are_all_groups_once_and_the_middle_one_stands_for_each():
    pages = range(2000)
    assert [groups(pages)[number] for number in CELL_GROUPS if number < len(groups(pages))] == [
        page for page in CELL_PAGES if page < 2000 - 31
    ]
    numbers = np.arange(len(groups(pages)))
    cells = cell_groups(numbers)
    assert (cells[cells > 0] % 2 == 1).all()
    middles = np.flatnonzero(cells)
    starts = middles - cells[middles] // 2
    assert starts[0] == 0
    assert (starts[1:] == (starts + cells[middles])[:-1]).all()
    # No cell has groups of two sizes.
    whole = middles[starts + cells[middles] <= len(numbers)]
    for middle in whole:
        half = cells[middle] // 2
        assert len(set(group_sizes(np.arange(middle - half, middle + half + 1)).tolist())) == 1
    assert (cell_groups(np.array([CELL_GROUPS[-1] + 1, 10**6])) == 0).all()
