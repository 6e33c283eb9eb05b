"""Other processes of this machine: a port for them, what they hold of memory, what they have computed."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tierstore_tools.together import cpu_seconds


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
    """Memory of these processes and all that they started, shared pages counted once (PSS)."""
    return sum(_pss(each, "Pss") for pid in pids for each in _family(pid))


def shared_bytes(pids: Iterable[int]) -> int:
    """As much of it as is shared memory; of pages that several have, a share each."""
    return sum(_pss(each, "Pss_Shmem") for pid in pids for each in _family(pid))


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


def _pss(pid: int, kind: str) -> int:
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) << 10
    return 0
