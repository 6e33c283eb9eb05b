"""A bundle: an object of an object store with consecutive pages of one prompt. Pure functions.

    head ‖ name of each page (20 bytes) ‖ origin (msgpack) ‖ pages, each behind its header (``objects.py``)

The head has the sizes of the other parts and the SHA-256 of the origin, and ends with its own XXH3-64. All
pages of a bundle have the same size, so the head gives the position of each page. Agents read the heads and
names of all bundles, and then ranges of pages. A reader does not trust the bytes of a page: it computes the
header that the page must have, and compares it with the page's header (``objects.py``).

In a sealed bundle (``forms.py``), the origin and the pages are encrypted, and the origin begins with the id
of their key.

The **origin** has the identity of the prompt and its tokens up to the bundle's end, 4 bytes per token. With
the origin, a host that has never seen the prompt can fetch the pages (``warm_up.py``). The host computes the
pages' names from the origin. If these names differ from the bundle's names, it does not fetch the bundle.

A bundle's name is a SHA-256 over its page names and their size. So hosts that write the same pages write the
same object, and an interrupted or repeated write changes nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from tierstore.cluster.objects import NAME_BYTES, SEALED_ID, SEALED_MAGIC, name_digest, object_name
from tierstore.cluster.orders import Origin
from tierstore.errors import TierStoreError
from tierstore.wire.messages import MAX_MESSAGE_BYTES

_MAGIC = b"tsbndl1\0"
# magic, pages, bytes of the origin, object_bytes, oldest_at, parent, SHA-256
_HEAD = struct.Struct("<8sIIII20s32s")
_CHECK = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size + _CHECK.size
_MOST_PAGES = 1 << 20
_MOST_OBJECT_BYTES = 2 << 30
_NO_PARENT = bytes(NAME_BYTES)


class BundleError(TierStoreError):
    """An object is damaged, or is not a bundle of this version."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The head and the page names of a bundle. ``parent`` is the name of the page before the first page, or
    zeros. ``names`` has 20 bytes for each page. ``oldest_at`` is the time at which the oldest page was
    written, in whole seconds since 1970; 0 if all pages were written together with the bundle. ``key_id`` is
    empty for a bundle that is not sealed."""

    name: str
    object_bytes: int
    origin_bytes: int
    parent: bytes
    origin_digest: bytes
    names: bytes
    oldest_at: int = 0
    key_id: bytes = b""

    @property
    def pages(self) -> int:
        return len(self.names) // NAME_BYTES

    @property
    def origin_at(self) -> int:
        """The offset of the origin in the bundle."""
        return HEAD_BYTES + len(self.names)

    @property
    def nbytes(self) -> int:
        return self.offset(self.pages)

    @property
    def has_parent(self) -> bool:
        return self.parent != _NO_PARENT

    def offset(self, at: int) -> int:
        """Return the offset of a page's header in the bundle."""
        return self.origin_at + self.origin_bytes + at * self.object_bytes

    def page_name(self, at: int) -> bytes:
        return self.names[at * NAME_BYTES : (at + 1) * NAME_BYTES]

    def origin(self, data: bytes, opened: Callable[[bytes], bytes | None] = bytes) -> Origin:
        """Return the origin with the encoded bytes ``data``, which ``opened`` decrypts. Raise
        :class:`BundleError` if the bytes were changed, or cannot be decrypted."""
        if hashlib.sha256(data).digest() != self.origin_digest:
            raise BundleError(f"the origin of bundle {self.name} has changed")
        plain = opened(data)
        if plain is None:
            raise BundleError(f"the origin of bundle {self.name} has no key here")
        try:
            return msgspec.msgpack.decode(plain, type=Origin)
        except msgspec.MsgspecError as error:
            raise BundleError(f"the origin of bundle {self.name} is malformed") from error


def make_bundle(
    names: Sequence[str], object_bytes: int, origin: Origin, sealed: Callable[[bytes], bytes] = bytes
) -> tuple[Bundle, bytes]:
    """Return the bundle of these pages, and the bytes before its first page. ``object_bytes`` is the size of
    a page with its header. ``sealed`` encrypts the encoded origin, if bundles are sealed."""
    return _bundle_of(b"".join(map(name_digest, names)), object_bytes, origin, sealed)


def merged_bundle(
    parts: Sequence[Bundle], last: Origin, oldest_at: float, sealed: Callable[[bytes], bytes] = bytes
) -> tuple[Bundle, bytes]:
    """Return one bundle with the pages of all ``parts``, and the bytes before its first page. Each part
    continues the part before it. ``last`` is the origin of the last part. ``oldest_at`` is the time at which
    the oldest page was written. ``sealed`` encrypts the encoded origin, if bundles are sealed."""
    names = b"".join(each.names for each in parts)
    parent = object_name(parts[0].parent) if parts[0].has_parent else ""
    count = sum(each.pages for each in parts)
    seconds = int(min(max(oldest_at, 0), (1 << 32) - 1))
    return _bundle_of(names, parts[0].object_bytes, Origin(last.pages, count, parent), sealed, seconds)


def _bundle_of(
    joined: bytes,
    object_bytes: int,
    origin: Origin,
    sealed: Callable[[bytes], bytes],
    oldest_at: int = 0,
) -> tuple[Bundle, bytes]:
    written = sealed(msgspec.msgpack.encode(origin))
    parent = name_digest(origin.parent) if origin.parent else _NO_PARENT
    digest = hashlib.sha256(written).digest()
    name, key_id = _name(joined, object_bytes), _key_id(written)
    bundle = Bundle(name, object_bytes, len(written), parent, digest, joined, oldest_at, key_id)
    head = _HEAD.pack(_MAGIC, bundle.pages, len(written), object_bytes, oldest_at, parent, digest)
    return bundle, head + _CHECK.pack(xxhash.xxh3_64_intdigest(head)) + joined + written


def read_bundle(name: str, nbytes: int, data: bytes) -> Bundle | int:
    """Parse the bundle ``name``, an object of ``nbytes`` bytes that begins with ``data``. If ``data`` is too
    short, return how many bytes are needed. Raise :class:`BundleError` if the object is not a bundle."""
    if len(data) < HEAD_BYTES:
        raise BundleError(f"bundle {name} is cut off")
    magic, pages, origin_bytes, object_bytes, oldest_at, parent, digest = _HEAD.unpack_from(data)
    (check,) = _CHECK.unpack_from(data, _HEAD.size)
    if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(data[: _HEAD.size]):
        raise BundleError(f"object {name} is no bundle of this version")
    origin_at: int = HEAD_BYTES + pages * NAME_BYTES
    needed: int = origin_at + min(origin_bytes, SEALED_ID.stop)
    whole = origin_at + origin_bytes + pages * object_bytes
    bounded = pages <= _MOST_PAGES and object_bytes <= _MOST_OBJECT_BYTES
    if not pages or not bounded or origin_bytes > MAX_MESSAGE_BYTES or whole != nbytes:
        raise BundleError(f"bundle {name} has {nbytes:,} bytes and should have {whole:,}")
    if len(data) < needed:
        return needed
    names = data[HEAD_BYTES:origin_at]
    if _name(names, object_bytes) != name:
        raise BundleError(f"bundle {name} is damaged")
    key_id = _key_id(data[origin_at:])
    return Bundle(name, object_bytes, origin_bytes, parent, digest, names, oldest_at, key_id)


def _key_id(origin: bytes) -> bytes:
    """Return the id of the key that decrypts an origin with these first bytes; empty for an origin that is
    not sealed. Such an origin is a msgpack array and never begins with ``SEALED_MAGIC``."""
    return origin[SEALED_ID] if origin.startswith(SEALED_MAGIC) else b""


def _name(names: bytes, object_bytes: int) -> str:
    return hashlib.sha256(_CHECK.pack(object_bytes) + names).hexdigest()[: 2 * NAME_BYTES]
