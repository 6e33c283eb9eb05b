"""The embedded store's answer to a lookup."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tierstore.index import Match, Page, Tier
from tierstore.store.base import Hit
from tierstore.store.leases import Lease
from tierstore.store.state import StoreState
from tierstore.transfer import Transfer

if TYPE_CHECKING:
    from tierstore.store.load import Loader


class EmbeddedHit(Hit):
    """Pages of this process's own tiers, under a lease."""

    def __init__(
        self, state: StoreState, loader: Loader, match: Match, lease: Lease, chunk_tokens: int
    ) -> None:
        self._state = state
        self._loader = loader
        self.match = match
        self.lease = lease
        self.chunk_tokens = chunk_tokens
        self.tokens = match.tokens
        counts = Counter([tier for _, tier in lease.held])
        by_tier = {tier.label: pages * chunk_tokens for tier in Tier if (pages := counts[tier])}
        if lease.held:
            by_tier[lease.held[-1][1].label] += match.tail_tokens - chunk_tokens
        self.by_tier = by_tier

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages of the hit, in prefix order."""
        return self.match.pages

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        return self._loader.prefetch(self, deadline_s=deadline_s)

    def release(self) -> None:
        with self._state.lock:
            self._state.leases.release(self.lease)
