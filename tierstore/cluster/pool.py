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


class PoolError(StoreUnavailableError):
    """The pool does not answer, or not in a way that can be understood."""


class Pool(Protocol):
    """Objects by name. Every call may take as long as it likes, and be made from several threads."""

    transport: str
    """How bytes travel: ``tcp``, ``rdma``, … For people."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Raises :class:`PoolError`."""

    def get(self, names: Sequence[str], into: Sequence[Memory]) -> list[int]:
        """Have objects written to memory: the size of each, ``NOT_THERE`` for what the pool does not have
        (its memory is left alone), less than 0 for what did not come. Memory of a call in which something did
        not come may be written to later. Raises :class:`PoolError`."""

    def put(self, names: Sequence[str], of: Sequence[Memory]) -> list[bool]:
        """Which of them are there now; for others there was no room. A name that exists keeps its bytes.
        Raises :class:`PoolError` for any other failure: then something may still be read from that memory."""

    def remove(self, name: str) -> None:
        """Best effort. Raises nothing."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """``host`` is this host's address, as other hosts reach it (empty: found out)."""

    url: str
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""


_KINDS: Mapping[str, str] = {
    "mooncake": "tierstore.cluster.mooncake",
    "etcd": "tierstore.cluster.mooncake",
    "fake": "tierstore.testing.fake_pool",
}


def check_url(url: str) -> None:
    """Raises :class:`UsageError` for an address that no pool has."""
    scheme = urlsplit(url).scheme
    if scheme not in _KINDS or not url.partition("://")[2]:
        raise UsageError(
            f"cluster is {url!r}: give mooncake://HOST:PORT (of mooncake_master) or etcd://HOST:PORT"
        )


def open_pool(options: PoolOptions) -> Pool:
    """Raises :class:`UsageError` for what cannot be opened at all, :class:`PoolError` for what may be there
    later."""
    check_url(options.url)
    module = import_module(_KINDS[urlsplit(options.url).scheme])
    return cast("Callable[[PoolOptions], Pool]", module.open_pool)(options)
