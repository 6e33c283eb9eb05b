"""The bundled engine's connector over a daemon."""

from __future__ import annotations

import itertools

import pytest

from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.bundled import open_connector
from tierstore_connectors.testing import TOKENS, ConnectorTests

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)
_models = itertools.count()


class TestConnectedStore(ConnectorTests):
    @pytest.fixture(autouse=True)
    def _daemon(self, shared_daemon):
        self.url = shared_daemon.url
        self.model = f"connector {next(_models)}"

    def open_connector(self, layout, pages):
        identity = Identity.of(layout.spec, model=self.model)
        return open_connector(layout.spec, identity, pool_pages=[pages] * len(layout.groups), store=self.url)

    def test_the_next_connector_finds_what_this_one_kept(self, layout):
        first = self.open_connector(layout, 8)
        self.release(first, self.compute(first, layout, first.prompt(TOKENS)))
        first.close()
        second = self.open_connector(layout, 8)
        hit = second.lookup(second.prompt(TOKENS))
        assert hit.by_tier == {"host": 70}
        assert hit.prefetch().wait(10) == 70
        loaded = second.load(hit).wait(10)
        assert self.loaded_bytes(second, layout, loaded) == layout.right(TOKENS, 70)
        self.release_loaded(second, loaded)
        second.close()


def test_an_engine_starts_without_its_daemon(short_path, monkeypatch):
    monkeypatch.setattr("tierstore_connectors.bundled._CONNECT_S", 0.05)
    connector = open_connector(SPEC, Identity.of(SPEC, model="m"), pool_pages=4, store=f"ipc://{short_path}")
    assert connector.lookup(connector.prompt(TOKENS)).tokens == 0
    assert connector.available() == 4
    connector.close()


@pytest.fixture
def short_path(tmp_path_factory):
    return tmp_path_factory.mktemp("d") / "s"


def test_other_addresses_are_refused_clearly():
    with pytest.raises(UsageError, match="write ipc://PATH or tcp://HOST:PORT"):
        open_connector(SPEC, Identity.of(SPEC, model="m"), pool_pages=4, store="http://localhost")
