"""What a distributed store has to be able to do, and how one is opened by its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast
from urllib.parse import urlsplit

from tierstore.errors import StoreUnavailableError, UsageError

Memory = tuple[int, int]
"""Address and bytes."""

NOT_THERE = 0
"""Instead of an object's size."""


class SharedStoreError(StoreUnavailableError):
    """The shared store does not answer, or not in a way that can be understood."""


class SharedStore(Protocol):
    """Objects by name. Every call may take as long as it likes, and be made from several threads."""

    transport: str
    """How bytes travel: ``tcp``, ``rdma``, … For people."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Raises :class:`SharedStoreError`."""

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        """Have objects written to memory: the size of each, ``NOT_THERE`` for what the shared store does not
        have (its memory is left alone), less than 0 for what did not come. Memory of a call in which
        something did not come may be written to later. Raises :class:`SharedStoreError`."""

    def put(self, names: Sequence[str], of: Sequence[Memory]) -> list[bool]:
        """Which of them are there now; for others there was no room. A name that exists keeps its bytes.
        Raises :class:`SharedStoreError` for any other failure: then something may still be read from that
        memory."""

    def remove(self, name: str) -> None:
        """Best effort. Raises nothing."""


@dataclass(frozen=True, slots=True)
class SharedStoreOptions:
    """``host`` is this host's address, as other hosts reach it (empty: found out)."""

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
    """Raises :class:`UsageError` for an address that no shared store has."""
    scheme = urlsplit(url).scheme
    if scheme not in _KINDS or not url.partition("://")[2]:
        raise UsageError(
            f"cluster is {url!r}: give mooncake://HOST:PORT (of mooncake_master) or etcd://HOST:PORT"
        )


def open_shared_store(options: SharedStoreOptions) -> SharedStore:
    """Raises :class:`UsageError` for what cannot be opened at all, :class:`SharedStoreError` for what may be
    there later."""
    check_url(options.url)
    module = import_module(_KINDS[urlsplit(options.url).scheme])
    return cast("Callable[[SharedStoreOptions], SharedStore]", module.open_shared_store)(options)
