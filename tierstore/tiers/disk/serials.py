"""The numbers of pages and of roots: which are taken, and which roots the next commit has to write."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import msgspec

from tierstore.keys import Identity


@dataclass(frozen=True, slots=True)
class Unwritten:
    """What a commit has to write: ``roots`` (serial → identity), all below ``next_serial``."""

    next_serial: int
    roots: Mapping[int, bytes]


class Serials:
    """Thread-safe. Pages and roots are numbered from one count."""

    def __init__(self, next_serial: int, roots: Mapping[int, bytes]) -> None:
        """As they are in the index."""
        self._by_digest = {
            identity.digest: serial
            for serial, root in roots.items()
            if (identity := identity_of(root)) is not None  # damaged: its pages are not found
        }
        self._lock = threading.Lock()
        self._next = next_serial
        self._unwritten: dict[int, bytes] = {}  # roots since the last commit

    def new(self) -> int:
        """A serial that no page in this directory ever had."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def root(self, identity: bytes) -> int | None:
        """The serial of the root of everything under an identity digest; None if nothing ever was."""
        return self._by_digest.get(identity)

    def add_root(self, identity: Identity) -> int:
        """The serial of an identity's root, made if there is none (and durable with the next commit)."""
        serial = self._by_digest.get(identity.digest)
        if serial is None:
            serial = self.new()
            with self._lock:
                self._unwritten[serial] = msgspec.json.encode(asdict(identity))
            self._by_digest[identity.digest] = serial
        return serial

    def roots(self) -> set[int]:
        """Those of all roots, durable or not."""
        return set(self._by_digest.values())

    def unwritten(self) -> Unwritten:
        """What the next commit has to write."""
        with self._lock:
            return Unwritten(self._next, dict(self._unwritten))

    def written(self, roots: Iterable[int]) -> None:
        """These are durable now."""
        with self._lock:
            for serial in roots:
                del self._unwritten[serial]


def identity_of(root: bytes) -> Identity | None:
    """An identity as it is stored; None when it is damaged."""
    try:
        return msgspec.json.decode(root, type=Identity)
    except msgspec.MsgspecError:
        return None
