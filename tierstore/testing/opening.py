"""Functions that open stores with injected I/O faults and with a clock that the test controls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tierstore import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES, Identity, KVSpec, PagePool, Store
from tierstore.backend import Registration
from tierstore.client.backend import RemoteBackend
from tierstore.client.handshake import Address, CurveKeys
from tierstore.core.backend import LocalBackend, open_core
from tierstore.groups import groups_of
from tierstore.policy import DEFAULT_POLICY
from tierstore.store.store import checked_pools
from tierstore.tiers.disk import FileIO
from tierstore.tiers.pinned import Pin

_LOOKUP_S = 10.0


def open_store(
    path: str | Path | None,
    spec: KVSpec,
    *,
    identity: Identity | None = None,
    pools: PagePool | Sequence[PagePool] | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    policy: str = DEFAULT_POLICY,
    mover_threads: int = 4,
    io: FileIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Store:
    """Open a store like :func:`tierstore.open`, with ``io`` for all file operations and with ``clock``."""
    page_pools = checked_pools(spec, pools)
    core = open_core(
        path,
        max(group.page_bytes for group in groups_of(spec)),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        policy=policy,
        mover_threads=mover_threads,
        pools=page_pools,
        io=io,
        clock=clock,
        **options,
    )
    backend = LocalBackend(core, owns_core=True)
    return Store(
        backend,
        spec,
        identity=identity,
        pools=page_pools or None,
        lookup_s=_LOOKUP_S,
        mover_threads=mover_threads,
        policy=policy,
        clock=clock,
    )


def connect_store(
    url: str,
    spec: KVSpec,
    *,
    identity: Identity | None = None,
    pools: PagePool | Sequence[PagePool] | None = None,
    lookup_s: float = 0.5,
    mover_threads: int = 2,
    keys: str | Path | None = None,
    server_key: str | Path | None = None,
    reach: Callable[[Pin], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """Open a store like :func:`tierstore.connect`, with ``clock`` for the ends of leases."""
    page_pools = checked_pools(spec, pools)
    identity = identity or Identity.of(spec, model="default")
    first, of_first = groups_of(spec)[0], identity.groups[0]
    backend = RemoteBackend(
        Address.parse(url, CurveKeys.read(keys, server_key)),
        Registration(of_first, first.page_bytes, spec.chunk_tokens),
        patience_s=lookup_s,
        reach=page_pools[0].reach if page_pools else reach,
        clock=clock,
    )
    return Store(
        backend,
        spec,
        identity=identity,
        pools=page_pools or None,
        lookup_s=lookup_s,
        mover_threads=mover_threads,
        clock=clock,
    )
