"""SGLang's host pools: where in them a page's bytes are, and how pages come and go.

A page is one page of one host pool: its runs (K and V, or one for each layer, as the pool's layout has it)
one after the other, opaque. Pages are found by their own names, whatever they follow: SGLang asks for the end
of a prompt only where it has the beginning, and some of its pools have no beginning at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tierstore import copying
from tierstore.store.buffers import copied_frames
from tierstore_connectors.common.facts import digest
from tierstore_connectors.sglang.identity import LEAST_TOKENS

Runs = Sequence["tuple[int, int]"]
"""Address and length of each piece of a page."""


class SGLangPool(Protocol):
    """What is used of SGLang's ``HostKVCache``. Indices are of tokens, ``page_size`` for each page."""

    page_size: int
    layout: str

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]: ...


class HostPool:
    """One of SGLang's host pools. Raises what SGLang raises for a layout whose pages have no addresses."""

    def __init__(self, name: str, pool: SGLangPool, first_page: Any) -> None:
        """``first_page`` are the indices of any page, to learn from how pages lie."""
        self.name = name
        self.pool = pool
        sizes = [int(size) for size in pool.get_page_buffer_meta(first_page)[1]]
        self.page_bytes = sum(sizes)
        self.chunk_tokens = max(int(pool.page_size), LEAST_TOKENS)
        kind = type(pool)
        self.layout = digest(
            [f"{kind.__module__}.{kind.__qualname__}", str(pool.layout), pool.page_size, sizes]
        )

    def runs(self, indices: Any, pages: int) -> list[Runs]:
        """The runs of each of ``pages`` pages. Made when bytes are really to be copied: it takes a
        millisecond for a hundred pages of many runs."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(addresses) // pages if pages else 0
        return [
            list(zip(addresses[at * each : (at + 1) * each], sizes[at * each : (at + 1) * each], strict=True))
            for at in range(pages)
        ]


class PageRuns:
    """Pages of a host pool, by the runs of each: source and target."""

    def __init__(self, runs: Sequence[Runs]) -> None:
        self._runs = runs

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int]:
        if len(self._runs[0]) == 1:
            return copying.copy_and_hash(
                [(address, self._runs[at][0][0]) for at, address in pages], page_bytes
            )
        self._copy(pages, to_pool=False)
        return copying.hash_all([address for _, address in pages], page_bytes)

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        self._copy(pages, to_pool=True)

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)

    def _copy(self, pages: Sequence[tuple[int, int]], *, to_pool: bool) -> None:
        """Runs of one length go in one call."""
        copies: dict[int, list[tuple[int, int]]] = {}
        for at, address in pages:
            for start, length in self._runs[at]:
                copies.setdefault(length, []).append((start, address) if to_pool else (address, start))
                address += length
        for length, pairs in copies.items():
            copying.copy_all(pairs, length, read_next=not to_pool)
