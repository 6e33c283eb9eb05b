"""A real process, killed with SIGKILL at random moments, over and over, on one directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading

import pytest

from tests.portions import portion
from tests.tierstore.tiers.disk.killed_writer import OPTIONS, payload
from tests.tierstore.tiers.disk.shelf import Shelf

WRITER = "tests.tierstore.tiers.disk.killed_writer"


class PageTable:
    """What the killed writers said."""

    def __init__(self):
        self.announced = {}  # serial -> (seed, nbytes)
        self.durable = set()  # serials that must be there
        self.removed = set()  # serials that must not be there

    def hear(self, line):
        serial, *page = map(int, line[1:].split())
        if line.startswith("?"):
            self.announced[serial] = page
        elif line.startswith("-"):
            self.durable.discard(serial)
        elif line.startswith("+"):
            self.durable.add(serial)
        else:
            assert line.startswith("~")
            self.removed.add(serial)


def run_and_kill(path, seed, page_table, delay_s):
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))
    writer = subprocess.Popen(
        [sys.executable, "-m", WRITER, str(path), str(seed)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "opened\n"
    threading.Timer(delay_s, writer.kill).start()
    for line in writer.stdout:
        if line.endswith("\n"):
            page_table.hear(line)
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL


def verify(path, page_table):
    shelf = Shelf(path, **OPTIONS)
    records = {record.serial: record for record in shelf.records()}
    assert page_table.durable <= records.keys(), "an acknowledged page is lost"
    assert not page_table.removed & records.keys(), "a removed page is back"
    for record, data in zip(records.values(), shelf.read(list(records.values())), strict=True):
        assert data == payload(*page_table.announced[record.serial]), (
            f"page {record.serial} is not what was saved"
        )
    shelf.close()
    page_table.durable = set(records)  # what was committed unheard counts from now on


@pytest.mark.parametrize("kills", portion(6, 1000))
@pytest.mark.timeout(3600)
def test_what_was_acknowledged_survives_kills(path, kills):
    chance = random.Random(kills)
    page_table = PageTable()
    for seed in range(kills):
        run_and_kill(path, seed, page_table, delay_s=chance.uniform(0, 0.2))
        verify(path, page_table)
    while not page_table.durable or not page_table.removed:  # the machine is busy: the writers came to little
        seed += 1
        run_and_kill(path, seed, page_table, delay_s=chance.uniform(0.2, 2))
        verify(path, page_table)
