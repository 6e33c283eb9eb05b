"""The bundled engine's connectors: without a store (here first), and over a :class:`tierstore.Store`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Transfer
from tierstore_connectors.base import Connector, Hit, LoadedPages


@dataclass(frozen=True, slots=True)
class NoHit:
    """The answer of a cache that is not there."""

    tokens: int = 0
    by_tier: Mapping[str, int] = field(default_factory=dict)

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        return Transfer.completed(0)

    def release(self) -> None:
        """There is no lease."""


class NoStore(Connector):
    """The engine on its own: a pool of pages, nothing reused."""

    def __init__(self, pool: PagePool, identity: Identity) -> None:
        self.pool = pool
        self._identity = identity

    def prompt(self, tokens: TokenIds) -> Prompt:
        return Prompt(self._identity, tokens, chunk_tokens=self.pool.spec.chunk_tokens)

    def lookup(self, prompt: Prompt, *, max_tokens: int | None = None) -> Hit:
        return NoHit()

    def load(self, hit: Hit, *, deadline_s: float | None = None) -> Transfer[LoadedPages]:
        return Transfer.completed(LoadedPages(0, ()))

    def save(
        self, prompt: Prompt, pages: Sequence[int], *, first: int, partial: bool = False
    ) -> Transfer[int]:
        return Transfer.completed(0)

    def allocate(self, count: int) -> list[int] | None:
        return self.pool.allocate(count)

    def release(self, pages: Sequence[int]) -> None:
        self.pool.free(pages)

    def evict(self, count: int) -> int:
        return 0

    def available(self) -> int:
        return self.pool.free_pages
