"""A prompt as a message describes it, and how it is found in the tree."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import xxhash

from tierstore.curve.groups import Groups, groups, groups_behind
from tierstore.daemon.protocol import MAX_CHUNKS, PromptPart
from tierstore.daemon.registration import Registration
from tierstore.daemon.session import Path, Refusal, Session
from tierstore.index import Match, Page, Tier, tier_runs
from tierstore.keys import KEY_BYTES, TOKEN_BYTES, PageKey, Prompt
from tierstore.store.find import frontier
from tierstore.store.state import StoreState


@dataclass(frozen=True, slots=True)
class Found:
    """What is held of a prompt. ``runs`` are the tiers of ``pages``; ``look_on_disk``: there may be more."""

    match: Match
    runs: Sequence[tuple[Tier, int]]
    look_on_disk: bool


class AskedPrompt:
    """``head`` are the first pages, remembered from earlier; ``keys`` and ``tokens`` are what follows them.

    Raises :class:`Refusal` when the message does not fit together.
    """

    def __init__(self, session: Session, part: PromptPart) -> None:
        self.registration: Registration = session.registration(part.identity)
        self.tokens = part.tokens
        self.chunk_tokens = self.registration.chunk_tokens
        self._width = self.chunk_tokens * TOKEN_BYTES
        whole = len(part.tokens) // self._width
        if len(part.tokens) % TOKEN_BYTES or len(part.keys) != whole * KEY_BYTES:
            raise Refusal(
                "usage",
                f"{len(part.tokens)} bytes of tokens in chunks of {self.chunk_tokens} need {whole} keys of "
                f"{KEY_BYTES} bytes, not {len(part.keys)} bytes",
            )
        if not 0 <= part.known <= MAX_CHUNKS or part.known + whole > MAX_CHUNKS:
            raise Refusal("usage", f"a prompt has {MAX_CHUNKS} chunks at most")
        self.keys = cast(Sequence[PageKey], struct.unpack(f"{KEY_BYTES}s" * whole, part.keys))
        self.path_number = part.path
        self.path: Path | None = None
        self.head: Sequence[Page] = ()
        if part.path:
            self._continue(session, part)

    def _continue(self, session: Session, part: PromptPart) -> None:
        path = session.path(part.path)
        if part.known > len(path.pages):
            raise Refusal("path", f"path {part.path} has {len(path.pages)} chunks, not {part.known}")
        if path.pages and path.pages[0].identity != self.registration.identity.digest:
            raise Refusal("path", f"path {part.path} is one of another identity")
        self.path = path
        self.head = path.pages if part.known == len(path.pages) else path.pages[: part.known]

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
        keys = [*(page.key for page in self.head), *self.keys]
        return Prompt.with_keys(self.registration.identity, tokens, keys, chunk_tokens=self.chunk_tokens)

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

    @property
    def whole_chunks(self) -> int:
        return len(self.head) + len(self.keys)

    def groups(self) -> Groups:
        """One key for each group of its whole pages, for the curve."""
        if not self.head:
            return groups(self.keys)
        return [*(page.key for page in groups(self.head)), *groups_behind(len(self.head), self.keys)]

    def lengthens(self, session: Session) -> int:
        """The number of the path that is this prompt's head, and nothing more; 0 if none is."""
        path = self.path
        ends_there = path is not None and len(self.head) == len(path.pages)
        return self.path_number if ends_there and session.paths.get(self.path_number) is path else 0

    def _key_before_the_rest(self) -> bytes:
        if self.head:
            return self.head[-1].key
        return xxhash.xxh3_128_digest(self.registration.identity.digest)

    # -- in the tree (under the state's lock) ---------------------------------------------------------

    def find(self, state: StoreState, max_tokens: int) -> Found:
        """The longest prefix in the tree. Raises :class:`Refusal` when the remembered pages are not all there
        any more."""
        max_tokens = self._findable(max_tokens)
        head_runs = self._head_runs(state)
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
        not be complete for that. Raises :class:`Refusal` when they are not there any more."""
        if self.head and not any(self.head[-1].copies):
            raise Refusal("path", "pages of this path have left")
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

    def _head_runs(self, state: StoreState) -> list[tuple[Tier, int]]:
        path = self.path
        if path is None:
            return []
        if path.changes != state.index.changes:
            path.runs = tier_runs(path.pages)
            path.changes = state.index.changes
        known = len(self.head)
        if known and (not path.runs or path.runs[-1][1] < known):
            raise Refusal("path", "pages of this path have left")
        return [(tier, min(end, known)) for n, (tier, end) in enumerate(path.runs) if _start(path, n) < known]

    def _within_head(self, max_tokens: int) -> Found:
        whole, rest = divmod(max_tokens, self.chunk_tokens)
        count = whole + bool(rest)
        pages = tuple(self.head[:count])
        return Found(
            Match(pages, max_tokens, rest or (self.chunk_tokens if whole else 0)), tier_runs(pages), False
        )

    def root(self, state: StoreState) -> Page:
        """The root of everything stored under this prompt's identity."""
        return state.root(self.registration.identity, self.registration.page_bytes)

    def first_pages(self, state: StoreState, chunks: int) -> Sequence[Page] | None:
        """The pages of the first ``chunks`` chunks, whether or not they have copies; None if they are not all
        in the tree."""
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
