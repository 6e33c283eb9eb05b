"""Other processes of this machine: a port for them, what they hold of memory, what they have computed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_CPUCLOCK_SCHED = 2


def free_port() -> int:
    """A port at loopback that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether something does at a port of loopback."""
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


def memory_bytes(pids: Iterable[int]) -> int:
    """Memory of these processes and all that they started, shared pages counted once (PSS). The kernel walks
    over all of their pages for it, .1 s for a few GiB: not while they are timed."""
    return sum(_kib(each, "smaps_rollup", "Pss") for pid in pids for each in _family(pid))


def private_bytes(pids: Iterable[int]) -> int:
    """As much of it as is no file's and no shared memory. The kernel counts these anyway: they may be timed
    meanwhile. Pages that a fork has shared count for each."""
    return sum(_kib(each, "status", "RssAnon") for pid in pids for each in _family(pid))


def shared_bytes(pids: Iterable[int]) -> int:
    """As much of it as is shared memory; of pages that several have, a share each."""
    return sum(_kib(each, "smaps_rollup", "Pss_Shmem") for pid in pids for each in _family(pid))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, ended threads included; 0 if there is no such process."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)  # as clock_getcpuclockid(3) encodes it
    except OSError:
        return 0.0


def core_seconds(pids: Iterable[int]) -> float:
    """What these processes and all that they started have computed so far."""
    return sum(cpu_seconds(each) for pid in pids for each in _family(pid))


def _family(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += _family(int(child))
    return found


def _kib(pid: int, file: str, name: str) -> int:
    """A line of /proc/PID/``file``, in bytes; 0 where there is none."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
