"""Damage at rest, calls that fail or lie, disks that hang: nothing wrong is served, nothing else is lost."""

from __future__ import annotations

import pytest

from tests.campaigns.campaign import damage_trials, disturbance_trials, stall_trials
from tests.campaigns.damage import DAMAGES
from tests.campaigns.disturbance import DISTURBANCES
from tests.campaigns.prompts import inline_life, odd_life
from tests.campaigns.scripts import SCENES
from tests.portions import portion

EXTENTS = SCENES[0].lives[0]


@pytest.mark.parametrize("life", [EXTENTS, inline_life(), odd_life()], ids=["extents", "inline", "odd sizes"])
@pytest.mark.parametrize("step", portion(3, 1))
def test_every_damage_to_every_page(place, prove, life, step):
    """Each kind of damage to every ``step``-th page."""
    trials = damage_trials(life, place)
    assert life.inline_bytes or {trial.fault for trial in trials} == set(DAMAGES)
    assert prove(_every(step, trials)) > 50 / step


@pytest.mark.parametrize("step", portion(12, 1))
@pytest.mark.parametrize(
    ("life", "lasting"), [(EXTENTS, [False, True]), (odd_life(), [False])], ids=["extents", "odd sizes"]
)
def test_every_fault_of_every_system_call(place, prove, life, lasting, step):
    """Each kind of fault at every ``step``-th call."""
    trials = disturbance_trials(life, place, lasting=lasting)
    assert {trial.fault for trial in trials} == set(DISTURBANCES)
    assert prove(_every(step, trials)) > 100 / step


def _every(step, trials):
    """Every ``step``-th trial of each fault."""
    faults = dict.fromkeys(trial.fault for trial in trials)
    return [trial for fault in faults for trial in [t for t in trials if t.fault == fault][::step]]


def test_a_disk_that_hangs_keeps_nobody_waiting_who_has_a_deadline(prove):
    assert prove(stall_trials(EXTENTS)) == 3
