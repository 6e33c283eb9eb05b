"""The prefix tree: pages below the root of each identity, found by their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstore.index.page import Page, Tier
from tierstore.keys import TOKEN_BYTES, Identity, PageKey, Prompt


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of a prompt, as ``pages`` in prefix order. ``tail_tokens`` tokens of the last
    page match: fewer than the page has if the prompts diverge inside its chunk. ``runs`` are the tiers of the
    pages at the time of the match (see :func:`tier_runs`)."""

    pages: tuple[Page, ...]
    tokens: int
    tail_tokens: int
    runs: Sequence[tuple[Tier, int]] = ()


def tier_runs(pages: Sequence[Page]) -> list[tuple[Tier, int]]:
    """Return the fastest tier of each page, run-length encoded as (tier, end of the run), up to the first
    page without a complete copy."""
    if not pages:
        return []
    for page in pages:  # a fast path: usually all pages are in the host tier
        hbm, host, _ = page.copies
        if hbm is not None or host is None or not host.ready:
            break
    else:
        return [(Tier.HOST, len(pages))]
    runs: list[tuple[Tier, int]] = []
    last: Tier | None = None
    for position, page in enumerate(pages):
        tier = page.ready_tier()
        if tier is not last:
            if last is not None:
                runs.append((last, position))
            last = tier
        if tier is None:
            return runs
    return [*runs, (last, len(pages))] if last is not None else runs


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many leading tokens two token strings share."""
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // TOKEN_BYTES
    low, high = TOKEN_BYTES, shorter  # equal up to low, unequal up to high
    while high - low > TOKEN_BYTES:
        middle = (low + high) // (2 * TOKEN_BYTES) * TOKEN_BYTES
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low // TOKEN_BYTES


_SIBLINGS_TRIED = 64  # newest siblings tried for a match inside a chunk


class Tree:
    """The pages of all identities. Not thread-safe: the store's lock guards it. The index changes the pages'
    copies."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Page] = {}
        self.pages = 0  # without the roots
        self.key_collisions = 0

    def __del__(self) -> None:
        """Break the reference cycles of pages, which the garbage collector does not track (see Page)."""
        for page in [*self._roots.values(), *self.walk()]:
            page.children.clear()
            page.copies.clear()

    # -- finding -------------------------------------------------------------------------------------

    def root(self, identity: Identity, nbytes: int, pool: int = 0) -> Page:
        """Return the root of all pages of an identity, each of ``nbytes``; create it if necessary. ``pool``
        is the number of these pages' pool in HBM."""
        page = self._roots.get(identity.digest)
        if page is None:
            page = self._roots[identity.digest] = Page.root(identity, nbytes, pool)
        return page

    def known_root(self, identity: bytes) -> Page | None:
        """Return the root of an identity digest; None if the identity has no root."""
        return self._roots.get(identity)

    def is_root(self, page: Page) -> bool:
        """Return whether ``page`` is the current root of its identity, not a forgotten root."""
        return self._roots.get(page.identity) is page

    def forget_root(self, identity: bytes) -> bool:
        """Remove the root of an identity without pages. Return False if the identity still has pages."""
        root = self._roots.get(identity)
        if root is not None and (root.children or root.kept):
            return False
        self._roots.pop(identity, None)
        return True

    def match(self, root: Page, prompt: Prompt, max_tokens: int) -> Match:
        """Return the longest prefix of ``prompt`` whose pages are all in the tree with complete copies."""
        return self.match_below(
            root,
            prompt.keys,
            prompt.token_bytes,
            prompt.chunk_tokens,
            max_tokens,
            whole=prompt.identity.whole_pages,
        )

    def match_below(
        self,
        parent: Page,
        keys: Sequence[PageKey],
        tokens: bytes,
        chunk_tokens: int,
        max_tokens: int,
        *,
        whole: bool,
    ) -> Match:
        """Do :meth:`match` for the part of a prompt that follows the page ``parent``. ``keys`` are the keys
        of the whole chunks of ``tokens``. With ``whole``, a match never ends inside a page."""
        width = chunk_tokens * TOKEN_BYTES
        pages = self.descend(parent, keys[: max_tokens // chunk_tokens], tokens, width)
        runs = tier_runs(pages)
        del pages[runs[-1][1] if runs else 0 :]
        matched = len(pages) * chunk_tokens
        if whole:
            return Match(tuple(pages), matched, chunk_tokens if pages else 0, runs)
        rest = tokens[len(pages) * width : (len(pages) + 1) * width]
        tail, tail_tokens = self._match_inside(pages[-1] if pages else parent, rest, max_tokens - matched)
        if tail is None:
            return Match(tuple(pages), matched, chunk_tokens if pages else 0, runs)
        pages.append(tail)
        return Match(tuple(pages), matched + tail_tokens, tail_tokens, tier_runs(pages))

    def descend(self, parent: Page, keys: Sequence[PageKey], tokens: bytes, width: int) -> list[Page]:
        """Return the pages of the chain below ``parent`` that hold ``tokens`` (chunks of ``width`` bytes),
        with or without copies, up to the first page that is not in the tree."""
        pages: list[Page] = []
        found: list[bytes] = []
        page: Page | None = parent
        for key in keys:
            page = page.children.get(key)  # type: ignore[union-attr]  # checked at the loop's end
            if page is None:
                break
            pages.append(page)
            found.append(page.tokens)
        # The keys have found the pages, and the tokens must be equal. One comparison of all tokens takes a
        # third of the time of one comparison for each chunk.
        if b"".join(found) == tokens[: len(pages) * width] and set(map(len, found)) <= {width}:
            return pages
        return self._descend_slowly(parent, keys, tokens, width)

    def _descend_slowly(self, parent: Page, keys: Sequence[PageKey], tokens: bytes, width: int) -> list[Page]:
        pages: list[Page] = []
        for key, start in zip(keys, range(0, len(tokens), width), strict=False):
            page = self.child(parent, key, tokens[start : start + width])
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages

    def child(self, parent: Page, key: PageKey, tokens: bytes) -> Page | None:
        """Return the child of ``parent`` that has this key and exactly ``tokens``; None if there is none."""
        page = parent.children.get(key)
        while page is not None and page.tokens != tokens:
            self.key_collisions += 1
            page = page.collision
        return page

    def path(self, root: Page, prompt: Prompt, pages: int) -> Page | None:
        """Return the page of chunk ``pages - 1`` (the root for 0), with or without copies; None if it is not
        in the tree."""
        page: Page | None = root
        for key, chunk in zip(prompt.keys[:pages], prompt.chunks(), strict=False):
            page = self.child(page, key, chunk) if page is not None else None
        return page

    def _match_inside(self, parent: Page, tokens: bytes, limit: int) -> tuple[Page | None, int]:
        best: Page | None = None
        most = 0
        if limit <= 0 or not tokens:
            return None, 0
        for page in itertools.islice(parent.all_children(), _SIBLINGS_TRIED):
            common = min(common_tokens(page.tokens, tokens), limit)
            if common > most and page.ready_tier() is not None:
                best, most = page, common
        return best, most

    # -- adding and removing -------------------------------------------------------------------------

    def make(self, parent: Page, key: PageKey, tokens: bytes, tick: int) -> Page:
        """Create a child of ``parent``, whose last use is ``tick``. ``parent`` must not have a child with
        ``tokens`` yet."""
        page = Page.below(parent, key, tokens)
        page.collision = parent.children.get(key)
        parent.children[key] = page
        page.last_use = tick
        self.pages += 1
        return page

    def unlink(self, page: Page) -> None:
        """Remove a page without children."""
        assert page.parent is not None
        _unlink(page.parent, page)
        self.pages -= 1

    # -- listing -------------------------------------------------------------------------------------

    def roots(self) -> list[Page]:
        return list(self._roots.values())

    def walk(self) -> Iterator[Page]:
        """Yield every page, parents before children."""
        stack = [page for root in self._roots.values() for page in root.all_children()]
        while stack:
            page = stack.pop()
            yield page
            stack.extend(page.all_children())


def _unlink(parent: Page, page: Page) -> None:
    first = parent.children[page.key]
    if first is page:
        if page.collision is None:
            del parent.children[page.key]
        else:
            parent.children[page.key] = page.collision
        return
    while first.collision is not page:
        assert first.collision is not None, f"{page} is not a child of its parent"
        first = first.collision
    first.collision = page.collision
