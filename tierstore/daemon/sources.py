"""Where a connected store's saves begin: a caller's buffers, or pages of the engine's pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import xxhash

from tierstore import memory
from tierstore.daemon.checksum import copy_and_hash
from tierstore.store.endpoints import Buffers
from tierstore.tiers.hbm import PagePool


class Source(Protocol):
    """Pages to save."""

    def copy(self, position: int, target: memoryview) -> int | None:
        """Copy page ``position`` to host memory, and return the XXH3-64 of what is there then; None when it
        could not be copied, and is not to be stored. Runs on a mover thread."""


class BufferSource:
    """Memory of the caller's."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers  # keeps them alive

    def copy(self, position: int, target: memoryview) -> int:
        return copy_and_hash(target, self._buffers.addresses[position])


class HbmSource:
    """The engine's pool: position ``i`` is whatever pool page the index has for it. What the processor cannot
    read is copied by the pool, and hashed in the arena."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.hbm_pages = list(hbm_pages)
        self._pool = pool
        self._computed = pool.computed()  # now: what is computed from here on need not be waited for

    def copy(self, position: int, target: memoryview) -> int:
        page = self.hbm_pages[position]
        if not self._pool.overlaps:
            return copy_and_hash(target, self._pool.address + page * self._pool.spec.page_bytes)
        to = memory.address_of(target, writable=True)
        self._pool.read_pages([(page, to)], after=self._computed)
        return int(xxhash.xxh3_64_intdigest(target))
