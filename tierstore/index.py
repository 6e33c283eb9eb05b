"""The prefix tree over chunks: which pages exist, in which tiers, who holds them, which may leave.

A *page* is a node: one chunk of tokens after one parent, under one identity (the root). A *copy* is that page
in one tier. A page without any copy is a *hole*: it stays in the tree only while pages below it have copies
(a copy lost to damage leaves one), and no match reaches past it.

Two rules keep every held page reachable by a lookup, and both are in :meth:`Index.may_leave`:

* no copy leaves a tier before the copies of its children in that tier;
* no page gives up its last copy while it has children at all.

A key only finds a child; its tokens decide (``Page.tokens`` is compared on every match). Two chunks with
equal keys under one parent are *twins*: both are kept, chained behind one dictionary entry.

Everything here is pure bookkeeping: no threads, no bytes, no clocks. The store calls it under its lock and
does what it says outside of it.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.keys import TOKEN_BYTES, PageKey, Prompt
from tierstore.policy import PageFacts, Policy

if TYPE_CHECKING:
    from tierstore.tiers.disk.records import PageRecord

_SIBLINGS_TRIED = 64  # newest siblings looked at for a match inside a chunk


class Tier(enum.IntEnum):
    """Where a copy can be, fastest first."""

    HBM = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        return self.name.lower()


_TIERS = tuple(Tier)  # iterating over the enum itself is slow


class Copy:
    """One page in one tier. ``place`` means something to that tier only. Only ``ready`` copies are served."""

    __slots__ = ("children", "damaged", "leases", "place", "queued", "ready")

    def __init__(self, place: int, *, ready: bool, leases: int) -> None:
        self.place = place
        self.ready = ready  # False while it is being filled, and again once it is found damaged
        self.damaged = False  # to be dropped with its last lease
        self.leases = leases
        self.children = 0  # copies of child pages in the same tier
        self.queued = False  # whether the eviction queue has an entry for it


class Page:
    """A node of the tree: ``tokens`` (uint32 bytes, possibly less than a full chunk) after ``parent``."""

    __slots__ = (
        "children",
        "copies",
        "depth",
        "hits",
        "identity",
        "key",
        "last_use",
        "parent",
        "pins",
        "record",
        "tokens",
        "twin",
    )

    def __init__(self, parent: Page | None, identity: bytes, key: PageKey, tokens: bytes) -> None:
        self.parent = parent
        self.identity = identity
        self.key = key
        self.tokens = tokens
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[PageKey, Page] = {}
        self.twin: Page | None = None
        self.copies: list[Copy | None] = [None, None, None]
        self.pins = 0
        self.last_use = 0
        self.hits = 0
        self.record: PageRecord | None = None  # what the disk tier keeps of it; outlives a lost disk copy

    def __repr__(self) -> str:
        where = ",".join(tier.label for tier in Tier if self.copies[tier] is not None)
        return f"Page(depth {self.depth}, {self.num_tokens} tokens, {where or 'hole'})"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def ready_tier(self) -> Tier | None:
        """The fastest tier with a complete copy."""
        # Spelled out: this runs for each page of each lookup, and iterating over an enum is slow.
        hbm, host, disk = self.copies
        if hbm is not None and hbm.ready:
            return Tier.HBM
        if host is not None and host.ready:
            return Tier.HOST
        if disk is not None and disk.ready:
            return Tier.DISK
        return None

    def all_children(self) -> Iterator[Page]:
        """The children, newest first, twins included."""
        for child in reversed(self.children.values()):
            twin: Page | None = child
            while twin is not None:
                yield twin
                twin = twin.twin


@dataclass(frozen=True, slots=True)
class Match:
    """The longest held prefix. ``pages`` in prefix order; of the last one ``tail_tokens`` tokens match, which
    is fewer than it holds when the prompts part inside its chunk."""

    pages: tuple[Page, ...]
    tokens: int
    tail_tokens: int


class Index:
    """The tree and, for each tier, the queue of pages that may leave. Not thread-safe: the store locks."""

    def __init__(self, policies: Sequence[Policy], page_bytes: int) -> None:
        self._policies = policies
        self._page_bytes = page_bytes
        self._roots: dict[bytes, Page] = {}
        self._queues: list[list[tuple[float, int, int, Page]]] = [[] for _ in Tier]
        self._order = itertools.count()
        self._tick = 0
        self.pages = 0  # in the tree, without the roots
        self.copies = [0] * len(Tier)
        self.leases = [0] * len(Tier)  # copies with at least one
        self.key_collisions = 0

    # -- finding -------------------------------------------------------------------------------------

    def root(self, identity: bytes) -> Page:
        """The root of everything stored under an identity digest."""
        page = self._roots.get(identity)
        if page is None:
            page = self._roots[identity] = Page(None, identity, PageKey(b""), b"")
        return page

    def match(self, prompt: Prompt, max_tokens: int) -> Match:
        """The longest prefix of ``prompt`` of which every page has a complete copy somewhere."""
        chunk_tokens = prompt.chunk_tokens
        pages: list[Page] = []
        page = self.root(prompt.identity.digest)
        for key, chunk in zip(prompt.keys[: max_tokens // chunk_tokens], prompt.chunks(), strict=False):
            child = page.children.get(key)
            if child is None or child.tokens != chunk:
                child = self.child(page, key, chunk)
            if child is None or child.ready_tier() is None:
                break
            pages.append(child)
            page = child
        matched = len(pages) * chunk_tokens
        tail, tail_tokens = self._match_inside(page, prompt.chunk(len(pages)), max_tokens - matched)
        if tail is None:
            return Match(tuple(pages), matched, chunk_tokens if pages else 0)
        return Match((*pages, tail), matched + tail_tokens, tail_tokens)

    def child(self, parent: Page, key: PageKey, tokens: bytes) -> Page | None:
        """The child of ``parent`` that holds exactly ``tokens``. The key finds it, the tokens decide."""
        page = parent.children.get(key)
        while page is not None and page.tokens != tokens:
            self.key_collisions += 1
            page = page.twin
        return page

    def path(self, prompt: Prompt, pages: int) -> Page | None:
        """The page of chunk ``pages - 1`` (the root for 0), whether or not it has copies; None if unknown."""
        page: Page | None = self.root(prompt.identity.digest)
        for key, chunk in zip(prompt.keys[:pages], prompt.chunks(), strict=False):
            page = self.child(page, key, chunk) if page is not None else None
        return page

    def _match_inside(self, parent: Page, tokens: bytes, limit: int) -> tuple[Page | None, int]:
        best: Page | None = None
        most = 0
        for page in itertools.islice(parent.all_children(), _SIBLINGS_TRIED):
            common = min(_common_tokens(page.tokens, tokens), limit)
            if common > most and page.ready_tier() is not None:
                best, most = page, common
        return best, most

    # -- growing and shrinking -----------------------------------------------------------------------

    def add(self, parent: Page, key: PageKey, tokens: bytes) -> Page:
        """The child of ``parent`` with ``tokens``, made if it is not there (then without copies)."""
        page = self.child(parent, key, tokens)
        if page is None:
            page = Page(parent, parent.identity, key, tokens)
            page.twin = parent.children.get(key)
            parent.children[key] = page
            page.last_use = self._tick
            self.pages += 1
        return page

    def add_copy(self, page: Page, tier: Tier, place: int, *, ready: bool, leases: int = 0) -> Copy:
        """Record a copy of ``page`` in a tier that has none of it."""
        assert page.copies[tier] is None, f"{page} already has a copy in {tier.label}"
        copy = page.copies[tier] = Copy(place, ready=ready, leases=leases)
        self.copies[tier] += 1
        self.leases[tier] += leases > 0
        above = page.parent.copies[tier] if page.parent else None
        if above is not None:
            above.children += 1
        # A copy placed under children that are already in this tier (a hole being filled) has to know them.
        if page.children:
            copy.children = sum(child.copies[tier] is not None for child in page.all_children())
        self._offer_all(page)
        return copy

    def set_ready(self, page: Page, tier: Tier) -> None:
        """The copy's bytes are complete."""
        self.copy(page, tier).ready = True
        self._offer_all(page)

    def set_damaged(self, page: Page, tier: Tier) -> None:
        """The copy's bytes are not what was saved: nobody is to be served from it any more."""
        copy = self.copy(page, tier)
        copy.ready = False
        copy.damaged = True

    def drop_copy(self, page: Page, tier: Tier) -> int:
        """Forget a copy and return its place. Forgets the page too when nothing needs it any more."""
        copy = self.copy(page, tier)
        assert copy.leases == 0, f"{page} leaves {tier.label} under a lease"
        page.copies[tier] = None
        self.copies[tier] -= 1
        above = page.parent.copies[tier] if page.parent else None
        if above is not None:
            above.children -= 1
        if page.parent is not None:
            self._offer(page.parent, tier)
        self.prune(page)
        return copy.place

    def copy(self, page: Page, tier: Tier) -> Copy:
        """The copy of ``page`` in ``tier``, which must be there."""
        copy = page.copies[tier]
        assert copy is not None, f"{page} has no copy in {tier.label}"
        return copy

    def prune(self, page: Page) -> None:
        """Remove ``page`` and then its ancestors from the tree as far as nothing needs them: no copies, no
        children, no pins."""
        while page.parent is not None and not page.children and not any(page.copies) and not page.pins:
            parent = page.parent
            _unlink(parent, page)
            self.pages -= 1
            self._offer_all(parent)
            page = parent

    # -- use, leases, pins ---------------------------------------------------------------------------

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """These pages are in use now (one tick of the logical clock for all of them)."""
        self._tick += 1
        for page in pages:
            page.last_use = self._tick
            page.hits += hit

    def restore_use(self, page: Page, hits: int) -> None:
        """Take over what an earlier life knew: called for pages in order of last use, oldest first."""
        self._tick += 1
        page.last_use = self._tick
        page.hits = hits

    def lease(self, page: Page, tier: Tier) -> None:
        copy = self.copy(page, tier)
        self.leases[tier] += copy.leases == 0
        copy.leases += 1

    def unlease(self, page: Page, tier: Tier) -> None:
        copy = self.copy(page, tier)
        assert copy.leases > 0, f"{page} has no lease in {tier.label}"
        copy.leases -= 1
        if copy.leases == 0:
            self.leases[tier] -= 1
            self._offer(page, tier)

    def pin(self, page: Page) -> None:
        page.pins += 1

    def unpin(self, page: Page) -> None:
        assert page.pins > 0, f"{page} is not pinned"
        page.pins -= 1
        self._offer_all(page)
        self.prune(page)

    # -- eviction ------------------------------------------------------------------------------------

    def may_leave(self, page: Page, tier: Tier) -> bool:
        """Whether this copy can be dropped without breaking a promise or cutting off a held page."""
        copy = page.copies[tier]
        if copy is None or not copy.ready or copy.leases or copy.children:
            return False
        if page.pins and not any(c is not None and c.ready for c in page.copies[tier + 1 :]):
            return False  # a pinned page keeps its coldest copy
        return not page.children or any(c is not None and c.ready for c in page.copies if c is not copy)

    def victim(self, tier: Tier) -> Page | None:
        """The page whose copy in ``tier`` should leave next, by the tier's policy; None if none may."""
        queue = self._queues[tier]
        while queue:
            score, _, _, page = queue[0]
            copy = page.copies[tier]
            if copy is None or not copy.queued:
                heapq.heappop(queue)  # of an earlier copy
            elif not self.may_leave(page, tier):
                heapq.heappop(queue)
                copy.queued = False  # it is offered again when what holds it is gone
            elif (now := self._score(page, tier)) > score:
                heapq.heapreplace(queue, (now, -page.depth, next(self._order), page))
            else:
                return page
        return None

    def facts(self, page: Page) -> PageFacts:
        return PageFacts(self._page_bytes, page.depth, page.last_use, page.hits)

    def _score(self, page: Page, tier: Tier) -> float:
        return self._policies[tier].score(self.facts(page))

    def _offer(self, page: Page, tier: Tier) -> None:
        copy = page.copies[tier]
        if copy is not None and not copy.queued and self.may_leave(page, tier):
            copy.queued = True
            entry = (self._score(page, tier), -page.depth, next(self._order), page)
            heapq.heappush(self._queues[tier], entry)

    def _offer_all(self, page: Page) -> None:
        for tier, copy in zip(_TIERS, page.copies, strict=True):
            if copy is not None and not copy.queued:
                self._offer(page, tier)

    # -- seeing and checking -------------------------------------------------------------------------

    def walk(self) -> Iterator[Page]:
        """Every page, parents before children."""
        stack = [page for root in self._roots.values() for page in root.all_children()]
        while stack:
            page = stack.pop()
            yield page
            stack.extend(page.all_children())

    def check(self) -> None:
        """Assert that counts, parents, children and queues agree."""
        pages = list(self.walk())
        assert len(pages) == self.pages, f"{len(pages)} pages in the tree, {self.pages} counted"
        for tier in Tier:
            held = [(page, copy) for page in pages if (copy := page.copies[tier]) is not None]
            assert len(held) == self.copies[tier], (
                f"{len(held)} copies in {tier.label}, {self.copies[tier]} counted"
            )
            assert sum(copy.leases > 0 for _, copy in held) == self.leases[tier], f"leases in {tier.label}"
            queued = {id(entry[3].copies[tier]) for entry in self._queues[tier]}
            for page, copy in held:
                below = sum(child.copies[tier] is not None for child in page.all_children())
                assert copy.children == below, (
                    f"{page}: {below} children in {tier.label}, {copy.children} counted"
                )
                assert not self.may_leave(page, tier) or id(copy) in queued, f"{page} is missing in a queue"
        for page in pages:
            assert page.children or page.pins or any(page.copies), f"{page} should have been pruned"


def _unlink(parent: Page, page: Page) -> None:
    first = parent.children[page.key]
    if first is page:
        if page.twin is None:
            del parent.children[page.key]
        else:
            parent.children[page.key] = page.twin
        return
    while first.twin is not page:
        assert first.twin is not None, f"{page} is not a child of its parent"
        first = first.twin
    first.twin = page.twin


def _common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two token strings share."""
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
