"""The prefix tree over chunks: which pages exist, in which tiers, who holds them, which may leave.

A *page* is a node: one chunk of tokens after one parent, under one identity (the root). A *copy* is that page
in one tier. A page without any copy is a *hole*: it stays in the tree only while pages below it have copies
(a copy lost to damage leaves one), and no match reaches past it.

The tree holds the pages that somebody has to do with. A page that is only on disk, and that nobody holds, may
fall *asleep*: it leaves the tree (:meth:`Index.sleep`), is known to the disk tier alone, and is brought back
when a lookup comes by (:meth:`Index.wake`). Ancestors of a page in the tree are in the tree. So memory is
bounded by what is in use and not by what the disk holds.

Two rules keep every held page reachable by a lookup, and both are in :meth:`Index.may_leave`:

* no copy leaves a tier before the copies of its children in that tier (for the disk, whose pages may sleep,
  the disk tier's own count decides);
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
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.keys import TOKEN_BYTES, PageKey, Prompt
from tierstore.policy import NO_HINT, PageFacts, PageHint, Policy, Reuse
from tierstore.policy.departed import MOST_WATCHED, Departed, fingerprint
from tierstore.policy.queue import Accesses, Queue, Standing

if TYPE_CHECKING:
    from tierstore.tiers.disk.records import PageRecord

_SPARE_HINTS = 1024
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


class Copy(Standing):
    """One page in one tier. ``place`` means something to that tier only. Only ``ready`` copies are served."""

    __slots__ = ("children", "damaged", "leases", "page", "place", "ready")

    def __init__(self, page: Page, place: int, *, ready: bool, leases: int) -> None:
        super().__init__()
        self.page = page
        self.place = place
        self.ready = ready  # False while it is being filled, and again once it is found damaged
        self.damaged = False  # to be dropped with its last lease
        self.leases = leases
        self.children = 0  # copies of child pages in the same tier


class Page:
    """A node of the tree: ``tokens`` (uint32 bytes, possibly less than a full chunk) after ``parent``."""

    __slots__ = (
        "checksum",
        "children",
        "copies",
        "depth",
        "fingerprint",
        "hint",
        "hinted",
        "hits",
        "hole",
        "identity",
        "key",
        "last_use",
        "nbytes",
        "parent",
        "pins",
        "record",
        "sampled",
        "serial",
        "session",
        "tokens",
        "twin",
    )

    def __init__(
        self, parent: Page | None, identity: bytes, key: PageKey, tokens: bytes, nbytes: int
    ) -> None:
        self.parent = parent
        self.identity = identity
        self.key = key
        self.tokens = tokens
        self.nbytes = nbytes  # of every copy, and of all pages under one identity
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[PageKey, Page] = {}
        self.twin: Page | None = None
        self.copies: list[Copy | None] = [None, None, None]
        self.pins = 0
        self.last_use = 0
        self.hits = 0
        self.fingerprint = fingerprint(int.from_bytes(key[:8], "big"))
        self.sampled = self.fingerprint < MOST_WATCHED
        self.hint = NO_HINT  # about its next use: void once it was used after tick ``hinted``
        self.hinted = 0
        self.session = 0  # that alone has saved it or a page behind it; 0: nobody alone
        self.serial = 0  # what the disk tier knows it by; 0: nothing of it is on disk
        self.record: PageRecord | None = None  # of its disk copy
        self.checksum: int | None = None  # XXH3-64 of its host copy, where that came with it
        self.hole = False  # its disk copy was lost, pages below it are still there

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
    is fewer than it holds when the prompts part inside its chunk. ``runs`` are the tiers of the pages at that
    moment (see :func:`tier_runs`)."""

    pages: tuple[Page, ...]
    tokens: int
    tail_tokens: int
    runs: Sequence[tuple[Tier, int]] = ()


class Index:
    """The tree and, for each tier, the queue of pages that may leave. Not thread-safe: the store locks."""

    def __init__(self, policies: Sequence[Policy], *, tick: int = 0) -> None:
        """``policies`` by tier; the one for the disk only hears of uses. ``tick`` is the logical clock."""
        self._roots: dict[bytes, Page] = {}
        self._queues = [self._queue(policies[tier], tier) for tier in (Tier.HBM, Tier.HOST)]
        self.disk_accesses = Accesses(policies[Tier.DISK])
        accesses = [*(queue.accesses for queue in self._queues), self.disk_accesses]
        self._watching = [each for each in accesses if each.policy.watched]
        self._added: list[int] = []  # sampled pages that a save has made, and touch() tells of
        self._departed = Departed()
        self._hints: list[tuple[float, int, Page, PageHint]] = []  # by the time at which they end
        self._order = itertools.count()
        self.tick = tick
        self.by_serial: dict[int, Page] = {}  # pages with a disk copy, ready or not, and holes
        self.idle: dict[Page, None] = {}  # that may have fallen idle, the first one first
        self.pages = 0  # in the tree, without the roots
        self.copies = [0] * len(Tier)
        self.leases = [0] * len(Tier)  # copies with at least one
        self.key_collisions = 0
        self.changes = 0  # grows whenever a match may come out differently

    # -- finding -------------------------------------------------------------------------------------

    def root(self, identity: bytes, nbytes: int) -> Page:
        """The root of everything stored under an identity digest, whose pages have ``nbytes``."""
        page = self._roots.get(identity)
        if page is None:
            page = self._roots[identity] = Page(None, identity, PageKey(b""), b"", nbytes)
        return page

    def match(self, root: Page, prompt: Prompt, max_tokens: int) -> Match:
        """The longest prefix of ``prompt`` of which every page is in the tree and has a complete copy."""
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
        """The same for the rest of a prompt, ``parent`` being the page before it. ``keys`` are those of the
        whole chunks of ``tokens``. ``whole``: there are no matches inside a page."""
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
        """The pages below ``parent`` that hold ``tokens`` (chunks of ``width`` bytes), whether or not they
        have copies, as far as they are in the tree."""
        pages: list[Page] = []
        found: list[bytes] = []
        page: Page | None = parent
        for key in keys:
            page = page.children.get(key)  # type: ignore[union-attr]  # checked at the loop's end
            if page is None:
                break
            pages.append(page)
            found.append(page.tokens)
        # The keys have found pages, their tokens decide. All at once: chunk by chunk takes thrice as long.
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
        """The child of ``parent`` that holds exactly ``tokens``. The key finds it, the tokens decide."""
        page = parent.children.get(key)
        while page is not None and page.tokens != tokens:
            self.key_collisions += 1
            page = page.twin
        return page

    def path(self, root: Page, prompt: Prompt, pages: int) -> Page | None:
        """The page of chunk ``pages - 1`` (the root for 0), whether or not it has copies; None if it is not
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

    # -- growing and shrinking -----------------------------------------------------------------------

    def add(self, parent: Page, key: PageKey, tokens: bytes) -> Page:
        """The child of ``parent`` with ``tokens``, made if it is not there (then without copies)."""
        page = self.child(parent, key, tokens)
        if page is None:
            page = self._make(parent, key, tokens)
            hits = self._departed.recall(page.fingerprint)
            if hits is not None:
                page.hits = hits + 1  # it would have been one
            if page.sampled and self._watching:
                self._added.append(page.fingerprint)
            self._departed.make_room(self.pages)
        return page

    def _make(self, parent: Page, key: PageKey, tokens: bytes) -> Page:
        page = Page(parent, parent.identity, key, tokens, parent.nbytes)
        page.twin = parent.children.get(key)
        parent.children[key] = page
        page.last_use = self.tick
        self.pages += 1
        return page

    def add_copy(self, page: Page, tier: Tier, place: int, *, ready: bool, leases: int = 0) -> Copy:
        """Record a copy of ``page`` in a tier that has none of it."""
        assert page.copies[tier] is None, f"{page} already has a copy in {tier.label}"
        copy = page.copies[tier] = Copy(page, place, ready=ready, leases=leases)
        if tier is not Tier.DISK:
            self._queues[tier].arrive(copy, self.tick, page.hits)
        self.copies[tier] += 1
        self.leases[tier] += leases > 0
        self.changes += 1
        above = page.parent.copies[tier] if page.parent else None
        if above is not None:
            above.children += 1
        # A copy placed under children that are already in this tier (a hole being filled) has to know them.
        if page.children:
            copy.children = sum(child.copies[tier] is not None for child in page.all_children())
        if ready:
            self._offer_all(page)
        return copy

    def set_ready(self, page: Page, tier: Tier) -> None:
        """The copy's bytes are complete."""
        self.copy(page, tier).ready = True
        self.changes += 1
        self._offer_all(page)

    def set_damaged(self, page: Page, tier: Tier) -> None:
        """The copy's bytes are not what was saved: nobody is to be served from it any more."""
        copy = self.copy(page, tier)
        copy.ready = False
        copy.damaged = True
        self.changes += 1

    def drop_copy(self, page: Page, tier: Tier) -> int:
        """Forget a copy and return its place. Forgets the page too when nothing needs it any more."""
        copy = self._take_copy(page, tier)
        if page.parent is not None:
            self._offer(page.parent, tier)
        if tier is Tier.DISK:
            page.record = None
            if not page.hole:
                self.by_serial.pop(page.serial, None)
                page.serial = 0
        self._offer_all(page)
        self.prune(page)
        return copy.place

    def _take_copy(self, page: Page, tier: Tier) -> Copy:
        copy = self.copy(page, tier)
        assert copy.leases == 0, f"{page} leaves {tier.label} under a lease"
        page.copies[tier] = None
        if tier is not Tier.DISK:
            self._queues[tier].leave(copy)
        self.copies[tier] -= 1
        self.changes += 1
        above = page.parent.copies[tier] if page.parent else None
        if above is not None:
            above.children -= 1
        return copy

    def fill_hole(self, page: Page) -> None:
        """Nothing on disk is below ``page`` any more: it need not be kept in mind."""
        page.hole = False
        if page.copies[Tier.DISK] is None:
            self.by_serial.pop(page.serial, None)
            page.serial = 0
        self.prune(page)

    def copy(self, page: Page, tier: Tier) -> Copy:
        """The copy of ``page`` in ``tier``, which must be there."""
        copy = page.copies[tier]
        assert copy is not None, f"{page} has no copy in {tier.label}"
        return copy

    def prune(self, page: Page) -> None:
        """Remove ``page`` and then its ancestors from the tree as far as nothing needs them: no copies, no
        children, no pins."""
        while page.parent is not None and not (page.children or any(page.copies) or page.pins or page.hole):
            parent = page.parent
            self._unlink(page)
            self._departed.remember(page.fingerprint, page.hits)
            self._offer_all(parent)
            page = parent

    def _unlink(self, page: Page) -> None:
        assert page.parent is not None
        _unlink(page.parent, page)
        self.pages -= 1
        self.idle.pop(page, None)
        self.by_serial.pop(page.serial, None)

    # -- sleep ---------------------------------------------------------------------------------------

    def in_tree(self, page: Page) -> bool:
        """Whether a page seen earlier is still there (roots always are)."""
        return page.parent is None or self.by_serial.get(page.serial) is page

    def wake(self, parent: Page, record: PageRecord, hits: int) -> Page:
        """Bring the page of ``record``, which is on disk, into the tree. One that is there stays as it is."""
        key = PageKey(record.key)
        page = self.child(parent, key, record.tokens) or self._make(parent, key, record.tokens)
        if page.copies[Tier.DISK] is None and not page.hole:
            page.hits = max(page.hits, hits)
            self.put_on_disk(page, record, ready=True)
        return page

    def put_on_disk(self, page: Page, record: PageRecord, *, ready: bool, leases: int = 0) -> None:
        """Give ``page`` its disk copy."""
        page.record = record
        page.serial = record.serial
        page.hole = False
        self.by_serial[record.serial] = page
        self.add_copy(page, Tier.DISK, record.place, ready=ready, leases=leases)

    def may_sleep(self, page: Page) -> bool:
        """Whether a page is on disk only, and nobody has to do with it."""
        hbm, host, disk = page.copies
        if disk is None or hbm is not None or host is not None:
            return False
        return disk.ready and not disk.leases and not page.children and not page.pins

    def sleep(self, page: Page) -> None:
        """Take an idle page out of the tree. Whoever still knows it sees a page without copies."""
        assert self.may_sleep(page), f"{page} is not idle"
        self._take_copy(page, Tier.DISK)
        parent = page.parent
        assert parent is not None
        self._unlink(page)
        self._offer_all(parent)

    # -- use, leases, pins ---------------------------------------------------------------------------

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """A lookup found these pages, or (no ``hit``) a save was about them: they are in use now (one tick of
        the logical clock for all of them)."""
        self.tick += 1
        tick = self.tick
        seen = self._added
        if hit:
            seen = []
            for page in pages:  # of every lookup: what is done here takes a tenth of its time
                page.last_use = tick
                page.hits += 1
                if page.sampled:
                    seen.append(page.fingerprint)
        else:
            for page in pages:
                page.last_use = tick
            self._added = []
        if seen:
            for accesses in self._watching:
                accesses.add(seen)

    def hint(self, pages: Sequence[Page], hint: PageHint) -> None:
        """``hint`` is about the next use of these pages."""
        for page in pages:
            page.hint = hint
            page.hinted = self.tick
            if hint.expires_s < math.inf:
                heapq.heappush(self._hints, (hint.expires_s, next(self._order), page, hint))
            self._worth_less(page)
        if len(self._hints) > 2 * self.pages + _SPARE_HINTS:
            self._hints = [each for each in self._hints if each[2].hint is each[3] and any(each[2].copies)]
            heapq.heapify(self._hints)

    def expire_hints(self, now_s: float) -> None:
        """The pages whose time to live is over are as good as done."""
        while self._hints and self._hints[0][0] <= now_s:
            _, _, page, hint = heapq.heappop(self._hints)
            if page.hint is hint and page.last_use <= page.hinted:
                page.hint = PageHint(Reuse.DONE, hint.priority)
                self._worth_less(page)

    def _worth_less(self, page: Page) -> None:
        """A page may be worth less than it was when it was last offered."""
        for tier in (Tier.HBM, Tier.HOST):
            copy = page.copies[tier]
            if copy is not None:
                copy.queued = False  # where it stands is not where it belongs any more
                if self.may_leave(page, tier):
                    self._queues[tier].offer(copy)

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

    def lease_all(self, held: Sequence[tuple[Page, Tier]]) -> None:
        """A lease on each of these copies. One loop: this and the next run at every lookup."""
        leases = self.leases
        for page, tier in held:
            copy = page.copies[tier]
            assert copy is not None, f"{page} has no copy in {tier.label}"
            if not copy.leases:
                leases[tier] += 1
            copy.leases += 1

    def unlease_all(self, held: Sequence[tuple[Page, Tier]]) -> list[tuple[Page, Tier]]:
        """Give up a lease on each of these copies. Returns those that are damaged and now without a lease."""
        leases = self.leases
        damaged = []
        for page, tier in held:
            copy = page.copies[tier]
            assert copy is not None, f"{page} has no copy in {tier.label}"
            assert copy.leases > 0, f"{page} has no lease in {tier.label}"
            copy.leases -= 1
            if copy.leases:
                continue
            leases[tier] -= 1
            if copy.damaged:
                damaged.append((page, tier))
            elif not copy.children:  # else it may not leave anyhow
                self._offer(page, tier)
        return damaged

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
        """The page whose copy in ``tier`` (not the disk, which keeps its own order) should leave next, by the
        tier's policy; None if none may."""
        copy = self._queues[tier].victim(self.tick)
        return copy.page if copy is not None else None

    def _queue(self, policy: Policy, tier: Tier) -> Queue[Copy]:
        return Queue(policy, self._facts, lambda copy: self.may_leave(copy.page, tier))

    @staticmethod
    def _facts(copy: Copy) -> PageFacts:
        page = copy.page
        hint = page.hint if page.last_use <= page.hinted else NO_HINT
        return PageFacts(
            page.nbytes,
            page.depth,
            page.last_use,
            page.hits,
            copy.arrived,
            hint.reuse,
            hint.priority,
            copy.segment,
            copy.spent,
        )

    def _offer(self, page: Page, tier: Tier) -> None:
        copy = page.copies[tier]
        if tier is Tier.DISK:
            if self.may_sleep(page):
                self.idle.setdefault(page)
        elif copy is not None and not copy.queued and self.may_leave(page, tier):
            self._queues[tier].offer(copy)

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
            if tier is Tier.DISK:
                queued = {id(page.copies[tier]) for page in self.idle}
            else:
                queued = self._queues[tier].queued()
            for page, copy in held:
                below = sum(child.copies[tier] is not None for child in page.all_children())
                assert copy.children == below, (
                    f"{page}: {below} children in {tier.label}, {copy.children} counted"
                )
                may_go = self.may_sleep(page) if tier is Tier.DISK else self.may_leave(page, tier)
                assert not may_go or id(copy) in queued, f"{page} is missing in a queue"
        for page in pages:
            assert page.children or page.pins or page.hole or any(page.copies), f"{page} should be gone"
        on_disk = {page.serial: page for page in pages if page.copies[Tier.DISK] is not None or page.hole}
        assert on_disk == self.by_serial, "pages on disk and serials do not agree"


def tier_runs(pages: Sequence[Page]) -> list[tuple[Tier, int]]:
    """The fastest tier of each page, as (tier, end of the run); up to the first page without a complete
    copy."""
    if not pages:
        return []
    for page in pages:  # mostly, all of a prompt is in the host tier: that takes a quarter of the time
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


def common_tokens(a: bytes, b: bytes) -> int:
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
