from __future__ import annotations

import gc
import sys

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.index import Index, Page, Tier, common_tokens
from tierstore.keys import Identity, PageKey, Prompt, encode_tokens
from tierstore.policy import LRU, FrequencyAgedLRU
from tierstore.spec import KVSpec
from tierstore.tiers.disk import PageRecord

CHUNK = 2
PAGE_BYTES = 10
IDENTITIES = [Identity("m", "layout"), Identity("m", "layout", tenant="other")]
short_prompts = st.lists(st.integers(0, 2), max_size=9)


def prompt(tokens, identity=IDENTITIES[0], digest=None):
    extra = {} if digest is None else {"digest": digest}
    return Prompt(identity, tokens, chunk_tokens=CHUNK, **extra)


class IndexAgainstDict(RuleBasedStateMachine):
    """The tree against a flat model: a dictionary from (identity, tokens so far) to the copies there are.

    Keys are cut to one bit, so that nearly every child has twins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = Index([LRU() for _ in Tier])
        self.model: dict[tuple[int, tuple[int, ...]], dict[Tier, int]] = {}
        self.leased: list[tuple[tuple[int, tuple[int, ...]], object, Tier]] = []
        self.places = iter(range(10**9))

    def _prompt(self, who, tokens):
        return prompt(tokens, IDENTITIES[who], digest=lambda data: bytes([sum(data) & 1]))

    def _root(self, who):
        return self.index.tree.root(IDENTITIES[who], PAGE_BYTES)

    def _pages(self, who, tokens):
        node = self._root(who)
        full = self._prompt(who, tokens)
        for i in range(0, len(tokens), CHUNK):
            chunk = tokens[i : i + CHUNK]
            key = full.keys[i // CHUNK] if len(chunk) == CHUNK else full.tail_key()
            yield (who, tuple(tokens[: i + len(chunk)])), node, key, encode_tokens(chunk)
            child = self.index.tree.child(node, key, encode_tokens(chunk))
            if child is None:
                return
            node = child

    @rule(who=st.integers(0, 1), tokens=short_prompts, tier=st.sampled_from(Tier))
    def save(self, who, tokens, tier):
        pages = []
        for name, node, key, chunk in self._pages(who, tokens):
            page = self.index.add(node, key, chunk)
            pages.append(page)
            copies = self.model.setdefault(name, {})
            if tier not in copies:
                copies[tier] = next(self.places)
                put(self.index, page, tier, copies[tier])
        self.index.touch(pages, hit=False)

    @rule(who=st.integers(0, 1), tokens=short_prompts, limit=st.integers(0, 9))
    def lookup(self, who, tokens, limit):
        match = self.index.tree.match(self._root(who), self._prompt(who, tokens), limit)
        best = 0
        for end in range(1, min(limit, len(tokens)) + 1):
            whole = [(who, tuple(tokens[:i])) for i in range(CHUNK, end, CHUNK)]
            inside = any(
                self.model.get(name)
                and name[0] == who
                and (end - 1) // CHUNK == (len(name[1]) - 1) // CHUNK
                and name[1][:end] == tuple(tokens[:end])
                for name in self.model
            )
            if inside and all(self.model.get(name) for name in whole):
                best = end
        assert match.tokens == best
        assert b"".join(p.tokens for p in match.pages).startswith(encode_tokens(tokens[:best]))
        self.index.touch(match.pages, hit=True)

    @rule(who=st.integers(0, 1), tokens=short_prompts)
    def lease(self, who, tokens):
        match = self.index.tree.match(self._root(who), self._prompt(who, tokens), len(tokens))
        for page in match.pages:
            tier = page.ready_tier()
            self.index.lease(page, tier)
            self.leased.append((self._name(who, page), page, tier))

    def _name(self, who, page):
        tokens = b""
        while page.parent is not None:
            tokens = page.tokens + tokens
            page = page.parent
        return who, tuple(memoryview(tokens).cast("I"))

    @precondition(lambda self: self.leased)
    @rule()
    def release(self):
        for _, page, tier in self.leased:
            self.index.release_all([(page, tier)])
        self.leased.clear()

    @rule(tier=st.sampled_from(Tier))
    def evict(self, tier):
        page = self._victim(tier)
        held = {(name, t) for name, _, t in self.leased}
        if page is None:
            # Nothing may leave: everything here is leased, has a child here, or would cut off a held page.
            for name, copies in self.model.items():
                if tier in copies and (name, tier) not in held:
                    below = [m for m, c in self.model.items() if c and self._is_child(m, name)]
                    assert any(tier in self.model[m] for m in below) or (below and len(copies) == 1)
            return
        name = next(n for n, c in self.model.items() if c.get(tier) == page.copies[tier].place)
        assert (name, tier) not in held
        below = [m for m, c in self.model.items() if c and self._is_child(m, name)]
        assert not any(tier in self.model[m] for m in below)
        assert not below or len(self.model[name]) > 1
        assert self.index.drop_copy(page, tier) == self.model[name].pop(tier)

    def _victim(self, tier):
        if tier is not Tier.DISK:
            return self.index.victim(tier)
        # The disk's own order is not the index's business, only what may leave.
        return next((page for page in self.index.tree.walk() if page.may_leave(tier)), None)

    @rule(who=st.integers(0, 1), tokens=short_prompts)
    def sleep_and_wake(self, who, tokens):
        """Everything idle leaves the tree, and is found again when it is brought back, parents first."""
        unloaded = []
        while (page := next(filter(Page.may_unload, list(self.index.eviction.idle)), None)) is not None:
            unloaded.append((page.parent, page.record))
            self.index.unload(page)
            assert not any(page.copies)
        self.index.check()
        for parent, record in reversed(unloaded):
            self.index.reload(self.index.by_serial.get(parent.serial, parent), record, hits=0)

    @staticmethod
    def _is_child(child, parent):
        who, tokens = child
        cut = (len(tokens) - 1) // CHUNK * CHUNK
        return who == parent[0] and tokens[:cut] == parent[1]

    @invariant()
    def consistent(self):
        self.index.check()
        assert self.index.tree.pages == sum(1 for copies in self.model.values() if copies)


TestIndex = IndexAgainstDict.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def put(index, page, tier, place):
    """A ready copy of ``page``; on disk with a record, as the disk tier makes one."""
    if tier is not Tier.DISK:
        index.add_copy(page, tier, place, ready=True)
        return
    parent = page.parent.serial
    record = PageRecord(place + 1, parent, page.key, page.identity, page.tokens, PAGE_BYTES, place)
    index.put_on_disk(page, record, ready=True)


def filled(index, tokens, tier=Tier.HOST):
    full = prompt(tokens)
    node = index.tree.root(full.identity, PAGE_BYTES)
    pages = []
    for key, chunk in zip(full.keys, full.chunks(), strict=True):
        node = index.add(node, key, chunk)
        index.add_copy(node, tier, len(pages), ready=True)
        pages.append(node)
    index.touch(pages, hit=False)
    return pages


def test_lru_takes_the_older_branch_and_children_before_parents():
    index = Index([LRU() for _ in Tier])
    old = filled(index, [1, 1, 2, 2])
    filled(index, [9, 9, 8, 8])
    order = []
    while (page := index.victim(Tier.HOST)) is not None:
        order.append(page)
        index.drop_copy(page, Tier.HOST)
    assert order[:2] == old[::-1]
    assert index.tree.pages == 0


def test_pinned_pages_keep_their_coldest_copy():
    index = Index([LRU() for _ in Tier])
    (page,) = filled(index, [1, 1])
    put(index, page, Tier.DISK, 0)
    index.pin(page)
    assert index.victim(Tier.HOST) is page
    assert not page.may_leave(Tier.DISK)
    index.unpin(page)
    assert page.may_leave(Tier.DISK)


def test_a_hole_hides_what_is_below_it_until_it_is_filled_again():
    index = Index([LRU() for _ in Tier])
    first, second = filled(index, [1, 1, 2, 2])
    index.set_damaged(first, Tier.HOST)
    index.drop_copy(first, Tier.HOST)
    root = index.tree.root(IDENTITIES[0], PAGE_BYTES)
    assert index.tree.match(root, prompt([1, 1, 2, 2]), 4).tokens == 0
    index.add_copy(first, Tier.HOST, 7, ready=True)
    assert index.tree.match(root, prompt([1, 1, 2, 2]), 4).pages == (first, second)
    index.check()


def test_common_tokens():
    def count(a, b):
        return common_tokens(encode_tokens(a), encode_tokens(b))

    assert count([1, 2, 3], [1, 2, 4]) == 2
    assert count([1, 2], [1, 2, 3]) == 2
    assert count([256, 2], [1, 2]) == 0
    assert count(list(range(64)), [*range(63), 255]) == 63
    assert count([], [1]) == 0


def test_a_twin_is_never_taken_for_the_other():
    index = Index([LRU() for _ in Tier])
    key = PageKey(b"same")
    root = index.tree.root(IDENTITIES[0], PAGE_BYTES)
    pages = [index.add(root, key, encode_tokens([n, n])) for n in range(5)]
    for n, page in enumerate(pages):
        index.add_copy(page, Tier.HOST, n, ready=True)
    assert len(set(map(id, pages))) == 5
    for n in (2, 0, 4, 1, 3):
        assert index.tree.child(root, key, encode_tokens([n, n])) is pages[n]
        index.drop_copy(pages[n], Tier.HOST)
        assert index.tree.child(root, key, encode_tokens([n, n])) is None
        index.check()


def test_pages_that_cost_more_leave_later():
    index = Index([FrequencyAgedLRU() for _ in Tier])
    layouts = [KVSpec.embedding(width=8, dtype="int8", worth=worth) for worth in (0, 3)]
    cheap, costly = (index.tree.root(Identity.of(layout, model="m"), PAGE_BYTES) for layout in layouts)
    for n in range(12):  # the oldest are cheap
        page = index.add(costly if n == 4 else cheap, PageKey(bytes([n])), encode_tokens([n, n]))
        index.add_copy(page, Tier.HOST, n, ready=True)
        index.touch([page], hit=False)
    left = []
    while (page := index.victim(Tier.HOST)) is not None:
        left.append(page.copies[Tier.HOST].place)
        index.drop_copy(page, Tier.HOST)
    assert left == [0, 1, 2, 3, *range(5, 12), 4]


def test_pages_that_the_collector_does_not_know_go_all_the_same():
    """Those that leave the tree, and those that are in it when it goes."""
    own = Identity("m", "layout", tenant="of this test")  # others' pages may go meanwhile
    identity = own.digest  # every page refers to it
    free = sys.getrefcount(identity)
    index = Index([LRU() for _ in Tier])
    page = root = index.tree.root(own, PAGE_BYTES)
    for n in range(100):
        page = index.add(page, PageKey(bytes([n]) * 16), encode_tokens([n]))
        index.add_copy(page, Tier.HOST, n, ready=True)
        put(index, page, Tier.DISK, n)
    assert not any(map(gc.is_tracked, [page, page.children, *filter(None, page.copies), page.record]))
    del page, root
    assert sys.getrefcount(identity) >= free + 200  # pages and records
    for _ in range(50):
        index.drop_copy(index.victim(Tier.HOST), Tier.HOST)
        index.unload(next(page for page in index.eviction.idle if page.may_unload()))
    index.check()
    assert sys.getrefcount(identity) < free + 110
    del index
    assert sys.getrefcount(identity) == free
