"""The serials and roots of a store directory: which serials are used, and which roots the next commit writes.

The index has a root for every identity that ever had a page: JSON with the identity's fields, and the model's
name for display. Pages and roots take their serials from one counter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import msgspec

from tierstore.keys import Identity
from tierstore.spec import worth_of

_MODEL_NAME = "model_name"  # an additional field of a root; earlier versions ignore it


@dataclass(frozen=True, slots=True)
class Unwritten:
    """The roots (serial → encoded identity) that the next commit has to write. All used serials are below
    ``next_serial``."""

    next_serial: int
    roots: Mapping[int, bytes]


class Serials:
    """Serials for pages and roots, from one counter. Thread-safe."""

    def __init__(self, next_serial: int, roots: Mapping[int, bytes]) -> None:
        """``next_serial`` and ``roots`` are those in the index."""
        self._by_digest: dict[bytes, int] = {}
        self._identities: dict[bytes, Identity] = {}
        self._names: dict[bytes, str] = {}
        self.worths: dict[int, int] = {}
        """Root's serial → ``worth`` of its pages (see LayerGroup), without zeros."""
        for serial, root in roots.items():
            identity, name = identity_of(root), model_name_of(root)
            if identity is not None:  # None: the root is damaged, and lookups do not find its pages
                self._know(serial, identity)
                if name:
                    self._names[identity.digest] = name
        self._lock = threading.Lock()
        self._next = next_serial
        self._unwritten: dict[int, bytes] = {}  # roots added since the last commit

    def new(self) -> int:
        """Return a serial that no page or root in this directory ever had."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def root(self, identity: bytes) -> int | None:
        """Return the serial of the root of the identity with this digest; None if it has no root."""
        return self._by_digest.get(identity)

    def add_root(self, identity: Identity, name: str = "") -> int:
        """Return the serial of an identity's root, and add the root if it does not exist. A new root becomes
        durable with the next commit. ``name`` is the model's name for display (empty: none)."""
        serial = self._by_digest.get(identity.digest)
        if serial is None:
            serial = self.new()
            with self._lock:
                named = {_MODEL_NAME: name} if name else {}
                self._unwritten[serial] = msgspec.json.encode({**asdict(identity), **named})
            self._know(serial, identity)
        return serial

    def _know(self, serial: int, identity: Identity) -> None:
        self._by_digest[identity.digest] = serial
        self._identities[identity.digest] = identity
        if worth := worth_of(identity.layout):
            self.worths[serial] = worth

    def identity(self, digest: bytes) -> Identity | None:
        """Return the identity with this digest; None if it has no root."""
        return self._identities.get(digest)

    def forget(self, digests: Iterable[bytes]) -> list[int]:
        """Forget the identities with these digests, and return the serials of their roots. A later page of
        such an identity gets a new root."""
        with self._lock:
            serials = []
            for digest in digests:
                serial = self._by_digest.pop(digest, None)
                self._identities.pop(digest, None)
                self._names.pop(digest, None)
                if serial is not None:
                    self._unwritten.pop(serial, None)
                    self.worths.pop(serial, None)
                    serials.append(serial)
            return serials

    def identities(self) -> dict[bytes, Identity]:
        """Return all identities that have a root, by digest."""
        return dict(self._identities)

    def names(self) -> dict[bytes, str]:
        """Return the model names that were in the index at open, by identity digest."""
        return dict(self._names)

    def roots(self) -> set[int]:
        """Return the serials of all roots, durable or not."""
        return set(self._by_digest.values())

    def unwritten(self) -> Unwritten:
        """Return what the next commit has to write."""
        with self._lock:
            return Unwritten(self._next, dict(self._unwritten))

    def written(self, roots: Iterable[int]) -> None:
        """Record that these roots are durable."""
        with self._lock:
            for serial in roots:
                self._unwritten.pop(serial, None)  # the root may have been forgotten during the commit


def identity_of(root: bytes) -> Identity | None:
    """Return the identity in a stored root; None if the root is damaged."""
    try:
        return msgspec.json.decode(root, type=Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def model_name_of(root: bytes) -> str:
    """Return the model's name for display in a stored root; empty if there is none or the root is damaged."""
    try:
        return msgspec.json.decode(root, type=dict[str, str]).get(_MODEL_NAME, "")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
