"""What the doctor looks at, each in the file of its subject. A check never raises: what it cannot find out is
part of what it found."""

from __future__ import annotations

from pathlib import Path

from tierstore.cli.checks import disk, gpu, machine, packages, sglang, vllm
from tierstore.cli.checks.check import Check, Status

__all__ = ["Check", "Status", "all_checks", "sglang_checks", "sglang_config", "vllm_checks", "vllm_flags"]


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


def cluster_checks(url: str) -> list[Check]:
    """What :func:`tierstore.cli.checks.cluster.checks` finds, and raises."""
    from tierstore.cli.checks import cluster

    return list(cluster.checks(url))


def sglang_checks(url: str | None, extra: str | None) -> list[Check]:
    """What :func:`tierstore.cli.checks.sglang.checks` finds, and raises."""
    return list(sglang.checks(url, extra))


def sglang_config(url: str | None) -> dict[str, object]:
    """What to give SGLang as ``--hicache-storage-backend-extra-config``."""
    return sglang.proposed(url)
