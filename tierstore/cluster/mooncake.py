"""Mooncake Store as a shared store, through its Python wheel in this process.

The operator runs ``mooncake_master``, and lends memory with ``mooncake_client`` processes, one on each host.
This module is a pure client of them: it lends no memory and uses no buffer of the library. Calls crash after
``close``, and ``close`` takes a second, so a process that uses this module ends with ``os._exit``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from tierstore.cluster.orders import Origin
from tierstore.cluster.shared_store import (
    NOT_THERE,
    Memory,
    SharedStore,
    SharedStoreOptions,
)
from tierstore.errors import SharedStoreError, UsageError

# The library reads these variables when it is imported. Without the pool and the slice size, objects of 1 to
# 8 MiB take 1.3 to 2 times as long. Without the time limits, a call to a host that is down takes 30 s, and a
# call to a missing master takes 22 s.
_ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "200",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
}
_NO_ROOM = -200
_NO_OBJECT = -704  # reported before any transfer
_INSTALL = (
    "pip install mooncake-transfer-engine-non-cuda (or -cuda13), and apt-get install libibverbs1 libnuma1"
)


class MooncakeStore(SharedStore):
    """A client of the master at ``mooncake://HOST:PORT``, or of the master that ``etcd://HOST:PORT`` names as
    leader."""

    def __init__(self, options: SharedStoreOptions) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise UsageError(f"cannot import Mooncake ({error}): {_INSTALL}") from error
        if options.protocol == "rdma" and not options.devices:
            raise UsageError("rdma needs cluster_devices: without them Mooncake silently uses TCP")
        url = urlsplit(options.url)
        master = options.url if url.scheme == "etcd" else url.netloc
        host = options.host or _address_towards(url.hostname or "", url.port or 0)
        self.transport = options.protocol
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(host, "P2PHANDSHAKE", 0, 0, options.protocol, options.devices, master)
        if code:
            raise SharedStoreError(f"Mooncake's master at {master} does not answer ({code})")
        self.exists(["ts1:"])  # the first call is slow, so no lookup should make it

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self._store.batch_is_exist(list(names))
        if len(found) != len(names) or any(each < 0 for each in found):
            raise SharedStoreError(f"Mooncake's master does not answer ({min(found, default=0)})")
        return [each == 1 for each in found]

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        addresses, sizes = zip(*into, strict=True)
        codes = self._store.batch_get_into(list(names), list(addresses), list(sizes))
        return [NOT_THERE if code == _NO_OBJECT else code for code in codes]

    def put(self, names: Sequence[str], of: Sequence[Memory], origin: Origin) -> list[bool]:
        addresses, sizes = zip(*of, strict=True)
        codes = self._store.batch_put_from(list(names), list(addresses), list(sizes))
        if failed := {code for code in codes if code not in (0, _NO_ROOM)}:
            raise SharedStoreError(f"Mooncake cannot put ({min(failed)})")
        return [code == 0 for code in codes]

    def remove(self, name: str) -> None:
        self._store.remove(name)

    def used(self, names: Sequence[str]) -> None:
        """Do nothing, because Mooncake itself counts the reads of its objects."""


def _address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to another host, without sending anything."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SharedStoreError(f"there is no route to {host}: {error.strerror}") from error


def open_shared_store(options: SharedStoreOptions) -> SharedStore:
    return MooncakeStore(options)
