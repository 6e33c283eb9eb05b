"""What a session keeps of windows and states: its end, and a save point in each stretch before it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tierstore.cli.test_operations import run
from tests.tierstore.store.grouped_model import CHUNK, GEMMA, HYBRID, Engine
from tierstore.groups import GroupRule
from tierstore.index import Tier
from tierstore.retention import checkpoint_tokens, superseded
from tierstore.spec import KVSpec, LayerGroup, LayerKind

TOKENS = list(range(2000))


# -- pure ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 500), st.integers(1, 200))
def test_the_end_stays_and_one_point_in_each_stretch(points, end, distance):
    gone = superseded(points, end, distance)
    kept = sorted({*points, end}.difference(gone))
    assert end in kept
    before = [point for point in kept if point < end]
    stretches = [-(-point // distance) for point in [*before, end]]
    assert len(set(stretches)) == len(stretches)
    for point in {*points, end}:  # nobody is thrown back by a whole stretch or more
        if point <= end:
            assert any(point <= other < point + distance for other in kept)
    assert [point for point in points if point > end and point in gone] == []


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 200))
def test_what_is_kept_does_not_depend_on_when_one_looks(turns, distance):
    """Turn by turn, or all at once at the end."""
    kept, end, points = [], 0, []
    for turn in turns:
        end += turn
        points.append(end)
        kept = sorted({*kept, end}.difference(superseded(kept, end, distance)))
    assert kept == sorted(set(points).difference(superseded(points, end, distance)))


@pytest.mark.parametrize("distance", [64, 4096])
def test_checkpoints_are_never_superseded(distance):
    points = list(range(distance, 20 * distance, distance))
    assert superseded(points, 20 * distance, distance) == []


@pytest.mark.parametrize("window", [128, 1024, 4096])
@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_checkpoints_take_a_sixteenth(window, chunk):
    full = LayerGroup(LayerKind.FULL_ATTENTION, (5,), 2, 64)
    windowed = LayerGroup(LayerKind.SLIDING_WINDOW, (0, 1, 2, 3, 4), 2, 64, window=window)
    state = LayerGroup(LayerKind.RECURRENT_STATE, (6,), state_bytes=1 << 20)
    for groups in ((full, windowed), (full, state), (full, windowed, state)):
        spec = KVSpec(groups, "bfloat16", chunk)
        distance = checkpoint_tokens(spec)
        assert distance % chunk == 0
        a_checkpoint = sum(
            len(GroupRule.of(part.groups[0]).pages(distance, chunk)) * part.page_bytes
            for part in spec.split()
            if part.groups[0].kind is not LayerKind.FULL_ATTENTION
        )
        kv = KVSpec(tuple(each for each in groups if each is not state), "bfloat16", chunk).page_bytes
        assert a_checkpoint <= kv * (distance // chunk) / 16 < a_checkpoint + kv / 16
    assert checkpoint_tokens(KVSpec((full,), "bfloat16", chunk)) == 0
    assert checkpoint_tokens(KVSpec((state,), "bfloat16", chunk)) == 16 * chunk


# -- in a store ---------------------------------------------------------------------------------------


@pytest.fixture(params=[GEMMA, HYBRID], ids=["windows", "states"])
def engine(request, tmp_path):
    with Engine(request.param, tmp_path, pages=200, checkpoint_tokens=16 * CHUNK) as engine:
        yield engine


def converse(engine, ends, *, session, after=0):
    """A conversation, turn by turn: each goes on where the last one ended."""
    for before, end in zip([after, *ends], ends, strict=False):
        turn = TOKENS[:end]
        prompt = engine.store.prompt(turn)
        with engine.store.lookup(prompt, max_tokens=len(turn) - 1) as hit:
            assert hit.tokens == before // CHUNK * CHUNK
        engine.save_to(turn, end // CHUNK * CHUNK, prompt=prompt, session=session)


def points(engine):
    """How many chunks there are before each place where a hit can end."""
    held = set(engine.held(1, TOKENS, range(60)))
    needed = {end: set(engine.rules[1].pages(end * CHUNK, CHUNK)) for end in range(1, 60)}
    return [end for end, pages in needed.items() if pages <= held]


def test_a_turn_that_was_gone_on_from_leaves(engine):
    converse(engine, [80, 170, 250, 350, 470, 530], session="s")
    engine.store.flush(30)
    # One for each stretch of 16 chunks: 15 (250 tokens), 29 (470) … and the end.
    assert points(engine) == [15, 29, 33]
    for end, tokens in ((530, 528), (527, 464), (463, 240), (239, 0)):
        with engine.lookup(TOKENS, max_tokens=end) as hit:
            assert hit.tokens == tokens
    engine.check()


def test_it_leaves_all_tiers(engine):
    converse(engine, [80], session="s")
    engine.store.flush(30)
    converse(engine, [170], session="s", after=80)
    engine.store.flush(30)
    found = engine.pages(1, TOKENS, range(20))
    left = [chunk for chunk, pages in found.items() if any(any(page.copies) for page in pages)]
    assert left == list(engine.rules[1].pages(160, CHUNK))
    engine.check()


def test_what_others_have_saved_too_stays(engine):
    converse(engine, [80], session="a")
    engine.save_to(TOKENS[:80], 80, session="b")
    converse(engine, [170], session="a", after=80)
    assert points(engine)[0] == 5
    engine.check()


def test_a_place_where_prompts_part_is_nobodys_turn(engine):
    engine.save_to(TOKENS[:80], 80)
    for number in range(3):
        other = [*TOKENS[:80], *range(5000 + 100 * number, 5100 + 100 * number)]
        prompt = engine.store.prompt(other)
        with engine.store.lookup(prompt) as hit:
            assert hit.tokens == 80
        engine.save_to(other, 176, prompt=prompt, session=f"session {number}")
    assert points(engine) == [5]
    engine.check()


def test_without_a_session_nothing_leaves(engine):
    converse(engine, [80, 170, 250], session=None)
    assert {5, 10, 15} <= set(points(engine))
    engine.check()


def test_a_turn_that_is_held_leaves_later(engine):
    converse(engine, [80], session="s")
    prompt = engine.store.prompt(TOKENS[:170])
    hit = engine.store.lookup(prompt)
    engine.save_to(TOKENS[:170], 160, prompt=prompt, session="s")
    loaded = engine.store.load(hit).wait(30)
    assert loaded.tokens == 80
    engine.verify(TOKENS, loaded)
    engine.release(loaded)
    engine.store.flush(30)
    gone = set(engine.rules[1].pages(80, CHUNK)).difference(engine.rules[1].pages(160, CHUNK))
    assert not engine.held(1, TOKENS, gone)
    engine.check()


def test_a_session_that_is_over_leaves_first_in_every_group(engine):
    engine.save_to(TOKENS[:160], 160, session="over")
    other = list(range(9000, 9160))
    engine.save_to(other, 160, session="going on")
    engine.lookup(TOKENS[:160]).release()  # used last
    engine.store.finish("over")
    for group, pool in enumerate(engine.pools):
        count = len(engine.held(group, TOKENS[:160], range(10)))
        assert engine.store.evict("hbm", count, group=group) == count
        assert pool.used_pages == len(engine.rules[group].pages(160, CHUNK))
    with engine.lookup(other) as hit:
        assert hit.by_tier == {"hbm": 160}
    engine.check()


def test_ls_shows_a_models_layers_together(tmp_path):
    with Engine(GEMMA, tmp_path, checkpoint_tokens=16 * CHUNK) as engine:
        converse(engine, [80, 160, 400], session="s")
        assert engine.store.flush(30)
    code, out, _ = run("ls", str(tmp_path))
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.startswith("played")]
    assert [line[3:5] for line in lines] == [["full", "attention"], ["sliding", "window"]]
    assert lines[0][5:8] == ["–", "25", "1"]
    assert lines[1][6:10] == ["24.0", "%", "6", "–"]  # behind 160 tokens and 400
    listed = json.loads(run("ls", str(tmp_path), "--json")[1])["identities"]
    assert {each["layers"]: each["pages"] for each in listed} == {
        "full attention": 25,
        "sliding window 40": 6,
    }


# -- what must hold -----------------------------------------------------------------------------------

SESSION = 100_000


def test_a_long_session_of_a_model_of_windows_keeps_a_quarter(tmp_path):
    """100K tokens in turns of some thousand, five of six layers windowed at 1,024: the bytes that are kept of
    those of all KV, in HBM and on disk, with a hit at each turn's end."""
    full = LayerGroup(LayerKind.FULL_ATTENTION, (5,), 1, 2)
    window = LayerGroup(LayerKind.SLIDING_WINDOW, (0, 1, 2, 3, 4), 1, 2, window=1024)
    spec = KVSpec((full, window), "float16", 64)
    everything = SESSION // 64 * spec.page_bytes
    with Engine(spec, tmp_path, pages=1700, host_bytes=64 << 20) as engine:
        before = 0
        for end in [*range(3100, SESSION, 4099), SESSION]:
            before = take_turn(engine, list(range(end)), before)
        engine.store.flush(60)
        assert kept_bytes(engine, Tier.HBM) <= 0.25 * everything
        assert kept_bytes(engine, Tier.HOST) <= 0.25 * everything
        assert kept_bytes(engine, Tier.DISK) <= 0.25 * everything
        with engine.lookup(list(range(SESSION))) as hit:
            assert hit.tokens == before
        engine.check()


def take_turn(engine, tokens, before):
    """Go on where the last turn ended, ``before``, with a checkpoint now and then. Where this one ends."""
    store, chunk_tokens = engine.store, engine.spec.chunk_tokens
    prompt = store.prompt(tokens)
    with store.lookup(prompt, max_tokens=len(tokens) - 1) as hit:
        assert hit.tokens == before
    end = len(tokens) // chunk_tokens * chunk_tokens
    save(engine, 0, range(before // chunk_tokens, end // chunk_tokens), prompt)
    between = range(store.checkpoint_tokens, end, store.checkpoint_tokens)
    for point in [*(at for at in between if at > before), end]:
        save(engine, 1, engine.rules[1].pages(point, chunk_tokens), prompt)
    return end


def save(engine, group, chunks, prompt):
    pages = engine.store.allocate_hbm(len(chunks), group=group)
    engine.store.save_hbm(prompt, pages, first=chunks.start, group=group, session="long").wait(30)
    engine.store.release_hbm(pages, group=group)


def kept_bytes(engine, tier):
    """The bytes of all pages in a tier."""
    if tier is Tier.HBM:
        cached = zip(engine.store._hbm.published, engine.pools, strict=True)
        return sum(len(pages) * pool.spec.page_bytes for pages, pool in cached)
    state = engine.store.backend.core.state
    with state.lock:
        return sum(page.nbytes for page in state.index.tree.walk() if page.copies[tier] is not None)
