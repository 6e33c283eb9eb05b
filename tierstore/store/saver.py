"""Start saves: make the requests for the pages of a layer group, and drop older save points of the session
that the new save supersedes (:mod:`tierstore.retention`). A save point is a position where a hit may end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.arguments import whole_number, whole_numbers
from tierstore.backend import LookupRequest, SaveHints
from tierstore.errors import UsageError
from tierstore.groups import Group, Past
from tierstore.index import Page
from tierstore.keys import PageKey, Prompt, TokenIds
from tierstore.mover import Mover
from tierstore.retention import superseded
from tierstore.store.buffers import HbmPages, PageSource
from tierstore.store.lookup import Finder
from tierstore.store.save import Save, SaveBudget
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Transfer
from tierstore.types import Hint

_DONE = Hint(reuse="done")


@dataclass(frozen=True, slots=True)
class _PagesToSave:
    """Pages to save, from page ``first`` of ``request`` on. For named pages of a ``prompt``, ``ends`` are the
    tokens at which they end. The last named page may have ``lacking`` tokens fewer than a chunk."""

    group: Group
    request: LookupRequest
    first: int
    prompt: Prompt | None = None
    ends: Sequence[int] = ()
    lacking: int = 0


class Saver:
    """Starts the saves of one store. ``checkpoint_tokens`` is the distance between save points that are
    kept."""

    def __init__(self, finder: Finder, mover: Mover, checkpoint_tokens: int) -> None:
        self.checkpoint_tokens = checkpoint_tokens
        self._finder = finder
        self._hbm = finder.hbm
        self._backend = finder.backend
        self._mover = mover
        self._budget = SaveBudget(finder.backend)

    def save(
        self,
        prompt: Prompt | TokenIds,
        source: PageSource,
        count: int,
        first: int,
        group: Group,
        hints: SaveHints,
    ) -> Transfer[int]:
        """See :meth:`Store.save_from <tierstore.Store.save_from>`."""
        return self._start(self._pages(prompt, group, first, count), source, {}, count, hints)

    def save_hbm(
        self, prompt: Prompt, hbm_pages: Sequence[int], first: int, group: Group, hints: SaveHints
    ) -> Transfer[int]:
        """See :meth:`Store.save_hbm <tierstore.Store.save_hbm>`."""
        pool = self._hbm.pool(group.number)
        hbm_pages = checked_hbm_pages(pool, hbm_pages)
        pages = self._pages(prompt, group, first, len(hbm_pages))
        request, number = pages.request, pages.group.number
        source = HbmPages(pool, hbm_pages)
        held: dict[int, Page] = {}
        if hbm_pages:
            tail_key: PageKey | None = None
            if request.num_chunks > len(request.keys):
                tail_key = prompt.tail_key(number if len(prompt.identity.groups) > 1 else 0)
            held = self._hbm.save(request, number, tail_key, source, pages.first, hints)
        return self._start(pages, source, held, len(held), hints)

    def _pages(self, prompt: Prompt | TokenIds, group: Group, first: int, count: int) -> _PagesToSave:
        """Return the pages to save. Raise :class:`UsageError` for chunks that the prompt does not have."""
        finder = self._finder
        single = finder.single(prompt)
        if single is not None:
            of, request = single
            return _PagesToSave(of, request, _checked_first(first, count, request.num_chunks))
        prompt = finder.prompt(prompt)
        chunk_tokens = finder.chunk_tokens
        group = prompt.bound(group)
        crosses = group.rule.past is Past.CROSS
        chunks = len(group.chunks(len(prompt))) if crosses else -(-len(prompt) // chunk_tokens)
        first = _checked_first(first, count, chunks)
        if not group.named:
            return _PagesToSave(group, finder.chain(prompt, group), first)
        if crosses:  # these pages are no save point, because pages of an input also serve other prompts
            ends = [(page + 1) * chunk_tokens for page in range(first, first + count)]
            return _PagesToSave(group, finder.pages_at(prompt, group, ends), 0)
        ends = [min((chunk + 1) * chunk_tokens, len(prompt)) for chunk in range(first, first + count)]
        lacking = (first + count) * chunk_tokens - ends[-1] if ends else 0
        return _PagesToSave(group, finder.pages_at(prompt, group, ends), 0, prompt, ends, lacking)

    def _start(
        self, pages: _PagesToSave, source: PageSource, held: dict[int, Page], count: int, hints: SaveHints
    ) -> Transfer[int]:
        request, first = pages.request, pages.first
        self._backend.register(request.registration)
        if hints and not count:
            self._backend.reserve(request.cut(first * request.chunk_tokens), first, 0, hints=hints)
        saved = Save(
            self._hbm,
            self._backend,
            self._mover,
            self._budget,
            self._finder.prompts,
            request,
            source,
            held,
            first,
            count,
            hints,
            pages.lacking if count == len(pages.ends) else 0,
        ).start()
        if pages.ends and hints.session is not None:
            assert pages.prompt is not None
            self._note_point(pages.prompt, pages.group, pages.ends[-1], hints.session)
        return saved

    def _note_point(self, prompt: Prompt, group: Group, end: int, session: str) -> None:
        """Record that a session was saved up to ``end``, and drop save points that are not worth keeping any
        more. Keep the end of the last whole chunk before ``end``, because a prompt with other last tokens can
        continue from there."""
        points = prompt.points.get(group.number, [])
        chunk_tokens = self._finder.chunk_tokens
        whole = end - end % chunk_tokens
        gone = superseded([point for point in points if point != whole], end, self.checkpoint_tokens)
        prompt.points[group.number] = kept = sorted({*points, end}.difference(gone))
        needed = {page for point in kept for page in group.rule.ends(point, chunk_tokens)}
        ends = sorted({page for point in gone for page in group.rule.ends(point, chunk_tokens)} - needed)
        if ends:
            self._let_leave(group, self._finder.pages_at(prompt, group, ends), session)

    def supersede(self, pages: Prompt, session: str) -> None:
        """See :meth:`Store.supersede <tierstore.Store.supersede>`."""
        single = self._finder.single(pages)
        if single is None or not single[1].named:
            raise UsageError("only named pages can be superseded: use a hint for pages of a chain")
        self._let_leave(*single, session)

    def _let_leave(self, group: Group, request: LookupRequest, session: str) -> None:
        hints = SaveHints(_DONE, session)
        self._hbm.supersede(request, group.number, hints)
        self._backend.reserve(request, 0, 0, hints=hints)


def checked_hbm_pages(pool: PagePool, hbm_pages: Sequence[int]) -> list[int]:
    """Return the page numbers. Raise :class:`UsageError` for a number that is not in the pool."""
    numbers = whole_numbers("hbm_pages", hbm_pages)
    if numbers and not 0 <= min(numbers) <= max(numbers) < pool.num_pages:
        raise UsageError(f"hbm_pages must lie between 0 and {pool.num_pages - 1}")
    return numbers


def _checked_first(first: int, count: int, chunks: int) -> int:
    """Return ``first``. Raise :class:`UsageError` if the ``count`` chunks from ``first`` on are not all among
    the prompt's ``chunks``."""
    first = whole_number("first", first)
    if first < 0 or first + count > chunks:
        raise UsageError(f"chunks {first} … {first + count} must lie within the prompt's {chunks} chunks")
    return first
