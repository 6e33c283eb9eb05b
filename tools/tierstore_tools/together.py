"""Several processes that do something at the same time: what clients of one daemon get between them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.synchronize
import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from tierstore.errors import TierStoreError

R = TypeVar("R")
Meet = Callable[[], object]
"""Wait until every process has come here."""

_MEET_S = 120.0
_CPUCLOCK_SCHED = 2


class Together(Generic[R]):
    """Calls ``work(meet, *arguments)`` once in a process for each of ``arguments``; one of them needs no
    process of its own."""

    def __init__(self, work: Callable[..., R], arguments: Sequence[tuple[Any, ...]]) -> None:
        self._work = work
        self._arguments = arguments

    def run(self) -> list[R]:
        """Their results. Raises :class:`TierStoreError` when one of them fails."""
        if len(self._arguments) == 1:
            return [self._work(lambda: None, *self._arguments[0])]
        context = multiprocessing.get_context("spawn")  # nobody may inherit our threads
        barrier = context.Barrier(len(self._arguments))
        pipes, processes = [], []
        for arguments in self._arguments:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(theirs, barrier, self._work, arguments), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [_result(pipe) for pipe in pipes]
        finally:
            for process in processes:
                process.join(_MEET_S)
                process.kill()


def _run(
    pipe: Connection,
    barrier: multiprocessing.synchronize.Barrier,
    work: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    try:
        pipe.send((True, work(lambda: barrier.wait(_MEET_S), *arguments)))
    except Exception:  # noqa: BLE001  # it is raised again where the results are wanted
        barrier.abort()
        pipe.send((False, traceback.format_exc()))


def _result(pipe: Connection) -> Any:
    try:
        good, result = pipe.recv()
    except EOFError:
        raise TierStoreError("a client process ended without a result") from None
    if not good:
        raise TierStoreError(f"a client process failed: {result}")
    return result


def cpu_seconds(pid: int) -> float:
    """What a process has computed so far, threads that have ended included. 0 for one that is not there."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) spells it
    except OSError:
        return 0.0


def share_cores_of(pid: int) -> int:
    """Run on the cores that another process may use. Returns how many those are."""
    cores = os.sched_getaffinity(pid)
    os.sched_setaffinity(0, cores)
    return len(cores)
