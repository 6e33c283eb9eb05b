"""The interface of a shared store. :func:`open_shared_store` opens one by its address."""

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
"""Address and size of memory, in bytes."""

NOT_THERE = 0
"""Returned in place of the size of an object that does not exist."""


class SharedStore(Protocol):
    """A store of objects by name. Calls may take any time. Several threads may make calls."""

    transport: str
    """The transport that moves bytes, such as ``tcp`` or ``rdma``, for people."""

    trouble: str = ""
    """Why the store does not work at present, for people; empty if it works. The store reports changes of
    it."""

    keys: SharedKeys | None = None
    """The keys of the store's pages. None if pages are not sealed (encrypted)."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether it exists. Raise :class:`SharedStoreError` if the store does not
        answer."""

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        """Read objects into memory. Return the size of each object, ``NOT_THERE`` for a missing object (its
        memory does not change), and a negative number for a failed read. After a failure, the store may still
        write to the memory of any object of the call. Raise :class:`SharedStoreError` if the store does not
        answer."""

    def put(self, names: Sequence[str], of: Sequence[Memory], origin: Origin) -> list[bool]:
        """Store objects. Return for each object whether it exists now; otherwise there was no room. An
        existing name keeps its bytes. ``origin`` has the prompt of the pages. Raise :class:`SharedStoreError`
        for any other failure: the store may then still read the memory."""

    def remove(self, name: str) -> None:
        """Try to remove an object. Does not raise."""

    def used(self, names: Sequence[str]) -> None:
        """Record that a prompt has used these objects, which may not exist. Does not wait."""


def _ignore(message: ToDaemon) -> None:
    """Drop the message."""


@dataclass(frozen=True, slots=True)
class SharedStoreOptions:
    """Options of a shared store. ``host`` is this host's address for other hosts (empty: detected).
    ``most_bytes`` and ``lifetime_s`` limit the bytes and the age of objects in an object store; without
    limits, the store deletes nothing on its own. With a ``sharing_key``, an object store seals (encrypts) its
    pages, and their keys are in the bucket at ``keys_url`` (``shared_keys.py``). ``held`` are the keys that
    this host knew when its last agent ended. The store calls ``tell`` with messages about its health, from
    any thread."""

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
    """Check a shared store's address. Raise :class:`UsageError` if it is malformed. The error message does
    not repeat the address, which may contain a password."""
    scheme = urlsplit(url).scheme
    if scheme not in _KINDS or not url.partition("://")[2]:
        raise UsageError(
            "cluster must be mooncake://HOST:PORT (of mooncake_master), etcd://HOST:PORT or "
            f"s3://BUCKET/PREFIX, got {scheme or 'no address'}"
        )
    if is_object_store(url):
        S3Address.parse(url)


def is_object_store(url: str) -> bool:
    """Return whether the shared store at an address is in an object store."""
    return urlsplit(url).scheme == "s3"


def read_secret(file: Path | None) -> bytes:
    """Return the cluster's secret in a file; empty without a file. Raise :class:`UsageError` for a secret
    that is unreadable, too short or too long."""
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
    """Open a shared store. Raise :class:`UsageError` if the options can never work, and
    :class:`SharedStoreError` if the store is unavailable now."""
    check_url(options.url)
    module = import_module(_KINDS[urlsplit(options.url).scheme])
    return cast("Callable[[SharedStoreOptions], SharedStore]", module.open_shared_store)(options)
