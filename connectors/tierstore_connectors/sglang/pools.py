"""SGLang's host pools: where in them a page's bytes are, and how pages come and go.

A page is one page of one host pool: its runs (K and V, or one for each layer, as the pool's layout has it)
one after the other, opaque. Pages are found by their own names, whatever they follow: SGLang asks for the end
of a prompt only where it has the beginning, and some of its pools have no beginning at all. """

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from tierstore import Hit, Store, copying, lookup_all
from tierstore.keys import Identity
from tierstore.store.buffers import copied_frames
from tierstore_connectors.common.facts import digest
from tierstore_connectors.sglang.identity import LEAST_TOKENS, page_prompt

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
    """One page of a host pool: source and target."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> list[int]:
        [(_, address)] = pages
        if len(self._runs) == 1:
            return copying.copy_and_hash([(address, self._runs[0][0])], page_bytes)
        at = address
        for start, length in self._runs:
            copying.copy_all([(at, start)], length, read_next=True)
            at += length
        return copying.hash_all([address], page_bytes)

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        [(_, address)] = pages
        for start, length in self._runs:
            copying.copy_all([(start, address)], length)
            address += length

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)


def find(store: Store, identity: Identity, keys: Sequence[str], chunk_tokens: int) -> list[Hit]:
    """What the daemon has of these pages, each under a lease of its own."""
    return lookup_all([(store, page_prompt(identity, key, chunk_tokens)) for key in keys])


def load(store: Store, hits: Sequence[Hit], runs: Sequence[Runs], deadline_s: float) -> list[bool]:
    """Load pages that were found into the host pool: which of them have come by then."""
    transfers = [
        store.load_to(hit, PageRuns(each), deadline_s=deadline_s) if hit.tokens else None
        for hit, each in zip(hits, runs, strict=True)
    ]
    return [transfer is not None and transfer.wait().tokens > 0 for transfer in transfers]


def save(
    store: Store,
    identity: Identity,
    keys: Sequence[str],
    runs: Sequence[Runs],
    chunk_tokens: int,
    deadline_s: float,
) -> list[bool]:
    """Save pages of the host pool: which of them are stored, be it since before. When this returns none of
    the pool is read any more."""
    ends = time.monotonic() + deadline_s
    transfers = [
        store.save_from(page_prompt(identity, key, chunk_tokens), PageRuns(each), 1)
        for key, each in zip(keys, runs, strict=True)
    ]
    stored = []
    for transfer in transfers:
        with contextlib.suppress(TimeoutError):
            transfer.wait(max(ends - time.monotonic(), 0))
        transfer.cancel()  # what is left of it: SGLang is going to write to these slots
        stored.append(transfer.wait() > 0)
    return stored
