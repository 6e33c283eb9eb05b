"""Helpers for tests of a small store: its layout, its pages, and loads into buffers."""

from __future__ import annotations

from tierstore.spec import KVSpec
from tierstore.testing import pages as testing_pages

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages


def page_of(tokens):
    return testing_pages.page_of(tokens, SPEC)


def pages_of(tokens):
    return testing_pages.pages_of(tokens, SPEC)


def leading_tokens(page, count):
    return testing_pages.leading_tokens(page, count, SPEC)


def load_bytes(store, hit, **kwargs) -> tuple[int, list[bytes]]:
    """Load a hit into fresh buffers: the tokens that came, and the bytes of their pages."""
    buffers = [bytearray(store.spec.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers, **kwargs).wait(30)
    full = -(-loaded.tokens // store.spec.chunk_tokens)
    return loaded.tokens, [bytes(buffer) for buffer in buffers[:full]]
