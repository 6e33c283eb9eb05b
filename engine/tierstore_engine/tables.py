"""The pages of one sequence in one layer group. There is a kind of table for each rule that says which pages
the next token needs.

``Sequence.tables`` has a :class:`GroupTable` for each layer group of the model. A table takes, shares,
publishes and releases the pages of its group. :mod:`tierstore_engine.keeper` calls the tables of all groups::

    FullTable    [ all of the past ...................... | rest of the prompt ]   a page for each chunk
    WindowTable  [ released ... | what the next token attends ]                    a page for each chunk
    StateTable   [ live page ]  [ snapshot at the last chunk's end ]               at most two pages
    CrossTable   [ first image ..... | second image ..... ]                        a page for 64 rows

A sequence is admitted with pages for all of its tokens in full tables, so only decoding can run out of these
pages. The other tables take pages for the next step, and release pages that no later token needs. A window
table is also used for attention chunks, which differ only in their :class:`~tierstore.groups.GroupRule`.

A full table publishes each page when it is complete. A hit needs few pages of the other groups, and these
exist only at *save points*: the end of the prompt, the place where other prompts diverge from it, and every
``checkpoint_tokens``. All of these are ends of chunks. A step ends at each save point, because a state exists
only for its last token. A sequence may leave, finished or parked, inside a chunk. In this case its partial
pages and its live state are published. With ``whole_windows`` a window table publishes each page when it is
complete, like a full table. SGLang finds no prompt without them (docs/sharing.md).

A cross table has the pages of the prompt's images. It takes these pages when the image's token is computed,
unless a load provides them. It publishes an image's pages as soon as they are complete, because they do not
depend on tokens.

A load returns shared pages. The sequence copies the page that a hit ends inside, and the state, before it
writes to them. (In a full group, the load itself makes that copy.) Forked sequences share pages by reference:
the first sequence that writes to a page copies it, and the last one that has the page releases it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Ints
from dataclasses import dataclass, replace

from tierstore.groups import GroupRule, Past
from tierstore.keys import Prompt
from tierstore.transfer import Transfer
from tierstore.types import GroupPages, Hint
from tierstore_connectors.base import Connector
from tierstore_engine.attention.base import NO_PAGE
from tierstore_engine.images import PromptImages


@dataclass(frozen=True, slots=True)
class SavePoint:
    """The lengths that later hits may have, in ascending order: ends of chunks, and last the length of a
    sequence that leaves inside a chunk. ``live`` is the length of the live states if they are published; only
    :meth:`GroupTable.drop` may follow then."""

    prompt: Prompt
    ends: Ints[int]
    hint: Hint | None = None
    session: str | None = None
    live: int | None = None


class PageGroup:
    """The pages of one layer group, shared by the tables of all sequences: the connector's methods for this
    group, and how many sequences share each page. Belongs to the engine's thread."""

    def __init__(self, connector: Connector, number: int, *, whole_windows: bool = False) -> None:
        self.rule = connector.rules[number]
        self.chunk_tokens = connector.pool.spec.chunk_tokens
        self.keeps = connector.keeps  # whether other sequences can find published pages
        # whether each page is published when it is complete, and not only at save points
        windowed = self.rule.past in (Past.WINDOW, Past.CHUNK)
        self.saves_all = self.rule.chained or (whole_windows and windowed)
        self._connector = connector
        self._number = number
        # by page: how many sequences have it, not counting the first
        self._shares: Counter[int] = Counter()

    @property
    def shared_pages(self) -> int:
        """Return the number of pages that are spared because sequences share pages."""
        return self._shares.total()

    def count(self, tokens: int) -> int:
        """Return how many chunks hold ``tokens`` tokens, including the incomplete one."""
        return -(-tokens // self.chunk_tokens)

    def is_shared(self, page: int) -> bool:
        return bool(self._shares[page])

    def share(self, pages: Iterable[int]) -> None:
        """Count one more sequence for each of these pages."""
        self._shares.update(pages)

    def allocate(self, count: int, *, near: Ints[int] = ()) -> list[int] | None:
        return self._connector.allocate(count, group=self._number, near=near)

    def release(self, pages: Ints[int]) -> None:
        """Release one sequence's share of these pages. Pages of no other sequence return to the pool."""
        owned = []
        for page in pages:
            if self._shares[page]:
                self._shares[page] -= 1
            else:
                del self._shares[page]
                owned.append(page)
        if owned:
            self._connector.release(owned, group=self._number)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy whole pages. Each pair is ``(to, from)``."""
        self._connector.pools[self._number].copy_pages(copies)

    def publish(self, point: SavePoint, pages: Ints[int], first: int, hint: Hint | None) -> Transfer[int]:
        """Save ``pages`` as chunks ``first, first + 1, …`` of the point's prompt."""
        return self._connector.save(
            point.prompt, pages, first=first, group=self._number, hint=hint, session=point.session
        )


class GroupTable(ABC):
    """The pages of a sequence in one layer group. By default this is one page for each chunk.

    ``pages`` is passed to attention or to a recurrent layer. A chunk whose page was released has
    :data:`NO_PAGE`. The list object is replaced when an entry changes or disappears, unless the entry becomes
    :data:`NO_PAGE`: a captured step recognises a list that only grows.
    """

    def __init__(self, group: PageGroup) -> None:
        self.group = group
        self.pages: list[int] = []
        self.saved_at = 0  # length of the last hit, or the last chunk's end whose pages are published
        self.expected = 0  # pages that a load in flight takes from the pool

    def another(self, images: PromptImages | None = None) -> GroupTable:
        """Return an empty table of the same group, for a prompt with these images."""
        return type(self)(self.group)

    # -- how many pages ------------------------------------------------------------------------------

    @abstractmethod
    def peak(self, tokens: int, step: int) -> int:
        """Return the most pages that a sequence of ``tokens`` tokens has at once, with steps of at most
        ``step`` tokens."""

    @abstractmethod
    def kept(self, tokens: int) -> int:
        """Return the most pages that a sequence of ``tokens`` tokens has between two steps, and while it
        decodes."""

    @property
    def held(self) -> int:
        """Return how many pages the table has."""
        return len(self.pages) - self.pages.count(NO_PAGE)

    @abstractmethod
    def lacking(self, tokens: int, coming: int) -> int:
        """Return how many more pages a sequence of ``tokens`` tokens takes between two steps, if ``coming``
        pages of a load, of all groups together, have not arrived yet."""

    # -- the life of a sequence ----------------------------------------------------------------------

    @abstractmethod
    def reserve(self, loaded: int, stop: int, shared: int) -> bool:
        """Prepare for a load of ``loaded`` tokens (0 for none) into a sequence of ``stop`` tokens. ``shared``
        whole pages of group 0 are already in HBM. Return False if there is no room; the caller must then call
        :meth:`drop`."""

    @abstractmethod
    def begin(self, held: GroupPages, tokens: int, stop: int) -> bool:
        """Take over the pages of a hit of ``tokens`` tokens (0 for none), for a sequence of ``stop`` tokens.
        Return False, and change nothing, if a page is missing that the sequence needs to continue."""

    def grow(self, start: int, stop: int) -> bool:
        """Ensure that the tokens ``start … stop`` have pages that no other sequence writes to. Return False
        without room; nothing has changed then."""
        group, pages, end = self.group, self.pages, self.group.count(stop)
        places = range(start // group.chunk_tokens, min(len(pages), end))
        shared = [place for place in places if group.is_shared(pages[place])]
        missing = max(end - len(pages), 0)
        if not shared and not missing:
            return True
        fresh = group.allocate(len(shared) + missing, near=[page for page in pages if page != NO_PAGE])
        if fresh is None:
            return False
        if shared:
            copies = [(fresh.pop(), place) for place in shared]
            group.copy((page, pages[place]) for page, place in copies)
            group.release([pages[place] for place in shared])
            self.pages = list(pages)
            for page, place in copies:
                self.pages[place] = page
        self.pages += fresh
        return True

    def own(self, tokens: int) -> bool:
        """Ensure that a sequence may write to the last page of its hit of ``tokens`` tokens. (A page inside
        which a hit ends belongs to the sequence already.) Return False without room; nothing has changed
        then."""
        if tokens % self.group.chunk_tokens:
            return True
        pages = self._with_copy(self.pages, tokens // self.group.chunk_tokens - 1)
        self.pages = pages or self.pages
        return pages is not None

    def _with_copy(self, pages: Ints[int], place: int) -> list[int] | None:
        """Return ``pages`` with a copy in place of one, which is released. None without room."""
        fresh = self.group.allocate(1, near=[page for page in pages if page != NO_PAGE])
        if fresh is None:
            return None
        self.group.copy([(fresh[0], pages[place])])
        self.group.release([pages[place]])
        return [*pages[:place], *fresh, *pages[place + 1 :]]

    def trim(self, tokens: int) -> None:
        """Release the pages after the first ``tokens`` tokens."""
        keep = self.group.count(tokens)
        if len(self.pages) > keep:
            self.group.release(self.pages[keep:])
            self.pages = self.pages[:keep]

    @abstractmethod
    def passed(self, tokens: int) -> None:
        """Release pages after the first ``tokens`` tokens were computed: those that neither a later token nor
        a hit at the last chunk's end needs."""

    def is_shared(self, tokens: int) -> bool:
        """Return whether another sequence may write to the page of token ``tokens``."""
        last = tokens // self.group.chunk_tokens
        return last < len(self.pages) and self.group.is_shared(self.pages[last])

    def fork(self) -> GroupTable | None:
        """Return a table for another sequence that continues from the same tokens. Return None if there is no
        room."""
        twin = self.another()
        self.group.share(page for page in self.pages if page != NO_PAGE)
        twin.pages, twin.saved_at = list(self.pages), self.saved_at
        return twin

    def drop(self) -> None:
        """Release all of the sequence's pages. The table is empty afterwards."""
        self.group.release([page for page in self.pages if page != NO_PAGE])
        self.pages = []
        self.saved_at = self.expected = 0

    # -- saves ---------------------------------------------------------------------------------------

    @abstractmethod
    def save(self, point: SavePoint) -> list[Transfer[int]]:
        """Publish the pages for hits at the ends of ``point``, as far as the table has them and they are not
        published yet. Return the copies to colder tiers."""

    @abstractmethod
    def saved(self, tokens: int) -> int:
        """Return ``tokens``, an end of a chunk, or fewer if the published pages support only a shorter
        hit."""


class FullTable(GroupTable):
    """Full attention and latents, which need every page of the past."""

    def peak(self, tokens: int, step: int) -> int:
        return self.group.count(tokens)

    def kept(self, tokens: int) -> int:
        return self.group.count(tokens)

    def lacking(self, tokens: int, coming: int) -> int:
        admitted = self.pages or self.expected  # this table has pages for all tokens
        return min(self.expected, coming) if admitted else self.kept(tokens)

    def reserve(self, loaded: int, stop: int, shared: int) -> bool:
        self.expected = self.group.count(loaded) - shared
        fresh = self.group.allocate(self.group.count(stop) - self.group.count(loaded))
        self.pages = fresh or []
        return fresh is not None

    def begin(self, held: GroupPages, tokens: int, stop: int) -> bool:
        had = [*held.pages, *self.pages]
        missing = self.group.count(stop) - len(had)
        more = self.group.allocate(missing, near=had) if missing > 0 else []
        if more is None:
            return False
        self.pages, self.saved_at, self.expected = [*had, *more], tokens, 0
        return True

    def passed(self, tokens: int) -> None:
        """Keep all pages."""

    def save(self, point: SavePoint) -> list[Transfer[int]]:
        # Save all pages in one call. A hint is published even if there are no pages, because it also applies
        # to earlier pages.
        first, stop = self.saved_at // self.group.chunk_tokens, self.group.count(point.ends[-1])
        if stop <= first and (point.hint is None or not first):
            return []
        self.saved_at = max(self.saved_at, point.ends[-1])
        return [self.group.publish(point, self.pages[first:stop], first, point.hint)]

    def saved(self, tokens: int) -> int:
        return min(self.saved_at - self.saved_at % self.group.chunk_tokens, tokens)


class NamedTable(GroupTable):
    """A table for a group with named pages. It takes pages as the sequence grows, and publishes them only at
    save points, unless the group ``saves_all``."""

    def lacking(self, tokens: int, coming: int) -> int:
        arrived = self.expected - min(self.expected, coming)
        return max(self.kept(tokens) - self.held - arrived, 0)

    def reserve(self, loaded: int, stop: int, shared: int) -> bool:
        self.expected = len(self.group.rule.pages(loaded, self.group.chunk_tokens))
        return True

    def save(self, point: SavePoint) -> list[Transfer[int]]:
        saves = []
        for end in point.ends:
            # If each page is published when it is complete, a hint comes later.
            hinted = self.group.saves_all and point.hint is not None and end == self.saved_at
            saving = self._save_at(end, point) if hinted or end > self.saved_at else None
            if saving is not None:
                saves.append(saving)
                if not end % self.group.chunk_tokens:
                    self.saved_at = end
        return saves

    def saved(self, tokens: int) -> int:
        needed = self.group.rule.pages(tokens, self.group.chunk_tokens)
        return tokens if self.saved_at == tokens or not needed else 0

    @abstractmethod
    def _save_at(self, end: int, point: SavePoint) -> Transfer[int] | None:
        """Publish the pages for a hit of ``end`` tokens. Return None if the table does not have them."""

    def _publish(self, point: SavePoint, end: int, pages: Ints[int], first: int) -> Transfer[int]:
        hint = point.hint
        if hint is not None and end % self.group.chunk_tokens:  # other hosts do not ask for partial pages
            hint = replace(hint, elsewhere=False) if hint.for_policy else None
        return self.group.publish(point, pages, first, hint)


class WindowTable(NamedTable):
    """Sliding windows and attention chunks, which need the pages that the next token attends."""

    def peak(self, tokens: int, step: int) -> int:
        # This is one page more than the table keeps, because the page inside which a hit ends is copied.
        group = self.group
        pages = group.count(group.rule.tokens) + group.count(group.chunk_tokens - 1 + step)
        return min(group.count(tokens), pages) + 1

    def kept(self, tokens: int) -> int:
        # The table keeps the pages for a hit at the last chunk's end, and the page of the next token.
        return min(self.group.count(tokens), self.group.count(self.group.rule.tokens) + 1)

    def begin(self, held: GroupPages, tokens: int, stop: int) -> bool:
        group, pages = self.group, list(held.pages)
        needed = group.rule.pages(tokens, group.chunk_tokens)
        if needed and not pages:
            return False
        assert range(held.first, held.first + len(pages)) == needed, "a hit has all pages that it needs"
        if pages and tokens % group.chunk_tokens:  # the sequence will write to the last page
            copied = self._with_copy(pages, len(pages) - 1)
            if copied is None:
                return False
            pages = copied
        before = needed.start if needed else tokens // group.chunk_tokens
        self.pages, self.saved_at, self.expected = [NO_PAGE] * before + pages, tokens, 0
        return True

    def passed(self, tokens: int) -> None:
        group = self.group
        ended = tokens - tokens % group.chunk_tokens
        needed = [group.rule.needed(tokens), group.rule.needed(ended)]
        keep = min((each.start for each in needed if each), default=ended) // group.chunk_tokens
        gone = [place for place in range(min(keep, len(self.pages))) if self.pages[place] != NO_PAGE]
        group.release([self.pages[place] for place in gone])
        for place in gone:
            self.pages[place] = NO_PAGE

    def _save_at(self, end: int, point: SavePoint) -> Transfer[int] | None:
        needed = self.group.rule.pages(end, self.group.chunk_tokens)
        if self.group.saves_all:
            # All pages are saved without a session, because a later save point of the session would supersede
            # them.
            needed = range(self.pages.count(NO_PAGE), self.group.count(end))
            point = replace(point, session=None)
        pages = self.pages[needed.start : needed.stop]
        if not needed or len(pages) != len(needed) or NO_PAGE in pages:
            return None
        if end % self.group.chunk_tokens and self.is_shared(end):
            return None
        return self._publish(point, end, pages, needed.start)


class StateTable(NamedTable):
    """A table for recurrent states. The next token needs the last state only. ``pages`` has the page of the
    live state. ``snapshot`` is empty, or has a copy of the state after ``snapshot_at`` tokens. ``before`` is
    empty, or has a copy of the state to go back to."""

    def __init__(self, group: PageGroup) -> None:
        super().__init__(group)
        self.snapshot: list[int] = []
        self.snapshot_at = 0
        self.before: list[int] = []

    def peak(self, tokens: int, step: int) -> int:
        return 2

    def kept(self, tokens: int) -> int:
        return 2

    @property
    def held(self) -> int:
        return len(self.pages) + len(self.snapshot) + len(self.before)

    def begin(self, held: GroupPages, tokens: int, stop: int) -> bool:
        live = self.group.allocate(1)
        if live is None or bool(held.pages) != bool(tokens):
            self.group.release(live or [])
            return False
        if held.pages:
            self.group.copy([(live[0], held.pages[-1])])
            self.group.release(held.pages)
        self.pages, self.saved_at, self.expected = live, tokens, 0
        return True

    def grow(self, start: int, stop: int) -> bool:
        return True

    def keep_state(self) -> bool:
        """Copy the state as it is now, for :meth:`go_back`. Return False without room."""
        self.before = self.before or self.group.allocate(1) or []
        self.group.copy((page, self.pages[0]) for page in self.before)
        return bool(self.before)

    def go_back(self) -> None:
        """Return to the state that :meth:`keep_state` has copied, if there is one."""
        self.group.copy((self.pages[0], page) for page in self.before)
        self.group.release(self.before)
        self.before = []

    def trim(self, tokens: int) -> None:
        """Do nothing, because the page has the state before the draft."""

    def passed(self, tokens: int) -> None:
        group = self.group
        if tokens % group.chunk_tokens or tokens <= self.snapshot_at or not group.keeps:
            return
        self.snapshot = self.snapshot or group.allocate(1) or []
        if self.snapshot:  # otherwise a later hit would be shorter
            group.copy([(self.snapshot[0], self.pages[0])])
            self.snapshot_at = tokens

    def is_shared(self, tokens: int) -> bool:
        return False  # each sequence has its own state

    def fork(self) -> GroupTable | None:
        twin = self.another()
        live = self.group.allocate(1)
        if live is None:
            return None
        self.group.copy([(live[0], self.pages[0])])
        twin.pages, twin.saved_at = live, self.saved_at
        return twin

    def drop(self) -> None:
        super().drop()
        self.group.release([*self.snapshot, *self.before])
        self.snapshot, self.snapshot_at, self.before = [], 0, []

    def _save_at(self, end: int, point: SavePoint) -> Transfer[int] | None:
        if self.snapshot and self.snapshot_at == end:
            saving = self._publish(point, end, self.snapshot, end // self.group.chunk_tokens - 1)
            self.group.release(self.snapshot)
            self.snapshot = []  # the page is published, so it must not be written again
            return saving
        if end == point.live:
            return self._publish(point, end, self.pages, (end - 1) // self.group.chunk_tokens)
        return None


class CrossTable(GroupTable):
    """Cross attention, which needs all images before the next token. ``pages`` has the pages of all images of
    the prompt in order, and ``rule`` knows these images. ``ready`` has the numbers of the images whose KV is
    in the pages, and ``published`` the numbers of the images that other sequences can find."""

    def __init__(self, group: PageGroup) -> None:
        super().__init__(group)
        self.rule = group.rule
        self.ready: set[int] = set()
        self.published: set[int] = set()

    def another(self, images: PromptImages | None = None) -> CrossTable:
        twin = CrossTable(self.group)
        inputs = images.inputs if images is not None else ()
        chunk_tokens = self.group.chunk_tokens
        twin.rule = GroupRule.cross(((each.start, each.rows) for each in inputs), chunk_tokens)
        return twin

    def pages_of(self, number: int) -> list[int]:
        """Return the pages of image ``number``."""
        place = self._place(number)
        return self.pages[place.start : place.stop]

    def missing(self, tokens: int) -> list[int]:
        """Return the numbers of the images that begin before ``tokens`` and whose KV is not in the pages."""
        return [number for number in range(self._begun(tokens)) if number not in self.ready]

    def take(self, number: int, pages: Ints[int]) -> None:
        """Take over the loaded pages of image ``number``."""
        place = self._place(number)
        self.pages = [*self.pages[: place.start], *pages, *self.pages[place.stop :]]
        self.ready.add(number)
        self.published.add(number)

    def _begun(self, tokens: int) -> int:
        return sum(start < tokens for start, _ in self.rule.inputs)

    def _place(self, number: int) -> range:
        """Return the places of an image's pages."""
        ends = [0, *(end // self.group.chunk_tokens for _, end in self.rule.inputs)]
        return range(ends[number], ends[number + 1])

    def peak(self, tokens: int, step: int) -> int:
        return self.kept(tokens)

    def kept(self, tokens: int) -> int:
        return len(self.rule.pages(tokens, self.group.chunk_tokens))

    def lacking(self, tokens: int, coming: int) -> int:
        return max(self.kept(tokens) - self.held - max(self.expected - coming, 0), 0)

    def reserve(self, loaded: int, stop: int, shared: int) -> bool:
        self.expected = self.kept(loaded)
        return True

    def begin(self, held: GroupPages, tokens: int, stop: int) -> bool:
        if len(held.pages) != self.kept(tokens):
            return False
        images = len(self.rule.inputs)
        rest = (self._place(images - 1).stop if images else 0) - len(held.pages)
        self.pages, self.expected = [*held.pages, *[NO_PAGE] * rest], 0
        self.ready = set(range(self._begun(tokens)))
        self.published = set(self.ready)
        return True

    def grow(self, start: int, stop: int) -> bool:
        places = [place for place in range(self.kept(stop)) if self.pages[place] == NO_PAGE]
        fresh = self.group.allocate(len(places)) if places else []
        if fresh is None:
            return False
        if fresh:
            self.pages = list(self.pages)
        for place, page in zip(places, fresh, strict=True):
            self.pages[place] = page
        return True

    def own(self, tokens: int) -> bool:
        return True

    def trim(self, tokens: int) -> None:
        """Do nothing, because drafted tokens are no images."""

    def passed(self, tokens: int) -> None:
        self.ready.update(range(self._begun(tokens)))

    def is_shared(self, tokens: int) -> bool:
        return False  # no token writes to an image's pages

    def fork(self) -> GroupTable | None:
        twin = super().fork()
        assert isinstance(twin, CrossTable)
        twin.rule, twin.ready, twin.published = self.rule, set(self.ready), set(self.published)
        return twin

    def drop(self) -> None:
        super().drop()
        self.ready, self.published = set(), set()

    def save(self, point: SavePoint) -> list[Transfer[int]]:
        new = sorted(self.ready - self.published)
        self.published.update(new)
        return [
            self.group.publish(point, self.pages_of(number), self._place(number).start, point.hint)
            for number in new
        ]

    def saved(self, tokens: int) -> int:
        return tokens if self.published.issuperset(range(self._begun(tokens))) else 0


_TABLES: dict[Past, type[GroupTable]] = {
    Past.ALL: FullTable,
    Past.STATE: StateTable,
    Past.CROSS: CrossTable,
}


def empty_tables(connector: Connector, *, whole_windows: bool = False) -> tuple[GroupTable, ...]:
    """Return an empty table for each layer group of the connector's model."""
    numbers = range(len(connector.pools))
    groups = [PageGroup(connector, number, whole_windows=whole_windows) for number in numbers]
    return tuple(_TABLES.get(group.rule.past, WindowTable)(group) for group in groups)
