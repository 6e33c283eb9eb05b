"""Copying a page and hashing it in one pass over memory."""

from __future__ import annotations

import ctypes

import xxhash

from tierstore import memory

# Hashed while they are still in the second-level cache: the second pass then costs a quarter of the first.
_PIECE_BYTES = 256 << 10


def copy_and_hash(target: memoryview, source: int) -> int:
    """Fill ``target`` from the address ``source``, and return the XXH3-64 of what is in it then. Releases the
    GIL for each piece of a page that is not small."""
    address = memory.address_of(target, writable=True)
    nbytes = target.nbytes
    if nbytes <= _PIECE_BYTES:
        ctypes.memmove(address, source, nbytes)
        return int(xxhash.xxh3_64_intdigest(target))
    digest = xxhash.xxh3_64()
    for start in range(0, nbytes, _PIECE_BYTES):
        stop = min(start + _PIECE_BYTES, nbytes)
        ctypes.memmove(address + start, source + start, stop - start)
        digest.update(target[start:stop])
    return int(digest.intdigest())
