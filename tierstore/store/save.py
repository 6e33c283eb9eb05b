"""Saves: from HBM pages or a caller's buffers into the host tier, and on to the disk behind everybody's back.

Everything that can be decided is decided when ``save`` is called: which pages are new and which host slots
they get. The copies follow on the mover's threads. What finds no slot is not stored, at once and without
waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.index import Match, Page, Tier
from tierstore.keys import PageKey, Prompt
from tierstore.mover import Mover, Priority
from tierstore.store.endpoints import PageSource
from tierstore.store.state import StoreState
from tierstore.store.write_behind import WriteBehind
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Transfer, TransferState

_PIECE_BYTES = 4 << 20


class HbmPages:
    """The engine's pool as a source: position ``i`` is whatever pool page the index has for it."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.pool = pool
        self.hbm_pages = list(hbm_pages)

    def read_into(self, wanted: Sequence[tuple[int, int]]) -> None:
        self.pool.read_pages((self.hbm_pages[position], address) for position, address in wanted)


@dataclass(slots=True)
class _Fill:
    """One page to copy into its host slot."""

    position: int
    page: Page
    address: int
    on_hbm: bool  # the source is its HBM copy, under a lease of ours


class SaveJob:
    """The copies of one save. ``stored`` counts tokens in or on their way into a tier below HBM."""

    def __init__(
        self, state: StoreState, source: PageSource, write_behind: WriteBehind | None, page_bytes: int
    ) -> None:
        self.state = state
        self.page_bytes = page_bytes
        self.source = source
        self.write_behind = write_behind
        self.stored_tokens = 0
        self.fills: list[_Fill] = []
        self.closed = False
        self._copying = 0
        self._pieces = 0
        self.transfer: Transfer[int] = Transfer.completed(0)

    # -- deciding (under the lock) -------------------------------------------------------------------

    def plan(self, prompt: Prompt, match: Match, first: int, count: int) -> None:
        """Find or make the pages of chunks ``first … first + count`` and reserve host slots for the new ones.
        ``match`` is what is held of the prompt."""
        state = self.state
        state.identities.setdefault(prompt.identity.digest, prompt.identity)
        if 0 < first <= match.tokens // prompt.chunk_tokens:
            parent: Page | None = match.pages[first - 1]
        else:
            parent = state.index.path(state.root(prompt.identity, self.page_bytes), prompt, first)
        touched: list[Page] = []
        for position in range(count):
            if parent is None or (parent.parent is not None and not any(parent.copies)):
                state.counters.not_stored_pages += count - position
                break  # the page before it is gone: this one could never be found
            key, tokens = chunk_of(prompt, first + position)
            page = state.index.add(parent, key, tokens)
            if not self._plan_page(position, page):
                state.counters.not_stored_pages += count - position
                break
            touched.append(page)
            parent = page
        state.touch(touched, hit=False)

    def _plan_page(self, position: int, page: Page) -> bool:
        """Publish and reserve for one page. False when the page is in no tier and cannot be put in one."""
        state = self.state
        on_hbm = isinstance(self.source, HbmPages) and self._publish(self.source, position, page)
        if state.host is None:
            return on_hbm
        if page.copies[Tier.HOST] is not None:
            state.counters.already_stored_pages += 1
            self.stored_tokens += page.num_tokens
            return True
        place = state.begin_host_fill(page)
        if place is None:
            kept = any(page.copies)
            state.counters.not_stored_pages += kept  # the caller counts the rest
            state.index.prune(page)
            return kept
        if on_hbm:
            state.index.lease(page, Tier.HBM)
        self.fills.append(_Fill(position, page, state.host.address(place), on_hbm))
        self.stored_tokens += page.num_tokens
        state.pending_saves += 1
        return True

    def _publish(self, source: HbmPages, position: int, page: Page) -> bool:
        """Make the caller's page the HBM copy, or read from the one that is there already."""
        if not self.state.publish(page, source.hbm_pages[position]):
            copy = page.copies[Tier.HBM]
            if copy is None:
                return False
            source.hbm_pages[position] = copy.place
        return True

    # -- copying -------------------------------------------------------------------------------------

    def start(self, mover: Mover) -> Transfer[int]:
        state = self.state
        pages = max(_PIECE_BYTES // self.page_bytes, 1)
        pieces = [self.fills[start : start + pages] for start in range(0, len(self.fills), pages)]
        self._pieces = len(pieces)
        nbytes = len(self.fills) * self.page_bytes
        self.transfer = Transfer(self._settle, pages=len(self.fills), nbytes=nbytes, clock=state.clock)
        if not pieces:
            self.transfer.finish()
        for piece in pieces:
            mover.submit(Priority.SAVE, lambda piece=piece: self._run(piece))  # type: ignore[misc]
        return self.transfer

    def _run(self, piece: list[_Fill]) -> None:
        state = self.state
        with state.lock:
            wanted = [] if self.closed else piece
            self._copying += 1
        self.source.read_into([(fill.position, fill.address) for fill in wanted])
        with state.lock:
            self._copying -= 1
            for fill in piece:
                self._end_fill(fill, filled=bool(wanted))
            if wanted and self.write_behind is not None:
                self.write_behind.enqueue([fill.page for fill in piece])
            self._pieces -= 1
            last = self._pieces == 0
            state.changed.notify_all()
        self.transfer.advance(len(wanted), len(wanted) * self.page_bytes)
        if last:
            self.transfer.finish()

    def _end_fill(self, fill: _Fill, *, filled: bool) -> None:
        state = self.state
        state.pending_saves -= 1
        state.end_host_fill(fill.page, filled=filled)
        if filled:
            state.unlease(fill.page, Tier.HOST)
            state.counters.saved_pages += 1
        else:
            state.counters.not_stored_pages += 1
            self.stored_tokens -= fill.page.num_tokens
        if fill.on_hbm:
            state.unlease(fill.page, Tier.HBM)

    def _settle(self, state: TransferState) -> int:
        with self.state.lock:
            self.closed = True
            self.state.changed.wait_for(lambda: not self._copying)
            return self.stored_tokens


def chunk_of(prompt: Prompt, index: int) -> tuple[PageKey, bytes]:
    """Key and token bytes of a prompt's chunk; the one after the last full chunk is its partial tail."""
    if index < len(prompt.keys):
        return prompt.keys[index], prompt.chunk(index)
    return prompt.tail_key(), prompt.tail
