"""Where pages come from and go to outside the store's own tiers: an engine's pool, or a caller's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierstore import copying, memory
from tierstore.errors import UsageError


class PageSource(Protocol):
    """Pages to save."""

    def read_into(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Copy pages to host memory: (position, address). Runs on a mover thread, without the GIL."""


class PageTarget(Protocol):
    """Where a load ends that is neither the pool nor a buffer for each page."""

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        """Take pages from host memory: (position, address). Runs on a mover thread, must not raise, and has
        taken all of them when it returns."""


class Buffers:
    """Caller's memory, one contiguous buffer of ``page_bytes`` for each page. They must not move or be
    reused until the transfer has ended. Raises :class:`UsageError` for buffers of another size or kind."""

    def __init__(
        self, buffers: Sequence[memoryview | bytearray | bytes], page_bytes: int, *, writable: bool
    ) -> None:
        self.views = [memoryview(buffer).cast("B") for buffer in buffers]
        self._page_bytes = page_bytes
        for position, view in enumerate(self.views):
            if view.nbytes != page_bytes:
                raise UsageError(f"page buffer {position} has {view.nbytes} bytes, a page has {page_bytes}")
        self.addresses = [memory.address_of(view, writable=writable) for view in self.views]

    def read_into(self, wanted: Sequence[tuple[int, int]]) -> None:
        copying.copy_all(((address, self.addresses[at]) for at, address in wanted), self._page_bytes)
