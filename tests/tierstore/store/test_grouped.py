"""Layer groups as one store: what is found and loaded is what the rule says of what every tier holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tierstore
from tests.tierstore.store.grouped_model import CHUNK, CHUNKED, FULL, GEMMA, HYBRID, IDENTITY, Engine
from tierstore import Identity, Prompt, UsageError, groups
from tierstore.index import Tier
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.transfer import TransferState
from tierstore.types import Promise

TOKENS = list(range(500, 700))  # 16-token chunks: 12 whole ones and 8 tokens


@pytest.fixture(params=[GEMMA, HYBRID], ids=["windows", "states"])
def engine(request, tmp_path):
    with Engine(request.param, tmp_path) as engine:
        yield engine


def test_a_prompt_goes_on_where_an_earlier_one_ended(engine):
    engine.save_to(TOKENS[:100], 96)
    hit = engine.lookup(TOKENS)
    assert (hit.tokens, hit.branch, hit.by_tier) == (96, 100, {"hbm": 96})
    assert engine.load(hit) == 96
    engine.check()


def test_what_was_promised_is_waited_for_in_every_group(engine):
    promise = Promise(192, 10.0)
    expected = engine.store.expect(engine.store.prompt(TOKENS), promise)
    engine.save_to(TOKENS[:100], 96)
    assert not expected.done
    engine.save_to(TOKENS, 192)
    expected.wait(30)
    assert expected.state is TransferState.DONE
    engine.evict("hbm")
    assert engine.store.expect(engine.store.prompt(TOKENS), promise).wait(30) is None
    assert engine.load(engine.lookup(TOKENS)) == 192
    engine.check()


def test_from_host_from_disk_and_from_another_life(engine, tmp_path):
    engine.save_to(TOKENS, 192)
    engine.evict("hbm")
    assert engine.load(engine.lookup(TOKENS)) == 192
    engine.store.flush(30)
    engine.evict("hbm")
    engine.evict("host")
    hit = engine.lookup(TOKENS)
    assert hit.by_tier == {"disk": 192}
    assert hit.prefetch().wait(30) == 192
    assert engine.load(hit) == 192
    engine.check()
    engine.close()
    with Engine(engine.spec, tmp_path) as second:
        hit = second.lookup(TOKENS)
        assert (hit.tokens, hit.by_tier) == (192, {"disk": 192})
        assert second.load(hit) == 192
        second.check()


def test_where_prompts_part_there_is_nothing_to_go_on_with_until_it_is_saved(engine):
    engine.save_to(TOKENS, 192)
    other = [*TOKENS[:150], *range(50)]
    hit = engine.lookup(other)
    assert (hit.tokens, hit.branch) == (0, 150)
    hit.release()
    engine.save_to(other, 144)  # the branch
    with engine.lookup(other) as hit:
        assert hit.tokens == 144
    with engine.lookup(TOKENS) as hit:
        assert hit.tokens == 192
    engine.check()


def test_prompts_that_part_within_a_chunk_share_no_state_and_no_window(engine):
    """The wrong hit that states had as long as their pages were found by their own chunk's tokens alone."""
    engine.save_to(TOKENS, 192)
    for at in (0, 1, 15, 16, 100, 175, 191):
        other = list(TOKENS)
        other[at] += 1000
        with engine.lookup(other) as hit:
            assert hit.tokens == 0
            assert hit.branch == at


def test_max_tokens_cuts_to_what_can_be_served(engine):
    for end in (48, 96, 192):
        engine.save_to(TOKENS, end)
    of_windows = {199: 192, 192: 192, 191: 96, 97: 96, 95: 80, 47: 32, 0: 0}
    of_states = {199: 192, 192: 192, 191: 96, 97: 96, 95: 48, 47: 0, 0: 0}
    for limit, tokens in (of_states if engine.spec is HYBRID else of_windows).items():
        with engine.lookup(TOKENS, max_tokens=limit) as hit:
            assert hit.tokens == tokens
    engine.check()


def test_a_group_whose_pages_have_left_shortens_the_hit(engine):
    for end in (96, 192):
        engine.save_to(TOKENS, end)
    engine.evict("hbm")
    engine.store.flush(30)
    engine.evict("host")
    engine.forget(1, TOKENS, [11])
    with engine.lookup(TOKENS) as hit:
        assert (hit.tokens, hit.branch) == (96, 200)
    assert engine.load(engine.lookup(TOKENS)) == 96
    engine.check()


def test_the_slowest_page_that_is_needed_counts(tmp_path):
    with Engine(GEMMA, tmp_path) as engine:
        engine.save_to(TOKENS[:192], 192)  # of the window, chunks 9, 10 and 11
        engine.forget(0, TOKENS, [11], [Tier.HBM])
        engine.forget(1, TOKENS, [9], [Tier.HBM])
        hit = engine.lookup(TOKENS)
        assert hit.by_tier == {"hbm": 10 * CHUNK, "host": 2 * CHUNK}
        assert engine.load(hit) == 192
        engine.check()


def test_an_end_that_needs_nothing_does_not_hide_a_longer_hit(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "_SCANNED", 1)
    with Engine(KVSpec((FULL, CHUNKED), "float32", CHUNK), tmp_path) as engine:  # attention chunks of 64
        engine.save_to(TOKENS[:96], 80)
        with engine.lookup(TOKENS) as hit:
            assert hit.tokens == 80
        engine.store.flush(30)
        engine.forget(1, TOKENS, [4])
        with engine.lookup(TOKENS) as hit:
            assert hit.tokens == 64
        engine.check()


def test_a_prompt_of_another_model_is_refused(engine):
    other = Prompt(Identity.of(KVSpec((FULL,), "float16", CHUNK), model="other"), TOKENS, chunk_tokens=CHUNK)
    with pytest.raises(UsageError, match="another page layout"):
        engine.store.lookup(other)


def test_prompts_of_several_identities_live_side_by_side(engine):
    engine.save_to(TOKENS, 192)
    tenant = replace(engine.store.identity, tenant="b")
    other = Prompt(tenant, TOKENS, chunk_tokens=CHUNK)
    assert engine.store.lookup(other).tokens == 0
    engine.save_to(TOKENS, 96, prompt=other)
    with engine.store.lookup(other) as hit:
        assert hit.tokens == 96
    with engine.lookup(TOKENS) as hit:
        assert hit.tokens == 192


def test_chunks_too_short_for_a_name_are_refused():
    full = LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 32)
    window = LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 1, 32, window=8)
    with pytest.raises(UsageError, match="chunk_tokens must be at least"):
        tierstore.open(None, KVSpec((full, window), "float32", 4), host_bytes=1 << 20)
    tierstore.open(None, KVSpec((full,), "float32", 4), host_bytes=1 << 20).close()


def test_pools_of_other_groups_are_refused():
    pools = tierstore.open_pools(GEMMA, 1 << 20)
    with pytest.raises(UsageError, match="another KV spec"):
        tierstore.open(None, GEMMA, identity=IDENTITY, pools=pools[::-1])
    others = tierstore.open_pools(GEMMA, 1 << 20)
    with pytest.raises(UsageError, match="must share one memory"):
        tierstore.open(None, GEMMA, identity=IDENTITY, pools=[pools[0], others[1]])


def test_parts_of_a_hit_and_what_comes_with_its_end(engine):
    engine.save_to(TOKENS, 192)
    engine.evict("hbm")
    hit = engine.lookup(TOKENS)
    back = engine.store.load_part(hit, 8, 12).wait(30)
    assert back.tokens == 192
    assert (back.groups[0].first, len(back.groups[0].pages)) == (8, 4)
    assert back.groups[1].first + len(back.groups[1].pages) == 12
    front = engine.store.load_part(hit, 0, 8, last=True).wait(30)
    assert (front.tokens, len(front.pages)) == (128, 8)
    assert not front.groups[1].pages
    for loaded in (back, front):
        engine.verify(TOKENS, loaded)
        engine.release(loaded)
    engine.check()


def test_a_cancelled_load_gives_everything_back(engine):
    engine.save_to(TOKENS, 192)
    engine.evict("hbm")
    for _ in range(5):
        transfer = engine.store.load(engine.lookup(TOKENS))
        transfer.cancel()
        engine.release(transfer.wait(30))
    engine.check()


def test_a_pool_without_room_for_one_group_is_a_miss(engine):
    engine.save_to(TOKENS, 192)
    engine.evict("hbm")
    taken = engine.store.allocate_hbm(engine.store.pools[1].num_pages, group=1)
    loaded = engine.store.load(engine.lookup(TOKENS)).wait(30)
    assert (loaded.tokens, loaded.pages) == (0, ())
    engine.store.release_hbm(taken, group=1)
    engine.check()


def test_a_plan_takes_all_of_a_hit_or_nothing(engine):
    engine.save_to(TOKENS, 192)
    engine.evict("hbm")
    hit = engine.lookup(TOKENS)
    engine.store.computed(16, 0, 100.0)
    assert engine.store.plan(hit, 201).tokens == 192
    engine.store.planner.moved("host", 1, 1e6, now_s=engine.store.clock())
    plan = engine.store.plan(hit, 201)
    assert (plan.tokens, plan.declined) == (0, {"host": 192})
    engine.store.decline(hit, plan)
    hit.release()
    assert engine.store.stats().counters["declined_tokens"]["host slower"] == 192
