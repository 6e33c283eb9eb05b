"""Real processes and real SIGKILLs at the level of the store."""

from __future__ import annotations

import pytest

from tests.campaigns.kills import Killer
from tests.campaigns.mortal import LIVES
from tests.campaigns.verdict import Verdict

KILLS = 12
MANY_KILLS = 100


@pytest.mark.parametrize(
    ("seed", "kills"),
    [(0, KILLS), *(pytest.param(each, MANY_KILLS, marks=pytest.mark.soak) for each in range(1, 5))],
)
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_kill_9(tmp_path, life, seed, kills):
    """12 kills of each of three kinds of store; on the real disk. The soak's 1,200 more are twelve tests, so
    that one that was interrupted can go on where it ended."""
    total = Verdict()
    with Killer(tmp_path / "store", life, seed=seed) as killer:
        for number in range(kills):
            verdict = killer.kill_one()
            assert verdict.good, f"seed {seed}, kill {number}: {verdict}"
            total.add(verdict)
    assert killer.acknowledged > kills / 4, "the writers were killed before they had done anything"
    assert killer.durable
