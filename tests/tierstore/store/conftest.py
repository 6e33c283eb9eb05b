"""A small store, and bytes that tell whose they are."""

from __future__ import annotations

import pytest

from tests.small_store import SPEC
from tierstore.keys import Identity
from tierstore.testing.opening import open_store as open_testing_store
from tierstore.tiers.hbm import PagePool


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
