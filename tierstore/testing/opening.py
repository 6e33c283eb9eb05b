"""Stores whose disk can be made to fail, and whose time can be made to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES, Identity, KVSpec, PagePool, Store
from tierstore.backend import Registration
from tierstore.client.backend import RemoteBackend
from tierstore.client.handshake import Address, CurveKeys
from tierstore.core.backend import LocalBackend, open_core
from tierstore.policy import DEFAULT_POLICY
from tierstore.tiers.disk import FileIO
from tierstore.tiers.pinned import Pin

_LOOKUP_S = 10.0


def open_store(
    path: str | Path | None,
    spec: KVSpec,
    *,
    identity: Identity | None = None,
    pool: PagePool | None = None,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    policy: str = DEFAULT_POLICY,
    mover_threads: int = 4,
    io: FileIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Store:
    """:func:`tierstore.open` over ``io`` (how files are opened, read and written), by ``clock``."""
    core = open_core(
        path,
        spec.page_bytes,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        policy=policy,
        mover_threads=mover_threads,
        pools=[pool],
        io=io,
        clock=clock,
        **options,
    )
    backend = LocalBackend(core, owns_core=True)
    return Store(
        backend,
        spec,
        identity=identity,
        pool=pool,
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
    pool: PagePool | None = None,
    lookup_s: float = 0.5,
    mover_threads: int = 2,
    keys: str | Path | None = None,
    server_key: str | Path | None = None,
    reach: Callable[[Pin], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Store:
    """:func:`tierstore.connect`, with the ends of leases by ``clock``."""
    identity = identity or Identity.of(spec, model="default")
    backend = RemoteBackend(
        Address.parse(url, CurveKeys.read(keys, server_key)),
        Registration(identity, spec.page_bytes, spec.chunk_tokens),
        patience_s=lookup_s,
        reach=pool.reach if pool is not None else reach,
        clock=clock,
    )
    return Store(
        backend,
        spec,
        identity=identity,
        pool=pool,
        lookup_s=lookup_s,
        mover_threads=mover_threads,
        clock=clock,
    )
