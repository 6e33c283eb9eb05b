"""A client's prompt in one layer group, and how its pages are found in the tree.

A layer group's pages are either *chained* (a page is found behind its parent) or *named* (a page is found by
its name, below the root). Only the code that makes a :class:`ChainView` or a :class:`NamedView` of a request
distinguishes the two kinds. All later code uses a :class:`PromptView`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import xxhash

from tierstore.backend import PrefixHandle, Registration
from tierstore.core.clients import NEVER, Client, Path, Refusal
from tierstore.core.find import find, frontier, load_named
from tierstore.core.residency import AccessLog
from tierstore.core.state import StoreState
from tierstore.errors import StoreClosedError
from tierstore.index import Match, Page, Tier, tier_runs
from tierstore.index.leases import PageLease
from tierstore.keys import TOKEN_BYTES, PageKey, Prompt

HOLD_S = 30.0
"""Seconds that pages loaded from disk stay in the tree for the request that needs them."""


@dataclass(frozen=True, slots=True)
class FoundPages:
    """The stored pages of a prompt, in prompt order. ``runs`` are their tiers as (tier, end of the run).
    ``tail_tokens`` tokens of the last page match. ``positions`` are the indices of these pages in a
    :class:`NamedView`; empty for a chain. ``look_on_disk`` is true if the disk may have more pages."""

    pages: Sequence[Page]
    tokens: int
    tail_tokens: int
    runs: Sequence[tuple[Tier, int]]
    look_on_disk: bool = False
    positions: Sequence[int] = ()


class PromptView(ABC):
    """The pages of one prompt in one layer group, as a client names them."""

    named = False
    depth = 0
    """Number of pages before the view's first page in its prompt, as far as known."""

    def __init__(self, registration: Registration, keys: Sequence[PageKey], tokens: bytes) -> None:
        self.registration = registration
        self.chunk_tokens = registration.chunk_tokens
        self.keys = keys
        self.tokens = tokens
        self._width = self.chunk_tokens * TOKEN_BYTES

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens in the prompt."""

    @property
    @abstractmethod
    def num_chunks(self) -> int:
        """Number of chunks in the prompt, including the partial tail."""

    @property
    @abstractmethod
    def whole_chunks(self) -> int:
        """Number of chunks in the prompt without the partial tail."""

    @property
    def head_left(self) -> bool:
        """Whether remembered pages of this prompt have left the tree. Needs the state's lock."""
        return False

    def spell_out(self) -> int:
        """Replace the remembered pages by their keys and tokens. Return the number of the remembered path."""
        return 0

    @abstractmethod
    def chunk(self, index: int) -> tuple[PageKey, bytes]:
        """Return the key and token bytes of a chunk. The last chunk may be the partial tail."""

    @abstractmethod
    def all_keys(self) -> Sequence[PageKey]:
        """Return the keys of all whole chunks."""

    @abstractmethod
    def whole(self) -> Prompt:
        """Return the prompt with all keys and tokens, without remembered pages."""

    def slice(self, chunks: Sequence[int]) -> tuple[PromptView, int]:
        """Return a view that contains these chunks, and the position of the first of these chunks in that
        view. In a chain, the chunks must be consecutive."""
        return self, chunks[0] if chunks else 0

    def shared(self, saved: range) -> Sequence[int]:
        """Return the chunks that other hosts need after the chunks ``saved`` were saved. In a chain, these
        are all chunks up to the last saved one. For named pages, these are the saved chunks, or all chunks if
        none was saved."""
        return range(saved.stop)

    def key_up_to(self, chunk: int) -> bytes:
        """Return bytes that identify the prompt up to this chunk under its identity. For named pages, the
        bytes identify the whole view."""
        return self.chunk(chunk)[0]

    def name(self) -> bytes:
        """Return a hash of everything that identifies this prompt: its identity, keys and tokens."""
        whole = self.whole()
        kind = b"%d %d " % (self.chunk_tokens, self.named)
        parts = (kind, whole.identity.digest, whole.token_bytes, *whole.keys)
        return hashlib.sha256(b"".join(parts)).digest()

    def root(self, state: StoreState) -> Page:
        """Return the root of all pages of this prompt's identity. Needs the state's lock. Raise
        :class:`Refusal` if the identity was forgotten and registered again with another page size."""
        nbytes = state.index.tree.root(self.registration.identity, self.registration.page_bytes).nbytes
        if nbytes != self.registration.page_bytes:
            raise Refusal("identity", f"pages of this identity have {nbytes} bytes now: register it again")
        return state.root(self.registration.identity, self.registration.page_bytes)

    # -- in the tree (under the state's lock) ---------------------------------------------------------

    @abstractmethod
    def find(self, state: StoreState, max_tokens: int) -> FoundPages | None:
        """Return the pages of the first ``max_tokens`` tokens that are in the tree; None if remembered pages
        have left the tree."""

    @abstractmethod
    def missing(self, found: FoundPages, limit: int) -> Sequence[int]:
        """Return the chunks of the first ``limit`` tokens that are not stored. A named view ignores ``limit``
        and checks all of its pages."""

    @abstractmethod
    def may_be_on_disk(self, state: StoreState) -> bool:
        """Return whether the disk may have pages that are not in the tree."""

    @abstractmethod
    def held(self, found: FoundPages) -> list[tuple[Page, Tier]]:
        """Return the copies that a lease on the found pages has to hold."""

    @abstractmethod
    def pinned(self, found: FoundPages) -> Sequence[Page]:
        """Return the pages that a pin on the found pages has to hold."""

    @abstractmethod
    def touch(self, log: AccessLog, found: FoundPages) -> None:
        """Record a use of the found pages."""

    @abstractmethod
    def remember(self, owner: object, client: Client, found: FoundPages, changes: int) -> PrefixHandle | None:
        """Make ``client`` remember the found pages. Return a handle for later requests, or None if there is
        nothing to remember."""

    def remember_saved(
        self, owner: object, client: Client, before: Sequence[Page], pages: Sequence[Page]
    ) -> PrefixHandle | None:
        """Make ``client`` remember the pages ``before`` and the whole ``pages`` after them, which it saves.
        Without a remembered path, the client would send a long prompt again with every batch that it
        saves."""
        return None

    @abstractmethod
    def first_pages(self, state: StoreState, chunks: int) -> Sequence[Page] | None:
        """Return the pages of the first ``chunks`` chunks, with or without copies; None if some of them are
        not in the tree."""

    @abstractmethod
    def in_tree(self, state: StoreState, chunks: range) -> Sequence[Page]:
        """Return the pages of these chunks that are in the tree, with or without copies."""

    # -- on disk (without the lock) -------------------------------------------------------------------

    @abstractmethod
    def disk_look(self, state: StoreState, limit: int) -> Callable[[], PageLease]:
        """Return a function that loads the pages of the first ``limit`` tokens that are on disk into the
        tree, and returns a lease on them for :data:`HOLD_S`. The function blocks."""


class ChainView(PromptView):
    """A prompt whose pages are found by following a chain. ``head`` has the first ``known`` pages of a path
    that the client remembers. ``keys`` and ``tokens`` are those of the chunks after ``head``."""

    def __init__(
        self,
        registration: Registration,
        keys: Sequence[PageKey],
        tokens: bytes,
        *,
        path: Path | None = None,
        path_number: int = 0,
        known: int = 0,
    ) -> None:
        super().__init__(registration, keys, tokens)
        self.path = path
        self.path_number = path_number
        self.head: Sequence[Page] = ()
        if path is not None:
            self.head = path.pages if known == len(path.pages) else path.pages[:known]

    def spell_out(self) -> int:
        whole, number = self.whole(), self.path_number
        self.keys, self.tokens = whole.keys, whole.token_bytes
        self.head, self.path, self.path_number = (), None, 0
        return number

    @property
    def head_left(self) -> bool:
        return bool(self.head) and not any(self.head[-1].copies)

    @property
    def num_tokens(self) -> int:
        return len(self.head) * self.chunk_tokens + len(self.tokens) // TOKEN_BYTES

    @property
    def num_chunks(self) -> int:
        return len(self.head) + -(-len(self.tokens) // self._width)

    @property
    def whole_chunks(self) -> int:
        return len(self.head) + len(self.keys)

    def whole(self) -> Prompt:
        tokens = b"".join([page.tokens for page in self.head]) + self.tokens
        return Prompt.with_keys(
            self.registration.identity, tokens, self.all_keys(), chunk_tokens=self.chunk_tokens
        )

    def chunk(self, index: int) -> tuple[PageKey, bytes]:
        if index < len(self.head):
            return self.head[index].key, self.head[index].tokens
        index -= len(self.head)
        tokens = self.tokens[index * self._width : (index + 1) * self._width]
        if index < len(self.keys):
            return self.keys[index], tokens
        before = self.key_before(self.whole_chunks)
        return PageKey(xxhash.xxh3_128_digest(before + tokens)), tokens

    def all_keys(self) -> Sequence[PageKey]:
        return [*(page.key for page in self.head), *self.keys] if self.head else self.keys

    def key_before(self, chunk: int) -> bytes:
        """Return the key of the chunk before ``chunk``, or the hash of the identity for the first chunk."""
        index = chunk - len(self.head)
        if index > 0:
            return self.keys[index - 1]
        return self.head[-1].key if self.head else xxhash.xxh3_128_digest(self.registration.identity.digest)

    # -- in the tree ---------------------------------------------------------------------------------

    def find(self, state: StoreState, max_tokens: int) -> FoundPages | None:
        max_tokens = self._findable(max_tokens)
        head_runs = self._head_runs(state)
        if head_runs is None:
            return None
        head_tokens = len(self.head) * self.chunk_tokens
        if max_tokens < head_tokens:
            return self._within_head(max_tokens)
        below, more = self._below(state, max_tokens - head_tokens)
        tail_tokens = below.tail_tokens or (self.chunk_tokens if self.head else 0)
        pages = (*self.head, *below.pages)
        if not state.health.readable:
            reachable = state.reachable(
                Match(pages, head_tokens + below.tokens, tail_tokens), self.chunk_tokens
            )
            return FoundPages(
                reachable.pages, reachable.tokens, reachable.tail_tokens, tier_runs(reachable.pages)
            )
        return FoundPages(
            pages, head_tokens + below.tokens, tail_tokens, _joined(head_runs, below.runs), more
        )

    def missing(self, found: FoundPages, limit: int) -> Sequence[int]:
        if found.tokens >= limit:
            return ()
        return range(found.tokens // self.chunk_tokens, -(-limit // self.chunk_tokens))

    def may_be_on_disk(self, state: StoreState) -> bool:
        # For this, the remembered pages must be in the tree, but their copies need not be complete.
        _, more = self._below(state, self._findable(len(self.tokens) // TOKEN_BYTES))
        return more

    def held(self, found: FoundPages) -> list[tuple[Page, Tier]]:
        # The earlier pages of a run cannot leave the tier before the last page of the run.
        return [(found.pages[end - 1], tier) for tier, end in found.runs]

    def pinned(self, found: FoundPages) -> Sequence[Page]:
        whole = found.tokens // self.chunk_tokens  # possibly without the last page, which may match in part
        return found.pages[whole - 1 : whole] if whole else ()

    def touch(self, log: AccessLog, found: FoundPages) -> None:
        if found.pages:
            log.touch(found.pages, hit=True)

    def remember(self, owner: object, client: Client, found: FoundPages, changes: int) -> PrefixHandle | None:
        known = len(found.pages) - (found.tail_tokens < self.chunk_tokens)
        if known <= 0:
            return None
        if self.path is not None and known <= len(self.head):
            return PrefixHandle(owner, self.path_number, known)
        path = Path(found.pages[:known], found.runs, changes)
        return PrefixHandle(owner, client.remember(path), known)

    def remember_saved(
        self, owner: object, client: Client, before: Sequence[Page], pages: Sequence[Page]
    ) -> PrefixHandle | None:
        path, head, number = Path((*before, *pages), (), NEVER), self.path, self.path_number
        ends_there = head is not None and len(self.head) == len(head.pages)
        if ends_there and client.paths.get(number) is head:
            client.lengthen(number, path)
        else:
            number = client.remember(path)
        return PrefixHandle(owner, number, len(path.pages))

    def first_pages(self, state: StoreState, chunks: int) -> Sequence[Page] | None:
        if chunks <= len(self.head):
            return self.head if chunks == len(self.head) else self.head[:chunks]
        count = chunks - len(self.head)
        below = state.index.tree.descend(self._parent(state), self.keys[:count], self.tokens, self._width)
        return (*self.head, *below) if len(below) == count else None

    def in_tree(self, state: StoreState, chunks: range) -> Sequence[Page]:
        keys = self.keys[: max(chunks.stop - len(self.head), 0)]
        tree = state.index.tree
        pages = [*self.head, *tree.descend(self._parent(state), keys, self.tokens, self._width)]
        if len(pages) == self.whole_chunks < chunks.stop:
            tail = tree.child(pages[-1] if pages else self.root(state), *self.chunk(self.whole_chunks))
            pages += [tail] if tail is not None else []
        return pages[chunks.start : chunks.stop]

    def _findable(self, tokens: int) -> int:
        """Return how many of ``tokens`` tokens can be found: only whole pages if the identity has no partial
        pages."""
        return tokens - tokens % self.chunk_tokens if self.registration.identity.whole_pages else tokens

    def _below(self, state: StoreState, max_tokens: int) -> tuple[Match, bool]:
        """Return the match of at most ``max_tokens`` tokens below ``head`` in the tree, and whether the disk
        may have more pages."""
        identity = self.registration.identity
        parent = self._parent(state)
        below = state.index.tree.match_below(
            parent, self.keys, self.tokens, self.chunk_tokens, max_tokens, whole=identity.whole_pages
        )

        def chunk(index: int) -> tuple[PageKey | None, bytes]:
            key = self.keys[index] if index < len(self.keys) else None
            return key, self.tokens[index * self._width : (index + 1) * self._width]

        more = below.tokens < max_tokens
        return below, more and frontier(state, parent, below, identity, self.chunk_tokens, chunk) is not None

    def _parent(self, state: StoreState) -> Page:
        """Return the parent of the first page after ``head``."""
        return self.head[-1] if self.head else self.root(state)

    def _head_runs(self, state: StoreState) -> list[tuple[Tier, int]] | None:
        """Return the tier runs of ``head``; None if some of its pages have left the tree."""
        path = self.path
        if path is None:
            return []
        if path.changes != state.index.changes:
            path.runs = tier_runs(path.pages)
            path.changes = state.index.changes
        known = len(self.head)
        if known and (not path.runs or path.runs[-1][1] < known):
            return None
        return [(tier, min(end, known)) for n, (tier, end) in enumerate(path.runs) if _start(path, n) < known]

    def _within_head(self, max_tokens: int) -> FoundPages:
        whole, rest = divmod(max_tokens, self.chunk_tokens)
        pages = tuple(self.head[: whole + bool(rest)])
        return FoundPages(pages, max_tokens, rest or (self.chunk_tokens if whole else 0), tier_runs(pages))

    # -- on disk -------------------------------------------------------------------------------------

    def disk_look(self, state: StoreState, limit: int) -> Callable[[], PageLease]:
        prompt, page_bytes = self.whole(), self.registration.page_bytes

        def look() -> PageLease:
            try:
                with find(state, prompt, limit, page_bytes) as match:
                    ends = [(match.pages[end - 1], tier) for tier, end in tier_runs(match.pages)]
                    return state.leases.take(ends, HOLD_S)
            except StoreClosedError:
                return PageLease()

        return look


class NamedView(PromptView):
    """Whole pages that are found independently of each other. ``depth`` pages come before the first page in
    its prompt, as far as known. Pages with a higher depth are evicted first."""

    named = True

    def __init__(
        self, registration: Registration, keys: Sequence[PageKey], tokens: bytes, *, depth: int = 0
    ) -> None:
        super().__init__(registration, keys, tokens)
        self.depth = depth

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_chunks(self) -> int:
        return len(self.keys)

    @property
    def whole_chunks(self) -> int:
        return len(self.keys)

    def chunk(self, index: int) -> tuple[PageKey, bytes]:
        return self.keys[index], self.tokens[index * self._width : (index + 1) * self._width]

    def all_keys(self) -> Sequence[PageKey]:
        return self.keys

    def whole(self) -> Prompt:
        return Prompt.with_keys(
            self.registration.identity, self.tokens, self.keys, chunk_tokens=self.chunk_tokens
        )

    def part(self, chunks: Sequence[int]) -> NamedView:
        parts = [self.chunk(chunk) for chunk in chunks]
        depth = self.depth + chunks[0] if chunks else 0
        keys, tokens = [key for key, _ in parts], b"".join([each for _, each in parts])
        return NamedView(self.registration, keys, tokens, depth=depth)

    def slice(self, chunks: Sequence[int]) -> tuple[PromptView, int]:
        return self.part(chunks), 0

    def shared(self, saved: range) -> Sequence[int]:
        return saved or range(self.whole_chunks)

    def key_up_to(self, chunk: int) -> bytes:
        return hashlib.sha256(b"".join(self.keys)).digest()

    # -- in the tree ---------------------------------------------------------------------------------

    def find(self, state: StoreState, max_tokens: int) -> FoundPages:
        stored = [
            (position, page, tier)
            for position, page in enumerate(self.tree_pages(state, range(len(self.keys))))
            if page is not None
            and (tier := page.ready_tier()) is not None
            and (tier is not Tier.DISK or state.health.readable)
        ]
        runs: list[tuple[Tier, int]] = []
        for tier, run in groupby(tier for _, _, tier in stored):
            runs.append((tier, (runs[-1][1] if runs else 0) + sum(1 for _ in run)))
        found = FoundPages(
            [page for _, page, _ in stored],
            len(stored) * self.chunk_tokens,
            self.chunk_tokens if stored else 0,
            runs,
            positions=[position for position, _, _ in stored],
        )
        lacking = len(stored) < len(self.keys)
        on_disk = lacking and bool(self.on_disk(state, self.missing(found, self.num_tokens)))
        return replace(found, look_on_disk=True) if on_disk else found

    def missing(self, found: FoundPages, limit: int) -> Sequence[int]:
        stored = set(found.positions)
        return [position for position in range(len(self.keys)) if position not in stored]

    def on_disk(self, state: StoreState, positions: Sequence[int]) -> list[int]:
        """Return those of the given positions whose pages may be on disk. Needs the state's lock."""
        root = self.root(state)
        if state.disk is None or not state.health.readable or not state.may_reload or not root.serial:
            return []
        may_lead = state.disk.may_lead
        return [at for at in positions if may_lead(root.serial, root.identity, *self.chunk(at), whole=True)]

    def may_be_on_disk(self, state: StoreState) -> bool:
        return self.find(state, self.num_tokens).look_on_disk

    def held(self, found: FoundPages) -> list[tuple[Page, Tier]]:
        tiers = [page.ready_tier() for page in found.pages]
        pairs = zip(found.pages, tiers, strict=True)
        return [(page, tier) for page, tier in pairs if tier is not None]

    def pinned(self, found: FoundPages) -> Sequence[Page]:
        return found.pages

    def touch(self, log: AccessLog, found: FoundPages) -> None:
        if found.pages:
            pairs = zip(found.positions, found.pages, strict=True)
            log.touch_named({page: self.depth + position for position, page in pairs}, hit=True)

    def remember(self, owner: object, client: Client, found: FoundPages, changes: int) -> PrefixHandle | None:
        return None  # named pages do not form a prefix

    def first_pages(self, state: StoreState, chunks: int) -> Sequence[Page] | None:
        return ()

    def in_tree(self, state: StoreState, chunks: range) -> Sequence[Page]:
        return [page for page in self.tree_pages(state, chunks) if page is not None]

    def tree_pages(self, state: StoreState, chunks: range) -> list[Page | None]:
        """Return the page of each of these chunks, with or without copies; None for a page not in the
        tree."""
        root, child = self.root(state), state.index.tree.child
        return [child(root, *self.chunk(at)) for at in chunks]

    # -- on disk -------------------------------------------------------------------------------------

    def disk_look(self, state: StoreState, limit: int) -> Callable[[], PageLease]:
        def look() -> PageLease:
            with state.lock:
                root = self.root(state)
                found = self.find(state, limit)
                places = self.on_disk(state, self.missing(found, limit))
            load_named(state, root, self.registration.identity, [self.chunk(place) for place in places])
            with state.lock:
                if state.closed:
                    return PageLease()
                return state.leases.take(self.held(self.find(state, limit)), HOLD_S)

        return look


def _start(path: Path, run: int) -> int:
    return path.runs[run - 1][1] if run else 0


def _joined(
    head: Sequence[tuple[Tier, int]], below: Sequence[tuple[Tier, int]]
) -> Sequence[tuple[Tier, int]]:
    """Return the tier runs of a prefix that consists of ``head`` and the pages ``below`` it."""
    if not head or not below:
        return head or below
    known = head[-1][1]
    if head[-1][0] is below[0][0]:
        head = head[:-1]
    return [*head, *((tier, known + end) for tier, end in below)]
