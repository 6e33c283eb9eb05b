from __future__ import annotations

import pytest

import tierstore
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import NoStore, StoreConnector, open_connector
from tierstore_connectors.testing import TOKENS, ConnectorTests

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)
IDENTITY = Identity.of(SPEC, model="m")


class TestNoStore(ConnectorTests):
    reuses = False

    def open_connector(self, pages):
        return NoStore(PagePool(SPEC, pages), IDENTITY)


class TestHostStore(ConnectorTests):
    def open_connector(self, pages):
        pool = PagePool(SPEC, pages)
        return StoreConnector(tierstore.open(None, SPEC, identity=IDENTITY, pool=pool, host_bytes=1 << 20))


class TestDiskStore(ConnectorTests):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.directory = tmp_path / "store"

    def open_connector(self, pages):
        return open_connector(
            SPEC,
            IDENTITY,
            pool_pages=pages,
            store=str(self.directory),
            host_bytes=1 << 20,
            disk_bytes=16 << 20,
        )

    def test_the_next_connector_finds_what_this_one_kept(self):
        first = self.open_connector(8)
        first.release(self.compute(first, first.prompt(TOKENS)))
        first.close()
        second = self.open_connector(8)
        hit = second.lookup(second.prompt(TOKENS))
        assert hit.by_tier == {"disk": 70}
        assert hit.prefetch().wait(10) == 70
        loaded = second.load(hit).wait(10)
        self.check_pages(second, loaded.pages, loaded.tokens)
        second.release(loaded.pages)
        second.close()


def test_a_store_without_a_pool_is_refused():
    with (
        tierstore.open(None, SPEC, host_bytes=1 << 20) as store,
        pytest.raises(UsageError, match="page pool"),
    ):
        StoreConnector(store)
