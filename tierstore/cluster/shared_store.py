"""The interface of a distributed store, and opening one by its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast
from urllib.parse import urlsplit

from tierstore.errors import StoreUnavailableError, UsageError

Memory = tuple[int, int]
"""Address and size in bytes."""

NOT_THERE = 0
"""Returned instead of an object's size."""


class SharedStoreError(StoreUnavailableError):
    """The shared store does not answer, or its answer is malformed."""


class SharedStore(Protocol):
    """Objects by name. A call may take any time, and several threads may make calls."""

    transport: str
    """The transport of bytes, such as ``tcp`` or ``rdma``, for people."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which names exist. Raise :class:`SharedStoreError` if the store does not answer."""

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        """Write objects to memory. Return the size of each, ``NOT_THERE`` for a missing object (its memory
        does not change), and a negative number for a failed one. After a failure, the memory of the whole
        call may still be written to. Raise :class:`SharedStoreError` if the store does not answer."""

    def put(self, names: Sequence[str], of: Sequence[Memory]) -> list[bool]:
        """Store objects. Return which of them exist now; there was no room for the others. An existing name
        keeps its bytes. Raise :class:`SharedStoreError` for any other failure: then the memory may still be
        read."""

    def remove(self, name: str) -> None:
        """Remove an object, best effort. Does not raise."""


@dataclass(frozen=True, slots=True)
class SharedStoreOptions:
    """Options of a shared store. ``host`` is this host's address for other hosts (empty: detected)."""

    url: str
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""


_KINDS: Mapping[str, str] = {
    "mooncake": "tierstore.cluster.mooncake",
    "etcd": "tierstore.cluster.mooncake",
    "fake": "tierstore.testing.fake_shared_store",
}


def check_url(url: str) -> None:
    """Check a shared store's address. Raise :class:`UsageError` if it is malformed."""
    scheme = urlsplit(url).scheme
    if scheme not in _KINDS or not url.partition("://")[2]:
        raise UsageError(
            f"cluster is {url!r}: give mooncake://HOST:PORT (of mooncake_master) or etcd://HOST:PORT"
        )


def open_shared_store(options: SharedStoreOptions) -> SharedStore:
    """Open a shared store. Raise :class:`UsageError` if that can never work, and :class:`SharedStoreError` if
    the store is unavailable now."""
    check_url(options.url)
    module = import_module(_KINDS[urlsplit(options.url).scheme])
    return cast("Callable[[SharedStoreOptions], SharedStore]", module.open_shared_store)(options)
