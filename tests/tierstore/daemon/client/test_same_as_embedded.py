"""The same script against a connected and an embedded store: the same tokens, the same bytes."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tierstore.daemon.client.conftest import SPEC, load_bytes, pages_of
from tierstore.daemon.connected import ConnectedStore
from tierstore.keys import Identity
from tierstore.store import Store
from tierstore.testing.pages import leading_tokens
from tierstore.tiers.hbm import PagePool

HBM_PAGES = 24
_models = itertools.count()

# Prompts that share prefixes, whole chunks and parts of one.
PROMPTS = [
    [*range(40)],
    [*range(70)],
    [*range(64)],
    [*range(37), *range(500, 540)],
    [*range(48), *range(900, 920)],
    [*range(2000, 2003)],
]
PAGES = [pages_of(tokens) for tokens in PROMPTS]

prompts = st.integers(0, len(PROMPTS) - 1)
steps = st.one_of(
    st.tuples(st.just("save"), prompts, st.integers(0, 5)),
    st.tuples(st.just("save from"), prompts, st.integers(0, 5)),
    st.tuples(st.just("save_hbm"), prompts, st.booleans()),
    st.tuples(st.just("lookup"), prompts, st.integers(0, 80)),
    st.tuples(st.just("load"), prompts, st.integers(0, 80)),
    st.tuples(st.just("load_hbm"), prompts, st.integers(0, 80)),
    st.tuples(st.just("release"), st.just(0), st.just(0)),
    st.tuples(st.just("evict hbm"), prompts, st.integers(0, 30)),
)


def matched(tokens, pages):
    """The bytes that a hit of ``tokens`` promises: not those behind the match in its last page."""
    counts = [min(tokens - at * SPEC.chunk_tokens, SPEC.chunk_tokens) for at in range(len(pages))]
    return [leading_tokens(page, count, SPEC) for page, count in zip(pages, counts, strict=True)]


class Player:
    """Plays steps on one store; ``kept`` are the HBM pages that the engine has not released yet."""

    def __init__(self, store):
        self.store = store
        self.kept = []
        self.hbm_tokens = 0  # of the last lookup

    def play(self, step):
        verb, which, number = step
        return getattr(self, verb.replace(" ", "_"))(which, number)

    def save(self, which, count):
        return self.store.save(PROMPTS[which], PAGES[which][:count]).wait(10)

    def save_from(self, which, first):
        if first >= len(PAGES[which]):
            return None
        return self.store.save(PROMPTS[which], PAGES[which][first:], first=first).wait(10)

    def save_hbm(self, which, keep):
        pages = self.store.allocate_hbm(len(PAGES[which]))
        if pages is None:
            return None
        for page, content in zip(pages, PAGES[which], strict=True):
            self.store.pool.array[page] = np.frombuffer(content, np.uint8)
        stored = self.store.save_hbm(self.store.prompt(PROMPTS[which]), pages).wait(10)
        self._keep(pages, keep)
        return stored, self.store.available_hbm()

    def lookup(self, which, limit):
        with self.store.lookup(PROMPTS[which], max_tokens=limit) as hit:
            self.hbm_tokens = hit.by_tier.get("hbm", 0)
            return hit.tokens

    def load(self, which, limit):
        tokens, pages = load_bytes(self.store, self.store.lookup(PROMPTS[which], max_tokens=limit))
        return tokens, matched(tokens, pages)

    def load_hbm(self, which, limit):
        loaded = self.store.load(self.store.lookup(PROMPTS[which], max_tokens=limit)).wait(10)
        got = [self.store.pool.array[page].tobytes() for page in loaded.pages]
        self._keep(loaded.pages, limit % 2)
        return loaded.tokens, matched(loaded.tokens, got), self.store.available_hbm()

    def _keep(self, pages, keep):
        if keep:
            self.kept.append(pages)
        else:
            self.store.release_hbm(pages)

    def release(self, _, __):
        if self.kept:
            self.store.release_hbm(self.kept.pop())
        return self.store.available_hbm()

    def evict_hbm(self, _, count):
        return self.store.evict("hbm", count), self.store.available_hbm()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, min_size=3, max_size=25))
def test_same_results(shared_daemon, script):
    identity = Identity.of(SPEC, model=f"same {next(_models)}")
    pools = [PagePool(SPEC, HBM_PAGES) for _ in range(2)]
    with (
        ConnectedStore.connect(
            shared_daemon.url, SPEC, identity=identity, pool=pools[0], lookup_s=5.0
        ) as connected,
        Store.open(None, SPEC, identity=identity, pool=pools[1], host_bytes=4 << 20) as embedded,
    ):
        assert connected.wait_connected(30)
        players = Player(connected), Player(embedded)
        for step in script:
            ours, theirs = (player.play(step) for player in players)
            assert ours == theirs, step
            # Of two pages that match alike inside a chunk, an embedded store takes the newer one and a
            # connected store the one in HBM.
            assert players[0].hbm_tokens >= players[1].hbm_tokens // 16 * 16
            connected.check()
            embedded.check()
