"""What the doctor looks at, each in the file of its subject. A check never raises: what it cannot find out is
part of what it found."""

from __future__ import annotations

from pathlib import Path

from tierstore.cli.checks import disk, gpu, machine, packages, vllm
from tierstore.cli.checks.check import Check, Status

__all__ = ["Check", "Status", "all_checks", "vllm_checks", "vllm_flags"]


def all_checks(directory: Path | None) -> list[Check]:
    """All checks; those of a file system only with a ``directory``, which need not exist yet."""
    found = [*packages.checks(), *machine.checks(), *gpu.checks()]
    if directory is not None:
        found += disk.checks(directory)
    return found


def vllm_checks(url: str | None, flags: str | None) -> list[Check]:
    """What :func:`tierstore.cli.checks.vllm.checks` finds, and raises."""
    return list(vllm.checks(url, flags))


def vllm_flags(url: str | None) -> dict[str, object]:
    """What to give vLLM as ``--kv-transfer-config``."""
    return vllm.proposed(url)
