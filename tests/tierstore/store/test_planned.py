"""What a store measures, plans and declines."""

from __future__ import annotations

import threading

import pytest

import tierstore
from tierstore.planner import TierRate
from tierstore.spec import LayerGroup, LayerKind
from tierstore.tiers.hbm import PagePool

SPEC = tierstore.KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=16)
TOKENS = list(range(16 * 8))
PAGES = [bytes([number]) * SPEC.page_bytes for number in range(8)]


@pytest.fixture
def store(tmp_path):
    with tierstore.open(
        str(tmp_path / "store"), SPEC, pools=PagePool(SPEC, 32), host_bytes=4 << 20, disk_bytes=16 << 20
    ) as opened:
        opened.save(TOKENS, PAGES).wait()
        assert opened.flush()
        yield opened
        opened.check()


def on_disk(store) -> None:
    store.evict("hbm")
    store.evict("host")


def come(store, pages) -> list[bytes]:
    return [bytes(store.pool.array[page]) for page in pages]


def test_loads_tell_what_their_tiers_take(store):
    assert not store.planner.rates(store._hbm.clock())
    on_disk(store)
    store.release_hbm(store.load(store.lookup(TOKENS)).wait().pages)
    rates = store.planner.rates(store._hbm.clock())
    assert set(rates) >= {"disk"}
    store.evict("hbm")
    store.release_hbm(store.load(store.lookup(TOKENS)).wait().pages)
    assert "host" in store.planner.rates(store._hbm.clock())
    assert set(store.backend.rates()) == {"disk"}


def test_a_hit_that_computing_beats_is_declined_and_counted(store):
    on_disk(store)
    store.computed(1000, 0, 1e-6)
    store.planner.moved("disk", 1e3, 60.0, now_s=store._hbm.clock())
    loaded = store.load(store.lookup(TOKENS)).wait()
    assert (loaded.tokens, loaded.pages) == (0, ())
    assert store.stats().counters["declined_tokens"] == {"disk slower": len(TOKENS)}
    assert store.backend.core.state.counters.declined_tokens == {"disk slower": len(TOKENS)}


def test_a_declined_tier_is_measured_behind_everybodys_back(store):
    on_disk(store)
    store.computed(1000, 0, 1.0)
    clock = store._hbm.clock
    store.planner.moved("disk", 1e3, 60.0, now_s=clock() - 20.0)
    measured = threading.Event()
    moved = store.planner.moved

    def note(*args, **named):
        moved(*args, **named)
        measured.set()

    store.planner.moved = note
    hit = store.lookup(TOKENS)
    planned = store.plan(hit)
    assert planned.declined == {"disk": len(TOKENS)}
    store.decline(hit, planned)
    hit.release()
    assert measured.wait(10)


def test_a_load_takes_its_deadline_from_the_plan_and_only_where_something_is_known(store):
    on_disk(store)
    transfer = store.load(store.lookup(TOKENS))
    assert transfer.remaining_s is None
    store.release_hbm(transfer.wait().pages)
    on_disk(store)
    store.computed(16, 0, 100.0)
    transfer = store.load(store.lookup(TOKENS))
    assert transfer.remaining_s is not None
    loaded = transfer.wait()
    assert loaded.tokens == len(TOKENS)
    store.release_hbm(loaded.pages)


@pytest.mark.parametrize("from_disk", [False, True])
def test_parts_of_a_hit_are_loaded_from_the_back(store, from_disk):
    if from_disk:
        on_disk(store)
    hit = store.lookup(TOKENS)
    back = store.load_part(hit, 5, 8, deadline_s=None).wait()
    middle = store.load_part(hit, 2, 5, deadline_s=None).wait()
    assert come(store, (*middle.pages, *back.pages)) == PAGES[2:]
    assert back.tokens == len(TOKENS)
    front = store.load_part(hit, 0, 2, deadline_s=None, last=True).wait()
    assert come(store, front.pages) == PAGES[:2]
    store.release_hbm([*front.pages, *middle.pages, *back.pages])
    assert store.lookup(TOKENS).by_tier == {"hbm": len(TOKENS)}


def test_a_part_behind_a_gap_is_found_again_when_the_gap_is_filled(store):
    hit = store.lookup(TOKENS)
    back = store.load_part(hit, 4, 8, deadline_s=None, last=True).wait()
    fresh = store.allocate_hbm(4)
    for place, page in zip(fresh, PAGES, strict=False):
        store.pool.array[place] = list(page)
    store.save_hbm(TOKENS[:64], fresh).wait()
    found = store.lookup(TOKENS)
    assert found.by_tier == {"hbm": len(TOKENS)}
    found.release()
    store.release_hbm([*fresh, *back.pages])


def test_what_is_told_by_the_backend_is_planned_with(store, monkeypatch):
    on_disk(store)
    store.computed(1000, 0, 1e-3)
    monkeypatch.setattr(store.backend, "rates", lambda: {"disk": TierRate(1.0)})
    assert store.plan(store.lookup(TOKENS)).declined == {"disk": len(TOKENS)}


def test_a_part_of_a_hit_is_declined_where_all_groups_have_chained_pages(tmp_path):
    """A chunk lies in the slowest tier that a group's page of it lies in."""
    groups = [LayerGroup(LayerKind.FULL_ATTENTION, (at,), 1, 32 << at) for at in range(2)]
    spec = tierstore.KVSpec(tuple(groups), "float16", 16)
    with tierstore.open(tmp_path, spec, host_bytes=4 << 20, disk_bytes=16 << 20) as store:
        prompt = store.prompt(TOKENS)
        for group in store.groups:
            store.save(prompt, [bytes(group.page_bytes)] * 8, group=group.number).wait()
        assert store.flush()
        store.evict("host")
        store.lookup(prompt, max_tokens=96).prefetch().wait()
        store.lookup(prompt.pages_of(1)).prefetch().wait()
        hit = store.lookup(prompt)
        assert hit.by_tier == {"host": 96, "disk": 32}
        assert hit.by_runs() == [("host", 96), ("disk", 32)]
        store.computed(1000, 0, 1e-3)
        store.planner.moved("disk", 1e3, 60.0, now_s=store.clock())
        store.planner.moved("host", 1e6, 1e-6, now_s=store.clock())
        planned = store.plan(hit, len(TOKENS) + 1)
        assert (planned.tokens, planned.declined) == (96, {"disk": 32})
        hit.release()
