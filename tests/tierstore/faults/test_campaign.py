"""The campaign itself: it sees what a broken store does, and what it does can be done again."""

from __future__ import annotations

import shutil

import pytest

from tests.campaigns.campaign import crash_trials, run_trials
from tests.campaigns.disk import crashes
from tests.campaigns.prompts import page_count
from tests.campaigns.recording import record
from tests.campaigns.scripts import SCENES
from tests.campaigns.verdict import judge
from tests.portions import portion
from tierstore.testing.faulty_io import Fault, FaultyIO, Lose

EXTENTS = SCENES[0]


def without(kind):
    """Between store and recording: calls of this kind are swallowed."""

    def over(io):
        faulty = FaultyIO(io)
        faulty.set(Fault(lambda call: call.kind == kind, Lose()))
        return faulty

    return over


@pytest.mark.parametrize("to_the_end", portion(False, True))
@pytest.mark.parametrize("kind", ["sync", "pwritev", "sync_directory"])
def test_a_store_that_leaves_out_a_call_is_found_out(place, kind, to_the_end):
    """By a crash that loses pages. The soak also judges the crashes after that one."""
    trials = crash_trials(EXTENTS, place, over=without(kind))
    losses = [trial for trial in trials if trial.fault in ("crash", "lost write")]
    found = False
    for _, verdict in run_trials(losses, place):
        assert not verdict.wrong_pages, "the checksums are still there"
        found = found or bool(verdict.lost_pages)
        if found and not to_the_end:
            break
    assert found


def test_the_same_seed_makes_the_same_crashes(place):
    recording, _ = recorded(place)

    def described(seed):
        return [crash.describe(recording.events) for crash in crashes(recording.events, seed=seed)]

    assert described(7) == described(7)
    assert described(7) != described(8)


def recorded(place):
    recording = record(place / "store", EXTENTS.lives, EXTENTS.steps)
    return recording, recording.marks[-1].held


def test_the_judge_sees_a_lost_page(place):
    recording, held = recorded(place)
    shutil.rmtree(place / "store")
    verdict = judge(place / "store", recording.lives, recording.prompts, held)
    spec = recording.lives[0].spec
    assert verdict.lost_pages == 2 * sum(page_count(tokens, spec) for tokens in held.values())  # asked twice
    assert not verdict.good


def test_the_judge_sees_a_wrong_page(place, monkeypatch):
    recording, held = recorded(place)
    monkeypatch.setattr("tests.campaigns.prompts.matches", lambda page, number, end, spec: end != 16)
    verdict = judge(place / "store", recording.lives, recording.prompts, held)
    assert verdict.wrong_pages > 0
    assert not verdict.good


def test_the_judge_sees_a_directory_over_its_cap(place):
    recording, held = recorded(place)
    (place / "store" / "forgotten").write_bytes(bytes(recording.lives[0].disk_bytes))
    verdict = judge(place / "store", recording.lives, recording.prompts, held)
    assert verdict.over_capacity > 0
    assert verdict.problems, "the store's own check sees it too"


def test_marks_say_what_must_be_there(place):
    recording, held = recorded(place)
    assert recording.must_have(0) == {}
    assert recording.must_have(len(recording.events)) == held
    assert any(recording.must_have(at) for at in range(len(recording.events)))
    for at in range(len(recording.events)):
        for name, tokens in recording.must_have(at).items():
            assert tokens <= recording.prompts[name]
