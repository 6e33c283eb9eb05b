"""The amount of memory and disk space of this machine, for checks, warnings and reports."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tierstore.units import format_size

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/proc/self/cgroup")
_GROUP_ROOT = Path("/sys/fs/cgroup")
_BLOCK_BYTES = 512  # unit of st_blocks, in every file system


class MemoryBytes(NamedTuple):
    """Bytes of memory. ``limit`` is the lowest limit that a control group (container) sets for this process;
    None if no limit is below the machine's memory."""

    total: int
    available: int
    limit: int | None = None


def memory_bytes() -> MemoryBytes:
    """Return the memory of this machine, or of the container of this process. A number is 0 if /proc does not
    have it."""
    figures = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", _text(_MEMINFO), re.MULTILINE)
    }
    total, available = figures.get("MemTotal", 0), figures.get("MemAvailable", 0)
    limits = [(limit, used) for limit, used in _group_limits() if limit < total]
    if not limits:
        return MemoryBytes(total, available)
    left = min(max(limit - used, 0) for limit, used in limits)
    limit = min(limit for limit, _ in limits)
    return MemoryBytes(limit, min(available, left), limit)


def memory_shortage(host_bytes: int) -> str:
    """Return the reason why an arena of ``host_bytes`` does not fit the memory of this machine or container;
    empty if it fits."""
    memory = memory_bytes()
    if host_bytes <= memory.total:
        return ""
    what = "memory limit of this container" if memory.limit is not None else "memory"
    return (
        f"host_bytes {format_size(host_bytes)}, {what} {format_size(memory.total)} (the kernel kills the "
        "daemon when the arena grows beyond it)"
    )


def _group_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and use of each control group of this process and of its parents. A container may see
    its own group as the root, although /proc shows another path."""
    for line in _text(_GROUPS).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2
            root, names = _GROUP_ROOT, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = _GROUP_ROOT / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        inside = [each for each in (group, *group.parents) if each == root or root in each.parents]
        for each in inside:
            limit, used = (_text(each / name).strip() for name in names)
            if limit.isdigit():
                yield int(limit), max((int(used) if used.isdigit() else 0) - _cache_bytes(each), 0)


def _cache_bytes(group: Path) -> int:
    """Return how many bytes of cached files the kernel can reclaim from a control group."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def disk_bytes(directory: Path) -> int:
    """Return the bytes that files under ``directory`` can use: what they use now, plus the free space."""
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
