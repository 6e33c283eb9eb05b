"""The daemon that an engine will use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tierstore.cli.checks.check import Check, fail, ok, warn
from tierstore.errors import StoreUnavailableError
from tierstore.units import GIB, KIB, format_size

if TYPE_CHECKING:
    from tierstore.daemon.stats import DaemonStats

_LEAST_ARENA = 2 * GIB
_TOKEN_BYTES = 128 * KIB  # an 8B Llama in bfloat16 has 32 layers, 8 KV heads of 128


def checks(url: str) -> Iterator[Check]:
    """Check whether the daemon answers, and the size of its tiers."""
    from tierstore.cli.operator import Operator

    if url.startswith("tcp://"):
        yield warn("daemon", url, "not checked over tcp: use tierstore stats --connect with your keys")
        return
    try:
        with Operator(url) as operator:
            stats = operator.stats()
    except StoreUnavailableError as error:
        yield fail("daemon", str(error), f"tierstore serve --listen {url} --disk DIR")
        return
    yield ok("daemon", f"pid {stats.pid} at {url}")
    yield _arena(stats)
    disk = stats.store.tiers.get("disk")
    if disk is None:
        advice = "start it with --disk DIR, so that pages survive a restart"
        yield warn("daemon's disk", "none", advice)
    else:
        yield ok("daemon's disk", format_size(disk.capacity_bytes), capacity_bytes=disk.capacity_bytes)


def _arena(stats: DaemonStats) -> Check:
    capacity = stats.store.tiers["host"].capacity_bytes
    tokens = capacity // _TOKEN_BYTES
    found = f"{format_size(capacity)}: about {tokens:,} tokens of an 8B Llama in bfloat16"
    if capacity < _LEAST_ARENA:
        advice = "all loads and saves go through it: start the daemon with --host-bytes 8GiB or more"
        return warn("daemon's arena", found, advice, capacity_bytes=capacity)
    return ok("daemon's arena", found, capacity_bytes=capacity)


def numbers(version: str, count: int = 2) -> tuple[int, ...]:
    """Return the first ``count`` numbers of an engine's version."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:count])
