"""A small store, and bytes that tell whose they are."""

from __future__ import annotations

import pytest

from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing import pages as testing_pages
from tierstore.testing.opening import open_store as open_testing_store
from tierstore.tiers.hbm import PagePool

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


@pytest.fixture
def open_store(tmp_path):
    """Opens stores that are checked and closed at the end of the test."""
    stores = []

    def open_(path="disk", *, spec=SPEC, pages=64, disk_pages=256, hbm_pages=0, **kwargs):
        pool = PagePool(spec, hbm_pages) if hbm_pages else None
        store = open_testing_store(
            None if path is None else tmp_path / path,
            spec,
            identity=kwargs.pop("identity", Identity.of(spec, model="test")),
            pools=pool,
            host_bytes=pages * spec.page_bytes,
            disk_bytes=kwargs.pop("disk_bytes", disk_pages * spec.page_bytes + (4 << 20)),
            **kwargs,
        )
        stores.append(store)
        return store

    yield open_
    for store in stores:
        if not store.closed:
            store.flush(10)
            store.check()
        store.close()
        assert store.stats().failed_tasks == 0
