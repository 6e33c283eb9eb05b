"""The checks of ``tierstore doctor``, one file per subject. A check never raises an exception for something
that it cannot find out, but reports it."""

from __future__ import annotations

from pathlib import Path

from tierstore.cli.checks import disk, gpu, machine, packages
from tierstore.cli.checks.check import Check, Status

__all__ = ["Check", "Status", "all_checks"]


def all_checks(directory: Path | None, host_bytes: int) -> list[Check]:
    """Return the results of all checks. File systems are checked only with a ``directory``, which need not
    exist yet."""
    found = [*packages.checks(), *machine.checks(host_bytes), *gpu.checks()]
    if directory is not None:
        found += disk.checks(directory)
    return found
