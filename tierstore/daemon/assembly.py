"""The store inside the daemon, as its settings say: no page pool, and an arena that clients can map."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from tierstore.daemon.settings import Settings
from tierstore.store.assembly import Assembly, open_tiers
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.host import HostTier


def assemble(settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> Assembly:
    """Open what the settings say. Raises :class:`~tierstore.errors.UsageError` and
    :class:`~tierstore.errors.StoreUnavailableError` when it cannot."""
    open_disk = None
    if settings.disk is not None:
        open_disk = partial(
            DiskTier.open,
            settings.disk,
            capacity_bytes=settings.disk_bytes,
            page_bytes=settings.page_bytes,
        )
    disk, host = open_tiers(open_disk, partial(HostTier, settings.host_bytes, shared=True))
    return Assembly(policy=settings.policy, host=host, disk=disk, clock=clock)


def arena_fd(assembly: Assembly) -> int:
    """What clients map."""
    assert assembly.host is not None, "the daemon has a host tier"
    fd = assembly.host.shared_fd
    assert fd is not None, "the arena is not shared memory"
    return fd
