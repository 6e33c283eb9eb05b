"""A model of several layer groups computes what it computes with all KV kept, wherever its hits begin.

The oracle is the same model with one layer group: windows are the same, and every token's KV stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.errors import UsageError
from tierstore.spec import LayerKind
from tierstore.tiers.group_pools import fits
from tierstore_connectors.bundled import open_connector
from tierstore_engine.beams import BeamParams
from tierstore_engine.build import load_model, make_runner
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.weights import digest_weights, random_weights

CHUNK = 16
WINDOW = 37
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True, keep_logits=True)


@dataclass(frozen=True)
class Pair:
    """One model twice: with a layer group for its windowed layers, and with all KV in one group."""

    grouped: LoadedModel
    whole: LoadedModel


@pytest.fixture(scope="module")
def pair() -> Pair:
    base = replace(preset("tiny", dtype="float32"), layers=4)
    windows = tuple(None if layer % 3 == 2 else WINDOW for layer in range(base.layers))
    whole = replace(base, windows=windows)
    kinds = tuple(
        LayerKind.FULL_ATTENTION if window is None else LayerKind.SLIDING_WINDOW for window in windows
    )
    grouped = replace(whole, kinds=kinds)
    weights = random_weights(whole, seed=3, device="cpu")
    digest = digest_weights(whole, weights)
    tokenizer = load_model("tiny", device="cpu").tokenizer
    return Pair(
        LoadedModel(grouped, tokenizer, weights, digest, "cpu"),
        LoadedModel(whole, tokenizer, weights, digest, "cpu"),
    )


class Engines:
    """Makes engines over one directory; when they are closed none of their pages may be missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[Engine] = []

    def __call__(
        self, model: LoadedModel, *, store: bool = True, pages: tuple[int, ...] = (64, 64), **settings: Any
    ) -> Engine:
        spec = model.kv_spec(chunk_tokens=CHUNK)
        connector = open_connector(
            spec,
            model.identity(spec),
            pool_pages=pages[: len(spec.split())],
            store=str(self._folder / "pages") if store else None,
            host_bytes=8 << 20,
            disk_bytes=64 << 20,
        )
        settings = {"prefill_chunk": 64, "plan": "load", **settings}
        checked = EngineSettings(**settings)
        runner = make_runner(model, connector.pools, checked)
        self._open.append(Engine(runner, model.tokenizer, connector, checked))
        return self._open[-1]

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            engine = self._open.pop()
            if engine.connector.keeps:
                assert engine.connector.store.flush(30)
                engine.connector.store.check()
            if not engine.has_work:
                for group, pool in enumerate(engine.connector.pools):
                    assert engine.connector.available(group=group) == pool.num_pages
            engine.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path)
    yield made
    made.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (tokens,), generator=generator).tolist()


def assert_same(got: Any, expected: Any) -> None:
    assert got.tokens == expected.tokens
    assert abs(got.logits - expected.logits).max() < 3e-4


@pytest.mark.parametrize("tokens", [1, CHUNK, WINDOW, 100, 333])
def test_windows_that_give_pages_back_change_nothing(pair, engines, tokens):
    grouped = engines(pair.grouped, store=False, pages=(64, 12))
    whole = engines(pair.whole, store=False)
    [got], [expected] = (engine.generate([prompt(tokens)], GREEDY) for engine in (grouped, whole))
    assert_same(got, expected)


def test_a_hit_begins_where_an_earlier_request_ended(pair, engines):
    engine, whole = engines(pair.grouped), engines(pair.whole, store=False)
    first = prompt(200)
    [answer] = engine.generate([first], GREEDY)
    following = [*first, *answer.tokens, *prompt(50, seed=1)]
    [got] = engine.generate([following], GREEDY)
    ended = len(first) + len(answer.tokens) - 1
    assert got.metrics.reused_by_tier["hbm"] == ended
    [expected] = whole.generate([following], GREEDY)
    assert_same(got, expected)


@pytest.mark.parametrize("tier", ["hbm", "host", "disk"])
def test_the_same_prompt_again_from_every_tier(pair, engines, tier):
    engine = engines(pair.grouped)
    [cold] = engine.generate([prompt(200)], GREEDY)
    if tier == "host":
        assert engine.connector.store.flush(30)  # what is being saved does not leave
        for group in range(2):
            engine.connector.evict(64, group=group)
    if tier == "disk":
        assert engine.connector.store.flush(30)
        engines.close()
        engine = engines(pair.grouped)
    [again] = engine.generate([prompt(200)], GREEDY)
    assert again.metrics.reused_by_tier[tier] == 199 // CHUNK * CHUNK
    assert_same(again, cold)


def test_what_is_in_hbm_of_the_first_group_needs_no_room_where_windows_are_colder(pair, engines):
    """A pool that has room for the prompt once, and has most of it already."""
    engine = engines(pair.grouped, pages=(16, 10))
    [cold] = engine.generate([prompt(200)], GREEDY)
    assert engine.connector.store.flush(30)
    engine.connector.evict(64, group=1)
    hit = engine.connector.lookup(engine.connector.prompt(prompt(200)), max_tokens=199)
    assert 0 < hit.by_tier["host"] < hit.tokens
    assert hit.hbm_pages == hit.tokens // CHUNK
    hit.release()
    [again] = engine.generate([prompt(200)], GREEDY)
    assert_same(again, cold)


@pytest.mark.parametrize("common", [3, CHUNK, 70, 128, 130])
def test_prompts_that_part_anywhere(pair, engines, common):
    """The first to part from another computes, the next one goes on from there."""
    engine, whole = engines(pair.grouped), engines(pair.whole, store=False)
    stem = prompt(200)
    engine.generate([stem], GREEDY)
    for seed in (1, 2):
        branch = [*stem[:common], *prompt(60, seed=seed)]
        [got] = engine.generate([branch], GREEDY)
        assert_same(got, whole.generate([branch], GREEDY)[0])
        if seed == 2:
            assert sum(got.metrics.reused_by_tier.values()) == common // CHUNK * CHUNK


def test_checkpoints_on_the_way(pair, engines):
    engine = engines(pair.grouped, checkpoint_tokens=64)
    engine.generate([prompt(200)], GREEDY)
    [got] = engine.generate([[*prompt(200)[:150], 5, 6, 7]], GREEDY)
    assert sum(got.metrics.reused_by_tier.values()) == 128


def held_ends(engine, tokens):
    """The ends of chunks at which the store supports a hit in ``tokens``."""
    found = []
    for end in range(CHUNK, len(tokens) + 1, CHUNK):
        hit = engine.connector.lookup(engine.connector.prompt(tokens), max_tokens=end)
        found += [end] if hit.tokens == end else []
        hit.release()
    return found


def in_sessions(engine, turns, params):
    """The completions of prompts that are computed together, each in a session of its own."""
    ids = [engine.add(turn, params, session=str(at)) for at, turn in enumerate(turns)]
    found = {}
    while len(found) < len(ids):
        found |= {each.request_id: each.completion for each in engine.step() if each.completion}
    return [found[number] for number in ids]


def test_whole_windows_are_stored_below_hbm(pair, engines):
    """Over two turns of a session whose steps are longer than the window, with preemptions."""
    engine = engines(pair.grouped, pages=(24, 12), max_sequences=8, whole_windows=True)
    oracle = engines(pair.whole, store=False, pages=(128,))
    turns = [prompt(120 + 7 * seed, seed=seed) for seed in range(4)]
    for answer, more in ((170, 20), (5, 0)):
        params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
        completions = in_sessions(engine, turns, params)
        expected = oracle.generate(turns, params)
        assert [each.tokens for each in completions] == [each.tokens for each in expected]
        turns = [
            [*turn, *each.tokens, *prompt(more, seed=9)]
            for turn, each in zip(turns, completions, strict=True)
        ]
    assert engine.stats().preemptions
    engines.close()
    again = engines(pair.grouped)
    for turn in turns:
        computed = len(turn) - 1  # the newest token has no KV
        assert held_ends(again, turn[:computed]) == list(range(CHUNK, computed + 1, CHUNK))


def test_requests_side_by_side_with_a_common_beginning(pair, engines):
    engine, whole = engines(pair.grouped), engines(pair.whole, store=False)
    prompts = [[*prompt(150), *prompt(20 + seed, seed=seed)] for seed in range(1, 5)]
    got, expected = engine.generate(prompts, GREEDY), whole.generate(prompts, GREEDY)
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens
    assert sum(sum(one.metrics.reused_by_tier.values()) for one in got) >= 3 * (150 // CHUNK * CHUNK)


def test_requests_that_give_way_come_back(pair, engines):
    engine = engines(pair.grouped, pages=(24, 12), max_sequences=8)
    whole = engines(pair.whole, store=False)
    prompts = [prompt(120 + 7 * seed, seed=seed) for seed in range(4)]
    params = SamplingParams(max_new_tokens=170, ignore_eos=True)
    got, expected = engine.generate(prompts, params), whole.generate(prompts, params)
    assert [one.tokens for one in got] == [other.tokens for other in expected]
    assert engine.stats().preemptions


def test_the_same_prompt_again_where_it_only_just_fits(pair, engines):
    """Its own pages in HBM are leased then, and no room for others."""
    engine = engines(pair.grouped, pages=(22, 8))
    peaks = engine._keeper.peaks(288 + 23)
    assert fits(engine.connector.pools, [20, *peaks[1:]])
    assert not fits(engine.connector.pools, [26, *peaks[1:]])
    answers = [engine.generate([prompt(288)], GREEDY)[0] for _ in range(3)]
    assert answers[1].tokens == answers[2].tokens == answers[0].tokens


def test_pages_that_lie_everywhere_do_not_keep_the_only_request_from_going_on(pair, engines):
    """Two sequences take their pages in turn, so that each lies in nearly every large page."""
    engine, whole = engines(pair.grouped, pages=(24, 10), max_sequences=2), engines(pair.whole, store=False)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    first = [prompt(20, seed=seed) for seed in (1, 2)]
    answers = engine.generate(first, params)
    following = [*first[0], *answers[0].tokens, *prompt(150, seed=3)]
    for group in (1,):
        engine.connector.evict(100, group=group)
    [got] = engine.generate([following], GREEDY)
    assert got.tokens == whole.generate([following], GREEDY)[0].tokens


def test_without_a_store_too(pair, engines):
    engine = engines(pair.grouped, store=False, pages=(24, 14), max_sequences=8)
    whole = engines(pair.whole, store=False)
    prompts = [prompt(120 + 7 * seed, seed=seed) for seed in range(5)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    got, expected = engine.generate(prompts, params), whole.generate(prompts, params)
    assert [one.tokens for one in got] == [other.tokens for other in expected]


def test_forks_and_beams_share_windows(pair, engines):
    engine, whole = engines(pair.grouped), engines(pair.whole, store=False)
    sampled = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=1.0, seed=4)
    got, expected = (each.sample(prompt(90), sampled, n=3) for each in (engine, whole))
    assert [one.tokens for one in got] == [other.tokens for other in expected]
    beams, others = (
        each.beam_search(prompt(70), BeamParams(width=3, max_new_tokens=20)) for each in (engine, whole)
    )
    assert [beam.tokens for beam in beams] == [beam.tokens for beam in others]


def test_a_pool_without_room_for_a_window_is_refused_at_once(pair, engines):
    engine = engines(pair.grouped, store=False, pages=(16, 3))
    with pytest.raises(RequestError, match="sliding_window"):
        engine.add(prompt(200), GREEDY)


def test_checkpoints_end_where_pages_end():
    with pytest.raises(UsageError, match="checkpoint_tokens"):
        EngineSettings(checkpoint_tokens=40).check_chunk(16)
