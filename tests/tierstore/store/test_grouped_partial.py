"""Pages of several layer groups that were saved before they were full, against a dictionary of all that was
saved: hits are as long as they may be, bring the very bytes, and no page serves other tokens."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tierstore.store import grouped_model as model
from tests.tierstore.store.grouped_model import CHUNK, EVERYTHING, GEMMA, HYBRID, Engine
from tierstore.index import Tier
from tierstore.spec import KVSpec

SPECS = [
    GEMMA,
    HYBRID,
    EVERYTHING,
    KVSpec((model.FULL, replace(model.CHUNKED, window=40)), "float32", CHUNK),
    KVSpec((model.FULL, model.LATENT), "float32", CHUNK),
]
LENGTH = 6 * CHUNK + 5
WHAT = ["all", "all", "some", "look", "cold"]


def save_all(engine, tokens, *, groups=None, prompt=None, session=None):
    """A sequence of these tokens leaves."""
    for group in range(len(engine.rules)) if groups is None else groups:
        chunks = engine.rules[group].pages(len(tokens), CHUNK)
        engine.save(group, tokens, chunks, prompt=prompt, session=session)


class Dictionary:
    """What was saved: by group, the tokens that each page comes behind, its own included."""

    def __init__(self, engine):
        self.rules, self.chains, self.named = engine.rules, engine.chains, engine.named
        self.pages = {group: set() for group in range(len(engine.rules))}

    def save(self, group, tokens):
        for end in self.rules[group].ends(len(tokens), CHUNK):
            self.pages[group].add(tuple(tokens[:end]))

    def branch(self, tokens, limit):
        """Of a chain's pages each may serve a part of it."""
        found = []
        for group in self.chains:
            length = 0
            while tuple(tokens[: length + CHUNK]) in self.pages[group] and length + CHUNK <= limit:
                length += CHUNK
            inside = 0
            for page in self.pages[group]:
                if length < len(page) <= length + CHUNK and page[:length] == tuple(tokens[:length]):
                    pairs = zip(page[length:], tokens[length:limit], strict=False)
                    common = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
                    most = min(len(page), limit, len(tokens)) - length
                    inside = max(inside, most if common is None else common)
            found.append(length + inside)
        return min(found)

    def longest(self, tokens, limit):
        branch = self.branch(tokens, limit)
        whole = branch // CHUNK * CHUNK
        for length in [*range(branch, whole, -1), *range(whole, 0, -CHUNK)]:
            if all(
                tuple(tokens[:end]) in self.pages[group]
                for group in self.named
                for end in self.rules[group].ends(length, CHUNK)
            ):
                return length
        return 0


steps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, LENGTH), st.sampled_from(WHAT)),
    min_size=3,
    max_size=16,
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(SPECS), st.tuples(*[st.integers(0, LENGTH - 1)] * 3), steps)
def test_hits_are_those_of_a_dictionary(spec, parts, steps):
    first = list(range(1000, 1000 + LENGTH))
    talks = [first, *([*first[:at], *range(at, LENGTH)] for at in parts)]
    with Engine(spec, pages=200, host_bytes=32 << 20) as engine:
        saved = Dictionary(engine)
        for which, number, what in [*steps, *((each, LENGTH, "look") for each in range(4))]:
            tokens = talks[which]
            if what in ("all", "some"):  # of some groups no page of this end is saved
                groups = [each for each in range(len(spec.groups)) if what == "all" or each % 2 == number % 2]
                save_all(engine, tokens[:number], groups=groups)
                for group in groups:
                    saved.save(group, tokens[:number])
                continue
            if what == "cold":
                engine.evict(Tier.HBM.label)
            expected = saved.longest(tokens, number)
            hit = engine.lookup(tokens, max_tokens=number)
            assert (hit.branch, hit.tokens) == (saved.branch(tokens, number), expected)
            assert sum(hit.by_tier.values()) == expected
            assert engine.load(hit) == expected
        engine.check()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tier", ["hbm", "host"])
def test_a_turn_goes_on_inside_of_a_page(spec, tier):
    with Engine(spec) as engine:
        told = list(range(70))
        save_all(engine, told)
        if tier == "host":
            engine.evict("hbm")
        hit = engine.lookup([*told, 5, 6, 7])
        assert (hit.tokens, hit.branch, hit.num_pages) == (70, 70, 5)
        assert hit.by_tier == {tier: 70}
        assert hit.prefetch().wait(10) == 70
        assert engine.load(hit) == 70
        engine.check()


@pytest.mark.parametrize("group", [1, 2])
def test_other_tokens_in_the_last_page_are_another_page(group):
    """Although the chain's page serves a part of it."""
    spec = [None, GEMMA, HYBRID][group]
    with Engine(spec) as engine:
        told = list(range(70))
        save_all(engine, told[:64])
        save_all(engine, told)
        hit = engine.lookup([*told[:68], 1, 2, 3])
        assert (hit.branch, hit.tokens) == (68, 64)
        assert engine.load(hit) == 64
        hit = engine.lookup([*told[:3], 9, *told[4:], 5])
        assert hit.tokens == 0
        hit.release()


def test_a_group_whose_partial_page_has_gone_shortens_the_hit():
    with Engine(HYBRID) as engine:
        told = list(range(70))
        save_all(engine, told[:64])
        save_all(engine, told)
        engine.evict("hbm")
        engine.forget(1, told, [4])
        hit = engine.lookup(told)
        assert (hit.branch, hit.tokens) == (70, 64)
        assert engine.load(hit) == 64
        engine.check()


@pytest.mark.parametrize("spec", [GEMMA, HYBRID, EVERYTHING])
@pytest.mark.parametrize("elsewhere", [(), (0,)])
def test_partial_pages_in_hbm_serve_a_prompt_whose_chain_is_below(spec, elsewhere):
    """``elsewhere`` are the chunks of the named groups that are in host memory only."""
    saved = list(range(1000, 1000 + LENGTH))
    prompt = [*saved[: CHUNK + 5], *range(LENGTH)]
    with Engine(spec) as engine:
        save_all(engine, saved, groups=engine.chains)
        save_all(engine, saved[: CHUNK + 5], groups=engine.named)
        for group in engine.chains:
            engine.store.evict("hbm", 40, group=group)
        for group in engine.named:
            for chunk in engine.rules[group].pages(CHUNK + 5, CHUNK):
                tier = Tier.HBM if chunk in elsewhere else Tier.HOST
                engine.forget(group, saved[: CHUNK + 5], [chunk], [tier])
        before = engine.store.stats().counters["lookups"]
        assert engine.load(engine.lookup(prompt)) == CHUNK + 5
        with asyncio.run(engine.store.lookup_async(prompt)) as hit:
            assert hit.tokens == hit.branch == CHUNK + 5
        assert engine.store.stats().counters["lookups"] == before + 2
        engine.check()


def test_a_partial_page_that_goes_between_lookup_and_load_shortens_the_load():
    """Its lease has ended meanwhile: what has come decides, and nothing leaks."""
    with Engine(GEMMA) as engine:
        told = list(range(70))
        save_all(engine, told[:64])
        save_all(engine, told)
        engine.evict("hbm")
        hit = engine.lookup(told)
        [window] = [part for part in hit.parts if part.group == 1]
        window.release()
        engine.forget(1, told, [4])
        loaded = engine.store.load(hit).wait(10)
        assert loaded.tokens < 70
        engine.verify(told, loaded)
        engine.release(loaded)
        engine.check()


@pytest.mark.parametrize("spec", [GEMMA, HYBRID])
def test_an_end_that_a_session_has_gone_on_from_leaves(spec):
    """And with it its partial page, in every tier; the last chunk's end before the newest stays beside it."""
    with Engine(spec) as engine:
        told = list(range(90))
        prompt = engine.store.prompt([])
        for end, grown in ((64, 64), (70, 70), (80, 80), (90, 90)):
            prompt.extend(told[len(prompt) : grown])
            save_all(engine, told[:end], prompt=prompt, session="s")
        assert engine.store.flush(30)
        held = {end: bool(engine.held(1, told[:end], [(end - 1) // CHUNK])) for end in (64, 70, 80, 90)}
        # A window's whole pages are also what the later ends need.
        assert held == {64: spec is GEMMA, 70: False, 80: True, 90: True}
        engine.check()


def test_names_are_of_all_tokens_whole_or_not():
    with Engine(HYBRID) as engine:
        told = list(range(70))
        prompt = engine.store.prompt(told)
        ends = range(1, 71)
        names = {*prompt.names_at(ends)}
        assert len(names) == len(ends)
        grown = engine.store.prompt(told[:3])
        grown.extend(told[3:])
        assert grown.names_at(ends[::-1]) == prompt.names_at(ends[::-1])
        other = engine.store.prompt([99, *told[1:]])
        assert names.isdisjoint(other.names_at(ends))
