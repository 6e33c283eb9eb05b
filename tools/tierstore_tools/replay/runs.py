"""Every policy at every capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tierstore.policy import POLICIES
from tierstore_tools.replay.hinting import HintSource
from tierstore_tools.replay.oracle import Belady, BeladyHints, NextUses
from tierstore_tools.replay.packed import PackedTrace
from tierstore_tools.replay.processes import Progress, run_all, usable_processors
from tierstore_tools.replay.simulator import Hinter, Simulator

_WORTH_PROCESSES_BLOCKS = 500_000  # of all cases together: starting processes takes half a second


@dataclass(frozen=True, slots=True)
class Case:
    """One replay."""

    policy: str
    capacity_blocks: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result. ``hit_rate`` is hit blocks over all blocks of all prompts."""

    policy: str
    capacity_blocks: int
    capacity_tokens: int
    hints: str
    hit_rate: float
    hit_blocks: int
    evicted_blocks: int


def run(
    trace: PackedTrace,
    cases: Sequence[Case],
    *,
    hints: HintSource,
    jobs: int | None = None,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """Replay every case, in this order, with hints from the source. ``jobs`` is the most processes (None:
    the processors that there are, where that is worth starting them)."""
    jobs = jobs or default_jobs(trace.blocks * len(cases))
    return run_all(_replay, Subject(trace, hints), cases, jobs=jobs, progress=progress)


def default_jobs(blocks: int) -> int:
    """The number of processes for replays of so many blocks together."""
    return usable_processors() if blocks > _WORTH_PROCESSES_BLOCKS else 1


class Subject:
    """What every case of a run shares: the trace, where hints come from, and the future, once it is asked
    for."""

    def __init__(self, trace: PackedTrace, hints: HintSource) -> None:
        self.trace = trace
        self.hints = hints

    @cached_property
    def uses(self) -> NextUses:
        """The next use of every block."""
        return NextUses(self.trace)

    def hinter(self) -> Hinter | None:
        """One for a single pass over the trace."""
        return self.hints.hinter(lambda: self.uses)


def _replay(subject: Subject, case: Case, progress: Progress) -> Row:
    trace = subject.trace
    belady = case.policy == Belady.name
    policy = Belady() if belady else POLICIES[case.policy]()
    hinter = BeladyHints(subject.uses) if belady else subject.hinter()
    simulator = Simulator(policy, case.capacity_blocks, hints=hinter)
    for number, request in enumerate(trace):
        if number % 64 == 0:
            progress(number / len(trace))
        simulator.step(request)
    result = simulator.result
    return Row(
        case.policy,
        case.capacity_blocks,
        case.capacity_blocks * trace.block_tokens,
        "none" if belady else subject.hints.name,
        result.hit_rate,
        result.hit_blocks,
        result.evicted_blocks,
    )
