"""The answer to a lookup: how many leading tokens are held, where, and a lease on them."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

from tierstore.index import Match, Page, Tier
from tierstore.store.state import Lease, StoreState
from tierstore.transfer import Transfer

if TYPE_CHECKING:
    from tierstore.store.load import Loader


class Hit:
    """``tokens`` leading tokens of a prompt can be loaded. The pages stay where they are until
    ``release()``, the end of the load, or the end of the lease; a load after that brings what is still there.

    ``by_tier`` counts the tokens by the fastest tier that held them at the lookup.
    """

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
        self.by_tier: dict[str, int] = {
            tier.label: pages * chunk_tokens for tier in Tier if (pages := counts[tier])
        }
        if lease.held:
            self.by_tier[lease.held[-1][1].label] += match.tail_tokens - chunk_tokens

    def __repr__(self) -> str:
        return f"Hit({self.tokens} tokens, {dict(self.by_tier)})"

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages of the hit, in prefix order."""
        return self.match.pages

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        """Bring what is on disk into host memory, in prefix order, and hold it there. The result is the
        number of leading tokens that are then above the disk; at the deadline it is what has arrived."""
        return self._loader.prefetch(self, deadline_s=deadline_s)

    def release(self) -> None:
        """Give the lease back. Repeating it is harmless."""
        with self._state.lock:
            self._state.release(self.lease)
