"""Real processes and real SIGKILLs at the level of the store."""

from __future__ import annotations

import pytest

from tierstore.testing.faults import Killer, Verdict
from tierstore.testing.faults.mortal import LIVES


@pytest.mark.parametrize("kills", [100, pytest.param(400, marks=pytest.mark.soak)])
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_kill_9(tmp_path, life, kills):
    """100 kills of each of three kinds of store; on the real disk."""
    total = Verdict()
    with Killer(tmp_path / "store", life, seed=kills) as killer:
        for _ in range(kills):
            verdict = killer.kill_one()
            assert verdict.good, f"seed {kills}: {verdict}"
            total.add(verdict)
    assert killer.acknowledged > kills / 4, "the writers were killed before they had done anything"
    assert killer.durable
