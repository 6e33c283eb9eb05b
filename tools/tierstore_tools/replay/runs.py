"""Run independent replays of one trace, in one process or several. Each result is reported as soon as it is
ready. A :class:`Case` is a policy at one capacity, a :class:`TieredCase` a policy through the tiers of a
machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

from tierstore.errors import TierStoreError
from tierstore_tools.replay.hints import BeladyHints, Hinter, HintSource, NextUses
from tierstore_tools.replay.machine import Machine
from tierstore_tools.replay.policies import Belady
from tierstore_tools.replay.simulator import Simulator
from tierstore_tools.replay.tiered import TieredEngine, TieredRow
from tierstore_tools.replay.trace import Trace, TraceRequest

Progress: TypeAlias = Callable[[float], None]  # called with the share of the work that is done, from 0 to 1

# blocks of all cases together, from which several processes pay: each takes half a second to start
_WORTH_PROCESSES_BLOCKS = 200_000
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One replay through a single tier."""

    policy: str
    capacity_blocks: int


@dataclass(frozen=True, slots=True)
class TieredCase:
    """One replay through the tiers of a machine."""

    policy: str
    prefetch: bool
    machine: Machine


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """The result of a :class:`Case`. ``hit_rate`` is hit blocks over all blocks of all prompts."""

    policy: str
    capacity_blocks: int
    capacity_tokens: int
    hints: str
    hit_rate: float
    hit_blocks: int
    evicted_blocks: int


AnyCase: TypeAlias = "Case | TieredCase"
AnyRow: TypeAlias = "ReplayRow | TieredRow"
Done: TypeAlias = Callable[[int, AnyRow], None]  # called with the number of a case and its result


class Subject:
    """The shared state of all cases: the trace, the source of hints, and the trace's future (computed
    once)."""

    def __init__(self, trace: Trace, hints: HintSource) -> None:
        self._trace = trace
        self._hints = hints

    @cached_property
    def _uses(self) -> NextUses:
        return NextUses(self._trace)

    def replay(self, case: AnyCase, progress: Progress) -> AnyRow:
        """Run one case and return its result."""
        hinter = self._hints.hinter(lambda: self._uses)
        if isinstance(case, TieredCase):
            return self._through_tiers(case, hinter, progress)
        belady = case.policy == Belady.name
        simulator = Simulator(
            case.policy, case.capacity_blocks, hints=BeladyHints(self._uses) if belady else hinter
        )
        for request in self._requests(progress):
            simulator.step(request)
        result = simulator.result
        return ReplayRow(
            case.policy,
            case.capacity_blocks,
            case.capacity_blocks * self._trace.block_tokens,
            "none" if belady else self._hints.name,
            result.hit_rate,
            result.hit_blocks,
            result.evicted_blocks,
        )

    def _through_tiers(self, case: TieredCase, hinter: Hinter | None, progress: Progress) -> TieredRow:
        engine = TieredEngine(
            case.machine,
            case.policy,
            block_tokens=self._trace.block_tokens,
            prefetch=case.prefetch,
            hints=hinter,
            hints_name=self._hints.name,
        )
        for request in self._requests(progress):
            engine.step(request)
        return engine.row()

    def _requests(self, progress: Progress) -> Iterator[TraceRequest]:
        for number, request in enumerate(self._trace):
            if number % 64 == 0:
                progress(number / len(self._trace))
            yield request


def run(
    trace: Trace,
    cases: Sequence[AnyCase],
    *,
    hints: HintSource,
    done: Done,
    jobs: int | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Replay every case with hints from the source. ``done`` is called in this process when a case ends.
    ``jobs`` is the most processes (None: one per processor if there is enough work). Raises
    :class:`TierStoreError` if a process dies."""
    if jobs is None:
        worth_it = trace.blocks * len(cases) > _WORTH_PROCESSES_BLOCKS
        jobs = len(os.sched_getaffinity(0)) if worth_it else 1
    subject = Subject(trace, hints)
    if min(jobs, len(cases)) > 1:
        _on_processes(subject, cases, min(jobs, len(cases)), done, progress)
        return
    for number, case in enumerate(cases):

        def advance(share: float, before: int = number) -> None:
            progress((before + share) / len(cases))

        done(number, subject.replay(case, advance))


# -- processes -------------------------------------------------------------------------------------------


class _Shares(Protocol):
    """The progress of every process, by number of the case. The last entry is no case: if it is not 0, all
    processes must stop."""

    def __getitem__(self, case: int, /) -> float: ...

    def __setitem__(self, case: int, share: float, /) -> None: ...


class _Worker:
    """The state of a worker process, set at its start."""

    subject: Subject
    shares: _Shares


class _Stopped(Exception):
    """Raised in a worker process when the run was stopped and results are not needed any more."""


def _start(subject: Subject, shares: _Shares) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process stops the others
    _Worker.subject, _Worker.shares = subject, shares
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker process if its parent is killed, also while it waits for work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work_on(number: int, case: AnyCase) -> AnyRow:
    def advance(share: float) -> None:
        _Worker.shares[number] = share
        if _Worker.shares[-1]:
            raise _Stopped

    return _Worker.subject.replay(case, advance)


def _on_processes(
    subject: Subject, cases: Sequence[AnyCase], jobs: int, done: Done, progress: Progress
) -> None:
    # Processes are not forked, because the thread that draws the progress may hold a lock.
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(cases) + 1, lock=False)
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(subject, shares))
    try:
        numbers: dict[Future[AnyRow], int] = {
            pool.submit(_work_on, number, case): number for number, case in enumerate(cases)
        }
        pending = set(numbers)
        while pending:
            ended, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in ended:
                shares[numbers[future]] = 1.0
                done(numbers[future], future.result())
            progress(sum(shares[number] for number in range(len(cases))) / len(cases))
    except BrokenProcessPool as error:
        raise TierStoreError("a replay process ended early (out of memory?): use fewer --jobs") from error
    finally:
        shares[len(cases)] = 1.0
        pool.shutdown(cancel_futures=True)
