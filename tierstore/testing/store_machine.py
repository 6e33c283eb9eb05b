"""A test of random sequences of a store's methods, compared with a simple model of the stored pages.

:class:`~tierstore.testing.store.StoreTests` runs the test for each layout. Hypothesis chooses the sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore import Hit, Store
from tierstore.groups import by_kind
from tierstore.testing.clock import wait_until
from tierstore.testing.layouts import CHUNK, Layout

_WAIT_S = 30.0

# Some of these prompts share whole chunks, and some share a part of a chunk.
PROMPTS: list[list[int]] = [
    [*range(40)],
    [*range(70)],
    [*range(64)],
    [*range(37), *range(500, 540)],
    [*range(48), *range(900, 920)],
    [*range(2000, 2003)],
]
_prompts = st.sampled_from(range(len(PROMPTS)))


class StoreMachine(RuleBasedStateMachine):
    """Calls methods of an initially empty store with HBM pools, and compares their results with a simple
    model. The model is the set of stored pages of each layer group, where a page is represented by the prompt
    up to the page's end, and the pins. The machine closes the store."""

    def __init__(self, store: Store, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.store = store
        self.room = layout.room(self.store)
        self.held: list[set[tuple[int, ...]]] = [set() for _ in layout.groups]
        self.pinned: dict[int, list[tuple[int, int]]] = {}  # by prompt: (hit, branch) of pins, newest last
        self.owned: list[Sequence[Sequence[int]]] = []  # HBM pages that the engine has not released, by group
        self.hits: list[tuple[Hit, int]] = []

    # -- the model -----------------------------------------------------------------------------------

    def expected(self, tokens: Sequence[int]) -> int:
        """Return the longest hit that all groups support with the stored pages."""
        branch = self.branch(tokens)
        _, named = by_kind(self.layout.groups)
        if not named:
            return branch
        whole = branch - branch % CHUNK
        lengths: list[int] = [*range(branch, whole, -1), *range(whole, 0, -CHUNK)]
        for length in lengths:
            ends = [(self.held[group.number], group.rule.ends(length, CHUNK)) for group in named]
            if all(tuple(tokens[:end]) in held for held, each in ends for end in each):
                return length
        return 0

    def branch(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens of a prompt whose chained pages are stored."""
        held, whole = self.held[0], 0
        while whole + CHUNK <= len(tokens) and tuple(tokens[: whole + CHUNK]) in held:
            whole += CHUNK
        rest = tokens[whole : whole + CHUNK]
        best = 0
        for page in held:
            if page[:whole] == tuple(tokens[:whole]) and whole < len(page) <= whole + CHUNK:
                pairs = zip(page[whole:], rest, strict=False)
                best = max(best, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))))
        return whole + best

    def note_saved(self, group: int, tokens: Sequence[int], first: int, count: int) -> int:
        """Record that ``count`` chunks from ``first`` on were saved. Return the number of tokens that the
        store must report as stored."""
        held = self.held[group]
        if first and not self.layout.groups[group].named and tuple(tokens[: first * CHUNK]) not in held:
            return 0
        ends = [min((at + 1) * CHUNK, len(tokens)) for at in range(first, first + count)]
        held.update(tuple(tokens[:end]) for end in ends)
        return ends[-1] - first * CHUNK if ends else 0

    # -- steps of an engine --------------------------------------------------------------------------

    @rule(
        which=_prompts,
        group=st.integers(0, 2),
        first=st.integers(0, 4),
        count=st.integers(0, 5),
        session=st.sampled_from([None, "a"]),
    )
    def save(self, which: int, group: int, first: int, count: int, session: str | None) -> None:
        tokens, group = PROMPTS[which], group % len(self.held)
        content = self.layout.pages_of(tokens, group)
        if first >= len(content):
            return
        content = content[first : first + count]
        saved = self.store.save(tokens, content, first=first, group=group, session=session)
        assert saved.wait(_WAIT_S) == self.note_saved(group, tokens, first, len(content))

    @rule(which=_prompts, keep=st.booleans())
    def save_hbm(self, which: int, keep: bool) -> None:
        """Compute a prompt and save all of its pages."""
        tokens = PROMPTS[which]
        count = -(-len(tokens) // CHUNK)
        if not self.finds_room(count):
            return
        owned, stored = self.layout.compute(self.store, tokens)
        for group in range(len(self.held)):
            assert stored == self.note_saved(group, tokens, 0, count) == len(tokens)
        self.own(owned, keep)

    def finds_room(self, count: int) -> bool:
        """Return whether ``count`` HBM pages of each group can be allocated. Try it, because ``has_room_hbm``
        may count cached pages that cannot be evicted before a page behind them is released."""
        allocated = []
        for group in range(len(self.held)):
            hbm_pages = self.store.allocate_hbm(count, group=group)
            if hbm_pages is None:
                break
            allocated.append(hbm_pages)
        self.layout.release(self.store, allocated)
        return len(allocated) == len(self.held)

    def own(self, owned: Sequence[Sequence[int]], keep: bool) -> None:
        if keep:
            self.owned.append(owned)
        else:
            self.layout.release(self.store, owned)

    @rule(which=_prompts, limit=st.integers(0, 80))
    def load(self, which: int, limit: int) -> None:
        tokens = PROMPTS[which]
        hit = self.store.lookup(tokens, max_tokens=limit)
        expected = self.expected(tokens[:limit])
        assert hit.tokens == sum(hit.by_tier.values()) == expected
        assert hit.branch == self.branch(tokens[:limit])
        assert self.layout.load(self.store, hit) == (expected, self.layout.right(tokens, expected))

    @rule(which=_prompts, limit=st.integers(0, 80), keep=st.booleans(), cancel=st.booleans())
    def load_hbm(self, which: int, limit: int, keep: bool, cancel: bool) -> None:
        tokens = PROMPTS[which]
        hit = self.store.lookup(tokens, max_tokens=limit)
        expected = self.expected(tokens[:limit])
        assert hit.tokens == expected
        room = self.layout.room(self.store)
        transfer = self.store.load(hit)
        cancelled = cancel and transfer.cancel()
        loaded = transfer.wait(_WAIT_S)
        if cancelled:
            assert loaded.tokens == 0
        else:
            assert loaded.tokens <= expected
            assert loaded.tokens == expected or min(room) < hit.num_pages * len(room)
        assert self.layout.read_hbm(self.store, loaded) == self.layout.right(tokens, loaded.tokens)
        self.own([part.pages for part in loaded.groups], keep)

    @precondition(lambda self: self.owned)
    @rule()
    def release_hbm(self) -> None:
        self.layout.release(self.store, self.owned.pop())

    @rule(which=_prompts)
    def hold(self, which: int) -> None:
        self.hits.append((self.store.lookup(PROMPTS[which]), which))

    @precondition(lambda self: self.hits)
    @rule(load=st.booleans())
    def release_hit(self, load: bool) -> None:
        hit, which = self.hits.pop(0)
        if load:
            right = self.layout.right(PROMPTS[which], hit.tokens)
            assert self.layout.load(self.store, hit) == (hit.tokens, right)
        hit.release()

    @rule(which=_prompts)
    def prefetch(self, which: int) -> None:
        with self.store.lookup(PROMPTS[which]) as hit:
            assert hit.prefetch().wait(_WAIT_S) == hit.tokens

    def whole_hit(self, tokens: Sequence[int]) -> int:
        """Return the longest hit that ends at the end of a chunk."""
        whole = self.expected(tokens[: len(tokens) // CHUNK * CHUNK])
        return whole if whole % CHUNK == 0 else self.whole_hit(tokens[:whole])

    @rule(which=_prompts)
    def pin(self, which: int) -> None:
        whole = self.whole_hit(PROMPTS[which])
        assert self.store.pin(PROMPTS[which]) == whole
        if whole:
            branch = self.branch(PROMPTS[which]) // CHUNK * CHUNK
            self.pinned.setdefault(which, []).append((whole, branch))

    @rule(which=_prompts)
    def unpin(self, which: int) -> None:
        pins = self.pinned.get(which, [])
        assert self.store.unpin(PROMPTS[which]) == (pins.pop()[0] if pins else 0)

    @rule(count=st.integers(0, 30))
    def evict_hbm(self, count: int) -> None:
        assert 0 <= self.store.evict("hbm", count) <= count

    @rule(count=st.integers(0, 30))
    def evict_host(self, count: int) -> None:
        """Evict pages from the host tier. As they are on disk, later results do not change."""
        if "disk" in self.store.stats().tiers:
            assert self.store.flush(_WAIT_S)
            assert 0 <= self.store.evict("host", count) <= count

    @rule()
    def finish(self) -> None:
        assert self.store.finish("a") >= 0
        assert self.store.finish("a") == 0

    @rule()
    def drop_everything(self) -> None:
        """Release and evict all pages that can be evicted. Only pinned pages and their ancestors stay."""
        for hit, _ in self.hits:
            hit.release()
        for owned in self.owned:
            self.layout.release(self.store, owned)
        self.hits.clear()
        self.owned.clear()
        assert self.store.flush(_WAIT_S)
        while sum(self.store.evict(tier) for tier in self.store.stats().tiers):
            pass  # a page can be evicted from its last tier only after its children have left every tier
        for group, held in zip(self.layout.groups, self.held, strict=True):
            held &= {
                tuple(PROMPTS[which][:end])
                for which, pins in self.pinned.items()
                for whole, branch in pins
                for end in group.rule.ends(whole if group.named else branch, CHUNK)
            }

    @invariant()
    def agrees_with_itself(self) -> None:
        self.store.check()

    def teardown(self) -> None:
        for which, pins in self.pinned.items():
            for _ in pins:
                self.store.unpin(PROMPTS[which])
        self.pinned.clear()
        self.drop_everything()
        wait_until(lambda: self.layout.room(self.store) == self.room)  # a cancelled load's copy may still run
        self.store.close()
