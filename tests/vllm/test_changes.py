"""Weights that change while an engine runs: what it has stored before is not found any more."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.vllm import changes, models
from tests.vllm.engines import ONE_THREAD
from tests.vllm.harness import patient
from tierstore_tools.vllm.engine import ENVIRONMENT


def test_whatever_may_have_changed_the_weights_begins_anew(model, daemon):
    """Resets that fail because a load is on its way, updates by RPC, versions, sleep; and what changes
    nothing costs nothing."""
    events = [*changes.HARMLESS, *changes.CHANGES]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.vllm.changes"),
            *(str(model(models.LLAMA)), json.dumps(patient(daemon.url)), *events),
        ],
        env={**ENVIRONMENT, **ONE_THREAD, **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    found = [json.loads(line.removeprefix("found ")) for line in lines]
    assert found == [
        [event, changes.ALIGNED, changes.ALIGNED if event in changes.HARMLESS else 0] for event in events
    ], done.stdout[-4000:]
    assert not done.returncode, done.stdout[-4000:]
