"""An engine of several layer groups, played: pages whose bytes say which tokens they come behind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

import tierstore
from tierstore.groups import Past
from tierstore.index import Page, Tier
from tierstore.keys import Identity, encode_tokens
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.testing.store import wait_until
from tierstore.tiers.group_pools import bytes_for
from tierstore.types import Loaded

CHUNK = 16
FULL = LayerGroup(LayerKind.FULL_ATTENTION, (2,), 1, 32)
WINDOW = LayerGroup(LayerKind.SLIDING_WINDOW, (4, 5), 1, 32, window=40)
STATE = LayerGroup(LayerKind.RECURRENT_STATE, (0, 1), state_bytes=3072)
CHUNKED = LayerGroup(LayerKind.CHUNKED_ATTENTION, (3,), 1, 32, window=64)
LATENT = LayerGroup(LayerKind.MLA_LATENT, (6,), 1, 48)
GEMMA = KVSpec((FULL, WINDOW), "float32", CHUNK)
HYBRID = KVSpec((FULL, STATE), "float32", CHUNK)
EVERYTHING = KVSpec((FULL, WINDOW, STATE, CHUNKED, LATENT), "float32", CHUNK)
IDENTITY = Identity.of(GEMMA, model="m")


def content(group: int, tokens: Sequence[int], chunk: int, nbytes: int) -> bytes:
    """The page of a chunk: another one behind any other tokens."""
    before = encode_tokens(list(tokens[: (chunk + 1) * CHUNK]))
    return hashlib.shake_128(bytes([group]) + before).digest(nbytes)


def page(group: int, tokens: Sequence[int], chunk: int, nbytes: int, *, rows: int) -> bytes:
    """The same where each token has a part of the page, as keys and values have, ``rows`` in all: those that
    the chunk has no tokens for hold what nobody may look at."""
    start, stop = chunk * CHUNK, min((chunk + 1) * CHUNK, len(tokens))
    so_far = hashlib.shake_128(bytes([group]) + encode_tokens(list(tokens[:start])))
    data = bytearray()
    for token in tokens[start:stop] if rows > 1 else ():
        so_far.update(encode_tokens([token]))
        data += so_far.digest(nbytes // rows)
    return bytes(data).ljust(nbytes, b"\xee") if rows > 1 else content(group, tokens, chunk, nbytes)


class Engine:
    """Saves and loads pages of every group, and looks at their bytes. All pages are given back at once."""

    def __init__(self, spec, path=None, *, store=None, pages=40, host_bytes=4 << 20, **options):
        self.spec = spec
        parts = spec.split()
        self.pools = tierstore.open_pools(spec, bytes_for(parts, [pages] * len(parts)))
        if store is None:
            identity = Identity.of(spec, model="played")
            self.store = tierstore.open(
                path,
                spec,
                identity=identity,
                pools=self.pools,
                host_bytes=host_bytes,
                disk_bytes=64 << 20,
                **options,
            )
        else:
            self.store = store(self.pools)
        self.rules = self.store.rules
        self.chains = [group for group, rule in enumerate(self.rules) if rule.past is Past.ALL]
        self.named = [group for group, rule in enumerate(self.rules) if rule.past is not Past.ALL]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.store.close()

    # -- what an engine does -------------------------------------------------------------------------

    def save(self, group, tokens, chunks, *, prompt=None, session=None):
        """Save chunks of a group. How many tokens of them are stored."""
        if not chunks:
            return 0
        prompt = prompt if prompt is not None else self.store.prompt(tokens)
        pages = self.store.allocate_hbm(len(chunks), group=group)
        assert pages is not None
        self.fill(group, tokens, pages, chunks)
        saved = self.store.save_hbm(prompt, pages, first=chunks[0], group=group, session=session)
        stored = saved.wait(30)
        self.store.release_hbm(pages, group=group)
        return stored

    def page(self, group, tokens, chunk) -> bytes:
        """What a chunk's page of a group holds."""
        rows = 1 if self.rules[group].past is Past.STATE else CHUNK
        return page(group, tokens, chunk, self.pools[group].spec.page_bytes, rows=rows)

    def fill(self, group, tokens, pages, chunks):
        """Compute these pages."""
        pool = self.pools[group]
        for page, chunk in zip(pages, chunks, strict=True):
            pool.array[page] = np.frombuffer(self.page(group, tokens, chunk), np.uint8)

    def save_to(self, tokens, end, *, prompt=None, session=None):
        """Save a prompt, its partial tail included, with a save point behind ``end`` tokens."""
        prompt = prompt if prompt is not None else self.store.prompt(tokens)
        for group in self.chains:
            self.save(group, tokens, range(-(-len(tokens) // CHUNK)), prompt=prompt, session=session)
        for group in self.named:
            chunks = self.rules[group].pages(end, CHUNK)
            self.save(group, tokens, chunks, prompt=prompt, session=session)

    def lookup(self, tokens, **options):
        self._tokens = tokens
        return self.store.lookup(tokens, **options)

    def load(self, hit, **options):
        """Load what was looked up last, compare its bytes, give it back. How many tokens came."""
        loaded = self.store.load(hit, **options).wait(30)
        self.verify(self._tokens, loaded)
        self.release(loaded)
        return loaded.tokens

    def verify(self, tokens, loaded: Loaded):
        for group, part in enumerate(loaded.groups):
            pool = self.pools[group]
            for chunk, page in enumerate(part.pages, part.first):
                expected = self.page(group, tokens[: loaded.tokens], chunk)
                got, rows = pool.array[page].tobytes(), loaded.tokens - chunk * CHUNK
                if self.rules[group].past is not Past.STATE and rows < CHUNK:
                    nbytes = rows * pool.spec.page_bytes // CHUNK  # behind them is what nobody looks at
                    got, expected = got[:nbytes], expected[:nbytes]
                assert got == expected, f"group {group}, chunk {chunk}"

    def release(self, loaded: Loaded):
        for group, part in enumerate(loaded.groups):
            self.store.release_hbm(part.pages, group=group)

    def evict(self, tier):
        self.store.evict(tier)

    # -- looking inside (of an embedded store) ---------------------------------------------------------

    def pages(self, group, tokens, chunks) -> dict[int, list[Page]]:
        """What the store knows of these chunks, in HBM and below: by chunk."""
        store, prompt = self.store, self.store.prompt(tokens)
        finder, of = store._finder, store.groups[group]
        state = store.backend.core.state
        found: dict[int, list[Page]] = {chunk: [] for chunk in chunks}
        for chunk in chunks:
            if of.named:
                request = finder.pages_at(prompt, of, [min((chunk + 1) * CHUNK, len(tokens))])
            else:
                request = finder.chain(prompt, of).cut((chunk + 1) * CHUNK)
            data = request.data[: request.nbytes]
            view = store.backend._view(request)
            with state.lock:
                root = view.root(state)
                below = state.index.tree.descend(root, request.keys, data, request.width)
            with store._hbm.lock:
                root = store._hbm.root(request, group)
                here = store._hbm.index.tree.descend(root, request.keys, data, request.width)
            count = 1 if of.named else chunk + 1
            found[chunk] = [pages[-1] for pages in (here, below) if len(pages) == count]
        return found

    def held(self, group, tokens, chunks) -> dict[int, Tier]:
        """The fastest tier of each chunk that some tier has; the last one may be incomplete, where the group
        is no chain."""
        held: dict[int, Tier] = {}
        for chunk, pages in self.pages(group, tokens, chunks).items():
            tiers = [tier for page in pages if (tier := page.ready_tier()) is not None]
            if tiers:
                held[chunk] = min(tiers)
        return held

    def forget(self, group, tokens, chunks, tiers=tuple(Tier)) -> None:
        """Have these pages leave tiers, as far as they may."""
        store = self.store
        state = store.backend.core.state
        for pages in self.pages(group, tokens, chunks).values():
            for page in pages:
                for tier in tiers:
                    lock = store._hbm.lock if tier is Tier.HBM else state.lock
                    with lock:
                        if page.may_leave(tier):
                            drop = store._hbm.drop if tier is Tier.HBM else None
                            drop(page) if drop is not None else state.residency.drop(page, tier)

    def check(self):
        """All that is counted twice agrees, and no page of a pool is anybody's."""
        self.store.flush(30)
        self.store.check()
        for group, pool in enumerate(self.pools):
            with self.store._hbm.lock:
                assert self.store._hbm._idle_pages(group) == pool.used_pages
        # A copy under way holds its source until it ends.
        wait_until(lambda: self.store.stats().open_hits == 0)
