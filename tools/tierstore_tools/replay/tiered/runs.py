"""Every policy through the tiers, without and with prefetching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore_tools.replay.hinting import HintSource
from tierstore_tools.replay.packed import PackedTrace
from tierstore_tools.replay.processes import Progress, run_all
from tierstore_tools.replay.runs import Subject
from tierstore_tools.replay.tiered.engine import Engine
from tierstore_tools.replay.tiered.machine import Machine
from tierstore_tools.replay.tiered.result import TieredRow


@dataclass(frozen=True, slots=True)
class TieredCase:
    """One replay."""

    policy: str
    prefetch: bool


def run_tiered(
    trace: PackedTrace,
    machine: Machine,
    cases: Sequence[TieredCase],
    *,
    hints: HintSource,
    jobs: int,
    progress: Progress = lambda _: None,
) -> list[TieredRow]:
    """Replay every case, in this order."""
    return run_all(_replay, (Subject(trace, hints), machine), cases, jobs=jobs, progress=progress)


def _replay(shared: tuple[Subject, Machine], case: TieredCase, progress: Progress) -> TieredRow:
    subject, machine = shared
    trace = subject.trace
    engine = Engine(
        machine,
        case.policy,
        block_tokens=trace.block_tokens,
        prefetch=case.prefetch,
        hints=subject.hinter(),
        hints_name=subject.hints.name,
    )
    for number, request in enumerate(trace):
        if number % 64 == 0:
            progress(number / len(trace))
        engine.step(request)
    return engine.row()
