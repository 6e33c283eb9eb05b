"""What a client knows of by itself: the pages in its own HBM, and who holds them."""

from __future__ import annotations

from tierstore.daemon.remembered import Question
from tierstore.daemon.sources import HbmSource
from tierstore.index import Match, Page, Tier
from tierstore.keys import PageKey
from tierstore.store.leases import Lease
from tierstore.store.state import StoreState
from tierstore.store.telling import NOTHING_TOLD, Teller, Told


class LocalPages:
    """A :class:`StoreState` with nothing but the engine's pool. Thread-safe."""

    def __init__(self, state: StoreState, page_bytes: int) -> None:
        self.state = state
        self._page_bytes = page_bytes

    def match(self, question: Question) -> Match:
        """The leading pages of a prompt that are in HBM."""
        if self.state.pool is None:
            return Match((), 0, 0)
        tokens = question.tokens_from(0)
        with self.state.lock:
            root = self.state.root(question.identity, self._page_bytes)
            return self.state.index.tree.match_below(
                root,
                question.keys,
                tokens,
                question.chunk_tokens,
                question.num_tokens,
                whole=question.identity.whole_pages,
            )

    def use(self, match: Match, lookup_tokens: int, lease_s: float) -> Lease:
        """Lease what a lookup has found here. Under the state's lock."""
        if self.state.pool is not None:
            return self.state.use(match, lookup_tokens, lease_s)
        self.state.counters.lookups += 1
        self.state.counters.lookup_tokens += lookup_tokens
        return Lease()

    def publish(
        self,
        question: Question,
        tail_key: PageKey | None,
        source: HbmSource,
        first: int,
        told: Told = NOTHING_TOLD,
    ) -> dict[int, Page]:
        """Make the pages of ``source`` the HBM copies of chunks ``first …``, or have it read those there are.
        Returns the pages by position, each under a lease for whoever copies it; fewer, when one cannot be
        held, and then nothing behind it either. ``tail_key`` is that of the partial tail."""
        state = self.state
        held: dict[int, Page] = {}
        teller = Teller(state, told)
        with state.lock:
            page = state.root(question.identity, self._page_bytes)
            for chunk in range(first + len(source.hbm_pages)):
                key = question.keys[chunk] if chunk < len(question.keys) else tail_key
                assert key is not None, "a prompt with a partial tail has a key for it"
                if chunk == first:
                    teller.begin(page)
                page = state.index.add(page, key, question.chunk(chunk))
                if chunk >= first:
                    teller.comes_to(page)
                    if not self._publish_page(page, source, chunk - first):
                        state.index.prune(page)
                        break
                    held[chunk - first] = page
            state.uses.touch(list(held.values()), hit=False)
            teller.saved(list(held.values()))
        return held

    def _publish_page(self, page: Page, source: HbmSource, position: int) -> bool:
        state = self.state
        if not state.hbm.publish(page, source.hbm_pages[position]):
            copy = page.copies[Tier.HBM]
            if copy is None:
                return False
            source.hbm_pages[position] = copy.place
        state.index.lease(page, Tier.HBM)
        return True
