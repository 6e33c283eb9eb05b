"""SGLang's host pools: where in them a page's bytes are, and how pages come and go.

A page is one page of one host pool: its runs (K and V, or one for each layer, as the pool's layout has it)
one after the other, opaque. Pages are found by their own names, whatever they follow: SGLang asks for the end
of a prompt only where it has the beginning, and some of its pools have no beginning at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from tierstore import copying
from tierstore.keys import LEAST_NAMED_TOKENS
from tierstore.store.buffers import copied_frames
from tierstore_connectors.common.facts import digest

Problem = Callable[[str, Exception], None]


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
        self.sizes = tuple(sizes)
        self.page_bytes = sum(sizes)
        self.chunk_tokens = max(int(pool.page_size), LEAST_NAMED_TOKENS)
        kind = type(pool)
        self.layout = digest(
            [f"{kind.__module__}.{kind.__qualname__}", str(pool.layout), pool.page_size, sizes]
        )

    def runs(self, indices: Any, pages: int) -> list[list[int]]:
        """Where the runs of each of ``pages`` pages begin. Raises :class:`ValueError` for indices of another
        number of pages: a wrong number must not become a wrong address."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(self.sizes)
        if len(addresses) != pages * each or tuple(sizes) != self.sizes * pages:
            raise ValueError(f"{len(addresses)} runs are not {pages} pages of the {self.name} pool")
        return [addresses[at : at + each] for at in range(0, pages * each, each)]


class PageRuns:
    """``pages`` pages of a host pool, which are at ``indices`` there: source and target of a save or load,
    whose page ``at`` is the one at ``places[at]`` (the same where that is None). SGLang is asked where they
    are when the first one is copied, which takes a millisecond for a hundred pages of many runs: a save of
    pages that are there needs none."""

    def __init__(
        self,
        pool: HostPool,
        indices: Any,
        pages: int,
        problem: Problem,
        places: Mapping[int, int] | None = None,
    ) -> None:
        self._pool = pool
        self._indices = indices
        self._pages = pages
        self._problem = problem
        self._places_of = places if places is not None else range(pages)
        self.failed = False

    @cached_property
    def _runs(self) -> list[list[int]]:
        return self._pool.runs(self._indices, self._pages)

    def _places(self, pages: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
        return [(address, self._runs[self._places_of[at]]) for at, address in pages]

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> Sequence[int | None]:
        try:
            return copying.gather_and_hash(self._places(pages), self._pool.sizes)
        except Exception as error:  # noqa: BLE001  # SGLang's, and must not end the mover's task
            self._problem("reading a host pool", error)
            return [None] * len(pages)

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        try:
            copying.scatter(self._places(pages), self._pool.sizes)
        except Exception as error:  # noqa: BLE001  # SGLang's, and must not end the mover's task
            self.failed = True
            self._problem("writing to a host pool", error)

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)
