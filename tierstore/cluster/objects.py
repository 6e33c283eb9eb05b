"""Names and headers of pages in the shared store. Pure functions.

A page's *proof* is a hash of everything that identifies the page, up to the end of chunk i::

    proof₋₁ = SHA-256("tierstore page 1\\0" ‖ secret ‖ identity)
    proofᵢ  = SHA-256(proofᵢ₋₁ ‖ keyᵢ ‖ tokensᵢ)

A named page has no parent. Its proof is computed as for a first page, but with ``tierstore loose page 1\\0``
as the first bytes, so chained and named pages cannot be confused. Its depth is 0.

A page's name is ``ts1:`` and the first 40 hex digits of its proof. The proof includes the keys because opaque
pages with equal tokens may differ (an image, an adapter). A header ends with the XXH3-64 of its other fields,
or with their keyed BLAKE2b if the cluster has a secret. With a secret, names cannot be guessed and headers
cannot be forged. But pages are not encrypted, and a page's XXH3-64 is not a signature. An attacker who can
write to the shared store and knows a page can replace it by another page with the same XXH3-64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

HEADER_BYTES = 128
NAME_BYTES = 20

_NAME = "ts1:"
_MAGIC = b"tspage1\0"
SEALED_MAGIC = b"tspage2\0"
SEALED_ID = slice(8, 16)  # the bytes of the key's id in a sealed origin
_CHAIN = b"tierstore page 1\0"
_NAMED = b"tierstore loose page 1\0"
_FIELDS = struct.Struct("<8sQIIQ32s32s")  # magic, page_bytes, chunk_tokens, depth, XXH3, identity, proof
_MAC_BYTES = HEADER_BYTES - _FIELDS.size
SEALED_FIELDS = struct.Struct("<8sQ20s32s16sQ")  # magic, page_bytes, name, salt, tag, XXH3 (``forms.py``)


def proofs(identity: bytes, chunks: Iterable[tuple[bytes, bytes]], *, secret: bytes = b"") -> list[bytes]:
    """Return the proofs of a prompt's chunks, from the first chunk on. ``chunks`` are pairs of key and
    tokens, and ``identity`` is the identity's digest.

    >>> first, second = proofs(bytes(32), [(b"k" * 16, b"abcd"), (b"l" * 16, b"efgh")])
    >>> object_name(first)
    'ts1:3ae9fa95f51a6965d940f68c89c15a0237313620'
    """
    proof = hashlib.sha256(_CHAIN + secret + identity).digest()
    made = []
    for key, tokens in chunks:
        proof = hashlib.sha256(proof + key + tokens).digest()
        made.append(proof)
    return made


def named_proofs(
    identity: bytes, chunks: Iterable[tuple[bytes, bytes]], *, secret: bytes = b""
) -> list[bytes]:
    """Return the proof of each named page, which does not depend on any other page."""
    root = hashlib.sha256(_NAMED + secret + identity).digest()
    return [hashlib.sha256(root + key + tokens).digest() for key, tokens in chunks]


def object_name(proof: bytes) -> str:
    return _NAME + proof.hex()[: 2 * NAME_BYTES]


def name_digest(name: str) -> bytes:
    """Return the 20 bytes of an object's name."""
    return bytes.fromhex(name.removeprefix(_NAME))


@dataclass(frozen=True, slots=True)
class PageObject:
    """A page in the shared store. ``depth`` is the number of pages before it; 0 for a named page."""

    identity: bytes
    page_bytes: int
    chunk_tokens: int
    depth: int
    proof: bytes

    @property
    def name(self) -> str:
        return object_name(self.proof)

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + self.page_bytes

    def header(self, checksum: int, *, secret: bytes = b"") -> bytes:
        """Return the header of this page with the XXH3-64 ``checksum``."""
        fields = _FIELDS.pack(
            _MAGIC, self.page_bytes, self.chunk_tokens, self.depth, checksum, self.identity, self.proof
        )
        if secret:
            return fields + hashlib.blake2b(fields, key=secret[:64], digest_size=_MAC_BYTES).digest()
        return fields + xxhash.xxh3_64_digest(fields) + bytes(_MAC_BYTES - 8)


def is_intact(data: memoryview, name: bytes) -> bool:
    """Return whether an object (a header and its page) is whole and has the name with these 20 bytes. This
    does not check the header's BLAKE2b or the GCM tag, which only a reader with the secret or the key can
    check."""
    if len(data) < HEADER_BYTES:
        return False
    if data[: len(SEALED_MAGIC)] == SEALED_MAGIC:
        magic, page_bytes, proof, _, _, checksum = SEALED_FIELDS.unpack_from(data)
        expected = SEALED_MAGIC
    else:
        magic, page_bytes, _, _, checksum, _, proof = _FIELDS.unpack_from(data)
        expected = _MAGIC
    page = data[HEADER_BYTES:]
    right = (magic, page_bytes, proof[:NAME_BYTES]) == (expected, len(page), name)
    return right and xxhash.xxh3_64_intdigest(page) == checksum


def page_objects(
    identity: bytes,
    page_bytes: int,
    chunk_tokens: int,
    keys: Sequence[bytes],
    chunks: Sequence[bytes],
    *,
    secret: bytes = b"",
    named: bool = False,
) -> list[PageObject]:
    """Return the objects of a prompt's whole chunks from its beginning on, or of ``named`` chunks."""
    prove = named_proofs if named else proofs
    made = prove(identity, zip(keys, chunks, strict=True), secret=secret)
    return [
        PageObject(identity, page_bytes, chunk_tokens, 0 if named else at, proof)
        for at, proof in enumerate(made)
    ]
