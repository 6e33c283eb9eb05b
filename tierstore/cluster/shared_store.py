"""The interface of a distributed store, and opening one by its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import urlsplit

from tierstore.cluster.orders import Origin, ToDaemon
from tierstore.cluster.s3_address import S3Address
from tierstore.errors import UsageError

if TYPE_CHECKING:
    from tierstore.cluster.shared_keys import SharedKeys

Memory = tuple[int, int]
"""Address and size in bytes."""

NOT_THERE = 0
"""Returned instead of an object's size."""


class SharedStore(Protocol):
    """Objects by name. A call may take any time, and several threads may make calls."""

    transport: str
    """The transport of bytes, such as ``tcp`` or ``rdma``, for people."""

    trouble: str = ""
    """Why the store does not work at present, for people; empty if it works. The store reports changes."""

    keys: SharedKeys | None = None
    """The keys of its pages. None if they are not sealed."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return which names exist. Raise :class:`SharedStoreError` if the store does not answer."""

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        """Write objects to memory. Return the size of each, ``NOT_THERE`` for a missing object (its memory
        does not change), and a negative number for a failed one. After a failure, the memory of the whole
        call may still be written to. Raise :class:`SharedStoreError` if the store does not answer."""

    def put(self, names: Sequence[str], of: Sequence[Memory], origin: Origin) -> list[bool]:
        """Store objects. Return which of them exist now; there was no room for the others. An existing name
        keeps its bytes. ``origin`` names the prompt of the pages. Raise :class:`SharedStoreError` for any
        other failure: then the memory may still be read."""

    def remove(self, name: str) -> None:
        """Remove an object, best effort. Does not raise."""

    def used(self, names: Sequence[str]) -> None:
        """Record that a prompt has used these objects. Some may not exist. Does not wait."""


def _ignore(message: ToDaemon) -> None:
    """Drop the message."""


@dataclass(frozen=True, slots=True)
class SharedStoreOptions:
    """Options of a shared store. ``host`` is this host's address for other hosts (empty: detected).
    ``most_bytes`` and ``lifetime_s`` are limits of an object store; a store without them changes nothing
    there on its own. With a ``sharing_key``, an object store seals its pages, with the keys in the bucket at
    ``keys_url`` (``shared_keys.py``); ``held`` are those that this host knew last. The store calls ``tell``
    with messages about its health, from any thread."""

    url: str
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""
    most_bytes: int = 0
    lifetime_s: float = 0.0
    keys_url: str = ""
    sharing_key: bytes = field(default=b"", repr=False)
    held: Sequence[tuple[str, str, bytes]] = ()
    tell: Callable[[ToDaemon], None] = _ignore


_KINDS: Mapping[str, str] = {
    "mooncake": "tierstore.cluster.mooncake",
    "etcd": "tierstore.cluster.mooncake",
    "s3": "tierstore.cluster.bundle_store",
    "fake": "tierstore.testing.fake_shared_store",
}


def check_url(url: str) -> None:
    """Check a shared store's address. Raise :class:`UsageError` if it is malformed. The message does not
    repeat the address, which may have a password."""
    scheme = urlsplit(url).scheme
    if scheme not in _KINDS or not url.partition("://")[2]:
        raise UsageError(
            "cluster must be mooncake://HOST:PORT (of mooncake_master), etcd://HOST:PORT or "
            f"s3://BUCKET/PREFIX, got {scheme or 'no address'}"
        )
    if is_object_store(url):
        S3Address.parse(url)


def is_object_store(url: str) -> bool:
    """Return whether the shared store at an address is an object store."""
    return urlsplit(url).scheme == "s3"


def read_secret(file: Path | None) -> bytes:
    """Return the cluster's secret in a file, empty without one. Raise :class:`UsageError` if it is
    unusable."""
    if file is None:
        return b""
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"cannot read the cluster's secret: {error}") from error
    if not 16 <= len(secret) <= 64:
        raise UsageError(f"the cluster's secret must have 16 to 64 bytes, got {len(secret)}")
    return secret


def open_shared_store(options: SharedStoreOptions) -> SharedStore:
    """Open a shared store. Raise :class:`UsageError` if that can never work, and :class:`SharedStoreError` if
    the store is unavailable now."""
    check_url(options.url)
    module = import_module(_KINDS[urlsplit(options.url).scheme])
    return cast("Callable[[SharedStoreOptions], SharedStore]", module.open_shared_store)(options)
