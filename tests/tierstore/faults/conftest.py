"""Where the campaign's stores are made, and how a trial's failure is told."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.campaigns.campaign import run_trials

_ENOUGH_BYTES = 256 << 20


@pytest.fixture
def place(tmp_path):
    """A directory for many small stores: in memory where there is some, since the disk model is our own."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < _ENOUGH_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="tierstore-test-") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Stores complain about every injected fault; thousands of tracebacks would be kept for the report."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture
def prove(place):
    """Runs trials and fails with what was done in the first bad ones. Returns how many ran."""

    def prove_(trials):
        bad = []
        runs = 0
        for trial, verdict in run_trials(trials, place):
            runs += 1
            if not verdict.good:
                bad.append(f"{trial.describe()}\n    {verdict}")
        assert not bad, f"{len(bad)} of {runs} trials:\n" + "\n".join(bad[:5])
        return runs

    return prove_
