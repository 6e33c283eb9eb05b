"""Describe the machine of a result."""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path

from tierstore.machine import memory_bytes


def describe(device: str = "cpu") -> dict[str, str | int]:
    """Return processor, memory, versions and date (UTC), for every JSON result."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "tierstore": _version("tierstore"),
        "device": device,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
