"""The checks of ``tierstore doctor``, one file per subject. A check never raises an exception for something
that it cannot find out, but reports it."""

from __future__ import annotations

from pathlib import Path

from tierstore.cli.checks import disk, gpu, machine, packages, sglang, vllm
from tierstore.cli.checks.check import Check, Status

__all__ = ["Check", "Status", "all_checks", "sglang_checks", "sglang_config", "vllm_checks", "vllm_flags"]


def all_checks(directory: Path | None, host_bytes: int) -> list[Check]:
    """Return the results of all checks. File systems are checked only with a ``directory``, which need not
    exist yet."""
    found = [*packages.checks(), *machine.checks(host_bytes), *gpu.checks()]
    if directory is not None:
        found += disk.checks(directory)
    return found


def vllm_checks(url: str | None, flags: str | None) -> list[Check]:
    """Return the results of :func:`tierstore.cli.checks.vllm.checks`; it can raise :class:`UsageError`."""
    return list(vllm.checks(url, flags))


def vllm_flags(url: str | None) -> dict[str, object]:
    """Return a value for vLLM's ``--kv-transfer-config``."""
    return vllm.proposed(url)


def cluster_checks(url: str) -> list[Check]:
    """Return the results of :func:`tierstore.cli.checks.cluster.checks`; it can raise :class:`UsageError`."""
    from tierstore.cli.checks import cluster

    return list(cluster.checks(url))


def sglang_checks(url: str | None, extra: str | None) -> list[Check]:
    """Return the results of :func:`tierstore.cli.checks.sglang.checks`; it can raise :class:`UsageError`."""
    return list(sglang.checks(url, extra))


def sglang_config(url: str | None) -> dict[str, object]:
    """Return a value for SGLang's ``--hicache-storage-backend-extra-config``."""
    return sglang.proposed(url)
