"""Hashes of a pack's pages, computed by several threads.

The version of a pack decides its cryptographic hash. Version 1 has SHA-256 (``hashlib``), which any tierstore
can read. Version 2 has BLAKE3 (the package ``blake3``, in the extra ``[packs]``), which takes two fifths of
the processor time on processors with SHA-256 instructions, and less on others. Both hashes have 256 bits, and
with both a signature covers every byte of a pack. The seals use SHA-256 in both versions, because they cover
little data.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import importlib.util
import os
from collections.abc import Callable

from tierstore import copying, memory

_HASHERS = min(os.cpu_count() or 1, 4)


class PageHash(enum.IntEnum):
    """The hash of a pack's pages. The value is the pack's version."""

    SHA256 = 1
    BLAKE3 = 2

    @classmethod
    def best(cls) -> PageHash:
        """Return the fastest installed hash."""
        return cls.BLAKE3 if importlib.util.find_spec("blake3") is not None else cls.SHA256

    def digester(self) -> Callable[[memoryview], bytes]:
        """Return the hash function. Raise :class:`ModuleNotFoundError` if the package of this hash is not
        installed."""
        if self is PageHash.SHA256:
            return _sha256
        from blake3 import blake3

        def digest(page: memoryview) -> bytes:
            return blake3(page).digest()

        return digest


async def page_digests(pages: memoryview, page_bytes: int, hash: PageHash) -> list[tuple[int, bytes]]:
    """Return the XXH3-64 and the digest of each page, computed by several threads."""
    count = len(pages) // page_bytes
    step = -(-count // _HASHERS)
    parts = [
        asyncio.to_thread(
            hash_pages, pages[start * page_bytes : min(start + step, count) * page_bytes], page_bytes, hash
        )
        for start in range(0, count, step)
    ]
    return [pair for part in await asyncio.gather(*parts) for pair in part]


def hash_pages(pages: memoryview, page_bytes: int, hash: PageHash) -> list[tuple[int, bytes]]:
    """Return the XXH3-64 and the digest of each page, computed on this thread."""
    start = memory.address_of(pages, writable=False)
    checksums = copying.hash_all(range(start, start + len(pages), page_bytes), page_bytes)
    digest = hash.digester()
    digests = (digest(pages[at : at + page_bytes]) for at in range(0, len(pages), page_bytes))
    return list(zip(checksums, digests, strict=True))


def _sha256(page: memoryview) -> bytes:
    return hashlib.sha256(page).digest()
