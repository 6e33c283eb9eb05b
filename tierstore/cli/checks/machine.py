"""Checks of the kernel, the memory and the limits of processes."""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Iterator

from tierstore.cli.checks.check import Check, ok, read_text, warn
from tierstore.machine import memory_bytes, memory_shortage
from tierstore.units import GIB, format_size

_THP = "/sys/kernel/mm/transparent_hugepage"
_POPULATE_KERNEL = (5, 14)  # MADV_POPULATE_WRITE
_LEAST_MEMORY = 2 * GIB
_LEAST_SHM = 1 * GIB
_LEAST_LOCKED = 1 * GIB
_LEAST_FILES = 4096  # each extent file needs 2 (a large store has 256 extents), and each client 1 or more


def checks(host_bytes: int) -> Iterator[Check]:
    """Check the machine, for a store or daemon with a host tier of ``host_bytes``."""
    yield _kernel()
    yield _memory()
    yield _arena(host_bytes)
    yield _shm()
    yield _huge_pages("huge pages", "enabled", "private memory")
    yield _huge_pages("huge pages, shared", "shmem_enabled", "memory shared between engines")
    yield _locked()
    yield _files()
    yield _overcommit()


def _kernel() -> Check:
    release = platform.release()
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers < _POPULATE_KERNEL:
        return warn("kernel", release, "Linux 5.14 or newer prepares memory ahead of its first use")
    return ok("kernel", release)


def _memory() -> Check:
    total, available, limit = memory_bytes()
    of = "of" if limit is None else "of this container's limit of"
    found = f"{format_size(available)} available {of} {format_size(total)}"
    if available < _LEAST_MEMORY:
        advice = "keep --host-bytes below the available memory: a store that swaps is slower than none"
        return warn("memory", found, advice, available_bytes=available)
    return ok("memory", found, available_bytes=available)


def _arena(host_bytes: int) -> Check:
    if short := memory_shortage(host_bytes):
        advice = "use smaller --host-bytes, or raise the container's memory limit"
        return warn("arena", short, advice, host_bytes=host_bytes)
    return ok("arena", f"{format_size(host_bytes)} fit this memory", host_bytes=host_bytes)


def _shm() -> Check:
    try:
        info = os.statvfs("/dev/shm")
    except OSError as error:
        return warn(
            "/dev/shm",
            error.strerror or str(error),
            "mount a tmpfs there for engines with several processes",
        )
    size, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    found = f"{format_size(free)} free of {format_size(size)}"
    if size < _LEAST_SHM:
        advice = (
            "too small for an engine with several processes (the arena is not in it): start a container "
            "with --shm-size=16g or --ipc=host"
        )
        return warn("/dev/shm", found, advice, free_bytes=free, size_bytes=size)
    return ok("/dev/shm", found, free_bytes=free, size_bytes=size)


def _huge_pages(name: str, setting: str, what: str) -> Check:
    text = read_text(f"{_THP}/{setting}")
    if text is None:
        return warn(name, "not in this kernel", f"copies of {what} are about a quarter slower")
    chosen = re.search(r"\[(\w+)\]", text)
    value = chosen.group(1) if chosen is not None else text
    if value in ("never", "deny"):
        wanted = "advise" if setting == "shmem_enabled" else "madvise"
        return warn(
            name, value, f"as root: echo {wanted} > {_THP}/{setting} (faster disk and copies of {what})"
        )
    return ok(name, value)


def _locked() -> Check:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    found = f"up to {format_size(soft)}"
    if soft < _LEAST_LOCKED:
        advice = "RDMA and some GPU drivers lock more: ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)"
        return warn("locked memory", found, advice, limit_bytes=soft)
    return ok("locked memory", found, limit_bytes=soft)


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        most = "any number" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"
        advice = f"ulimit -n 65536 (systemd: LimitNOFILE=65536); this user can raise it to {most}"
        return warn("open files", f"{soft:,}", advice, limit=soft)
    return ok("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}")


def _overcommit() -> Check:
    value = read_text("/proc/sys/vm/overcommit_memory")
    if value == "2":
        advice = (
            "the kernel may refuse large mappings: sysctl vm.overcommit_memory=0, or raise overcommit_ratio"
        )
        return warn("vm.overcommit_memory", value, advice)
    return ok("vm.overcommit_memory", value or "unknown")
