"""Every page that a daemon has acknowledged is found afterwards, or was evicted and counted."""

from __future__ import annotations

import numpy as np

from tests.daemons import SPEC, daemon_stats, in_threads

ARENA_BYTES = 16 << 20
PROMPTS = 128
CHUNKS = 64
PAGES = PROMPTS * CHUNKS  # 64 MiB: four arenas


def tokens_of(number):
    return np.arange(CHUNKS * SPEC.chunk_tokens, dtype=np.uint32) + (number << 16)


def contents(number):
    pages = np.arange(number * CHUNKS, (number + 1) * CHUNKS, dtype=np.uint32)
    return np.repeat(pages, SPEC.page_bytes // 4).reshape(CHUNKS, -1)


def test_four_arenas_in_seconds_lose_nothing_silently(make_daemon, connect):
    daemon = make_daemon(host_bytes=ARENA_BYTES, disk=False)
    stores = [connect(daemon.url) for _ in range(2)]
    stored = [0] * PROMPTS  # tokens that were acknowledged

    def push(which):
        for number in range(which, PROMPTS, len(stores)):
            pages = [memoryview(page).cast("B") for page in contents(number)]
            stored[number] = stores[which].save(tokens_of(number), pages).wait(30)

    in_threads(*(lambda which=which: push(which) for which in range(len(stores))))
    acknowledged = sum(stored) // SPEC.chunk_tokens
    saved = sum(store.stats().counters["saved_pages"] for store in stores)
    refused = sum(store.stats().counters["not_stored_pages"] for store in stores)
    assert acknowledged == saved == PAGES - refused
    assert acknowledged > 2 * ARENA_BYTES // SPEC.page_bytes  # it was full, and went on

    found = 0
    for number in range(PROMPTS):
        hit = stores[0].lookup(tokens_of(number))
        assert hit.tokens <= stored[number]
        buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
        assert stores[0].load(hit, buffers).wait(30).tokens == hit.tokens
        for buffer, page in zip(buffers, contents(number), strict=False):
            assert buffer == page.tobytes()
        found += hit.num_pages
    stats = stores[0].stats()
    evicted = daemon_stats(stores[0])["store"]["counters"]["evicted_pages"]["host"]
    assert found + evicted == acknowledged
    assert found == stats.tiers["host"].pages
