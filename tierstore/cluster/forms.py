"""The encoding of pages in the shared store: plain, or sealed (encrypted) with a shared data key
(``shared_keys.py``).

In both encodings, an object has a header of 128 bytes and the page. A **plain** header has the page's
identity, position and XXH3-64 (``objects.py``). A **sealed** page is encrypted with AES-256-GCM, behind this
header::

    magic ‖ page_bytes ‖ name ‖ salt ‖ tag ‖ XXH3-64 of the sealed page ‖ zeros

The GCM tag covers the identity, the position, and a SHA-256 of all tokens up to the page's end. So a changed
page, a page under another name, and a page of another tenant are misses. An older copy of the same object
passes the check, because it is the page of the same tokens, tenant and model.

The names of sealed pages depend on the data key, so an attacker cannot compare them with the names of a
guessed prompt. In a bundle, the prompt's tokens (its origin) are encrypted behind ``magic ‖ key id ‖ salt``.
A program that can read the bucket sees the numbers and sizes of pages, which bundle continues which, which
bundles have the same key, and the times and numbers of uses.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from typing import Protocol

import xxhash

from tierstore import copying
from tierstore.cluster.objects import (
    HEADER_BYTES,
    NAME_BYTES,
    SEALED_FIELDS,
    SEALED_ID,
    SEALED_MAGIC,
    PageObject,
)
from tierstore.cluster.orders import PromptPages
from tierstore.cluster.shared_keys import SharedKeys
from tierstore.cluster.shared_store import Memory
from tierstore.tiers.disk.keyring import SALT_BYTES, DataKey, Scope

_FACTS = struct.Struct("<32s32sQQQ")  # identity, proof, page_bytes, chunk_tokens, depth


class ObjectForm(Protocol):
    """The encoding of pages of one tenant and model in the shared store."""

    secret: bytes
    """The secret that the names of pages hash; see :func:`~tierstore.cluster.objects.page_objects`."""

    def write(self, pages: Sequence[tuple[Memory, int, PageObject]]) -> None:
        """Encode each object into its memory, from the page at the address behind it in the list. All pages
        have the same size."""

    def open(self, places: Sequence[Memory], objects: Sequence[PageObject]) -> list[int]:
        """Check the objects in ``places``. Return the XXH3-64 of the leading pages that match. These pages
        are decrypted in place, behind their headers."""

    def seal_origin(self, origin: bytes) -> bytes:
        """Return the bytes of an encoded origin as they are written to a bundle."""


class PlainForm(ObjectForm):
    """Pages that are not encrypted, with the cluster's ``secret`` in their names if it is not empty."""

    def __init__(self, secret: bytes = b"") -> None:
        self.secret = secret

    def write(self, pages: Sequence[tuple[Memory, int, PageObject]]) -> None:
        copies = [(place[0] + HEADER_BYTES, address) for place, address, _ in pages]
        checksums = copying.copy_and_hash(copies, pages[0][2].page_bytes)
        for (place, _, page), checksum in zip(pages, checksums, strict=True):
            ctypes.memmove(place[0], page.header(checksum, secret=self.secret), HEADER_BYTES)

    def open(self, places: Sequence[Memory], objects: Sequence[PageObject]) -> list[int]:
        if not places:
            return []
        pages = [address + HEADER_BYTES for address, _ in places]
        checksums = copying.hash_all(pages, objects[0].page_bytes)
        for at, (place, page, checksum) in enumerate(zip(places, objects, checksums, strict=True)):
            if ctypes.string_at(place[0], HEADER_BYTES) != page.header(checksum, secret=self.secret):
                return checksums[:at]
        return checksums

    def seal_origin(self, origin: bytes) -> bytes:
        return origin


class SealedForm(ObjectForm):
    """Pages that are encrypted with ``key``."""

    def __init__(self, key: DataKey) -> None:
        self._key = key
        self.secret = key.name(b"", b"shared names")

    def write(self, pages: Sequence[tuple[Memory, int, PageObject]]) -> None:
        for place, address, page in pages:
            salt, sealed = os.urandom(SALT_BYTES), _view(place[0] + HEADER_BYTES, page.page_bytes)
            tag = self._key.seal(salt, _facts(page), _view(address, page.page_bytes), sealed)
            fields = (SEALED_MAGIC, page.page_bytes, page.proof[:NAME_BYTES], salt, tag)
            header = SEALED_FIELDS.pack(*fields, xxhash.xxh3_64_intdigest(sealed)).ljust(HEADER_BYTES, b"\0")
            ctypes.memmove(place[0], header, HEADER_BYTES)

    def open(self, places: Sequence[Memory], objects: Sequence[PageObject]) -> list[int]:
        checksums: list[int] = []
        for place, page in zip(places, objects, strict=True):
            header = ctypes.string_at(place[0], SEALED_FIELDS.size)
            magic, page_bytes, name, salt, tag, _ = SEALED_FIELDS.unpack(header)
            opened = _view(place[0] + HEADER_BYTES, page.page_bytes)  # in place
            expected = (SEALED_MAGIC, page.page_bytes, page.proof[:NAME_BYTES])
            if (magic, page_bytes, name) != expected or not self._key.open(
                salt, tag, _facts(page), opened, opened
            ):
                break
            checksums.append(xxhash.xxh3_64_intdigest(opened))
        return checksums

    def seal_origin(self, origin: bytes) -> bytes:
        salt = os.urandom(SALT_BYTES)
        head = SEALED_MAGIC + self._key.id + salt
        return head + self._key.seal_text(salt, head, origin)


class ObjectForms:
    """The encodings of pages by tenant and model: sealed if there are ``keys``, otherwise plain."""

    def __init__(self, secret: bytes, keys: SharedKeys | None) -> None:
        self._plain = PlainForm(secret)
        self._keys = keys

    def of(self, pages: PromptPages, *, make: bool = False) -> ObjectForm | None:
        """Return the encoding of these pages. Return None if their tenant and model have no key, so that no
        such page is in the shared store. With ``make``, make a missing key, and raise :class:`BucketError` if
        that fails."""
        if self._keys is None:
            return self._plain
        scope = scope_of(pages)
        key = self._keys.find_or_make(scope) if make else self._keys.find(scope)
        return SealedForm(key) if key is not None else None


def scope_of(pages: PromptPages) -> Scope:
    return Scope(pages.identity.get("tenant", ""), pages.identity.get("model", ""))


def opened_origin(sealed: bytes, keys: SharedKeys | None) -> bytes | None:
    """Decrypt the result of :meth:`SealedForm.seal_origin`. Return None if the bytes were changed, or if
    their key is not in ``keys``."""
    head = sealed[: SEALED_ID.stop + SALT_BYTES]
    key = keys.by_id(sealed[SEALED_ID]) if keys is not None else None
    return key.open_text(head[-SALT_BYTES:], head, sealed[len(head) :]) if key is not None else None


def _facts(page: PageObject) -> bytes:
    return _FACTS.pack(page.identity, page.proof, page.page_bytes, page.chunk_tokens, page.depth)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
