"""Helpers for tests with a daemon: small pages, their bytes, and what a daemon says."""

from __future__ import annotations

import json
import threading

from tierstore.spec import KVSpec
from tierstore.testing import pages as testing_pages
from tierstore.wire import messages

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages
TOKENS = list(range(100, 170))  # 4 full chunks and 6 tokens


def pages_of(tokens):
    return testing_pages.pages_of(tokens, SPEC)


def load_bytes(store, hit, **kwargs):
    """Load a hit into fresh buffers: the tokens that came, and the bytes of their pages."""
    count = -(-hit.tokens // SPEC.chunk_tokens)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(count)]
    loaded = store.load(hit, buffers, **kwargs).wait(30)
    full = -(-loaded.tokens // SPEC.chunk_tokens)
    return loaded.tokens, [bytes(buffer) for buffer in buffers[:full]]


def right_bytes(tokens, count, pages):
    """Whether these are the pages of the first ``count`` tokens of a prompt."""
    for at, (page, expected) in enumerate(zip(pages, pages_of(tokens), strict=False)):
        left = min(count - at * SPEC.chunk_tokens, SPEC.chunk_tokens)
        got = testing_pages.leading_tokens(page, left, SPEC)
        if got != testing_pages.leading_tokens(expected, left, SPEC):
            return False
    return len(pages) * SPEC.chunk_tokens >= count


def close_all(stores):
    """Close those that are open, after seeing that all is where it belongs in them."""
    for store in stores:
        if not store.closed:
            store.check()
        store.close()
        assert store.stats().failed_tasks == 0


def daemon_stats(store):
    """All that the daemon tells of itself."""
    answer = store.backend.connection.ask(messages.Stats(0), messages.StatsAnswer)
    return json.loads(answer.json)


def in_threads(*functions):
    """Run them at the same time; whatever one of them raises is raised."""
    raised = []

    def run(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001  # raised again below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in raised:
        raise error
