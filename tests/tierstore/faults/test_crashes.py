"""Every crash at every write point of the short scripts, and of random long ones."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.campaigns.campaign import crash_trials
from tests.campaigns.disk import CRASHES
from tests.campaigns.scripts import HARDLY_SMALLER_INDEX, SCENES, SMALLER_INDEX, random_scene
from tests.portions import chosen
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO

BY_NAME = {scene.name: scene for scene in SCENES}


def is_creation(trial):
    """A crash while the index file is being made: see the expected failure below."""
    return "(Created)" in trial.describe() and trial.fault == "torn write"


def is_cut_back(trial):
    """A smaller cap, and the power fails before the cut of the extents is durable: expected to fail, too."""
    return trial.describe().startswith("smaller cap") and trial.fault in ("lost write", "reordered write")


def crashes_of(name, place):
    trials = crash_trials(BY_NAME[name], place)
    assert {trial.fault for trial in trials} >= set(CRASHES) - {"reordered write"}
    return [trial for trial in trials if not (is_creation(trial) or is_cut_back(trial))]


@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_is_wrong_lost_or_over_the_cap_after_a_crash(place, prove, name):
    """Killed at a twelfth of the write points; of what a power failure may leave there, a thirty-sixth."""
    trials = crashes_of(name, place)
    assert len(trials) > 200
    killed = [trial for trial in trials if trial.fault == "crash"]
    others = [trial for trial in trials if trial.fault != "crash"]
    draw = random.Random(name)
    prove([*draw.sample(killed, len(killed) // 12), *draw.sample(others, len(others) // 36)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BY_NAME)
def test_nothing_is_wrong_lost_or_over_the_cap_after_any_crash(place, prove, name):
    prove(crashes_of(name, place))


@pytest.mark.parametrize("count", chosen([1, 2, 3, 4, 5], 2))
def test_a_sync_that_failed_acknowledges_nothing(place, prove, count):
    """And no later sync makes up for it: the kernel reports a lost write once."""
    syncs = []

    def nth(call):
        syncs.append(call.kind == "sync")
        return call.kind == "sync" and sum(syncs) == count

    def over(io):
        faulty = FaultyIO(io)
        faulty.set(Fault(nth, Fail(errno.EIO)))
        return faulty

    trials = crash_trials(BY_NAME["extents"], place, over=over)
    assert sum(syncs) >= count, "there was no such sync"
    prove(trial for trial in trials if trial.fault in ("crash", "lost write", "reordered write"))


def test_a_crash_while_the_index_is_made_leaves_a_directory_that_opens(place, prove):
    prove(trial for trial in crash_trials(BY_NAME["extents"], place) if is_creation(trial))


def test_a_smaller_cap_holds_after_any_crash(place, prove):
    prove(trial for trial in crash_trials(BY_NAME["smaller cap"], place) if is_cut_back(trial))


@pytest.mark.parametrize("scene", [SMALLER_INDEX, HARDLY_SMALLER_INDEX], ids=lambda scene: scene.name)
def test_nothing_is_lost_while_a_smaller_index_is_made(place, prove, scene):
    """Until the new index takes the old one's name the old one is whole, and what it kept is kept again."""
    trials = crash_trials(scene, place)
    killed = [trial for trial in trials if trial.fault == "crash"]
    others = [trial for trial in trials if trial.fault != "crash" and not is_creation(trial)]
    assert len(killed) > 40
    assert sum("(Renamed)" in trial.describe() for trial in killed) > 1, "no smaller index was made"
    prove([*killed[::10], *others[::300]])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scene", [SMALLER_INDEX, HARDLY_SMALLER_INDEX], ids=lambda scene: scene.name)
def test_nothing_is_lost_by_any_crash_while_a_smaller_index_is_made(place, prove, scene):
    prove(crash_trials(scene, place))


def prove_some_of(seed, place, prove, most):
    scene = random_scene(seed)
    note(f"{scene}")
    trials = [trial for trial in crash_trials(scene, place, seed=seed) if not is_creation(trial)]
    step = max(len(trials) // most, 1)
    prove(trials[seed % step :: step])


@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 16))
def test_some_crashes_of_random_scripts(seed, place, prove):
    prove_some_of(seed, place, prove, most=20)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@settings(
    max_examples=300,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 1 << 32))
def test_many_crashes_of_random_scripts(seed, place, prove):
    prove_some_of(seed, place, prove, most=200)
