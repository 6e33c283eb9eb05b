from __future__ import annotations

import pytest

import tierstore
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore_connectors.bundled import NoStore, StoreConnector, open_connector
from tierstore_connectors.testing import TOKENS, ConnectorTests

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)
IDENTITY = Identity.of(SPEC, model="m")


class TestNoStore(ConnectorTests):
    reuses = False

    def open_connector(self, layout, pages):
        return NoStore(layout.pools(pages), Identity.of(layout.spec, model="m"))


class TestHostStore(ConnectorTests):
    def open_connector(self, layout, pages):
        identity = Identity.of(layout.spec, model="m")
        pools = layout.pools(pages)
        return StoreConnector(
            tierstore.open(None, layout.spec, identity=identity, pools=pools, host_bytes=1 << 20)
        )


class TestDiskStore(ConnectorTests):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.directory = tmp_path / "store"

    def open_connector(self, layout, pages):
        return open_connector(
            layout.spec,
            Identity.of(layout.spec, model="m"),
            pool_pages=[pages] * len(layout.groups),
            store=str(self.directory),
            host_bytes=1 << 20,
            disk_bytes=16 << 20,
        )

    def test_the_next_connector_finds_what_this_one_kept(self, layout):
        first = self.open_connector(layout, 8)
        self.release(first, self.compute(first, layout, first.prompt(TOKENS)))
        first.close()
        second = self.open_connector(layout, 8)
        hit = second.lookup(second.prompt(TOKENS))
        assert hit.by_tier == {"disk": 70}
        assert hit.prefetch().wait(10) == 70
        loaded = second.load(hit).wait(10)
        assert self.loaded_bytes(second, layout, loaded) == layout.right(TOKENS, 70)
        self.release_loaded(second, loaded)
        second.close()


def test_a_store_without_a_pool_is_refused():
    with (
        tierstore.open(None, SPEC, host_bytes=1 << 20) as store,
        pytest.raises(UsageError, match="page pool"),
    ):
        StoreConnector(store)


FULL = LayerGroup(LayerKind.FULL_ATTENTION, (1,), 1, 32)
WINDOW = LayerGroup(LayerKind.SLIDING_WINDOW, (0, 2), 1, 32, window=40)
STATE = LayerGroup(LayerKind.RECURRENT_STATE, (3,), state_bytes=4096)
GROUPS = KVSpec((FULL, WINDOW), "float32", 16)
STATES = KVSpec((STATE,), "float32", 16)


def test_idle_pages_of_one_layer_group_make_room_for_another(tmp_path):
    connector = open_connector(
        GROUPS, Identity.of(GROUPS, model="m"), pool_pages=(4, 6), store=str(tmp_path), host_bytes=1 << 20
    )
    everything = connector.allocate(16)
    connector.save(connector.prompt(range(16 * 16)), everything, first=0).wait(10)
    assert connector.available(group=1) == 0
    connector.release(everything)
    assert connector.available(group=1) == 8
    assert len(connector.allocate(3, group=1)) == 3
    assert connector.available() == 10
    assert connector.store.stats().tiers["hbm"].used_bytes <= connector.pools[0].large_pages.nbytes
    connector.store.check()
    connector.close()


def test_a_pool_is_missing():
    with pytest.raises(UsageError, match="2 layer groups"):
        open_connector(GROUPS, Identity.of(GROUPS, model="m"), pool_pages=4, store=None)


def test_a_store_that_would_never_be_used_is_refused(tmp_path):
    with pytest.raises(UsageError, match="prefix_cache is off"):
        open_connector(SPEC, IDENTITY, pool_pages=4, store=str(tmp_path), prefix_cache=False)


@pytest.mark.parametrize("spec", [GROUPS, STATES], ids=["windows", "states"])
def test_a_model_of_several_layer_groups_goes_on_from_its_save_points(spec, tmp_path):
    connector = open_connector(
        spec,
        Identity.of(spec, model="m"),
        pool_pages=[12] * len(spec.groups),
        store=str(tmp_path),
        host_bytes=1 << 20,
        disk_bytes=16 << 20,
    )
    prompt = connector.prompt(TOKENS)
    for group, rule in enumerate(connector.rules):
        chunks = rule.pages(64, 16)
        pages = connector.allocate(len(chunks), group=group)
        connector.pools[group].array[pages] = 7 + group
        connector.save(prompt, pages, first=chunks.start, group=group).wait(10)
        connector.release(pages, group=group)
        assert connector.available(group=group) == connector.pools[group].num_pages
    hit = connector.lookup(connector.prompt([*TOKENS[:65], 1]))
    assert hit.tokens == hit.branch == 64
    loaded = connector.load(hit).wait(10)
    assert loaded.tokens == 64
    for group, part in enumerate(loaded.groups):
        chunks = connector.rules[group].pages(64, 16)
        assert (part.first, len(part.pages)) == (chunks.start, len(chunks))
        assert (connector.pools[group].array[list(part.pages)] == 7 + group).all()
        connector.release(part.pages, group=group)
        assert connector.evict(12, group=group) == len(chunks)
    assert connector.stats().tiers["hbm"].pages == 0
    connector.close()
