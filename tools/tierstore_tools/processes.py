"""Other processes of this machine: free ports, memory, processor time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CPUCLOCK_SCHED = 2


def listens(port: int) -> bool:
    """Return whether something listens at a port of loopback."""
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory (PSS) of these processes and their children; shared pages count once. Do not call it
    while the processes are timed: the kernel visits all of their pages, which takes .1 s for a few GiB."""
    return sum(_kib(each, "smaps_rollup", "Pss") for pid in pids for each in _family(pid))


def private_bytes(pids: Iterable[int]) -> int:
    """Return the private anonymous memory of these processes. The call reads a counter of the kernel, so it
    does not disturb processes that are timed. Pages shared by a fork count for each process."""
    return sum(_kib(each, "status", "RssAnon") for pid in pids for each in _family(pid))


def shared_bytes(pids: Iterable[int]) -> int:
    """Return the shared memory of these processes in bytes. A page that several processes share is divided
    between them."""
    return sum(_kib(each, "smaps_rollup", "Pss_Shmem") for pid in pids for each in _family(pid))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, ended threads included; 0 if there is no such process."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) encodes it
    except OSError:
        return 0.0


def core_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of these processes and their children so far."""
    return sum(cpu_seconds(each) for pid in pids for each in _family(pid))


def _family(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += _family(int(child))
    return found


def _kib(pid: int, file: str, name: str) -> int:
    """Return a line of /proc/PID/``file`` in bytes; 0 if there is none."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
