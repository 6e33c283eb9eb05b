"""Many independent replays of one trace, one after the other or on several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, Protocol, TypeVar

from tierstore.errors import TierStoreError

Progress = Callable[[float], None]  # the share that is done, 0 to 1

Shared = TypeVar("Shared", contravariant=True)
Case = TypeVar("Case", contravariant=True)
Row = TypeVar("Row", covariant=True)
_Shared = TypeVar("_Shared")
_Case = TypeVar("_Case")
_Row = TypeVar("_Row")

_POLL_S = 0.1


class Work(Protocol, Generic[Shared, Case, Row]):
    """What is done for a case: a function at the top level of a module, for it is sent to the processes."""

    def __call__(self, shared: Shared, case: Case, progress: Progress, /) -> Row: ...


def run_all(
    work: Work[_Shared, _Case, _Row],
    shared: _Shared,
    cases: Sequence[_Case],
    *,
    jobs: int,
    progress: Progress = lambda _: None,
) -> list[_Row]:
    """``work(shared, case, progress)`` of every case, in their order, on at most ``jobs`` processes (1: in
    this one). ``shared`` is sent to each process once. Raises :class:`TierStoreError` when one dies."""
    jobs = min(jobs, len(cases))
    if jobs > 1:
        return _on_processes(work, shared, cases, jobs, progress)
    rows = []
    for number, case in enumerate(cases):

        def advance(share: float, done: int = number) -> None:
            progress((done + share) / len(cases))

        rows.append(work(shared, case, advance))
    return rows


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


class _Shares(Protocol):
    """What every process writes its progress to, by number of the case. The last one is not a case: when it
    is not 0, all are to stop."""

    def __getitem__(self, case: int, /) -> float: ...

    def __setitem__(self, case: int, share: float, /) -> None: ...


class _Worker:
    """What a process was given when it started."""

    work: Any
    shared: Any
    shares: _Shares


class _Stopped(Exception):
    """The results are not wanted any more."""


def _start(work: object, shared: object, shares: _Shares) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process tells the others
    _Worker.work, _Worker.shared, _Worker.shares = work, shared, shares


def _work_on(number: int, case: object) -> Any:
    def advance(share: float) -> None:
        _Worker.shares[number] = share
        if _Worker.shares[-1]:
            raise _Stopped

    return _Worker.work(_Worker.shared, case, advance)


def _on_processes(
    work: Work[_Shared, _Case, _Row],
    shared: _Shared,
    cases: Sequence[_Case],
    jobs: int,
    progress: Progress,
) -> list[_Row]:
    # Not forked: the thread that draws the progress may hold a lock at that moment.
    context = multiprocessing.get_context("spawn")
    shares = context.Array("d", len(cases) + 1, lock=False)
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(work, shared, shares))
    try:
        futures: list[Future[_Row]] = [pool.submit(_work_on, at, case) for at, case in enumerate(cases)]
        pending = set(futures)
        while pending:
            _, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            done = (1.0 if future.done() else share for future, share in zip(futures, shares, strict=False))
            progress(sum(done) / len(cases))
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise TierStoreError("a replay process ended early (out of memory?): use fewer --jobs") from error
    finally:
        shares[len(cases)] = 1.0
        pool.shutdown(cancel_futures=True)
