"""A prompt as a client says it, and how it is found in the tree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from tierstore.backend import Registration
from tierstore.core.clients import Client, Path, Refusal
from tierstore.core.find import frontier
from tierstore.core.state import StoreState
from tierstore.index import Match, Page, Tier, tier_runs
from tierstore.keys import TOKEN_BYTES, PageKey, Prompt


@dataclass(frozen=True, slots=True)
class Found:
    """What is held of a prompt. ``runs`` are the tiers of ``pages``; ``look_on_disk``: there may be more."""

    match: Match
    runs: Sequence[tuple[Tier, int]]
    look_on_disk: bool


class PromptView:
    """A prompt as a client says it: ``keys`` and ``tokens`` behind the first ``known`` pages of a path that
    is remembered for it (``head``)."""

    def __init__(
        self,
        registration: Registration,
        keys: Sequence[PageKey],
        tokens: bytes,
        *,
        path: Path | None = None,
        path_number: int = 0,
        known: int = 0,
        loose: bool = False,
        depth: int = 0,
    ) -> None:
        self.registration = registration
        self.loose = loose
        self.depth = depth  # pages before the first one, where they are loose
        self.chunk_tokens = registration.chunk_tokens
        self._width = self.chunk_tokens * TOKEN_BYTES
        self.keys = keys
        self.tokens = tokens
        self.path = path
        self.path_number = path_number
        self.head: Sequence[Page] = ()
        if path is not None:
            self.head = path.pages if known == len(path.pages) else path.pages[:known]

    def spell_out(self) -> None:
        """Go on without what is remembered: pages of it have left."""
        whole = self.whole()
        self.keys, self.tokens = whole.keys, whole.token_bytes
        self.head, self.path, self.path_number = (), None, 0

    @property
    def head_left(self) -> bool:
        """Whether remembered pages are not there any more. Under the state's lock."""
        return bool(self.head) and not any(self.head[-1].copies)

    @property
    def num_tokens(self) -> int:
        return len(self.head) * self.chunk_tokens + len(self.tokens) // TOKEN_BYTES

    @property
    def num_chunks(self) -> int:
        """The partial tail included."""
        return len(self.head) + -(-len(self.tokens) // self._width)

    def whole(self) -> Prompt:
        """All of it."""
        tokens = b"".join([page.tokens for page in self.head]) + self.tokens
        return Prompt.with_keys(
            self.registration.identity, tokens, self.all_keys(), chunk_tokens=self.chunk_tokens
        )

    def chunk(self, index: int) -> tuple[PageKey, bytes]:
        """Key and token bytes of a chunk; the last one may be the partial tail."""
        if index < len(self.head):
            return self.head[index].key, self.head[index].tokens
        index -= len(self.head)
        tokens = self.tokens[index * self._width : (index + 1) * self._width]
        if index < len(self.keys):
            return self.keys[index], tokens
        before = self.keys[-1] if self.keys else self._key_before_the_rest()
        return PageKey(xxhash.xxh3_128_digest(before + tokens)), tokens

    def part(self, chunks: Sequence[int]) -> PromptView:
        """Some of its chunks, where they are loose."""
        assert self.loose, "chunks of a prompt are nothing without those before them"
        width = self._width
        tokens = b"".join([self.tokens[chunk * width : (chunk + 1) * width] for chunk in chunks])
        depth = self.depth + chunks[0] if chunks else 0
        keys = [self.keys[chunk] for chunk in chunks]
        return PromptView(self.registration, keys, tokens, loose=True, depth=depth)

    def name(self) -> bytes:
        """Hash everything that tells this prompt from others: its identity, keys and tokens."""
        whole = self.whole()
        kind = b"%d %d " % (self.chunk_tokens, self.loose)
        parts = (kind, whole.identity.digest, whole.token_bytes, *whole.keys)
        return hashlib.sha256(b"".join(parts)).digest()

    @property
    def whole_chunks(self) -> int:
        return len(self.head) + len(self.keys)

    def all_keys(self) -> Sequence[PageKey]:
        """The keys of its whole chunks."""
        return [*(page.key for page in self.head), *self.keys] if self.head else self.keys

    def lengthens(self, client: Client) -> int:
        """The number of the path that is this prompt's head, and nothing more; 0 if none is."""
        path = self.path
        ends_there = path is not None and len(self.head) == len(path.pages)
        return self.path_number if ends_there and client.paths.get(self.path_number) is path else 0

    def _key_before_the_rest(self) -> bytes:
        if self.head:
            return self.head[-1].key
        return xxhash.xxh3_128_digest(self.registration.identity.digest)

    # -- in the tree (under the state's lock) ---------------------------------------------------------

    def find(self, state: StoreState, max_tokens: int) -> Found | None:
        """The longest prefix in the tree. None when the remembered pages are not all there any more."""
        max_tokens = self._findable(max_tokens)
        head_runs = self._head_runs(state)
        if head_runs is None:
            return None
        head_tokens = len(self.head) * self.chunk_tokens
        if max_tokens < head_tokens:
            return self._within_head(max_tokens)
        below, more = self._below(state, max_tokens - head_tokens)
        match = Match(
            (*self.head, *below.pages),
            head_tokens + below.tokens,
            below.tail_tokens or (self.chunk_tokens if self.head else 0),
        )
        return _reachable(state, Found(match, _joined(head_runs, below.runs), more), self.chunk_tokens)

    def may_be_on_disk(self, state: StoreState) -> bool:
        """Whether the disk may have pages of this prompt that are not in the tree. The remembered ones need
        not be complete for that, but there."""
        _, more = self._below(state, self._findable(len(self.tokens) // TOKEN_BYTES))
        return more

    def _findable(self, tokens: int) -> int:
        """How many of so many tokens can be found at all."""
        return tokens - tokens % self.chunk_tokens if self.registration.identity.whole_pages else tokens

    def _below(self, state: StoreState, max_tokens: int) -> tuple[Match, bool]:
        """What is in the tree behind the head, of at most ``max_tokens`` tokens, and whether the disk may
        have more of them."""
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
        """What the pages behind the head are below."""
        return self.head[-1] if self.head else self.root(state)

    def _head_runs(self, state: StoreState) -> list[tuple[Tier, int]] | None:
        """The runs of the remembered pages; None when they are not all there any more."""
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

    def _within_head(self, max_tokens: int) -> Found:
        whole, rest = divmod(max_tokens, self.chunk_tokens)
        count = whole + bool(rest)
        pages = tuple(self.head[:count])
        return Found(
            Match(pages, max_tokens, rest or (self.chunk_tokens if whole else 0)), tier_runs(pages), False
        )

    def root(self, state: StoreState) -> Page:
        """The root of everything stored under this prompt's identity. Raises :class:`Refusal` where that has
        been forgotten, and registered again for pages of another size."""
        nbytes = state.index.tree.root(self.registration.identity.digest, self.registration.page_bytes).nbytes
        if nbytes != self.registration.page_bytes:
            raise Refusal("identity", f"pages of this identity have {nbytes} bytes now: register it again")
        return state.root(self.registration.identity, self.registration.page_bytes)

    def loose_pages(self, state: StoreState) -> list[Page | None]:
        """The page of each loose chunk that can be had now, None where it is in no tier that answers."""
        root = self.root(state)
        pages: list[Page | None] = []
        for key, start in zip(self.keys, range(0, len(self.tokens), self._width), strict=True):
            page = state.index.tree.child(root, key, self.tokens[start : start + self._width])
            tier = page.ready_tier() if page is not None else None
            there = tier is not None and (tier is not Tier.DISK or state.health.readable)
            pages.append(page if there else None)
        return pages

    def loose_on_disk(self, state: StoreState, pages: Sequence[Page | None]) -> list[int]:
        """Which of the loose chunks that are missing among ``pages`` the disk may have."""
        root = self.root(state)
        if state.disk is None or not state.health.readable or not state.may_reload or not root.serial:
            return []
        may_lead = state.disk.child_filter.may_lead
        return [
            at
            for at, page in enumerate(pages)
            if page is None and may_lead(root.serial, *self.chunk(at), whole=True)
        ]

    def pages_in_tree(self, state: StoreState) -> Sequence[Page]:
        """The pages of its whole chunks that are in the tree, whether or not they have copies."""
        if self.loose:
            return [page for page in self.loose_pages(state) if page is not None]
        return (
            *self.head,
            *state.index.tree.descend(self._parent(state), self.keys, self.tokens, self._width),
        )

    def first_pages(self, state: StoreState, chunks: int) -> Sequence[Page] | None:
        """The pages of the first ``chunks`` chunks, whether or not they have copies; None if they are not all
        in the tree."""
        if self.loose:
            return ()
        if chunks <= len(self.head):
            return self.head if chunks == len(self.head) else self.head[:chunks]
        count = chunks - len(self.head)
        below = state.index.tree.descend(self._parent(state), self.keys[:count], self.tokens, self._width)
        return (*self.head, *below) if len(below) == count else None


def _reachable(state: StoreState, found: Found, chunk_tokens: int) -> Found:
    """As much of it as can be loaded now: where the disk is offline, what is above it."""
    if state.health.readable:
        return found
    match = state.reachable(found.match, chunk_tokens)
    return Found(match, tier_runs(match.pages), False)


def _start(path: Path, run: int) -> int:
    return path.runs[run - 1][1] if run else 0


def _joined(
    head: Sequence[tuple[Tier, int]], below: Sequence[tuple[Tier, int]]
) -> Sequence[tuple[Tier, int]]:
    """Runs one after the other."""
    if not head or not below:
        return head or below
    known = head[-1][1]
    if head[-1][0] is below[0][0]:
        head = head[:-1]
    return [*head, *((tier, known + end) for tier, end in below)]
