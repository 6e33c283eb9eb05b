"""The hbm tier: a pool of pages on the device that computes, read in place by the attention kernels.

On a machine without a GPU the device is ``cpu``: the pool is ordinary memory and "HBM" is only its place in
the hierarchy. One page is ``KVSpec.page_bytes`` contiguous bytes, so a page moves in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from tierstore import memory
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec


class PagePool:
    """``num_pages`` pages of ``spec`` in one allocation, and a free list. Not thread-safe: its owner locks.

    ``array`` is the memory as uint8 ``[num_pages, page_bytes]``; an engine views it in its own dtype.
    """

    def __init__(self, spec: KVSpec, num_pages: int, *, device: str = "cpu") -> None:
        if device != "cpu":
            raise UsageError(f"no page pool for device {device!r} yet: use cpu")
        if num_pages < 1:
            raise UsageError(
                f"a page pool needs at least one page of {spec.page_bytes} bytes, not {num_pages}"
            )
        self.spec = spec
        self.num_pages = num_pages
        self.device = device
        self._memory = Memory(num_pages * spec.page_bytes, shared=False)
        self._memory.populate()
        view = self._memory.view(0, num_pages * spec.page_bytes)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(view, np.uint8).reshape(num_pages, spec.page_bytes)
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: page 0 first

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, lowest first where possible, or None if fewer are free."""
        if count > len(self._free):
            return None
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken[::-1]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))

    def read_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy pages to host memory: (page, address) pairs. Releases the GIL, like the two below."""
        memory.copy_all(((address, self._address(page)) for page, address in copies), self.spec.page_bytes)

    def write_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy host memory into pages: (page, address) pairs."""
        memory.copy_all(((self._address(page), address) for page, address in copies), self.spec.page_bytes)

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy within the pool: (destination page, source page) pairs."""
        addresses = ((self._address(to), self._address(of)) for to, of in copies)
        memory.copy_all(addresses, self.spec.page_bytes)

    def _address(self, page: int) -> int:
        return self._memory.address + page * self.spec.page_bytes
