"""A real process, killed with SIGKILL at random moments, over and over, on one directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from tests.tierstore.tiers.disk.killed_writer import OPTIONS, payload
from tests.tierstore.tiers.disk.shelf import Shelf

WRITER = "tests.tierstore.tiers.disk.killed_writer"


class Ledger:
    """What the killed writers said, and so what must be there and what may."""

    def __init__(self):
        self.durable = {}  # serial -> (seed, nbytes)
        self.leaving = {}  # removal announced, not known to have happened

    def hear(self, line):
        if line.startswith("+"):
            serial, seed, nbytes = map(int, line[1:].split())
            self.durable[serial] = (seed, nbytes)
        elif line.startswith("-"):
            self.leaving[int(line[1:])] = self.durable.pop(int(line[1:]))
        elif line.startswith("~"):
            del self.leaving[int(line[1:])]


def run_and_kill(path, seed, ledger, delay_s):
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))
    writer = subprocess.Popen(
        [sys.executable, "-m", WRITER, str(path), str(seed)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "opened\n"
    threading.Timer(delay_s, writer.kill).start()
    for line in writer.stdout:
        if line.endswith("\n"):
            ledger.hear(line)
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL


def verify(path, ledger):
    shelf = Shelf(path, **OPTIONS)
    records = {record.serial: record for record in shelf.tier.records()}
    assert ledger.durable.keys() <= records.keys(), "an acknowledged page is lost"
    for record, data in zip(records.values(), shelf.read(list(records.values())), strict=True):
        known = ledger.durable.get(record.serial) or ledger.leaving.get(record.serial)
        if known is not None:
            assert data == payload(*known), f"page {record.serial} is not what was saved"
        else:  # committed, but killed before it could say so
            assert data is not None, f"page {record.serial} was committed without its payload"
    shelf.close()
    return records


@pytest.mark.parametrize("kills", [30, pytest.param(1000, marks=pytest.mark.soak)])
@pytest.mark.timeout(3600)
def test_what_was_acknowledged_survives_kills(path, kills):
    chance = random.Random(kills)
    ledger = Ledger()
    for seed in range(kills):
        run_and_kill(path, seed, ledger, delay_s=chance.uniform(0, 0.2))
        records = verify(path, ledger)
        # The next writer knows only what is there. Pages that were committed unheard have no seed.
        ledger.leaving.clear()
        ledger.durable = {serial: known for serial, known in ledger.durable.items() if serial in records}
    assert ledger.durable
