"""Keys of chunks, made from the block hashes that vLLM has computed.

vLLM's hash of a block covers the hash of the block before it, its tokens, and whatever else changes its KV:
the images in it, the LoRA adapter, the cache salt. With a key made from anything less, prompts that only look
alike would get each other's pages. So the hash of a chunk's last block is the chunk's key, hashed once more
with adapter and salt: with ``--prefix-caching-hash-algo xxhash`` vLLM's own hash is none that a tenant could
not find a collision for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from tierstore.keys import KEY_BYTES, PageKey


def secret_of(adapter: Sequence[str], salt: str | None) -> bytes:
    """What tells apart requests with equal block hashes: the adapter's name and path, and the salt."""
    return hashlib.sha256(msgspec.json.encode([list(adapter), salt])).digest()


def chunk_key(block_hash: bytes, secret: bytes) -> PageKey:
    """The key of the chunk whose last block has this hash."""
    return PageKey(hashlib.sha256(secret + bytes(block_hash)).digest()[:KEY_BYTES])


def chunk_keys(
    block_hashes: Sequence[bytes], secret: bytes, blocks_per_chunk: int, first: int = 0
) -> list[PageKey]:
    """The keys of the whole chunks from chunk ``first`` on."""
    last = range((first + 1) * blocks_per_chunk - 1, len(block_hashes), blocks_per_chunk)
    return [chunk_key(block_hashes[at], secret) for at in last]


def private_hashes(algorithm: str, environment: Mapping[str, str], *, fixed_seed: bool) -> bool:
    """Whether vLLM's block hashes mean something in one process only, so that nothing is found again by
    another one or after a restart. ``fixed_seed``: this vLLM begins cryptographic hashes with a constant
    (from 0.29 on); otherwise with random bytes, unless the environment has a seed."""
    if "PYTHONHASHSEED" in environment:
        return False
    return not (fixed_seed and algorithm.startswith("sha256"))
