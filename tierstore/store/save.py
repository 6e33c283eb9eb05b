"""Saves: from HBM pages or a caller's buffers into the host tier, and on to the disk behind everybody's back.

Everything that can be decided is decided when ``save`` is called: which pages are new and which host slots
they get. What finds no slot is not stored, at once and without waiting. A long prompt is decided in steps, so
that others get the lock in between, and the copies of each step, on the mover's threads, do not wait for the
next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tierstore.index import Match, Page, Tier
from tierstore.keys import PageKey, Prompt
from tierstore.mover import Mover, Priority
from tierstore.store.branch import Branch
from tierstore.store.endpoints import PageSource
from tierstore.store.state import StoreState
from tierstore.store.telling import NOTHING_TOLD, Told
from tierstore.store.write_behind import WriteBehind
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Transfer, TransferState

_PIECE_BYTES = 4 << 20
_STEP_PAGES = 64  # decided while the store is locked: about a millisecond


class HbmPages:
    """The engine's pool as a source: position ``i`` is whatever pool page the index has for it."""

    def __init__(self, pool: PagePool, hbm_pages: Sequence[int]) -> None:
        self.pool = pool
        self.hbm_pages = list(hbm_pages)
        self._computed = pool.computed()  # now: what is computed from here on need not be waited for

    def read_into(self, wanted: Sequence[tuple[int, int]]) -> None:
        copies = [(self.hbm_pages[position], address) for position, address in wanted]
        self.pool.read_pages(copies, after=self._computed)


class _Fill(Struct, gc=False, eq=False):
    """One page to copy into its host slot."""

    position: int
    page: Page
    address: int
    on_hbm: bool  # the source is its HBM copy, under a lease of ours


class SaveJob:
    """The copies of one save. ``stored_tokens`` are in, or on their way into, a tier below HBM."""

    def __init__(
        self,
        state: StoreState,
        source: PageSource,
        write_behind: WriteBehind | None,
        prompt: Prompt,
        chunks: range,
        page_bytes: int,
        told: Told = NOTHING_TOLD,
    ) -> None:
        self.state = state
        self.prompt = prompt
        self.chunks = chunks
        self.page_bytes = page_bytes
        self.source = source
        self.write_behind = write_behind
        self.stored_tokens = 0
        self.fills: list[_Fill] = []
        self.closed = False
        self.transfer: Transfer[int] = Transfer(self._settle, pages=0, nbytes=0, clock=state.clock)
        self._branch = Branch(state, told)
        self._position = 0  # decided so far
        self._submitted = 0  # fills
        self._copying = 0
        self._pieces = 1  # the deciding counts as one, so that the copies do not end before it

    # -- deciding (under the lock) -------------------------------------------------------------------

    def begin(self, match: Match) -> None:
        """Find out where in the tree the chunks belong. ``match`` is what is held of the prompt."""
        state, prompt, first = self.state, self.prompt, self.chunks.start
        state.identities.setdefault(prompt.identity.digest, prompt.identity)
        parent: Page | None
        if 0 < first <= match.tokens // prompt.chunk_tokens:
            parent = match.pages[first - 1]
        else:
            parent = state.index.tree.path(state.root(prompt.identity, self.page_bytes), prompt, first)
        self._branch.begin(parent)

    def _step(self) -> None:
        """Find or make the next pages and reserve host slots for the new ones."""
        state = self.state
        stop = min(self._position + _STEP_PAGES, len(self.chunks))
        while self._position < stop:
            page = None if state.closed else self._next_page(following=stop - self._position - 1)
            if page is None:
                state.counters.not_stored_pages += len(self.chunks) - self._position
                self._position = len(self.chunks)
                break
            self._branch.grow(page)
            self._position += 1
        state.fills.none_follows()
        self._branch.end_step(last=self._position == len(self.chunks))

    def _next_page(self, *, following: int) -> Page | None:
        page = self._branch.next(*chunk_of(self.prompt, self.chunks[self._position]))
        return page if page is not None and self._plan_page(self._position, page, following) else None

    def _plan_page(self, position: int, page: Page, following: int) -> bool:
        """Publish and reserve for one page, which ``following`` pages come after in this step. False when the
        page is in no tier and cannot be put in one."""
        state = self.state
        on_hbm = isinstance(self.source, HbmPages) and self._publish(self.source, position, page)
        if state.host is None:
            return on_hbm
        if page.copies[Tier.HOST] is not None:
            state.counters.already_stored_pages += 1
            self.stored_tokens += page.num_tokens
            return True
        place = state.fills.begin(page, following=following)
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
        if not self.state.hbm.publish(page, source.hbm_pages[position]):
            copy = page.copies[Tier.HBM]
            if copy is None:
                return False
            source.hbm_pages[position] = copy.place
        return True

    # -- copying -------------------------------------------------------------------------------------

    def _submit(self, mover: Mover) -> None:
        """Have what is decided copied. Under the lock: a store that is closed meanwhile would drop it."""
        pages = max(_PIECE_BYTES // self.page_bytes, 1)
        starts = range(self._submitted, len(self.fills), pages)
        pieces = [self.fills[start : start + pages] for start in starts]
        new = len(self.fills) - self._submitted
        self._submitted = len(self.fills)
        self._pieces += len(pieces)
        self.transfer.expect(new, new * self.page_bytes)
        for piece in pieces:
            mover.submit(Priority.SAVE, lambda piece=piece: self._run(piece))  # type: ignore[misc]

    def run(self, mover: Mover) -> Transfer[int]:
        """Decide, and have it copied. Without the lock."""
        decided = False
        while not decided:
            self.state.give_way()
            with self.state.lock:
                self._step()
                self._submit(mover)
                decided = self._position == len(self.chunks)
                last = decided and self._end_piece()
        if last:
            self.transfer.finish()
        return self.transfer

    def _run(self, piece: list[_Fill]) -> None:
        state = self.state
        with state.lock:
            wanted = [] if self.closed else piece
            self._copying += 1
        self.source.read_into([(fill.position, fill.address) for fill in wanted])
        with state.lock:
            self._copying -= 1
            state.pending_saves -= len(piece)
            if wanted:
                self._stored([fill.page for fill in piece])
            else:
                self._give_up(piece)
            for fill in piece:
                if fill.on_hbm:
                    state.leases.unlease(fill.page, Tier.HBM)
            last = self._end_piece()
            state.changed.notify_all()
        self.transfer.advance(len(wanted), len(wanted) * self.page_bytes)
        if last:
            self.transfer.finish()

    def _end_piece(self) -> bool:
        """Whether it was the last one."""
        self._pieces -= 1
        return self._pieces == 0

    def _stored(self, pages: Sequence[Page]) -> None:
        self.state.fills.complete(pages)
        self.state.counters.saved_pages += len(pages)
        if self.write_behind is not None:
            self.write_behind.enqueue(pages)

    def _give_up(self, piece: Sequence[_Fill]) -> None:
        self.state.fills.give_up(fill.page for fill in piece)
        self.stored_tokens -= sum(fill.page.num_tokens for fill in piece)
        self.state.counters.not_stored_pages += len(piece)

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
