"""The pages of a sequence in the layer groups that do not need all of the past: windows and states.

The first group of a model needs every page of a sequence, and :mod:`tierstore_engine.keeper` says how it gets
them. The groups beside it need little at a time, and that little changes while the sequence goes on::

    window   [ given back ...... | pages that the next token attends )   one page for each chunk
    state    [ live page ]  [ snapshot at the last chunk's end ]         two pages, whatever the length

What a later hit needs of them is there only where it was saved, at *save points*: the end of the prompt,
where others' prompts part from it, and every ``checkpoint_tokens``, all of them ends of chunks; and where the
sequence leaves, at its end or to be parked. A step ends at each of them, for a state cannot be had of tokens
before its last. A sequence that leaves need not be at a chunk's end: its partial page of each window is
published as it is, and so is the live page of a state, which is the snapshot behind its last token.

A hit begins where all groups have what it needs. What it brings is shared: of windows pages that are complete
but for the one that it ends inside of, and of a state a snapshot. Of these two whoever goes on has a copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field

from tierstore.groups import GroupRule, Past
from tierstore.keys import Prompt
from tierstore.transfer import Transfer
from tierstore.types import GroupPages, Hint
from tierstore_connectors.base import Connector
from tierstore_engine.attention.base import NO_PAGE


@dataclass(slots=True)
class SideTable:
    """One sequence's pages in one such group. ``pages`` is what attention, or a recurrent layer, is given:
    of a window one page for each chunk (:data:`NO_PAGE` where it was given back), of a state its live page.
    ``snapshot`` is a copy of the state behind ``snapshot_at`` tokens."""

    pages: list[int] = field(default_factory=list)
    snapshot: int = NO_PAGE
    snapshot_at: int = 0
    saved_at: int = 0
    """The last save point whose pages were published."""


@dataclass(frozen=True, slots=True)
class SavePoint:
    """``tokens`` of ``prompt`` are computed: a hit may begin here later. They are a multiple of the chunk, or
    all of the prompt of a sequence that leaves. ``leaves``: it does, and nothing behind them is computed."""

    prompt: Prompt
    tokens: int
    hint: Hint | None = None
    session: str | None = None
    leaves: bool = False


class PageShares(Counter[int]):
    """By page, how many sequences have it beside the first. The last that has one gives it back."""

    def owned(self, pages: Ints[int]) -> list[int]:
        """A sequence is done with these pages: those that nobody else has, to be given back."""
        owned = []
        for page in pages:
            if self[page]:
                self[page] -= 1
            else:
                del self[page]
                owned.append(page)
        return owned


class SideGroup(ABC):
    """One group of one model: what its tables hold, and all that is said to the connector about them. Pages
    that forked sequences share are counted here. Belongs to the engine's thread."""

    def __init__(self, connector: Connector, group: int) -> None:
        self._connector = connector
        self._group = group
        self._rule = connector.rules[group]
        self._chunk = connector.pool.spec.chunk_tokens
        self._shares = PageShares()

    @property
    def shared_pages(self) -> int:
        return self._shares.total()

    @abstractmethod
    def peak(self, tokens: int, step: int) -> int:
        """Return the most pages that a sequence of ``tokens`` tokens has at a time, in steps of ``step`` at
        most."""

    @abstractmethod
    def kept(self, tokens: int) -> int:
        """Return the most pages that a sequence of ``tokens`` tokens has between two steps, and while it
        decodes."""

    @abstractmethod
    def begin(self, table: SideTable, held: GroupPages | None, tokens: int) -> bool:
        """Take over the pages of a hit of ``tokens`` tokens (None: of nothing). False, and nothing taken over
        or changed, where a page is missing that the sequence needs to go on."""

    @abstractmethod
    def grow(self, table: SideTable, start: int, stop: int) -> bool:
        """See to it that the tokens ``start … stop`` have pages that nobody else writes to. False where there
        is no room; what was had by then stays in the table."""

    @abstractmethod
    def trim(self, table: SideTable, tokens: int) -> None:
        """Give back the pages behind the first ``tokens`` tokens."""

    @abstractmethod
    def passed(self, table: SideTable, tokens: int) -> None:
        """The first ``tokens`` tokens are computed: what no later token needs, nor a hit at the last chunk's
        end, is given back."""

    @abstractmethod
    def save(self, table: SideTable, point: SavePoint) -> Transfer[int] | None:
        """Publish what a hit at ``point`` needs, if the table has it. Where the sequence leaves, what it has
        written to last is published, too: only :meth:`drop` may follow."""

    def shares(self, table: SideTable, tokens: int) -> bool:
        """Whether another sequence has the page that token ``tokens`` is written to, and may write to it."""
        last = tokens // self._chunk
        return last < len(table.pages) and bool(self._shares[table.pages[last]])

    @abstractmethod
    def share(self, parent: SideTable, child: SideTable) -> bool:
        """Give ``child`` what it needs to go on beside ``parent``. False, and nothing changed, without
        room."""

    def saved(self, table: SideTable, tokens: int) -> bool:
        """Whether what a hit of ``tokens`` tokens needs has been published, as far as it needs any."""
        return table.saved_at == tokens or not self._rule.pages(tokens, self._chunk)

    def held(self, table: SideTable) -> int:
        """Return how many pages the table has."""
        return len(table.pages) - table.pages.count(NO_PAGE) + (table.snapshot != NO_PAGE)

    def brought(self, tokens: int) -> int:
        """Return how many pages a load of ``tokens`` tokens brings."""
        return len(self._rule.pages(tokens, self._chunk))

    def drop(self, table: SideTable) -> None:
        """The sequence is done with all of its pages."""
        self._release([page for page in table.pages if page != NO_PAGE])
        if table.snapshot != NO_PAGE:
            self._release([table.snapshot])
        table.pages = []
        table.snapshot, table.snapshot_at, table.saved_at = NO_PAGE, 0, 0

    def discard(self, held: GroupPages) -> None:
        """Pages of a hit are not taken over."""
        self._connector.release(held.pages, group=self._group)

    def _publish(self, point: SavePoint, pages: Ints[int], first: int) -> Transfer[int]:
        return self._connector.save(
            point.prompt, pages, first=first, group=self._group, hint=point.hint, session=point.session
        )

    def _release(self, pages: list[int]) -> None:
        owned = self._shares.owned(pages)
        if owned:
            self._connector.release(owned, group=self._group)


class WindowGroup(SideGroup):
    """Sliding windows and attention chunks."""

    def peak(self, tokens: int, step: int) -> int:
        # One more than it keeps: the page that a hit ends inside of is copied.
        return min(self._pages(tokens), self._past + self._pages(self._chunk - 1 + step)) + 1

    def kept(self, tokens: int) -> int:
        return min(self._pages(tokens), self._past + 1)

    @property
    def _past(self) -> int:
        """Pages before the last chunk's end that a hit there needs."""
        return self._pages(self._rule.tokens)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._chunk)

    def begin(self, table: SideTable, held: GroupPages | None, tokens: int) -> bool:
        needed = self._rule.pages(tokens, self._chunk)
        if needed and held is None:
            return False
        pages = list(held.pages) if held is not None else []
        if held is not None:
            assert range(held.first, held.first + len(pages)) == needed, "a hit has what it needs"
            if tokens % self._chunk:  # the last page is going to be written
                own = self._connector.allocate(1, group=self._group, near=pages)
                if own is None:
                    return False
                self._connector.pools[self._group].copy_pages([(own[0], pages[-1])])
                self._release([pages[-1]])
                pages[-1] = own[0]
        table.pages = [NO_PAGE] * (needed.start if needed else tokens // self._chunk) + pages
        table.saved_at = tokens
        return True

    def grow(self, table: SideTable, start: int, stop: int) -> bool:
        pages, first = table.pages, start // self._chunk
        shared = [place for place in range(first, len(pages)) if self._shares[pages[place]]]
        missing = max(-(-stop // self._chunk) - len(pages), 0)
        if not shared and not missing:
            return True
        near = [page for page in pages if page != NO_PAGE]
        fresh = self._connector.allocate(len(shared) + missing, group=self._group, near=near)
        if fresh is None:
            return False
        copies = [(fresh.pop(), place) for place in shared]
        pool = self._connector.pools[self._group]
        pool.copy_pages((page, pages[place]) for page, place in copies)
        self._release([pages[place] for place in shared])
        for page, place in copies:
            pages[place] = page
        pages += fresh
        return True

    def trim(self, table: SideTable, tokens: int) -> None:
        keep = -(-tokens // self._chunk)
        self._release(table.pages[keep:])
        del table.pages[keep:]

    def passed(self, table: SideTable, tokens: int) -> None:
        ended = tokens - tokens % self._chunk
        needed = [self._rule.needed(tokens), self._rule.needed(ended)]
        keep = min((each.start for each in needed if each), default=ended) // self._chunk
        gone = [place for place in range(min(keep, len(table.pages))) if table.pages[place] != NO_PAGE]
        self._release([table.pages[place] for place in gone])
        for place in gone:
            table.pages[place] = NO_PAGE

    def save(self, table: SideTable, point: SavePoint) -> Transfer[int] | None:
        needed = self._rule.pages(point.tokens, self._chunk)
        if point.tokens <= table.saved_at or not needed:
            return None
        pages = table.pages[needed.start : needed.stop]
        if len(pages) != len(needed) or NO_PAGE in pages:
            return None
        if point.tokens % self._chunk and self.shares(table, point.tokens):
            return None
        table.saved_at = point.tokens
        return self._publish(point, pages, needed.start)

    def share(self, parent: SideTable, child: SideTable) -> bool:
        self._shares.update(page for page in parent.pages if page != NO_PAGE)
        child.pages, child.saved_at = list(parent.pages), parent.saved_at
        return True


class StateGroup(SideGroup):
    """Recurrent states."""

    def peak(self, tokens: int, step: int) -> int:
        return 2

    def kept(self, tokens: int) -> int:
        return 2

    def begin(self, table: SideTable, held: GroupPages | None, tokens: int) -> bool:
        live = self._connector.allocate(1, group=self._group)
        if live is None or (held is None) != (tokens == 0):
            self._release(live or [])
            return False
        if held is not None:
            self._connector.pools[self._group].copy_pages([(live[0], held.pages[-1])])
            self.discard(held)
        table.pages, table.saved_at = live, tokens
        return True

    def grow(self, table: SideTable, start: int, stop: int) -> bool:
        return True

    def trim(self, table: SideTable, tokens: int) -> None:
        raise AssertionError("a state cannot go back: there are no drafts")

    def passed(self, table: SideTable, tokens: int) -> None:
        if tokens % self._chunk or tokens <= table.snapshot_at or not self._connector.keeps:
            return
        if table.snapshot == NO_PAGE:
            page = self._connector.allocate(1, group=self._group)
            if page is None:
                return  # a later hit begins earlier
            table.snapshot = page[0]
        self._connector.pools[self._group].copy_pages([(table.snapshot, table.pages[0])])
        table.snapshot_at = tokens

    def save(self, table: SideTable, point: SavePoint) -> Transfer[int] | None:
        if point.tokens <= table.saved_at:
            return None
        if table.snapshot != NO_PAGE and table.snapshot_at == point.tokens:
            saving = self._publish(point, [table.snapshot], point.tokens // self._chunk - 1)
            self._release([table.snapshot])  # published, it is not to be written again
            table.snapshot = NO_PAGE
        elif point.leaves:
            saving = self._publish(point, table.pages, (point.tokens - 1) // self._chunk)
        else:
            return None
        table.saved_at = point.tokens
        return saving

    def shares(self, table: SideTable, tokens: int) -> bool:
        return False  # each has a state of its own

    def share(self, parent: SideTable, child: SideTable) -> bool:
        live = self._connector.allocate(1, group=self._group)
        if live is None:
            return False
        self._connector.pools[self._group].copy_pages([(live[0], parent.pages[0])])
        child.pages, child.saved_at = live, parent.saved_at
        return True


def side_groups(connector: Connector) -> tuple[SideGroup, ...]:
    """One for each group of the connector's model behind the first."""
    return tuple(_side_group(connector, group, rule) for group, rule in enumerate(connector.rules) if group)


def _side_group(connector: Connector, group: int, rule: GroupRule) -> SideGroup:
    assert rule.past is not Past.ALL, "layers that need all of the past are one group, the first"
    return StateGroup(connector, group) if rule.past is Past.STATE else WindowGroup(connector, group)
