"""Copies between SGLang's host pools and pages.

A page is one page of one host pool: its runs (K and V, or one per layer, as in the pool's layout),
concatenated and opaque. Pages are found by their own names, without the pages before them. SGLang asks for
the end of a prompt only if it has the beginning. Some of its pools have no beginning at all.
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
    """The used part of SGLang's ``HostKVCache``. Indices are of tokens, ``page_size`` per page."""

    page_size: int
    layout: str

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]: ...


class HostPool:
    """One of SGLang's host pools. Raises SGLang's errors for a layout whose pages have no addresses."""

    def __init__(self, name: str, pool: SGLangPool, first_page: Any) -> None:
        """Read the layout of a page from ``first_page``, the indices of any page."""
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
        """Return the addresses of the runs of each of ``pages`` pages. Raises :class:`ValueError` for indices
        of another number of pages: a wrong number must not become a wrong address."""
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        each = len(self.sizes)
        if len(addresses) != pages * each or tuple(sizes) != self.sizes * pages:
            raise ValueError(f"{len(addresses)} runs are not {pages} pages of the {self.name} pool")
        return [addresses[at : at + each] for at in range(0, pages * each, each)]

    def gather(self, places: Sequence[tuple[int, list[int]]]) -> Sequence[int | None]:
        """Copy the runs of pages to these addresses, and return the checksums."""
        return copying.gather_and_hash(places, self.sizes)

    def scatter(self, places: Sequence[tuple[int, list[int]]]) -> None:
        """Copy pages from these addresses to their runs."""
        copying.scatter(places, self.sizes)

    def prompt(self, identity: Identity, keys: Sequence[str], before: int) -> tuple[Prompt, int]:
        """Return a prompt that finds the pages ``keys``, and the place of the first in it. ``before``: the
        number of pages before them, if SGLang gives it."""
        return pages_named(identity, keys, self.chunk_tokens, before), 0

    def identity(self, *, model: str, revision: str, shard: str) -> Identity:
        """Return the identity of its pages."""
        spec = KVSpec.opaque(self.page_bytes, chunk_tokens=self.chunk_tokens, hashed=True)
        codec = f"sglang-{self.name}-{self.layout}"
        return Identity.of(spec, model=model, revision=revision, codec=codec, shard=shard)


class PoolPages(Protocol):
    """Pages of one host pool: in SGLang's form (:class:`HostPool`), or of one layer group in the form of all
    engines (:class:`~tierstore_connectors.sglang.sharing.SharedPages`)."""

    @property
    def name(self) -> str: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def chunk_tokens(self) -> int: ...

    def runs(self, indices: Any, pages: int) -> Sequence[Any]:
        """Return the place of each of ``pages`` pages at ``indices``. Raises :class:`ValueError` for indices
        of another number of pages."""

    def gather(self, places: Sequence[tuple[int, Any]]) -> Sequence[int | None]:
        """Copy the places of :meth:`runs` to these addresses, and return the checksums."""

    def scatter(self, places: Sequence[tuple[int, Any]]) -> None:
        """Copy pages from these addresses to their places."""

    def prompt(self, identity: Identity, keys: Sequence[str], before: int) -> tuple[Prompt, int] | None:
        """Return a prompt that finds the pages ``keys``, and the place of the first in it; None if it cannot
        be made. ``before``: the number of pages before them, if SGLang gives it."""


class PagePlaces:
    """The source or target of a save or load: ``pages`` pages of a host pool at ``indices``.

    Page ``at`` of the save or load is the pool's page ``places[at]``, or ``at`` if ``places`` is None. SGLang
    is asked for addresses when the first page is copied: this takes a millisecond for a hundred pages of many
    runs, and a save of pages that are already stored needs none.
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
