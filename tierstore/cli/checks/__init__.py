"""The checks of ``tierstore doctor``, one file per subject. If a check cannot determine something, it reports
this as its result and raises no exception."""

from __future__ import annotations

from pathlib import Path

from tierstore.cli.checks import disk, gpu, machine, packages
from tierstore.cli.checks.check import Check, Status

__all__ = ["Check", "Status", "all_checks"]


def all_checks(directory: Path | None, host_bytes: int) -> list[Check]:
    """Return the results of all checks. The file system of ``directory``, which need not exist yet, is
    checked if it is given."""
    found = [*packages.checks(), *machine.checks(host_bytes), *gpu.checks()]
    if directory is not None:
        found += disk.checks(directory)
    return found
