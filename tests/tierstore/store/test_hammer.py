"""24 threads hammer one store under a tight capacity; every byte that comes back is compared."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from tests.small_store import SPEC, leading_tokens, pages_of

THREADS = 24
TIMES = 200
PROMPTS = 40


class Hammer:
    """The prompts are a forest with shared prefixes, so that threads meet on the same pages; the dict
    ``pages`` says what each page must contain."""

    def __init__(self, store, seed):
        rng = random.Random(seed)
        self.store = store
        self.wrong = []
        self.done = dict.fromkeys(
            ("lookup", "load", "hbm", "save", "save_hbm", "evict", "pin", "prefetch"), 0
        )
        self.prompts = []
        for _ in range(PROMPTS):
            stem = (
                rng.choice(self.prompts)[: rng.randrange(0, 120)]
                if self.prompts and rng.random() < 0.7
                else []
            )
            self.prompts.append(stem + [rng.randrange(1000) for _ in range(rng.randrange(1, 160))])
        self.pages = [pages_of(tokens) for tokens in self.prompts]

    def run(self, times):
        """All threads, until each of the actions has been done that many times, or something is wrong."""
        if not self.store.pool:
            self.done = {name: 0 for name in self.done if "hbm" not in name}
        threads = [threading.Thread(target=self._work, args=(n, times)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, number, times):
        rng = random.Random(number)
        actions = [getattr(self, name) for name in self.done]
        while not self.wrong and min(self.done.values()) < times:
            which = rng.randrange(PROMPTS)
            action = rng.choice(actions)
            try:
                action(rng, which)
                self.done[action.__name__] += 1
            except Exception as error:  # noqa: BLE001
                self.wrong.append(f"{action.__name__}: {error!r}")
                return

    def lookup(self, rng, which):
        tokens = self.prompts[which][: rng.randrange(1, 200)]
        with self.store.lookup(tokens) as hit:
            assert hit.tokens <= len(tokens)

    def load(self, rng, which):
        hit = self.store.lookup(self.prompts[which])
        buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
        transfer = self.store.load(hit, buffers, deadline_s=rng.choice([None, None, 0.0005, 5]))
        if rng.random() < 0.2:
            transfer.cancel()
        self._compare(which, transfer.wait(30), map(bytes, buffers))

    def hbm(self, rng, which):
        transfer = self.store.load(
            self.store.lookup(self.prompts[which]), deadline_s=rng.choice([None, 0.0005, 5])
        )
        if rng.random() < 0.2:
            transfer.cancel()
        loaded = transfer.wait(30)
        self._compare(which, loaded, (self.store.pool.array[page].tobytes() for page in loaded.pages))
        if loaded.tokens % SPEC.chunk_tokens:
            self.store.pool.array[loaded.pages[-1]] = 255  # a private page: the engine writes on
        self.store.release_hbm(loaded.pages)

    def _compare(self, which, loaded, got):
        for page, (expected, data) in enumerate(zip(self.pages[which], got, strict=False)):
            count = min(loaded.tokens - page * SPEC.chunk_tokens, SPEC.chunk_tokens)
            if count > 0 and leading_tokens(data, count) != leading_tokens(expected, count):
                self.wrong.append(f"page {page} of prompt {which}")

    def save(self, rng, which):
        count = rng.randrange(1, len(self.pages[which]) + 1)
        transfer = self.store.save(self.prompts[which], self.pages[which][:count])
        if rng.random() < 0.1:
            transfer.cancel()
        assert 0 <= transfer.wait(30) <= len(self.prompts[which])

    def save_hbm(self, rng, which):
        mine = self.pages[which]
        pages = self.store.allocate_hbm(len(mine))
        if pages is None:
            return
        for page, data in zip(pages, mine, strict=True):
            self.store.pool.array[page] = np.frombuffer(data, np.uint8)
        transfer = self.store.save_hbm(self.store.prompt(self.prompts[which]), pages)
        if rng.random() < 0.3:
            transfer.wait(30)
        self.store.release_hbm(pages)

    def evict(self, rng, which):
        tiers = list(self.store.stats().tiers)
        self.store.evict(rng.choice(tiers), rng.randrange(1, 6))

    def pin(self, rng, which):
        tokens = self.prompts[which][:32]
        if self.store.pin(tokens):
            self.store.unpin(tokens)

    def prefetch(self, rng, which):
        with self.store.lookup(self.prompts[which]) as hit:
            transfer = hit.prefetch(deadline_s=rng.choice([None, 0.001]))
            if rng.random() < 0.3:
                transfer.cancel()
            transfer.wait(30)


@pytest.mark.parametrize("tiers", ["host", "host+disk", "hbm+host", "hbm+host+disk"])
@pytest.mark.parametrize("times", [TIMES, pytest.param(75 * TIMES, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_no_wrong_byte_no_leak_no_overflow(open_store, tiers, times):
    store = open_store(
        "disk" if "disk" in tiers else None,
        pages=60,
        disk_pages=120,
        hbm_pages=50 if "hbm" in tiers else 0,
        lease_s=2.0,
    )
    hammer = Hammer(store, seed=tiers)
    hammer.run(times)
    assert hammer.wrong == []
    assert store.flush(30)
    store._mover.drain(30)
    stats = store.stats()
    assert stats.failed_tasks == 0
    assert stats.open_hits == stats.pending_saves == stats.pending_writes == 0
    assert all(tier.leased_pages == 0 for tier in stats.tiers.values())
    assert all(tier.used_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
    store.check()
    if store.pool:
        assert store.available_hbm() == store.pool.num_pages
    while sum(store.evict(tier) for tier in stats.tiers):
        pass  # a page's last copy waits for the pages below it, which may be in another tier
    store.flush(30)
    assert store.stats().pages == 0
    assert store.stats().tiers["host"].used_bytes == 0
