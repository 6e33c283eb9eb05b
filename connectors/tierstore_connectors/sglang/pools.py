"""Copies between SGLang's host pools and pages.

A page of the store has the runs of one page of one host pool, concatenated: K and V, or one run per layer, as
in the pool's layout. A page is found by its name, without the pages before it. SGLang reads later pages of a
prompt only if it has the earlier ones, and some pools have only the last pages of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from tierstore import copying
from tierstore.keys import LEAST_NAMED_TOKENS, Identity, Prompt
from tierstore.spec import KVSpec
from tierstore.store.buffers import copied_frames
from tierstore_connectors.common.facts import digest
from tierstore_connectors.sglang.identity import pages_named

Problem = Callable[[str, Exception], None]


class SGLangPool(Protocol):
    """The used part of SGLang's ``HostKVCache``. ``indices`` has the slot of each token, ``page_size`` slots
    per page."""

    page_size: int
    layout: str

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]: ...


class HostPool:
    """A host pool of SGLang. Raises SGLang's error for a layout in which pages have no addresses."""

    def __init__(self, name: str, pool: SGLangPool, first_page: Any) -> None:
        """``first_page`` has the indices of a page, from which the layout of all pages is read."""
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
        """Return the addresses of the runs of each of ``pages`` pages. Raise :class:`ValueError` if
        ``indices`` has another number of pages."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(self.sizes)
        if len(addresses) != pages * each or tuple(sizes) != self.sizes * pages:
            raise ValueError(f"{len(addresses)} runs are not {pages} pages of the {self.name} pool")
        return [addresses[at : at + each] for at in range(0, pages * each, each)]

    def gather(self, places: Sequence[tuple[int, list[int]]]) -> Sequence[int | None]:
        """Copy the runs of each page to its address, and return the pages' checksums. ``places`` has pairs
        (address, runs)."""
        return copying.gather_and_hash(places, self.sizes)

    def scatter(self, places: Sequence[tuple[int, list[int]]]) -> None:
        """Copy each page from its address to its runs. ``places`` has pairs (address, runs)."""
        copying.scatter(places, self.sizes)

    def prompt(self, identity: Identity, keys: Sequence[str], before: int) -> tuple[Prompt, int]:
        """Return a prompt that finds the pages ``keys``, and 0, the index of the first of them in the prompt.
        ``before`` is the number of pages before them, if SGLang reports it."""
        return pages_named(identity, keys, self.chunk_tokens, before), 0

    def identity(self, *, model: str, revision: str, shard: str) -> Identity:
        """Return the identity of the pool's pages."""
        spec = KVSpec.opaque(self.page_bytes, chunk_tokens=self.chunk_tokens, hashed=True)
        codec = f"sglang-{self.name}-{self.layout}"
        return Identity.of(spec, model=model, revision=revision, codec=codec, shard=shard)


class PoolPages(Protocol):
    """Copies between one host pool and pages: pages in SGLang's layout (:class:`HostPool`), or pages of one
    layer group in the layout that all engines share
    (:class:`~tierstore_connectors.sglang.sharing.SharedPages`)."""

    @property
    def name(self) -> str: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    def runs(self, indices: Any, pages: int) -> Sequence[Any]:
        """Return the location in the pool of each of ``pages`` pages at ``indices``. Raise
        :class:`ValueError` if ``indices`` has another number of pages."""

    def gather(self, places: Sequence[tuple[int, Any]]) -> Sequence[int | None]:
        """Copy pages from the pool and return their checksums. ``places`` has pairs (address, location), with
        locations from :meth:`runs`."""

    def scatter(self, places: Sequence[tuple[int, Any]]) -> None:
        """Copy pages to the pool. ``places`` has pairs (address, location), with locations from
        :meth:`runs`."""

    def prompt(self, identity: Identity, keys: Sequence[str], before: int) -> tuple[Prompt, int] | None:
        """Return a prompt that finds the pages ``keys``, and the index of the first of them in the prompt.
        Return None if the pages' tokens are needed but unknown. ``before`` is the number of pages before
        them, if SGLang reports it."""


class PagePlaces:
    """The source or target of a save or load: ``pages`` pages of a host pool at ``indices``.

    Page ``at`` of the save or load is page ``places[at]`` of ``indices``, or page ``at`` if ``places`` is
    None. The addresses are computed when the first page is copied, because SGLang needs a millisecond for a
    hundred pages with many runs, and a save of stored pages needs no addresses.
    """

    def __init__(
        self,
        pool: PoolPages,
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
    def _runs(self) -> Sequence[Any]:
        return self._pool.runs(self._indices, self._pages)

    def _places(self, pages: Sequence[tuple[int, int]]) -> list[tuple[int, Any]]:
        return [(address, self._runs[self._places_of[at]]) for at, address in pages]

    def copy(self, pages: Sequence[tuple[int, int]], page_bytes: int) -> Sequence[int | None]:
        try:
            return self._pool.gather(self._places(pages))
        except Exception as error:  # noqa: BLE001  # SGLang's errors must not end the mover's task
            self._problem("reading a host pool", error)
            return [None] * len(pages)

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        try:
            self._pool.scatter(self._places(pages))
        except Exception as error:  # noqa: BLE001  # SGLang's errors must not end the mover's task
            self.failed = True
            self._problem("writing to a host pool", error)

    def frames(
        self, positions: Sequence[int], page_bytes: int
    ) -> tuple[list[memoryview], Sequence[int | None]]:
        return copied_frames(self, positions, page_bytes)
