"""Requests that wait: what they find on disk is brought up, and what others compute is computed once."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.engine.stored import Stored
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams

from .conftest import Oracle
from .test_oracle import WHOLE, assert_same

ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)


@pytest.fixture
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("llama3")


@pytest.fixture
def model(oracle: Oracle, loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded(str(oracle.folder))


def test_of_equal_prompts_one_is_computed(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    engine = stored_engine(model, pool_pages=200).engine
    for each in engine.generate([oracle.prompt] * 4, WHOLE):
        assert_same(each, oracle)
    prefilled = engine.stats().computed_tokens - 4 * (len(oracle.tokens) - 1)
    assert prefilled <= len(oracle.prompt) + 3 * 16


def test_of_a_common_beginning_one_computes_and_others_go_on_by_themselves(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    engine = stored_engine(model, pool_pages=200).engine
    prompts = [[*oracle.prompt[:256], 5 + number, *range(20, 60)] for number in range(3)]
    engine.generate(prompts, ONE)
    assert engine.stats().computed_tokens <= 256 + 3 * 41


def test_who_waits_goes_on_when_the_one_that_computes_is_cancelled(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    engine = stored_engine(model, pool_pages=200).engine
    first = engine.add(oracle.prompt, WHOLE)
    second = engine.add(oracle.prompt, WHOLE)
    engine.step()
    assert engine.computed_tokens(second) == 0
    engine.cancel(first)
    done = []
    while engine.has_work:
        done += [output.completion for output in engine.step() if output.completion]
    [completion] = [each for each in done if each.request_id == second]
    assert_same(completion, oracle)


def test_what_waits_is_brought_up_from_disk_before_it_is_admitted(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    stored = stored_engine(model, disk="store", max_sequences=1)
    stored.engine.generate([oracle.prompt], WHOLE)
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    stored.store.evict("host")
    other = stored.engine.add([7] * 300, SamplingParams(max_new_tokens=40, ignore_eos=True))
    stored.engine.step()
    waiting = stored.engine.add(oracle.prompt, WHOLE)
    stored.engine.step()
    ends = time.monotonic() + 30
    while True:
        with stored.store.lookup(oracle.prompt) as hit:
            if not hit.by_tier.get("disk"):
                break
        assert time.monotonic() < ends
    assert stored.engine.computed_tokens(waiting) == 0
    assert stored.engine.computed_tokens(other) < 300
    completions = {}
    while stored.engine.has_work:
        completions.update({o.request_id: o.completion for o in stored.engine.step() if o.completion})
    assert_same(completions[waiting], oracle)
    assert completions[waiting].metrics.reused_by_tier.get("disk", 0) == 0


def test_a_request_that_goes_while_it_waits_holds_nothing(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    stored = stored_engine(model, disk="store", max_sequences=1)
    stored.engine.generate([oracle.prompt], WHOLE)
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    stored.store.evict("host")
    stored.engine.add([7] * 300, WHOLE)
    stored.engine.step()
    waiting = stored.engine.add(oracle.prompt, WHOLE)
    stored.engine.step()
    assert len(stored.engine._scheduler._ahead) == 1
    stored.engine.cancel(waiting)
    assert len(stored.engine._scheduler._ahead) == 0
    while stored.engine.has_work:
        stored.engine.step()
    assert stored.store.stats().open_hits == 0


def test_a_request_is_one_lookup_and_its_hit_counts_where_it_is_served_from(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    stored = stored_engine(model, pool_pages=400, disk="store", max_sequences=2)
    prompts = [[*oracle.prompt[:96], 5 + number, *range(20, 60)] for number in range(16)]
    stored.engine.generate(prompts, ONE)
    backend = stored.store.backend
    assert stored.store.stats().counters["lookups"] == backend.stats().counters["lookups"] == 16

    before = dict(backend.stats().counters["hit_tokens"])
    longer = [*prompts[0], *range(100, 140)]
    stored.engine.generate([longer], ONE)
    after = backend.stats().counters["hit_tokens"]
    assert after["hbm"] - before["hbm"] >= 96
    assert (after["host"], after["disk"]) == (before["host"], before["disk"]), "HBM had all of the hit"
    assert backend.stats().counters["lookups"] == 17
