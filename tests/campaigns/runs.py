"""Running the campaign: as many trials of every fault as are asked for, and real kills."""

from __future__ import annotations

import logging
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.campaigns.campaign import (
    FAULTS,
    Trial,
    crash_trials,
    damage_trials,
    run_trials,
    trials_of,
)
from tests.campaigns.damage import DAMAGES
from tests.campaigns.disk import CRASHES
from tests.campaigns.kills import Killer
from tests.campaigns.mortal import LIVES
from tests.campaigns.prompts import odd_life
from tests.campaigns.scripts import random_scene
from tests.campaigns.verdict import Verdict
from tierstore_tools.report import Phases

KILLED = "kill -9"
_PROGRESS_EVERY = 5  # runs
_TRIES = 50  # random scripts, at most, when one fault is rare


@dataclass(frozen=True, slots=True)
class FaultRow:
    """All runs of one fault."""

    fault: str
    runs: int
    wrong_pages: int  # served, and not what was saved
    lost_pages: int  # acknowledged as durable, and not served
    over_capacity: int  # times the directory was found to take more than its cap
    failed_checks: int  # times a store did not open, broke its own check, or promised what it did not have
    recovery_s: float  # from open to the answer to the first lookup, the longest

    @property
    def good(self) -> bool:
        return not (self.wrong_pages or self.lost_pages or self.over_capacity or self.failed_checks)


@dataclass(frozen=True, slots=True)
class FaultsResult:
    """``failures`` says of the first bad runs what was done to them, one line each."""

    seed: int
    rows: tuple[FaultRow, ...]
    failures: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "seed": self.seed,
            "rows": [asdict(row) for row in self.rows],
            "failures": list(self.failures),
        }


def run(directory: Path, phases: Phases, *, runs: int, seed: int) -> FaultsResult:
    """``runs`` trials of each fault under ``directory``. The same seed does the same (but for the moments of
    the kills)."""
    logging.disable(logging.WARNING)  # the stores have much to complain about
    rows = []
    failures: list[str] = []
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix="faults-") as own:
            with phases.phase("preparing", measurable=False):
                chosen = _choose(Path(own), runs, seed)
            rows.append(_kills(Path(own), phases, runs, seed, failures))
            for fault in FAULTS:
                rows.append(_row(fault, chosen[fault], Path(own), phases, failures))
    finally:
        logging.disable(logging.NOTSET)
    return FaultsResult(seed, tuple(rows), tuple(failures))


def _choose(directory: Path, runs: int, seed: int) -> dict[str, list[Trial]]:
    """``runs`` trials of each fault: from the short scripts, then from random ones, then again."""
    pool: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials_of(FAULTS, directory, seed=seed):
        pool[trial.fault].append(trial)
    for more in range(seed, seed + _TRIES):
        if all(len(pool[fault]) >= runs for fault in (*CRASHES, *DAMAGES)):
            break
        for trial in _more_trials(directory, more):
            pool[trial.fault].append(trial)
    chance = random.Random(seed)
    return {fault: _sample(pool[fault], runs, chance) for fault in FAULTS}


def _more_trials(directory: Path, seed: int) -> Iterator[Trial]:
    yield from crash_trials(random_scene(seed), directory, seed=seed)
    yield from damage_trials(odd_life(), directory, seed=seed + 1)


def _sample(pool: list[Trial], count: int, chance: random.Random) -> list[Trial]:
    repeated = pool * (count // len(pool))
    return repeated + chance.sample(pool, count - len(repeated))


def _row(fault: str, trials: list[Trial], directory: Path, phases: Phases, failures: list[str]) -> FaultRow:
    total = Verdict()
    with phases.phase(fault) as phase:
        for done, (trial, verdict) in enumerate(run_trials(trials, directory)):
            total.add(verdict)
            if not verdict.good:
                failures.append(f"{trial.describe()}: {verdict}")
            if done % _PROGRESS_EVERY == 0:
                phase.update(done / len(trials))
    return _summed(fault, len(trials), total)


def _kills(directory: Path, phases: Phases, runs: int, seed: int, failures: list[str]) -> FaultRow:
    total = Verdict()
    done = 0
    with phases.phase(KILLED) as phase:
        for number, life in enumerate(LIVES):
            share = (runs + number) // len(LIVES)
            with Killer(directory / life, life, seed=seed + number) as killer:
                for _ in range(share):
                    verdict = killer.kill_one()
                    total.add(verdict)
                    done += 1
                    if not verdict.good:
                        failures.append(f"{KILLED}, {life}, life {done}: {verdict}")
                    phase.update(done / runs)
    return _summed(KILLED, done, total)


def _summed(fault: str, runs: int, total: Verdict) -> FaultRow:
    return FaultRow(
        fault,
        runs,
        total.wrong_pages,
        total.lost_pages,
        total.over_capacity,
        len(total.problems),
        total.recovery_s,
    )
