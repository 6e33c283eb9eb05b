"""How much memory and disk this machine has: for checks, warnings and reports."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system


class MemoryBytes(NamedTuple):
    total: int
    available: int


def memory_bytes() -> MemoryBytes:
    """Memory of this machine, or of the container that this process is in. 0 where /proc does not say."""
    figures = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _text(_MEMINFO), re.MULTILINE)
    }
    total, available = figures.get("MemTotal", 0), figures.get("MemAvailable", 0)
    limit = _text(_CONTAINER_LIMIT).strip()
    if limit.isdigit() and int(limit) < total:
        return MemoryBytes(int(limit), min(available, int(limit)))
    return MemoryBytes(total, available)


def disk_bytes(directory: Path) -> int:
    """Bytes that files under ``directory`` could take: what they take now, and what is free."""
    taken = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            taken += os.lstat(os.path.join(parent, name)).st_blocks * _BLOCK_BYTES
    return taken + shutil.disk_usage(directory).free


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
