"""A hit from both ends: computed from the front while its later pages are loaded."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.engine.stored import Stored
from tests.portions import chosen
from tierstore.planner import Plan, Planner
from tierstore.store import hit
from tierstore.transfer import Transfer
from tierstore_engine.loaded import LoadedModel

from .conftest import STORED_CHUNK, Oracle
from .test_oracle import GREEDY, assert_same

CHUNK = 64


class FixedPlanner(Planner):
    """Both ends meet where the test says, if they may."""

    def __init__(self, meeting_point: int, deadline_s: float = 60.0) -> None:
        super().__init__()
        self._meet_at = meeting_point
        self._deadline_s = deadline_s

    def plan(self, parts, prompt_tokens, *, now_s, block=0) -> Plan:
        tokens = sum(part.tokens for part in parts)
        return Plan(tokens, self._meet_at if block else 0, 0.0, 0.0, self._deadline_s)

    def meeting_point(self, parts, front, *, now_s) -> int:
        return max(self._meet_at, front)


# One layer group, and several: beside full attention windows, attention chunks, states of two kinds.
CHAINS = ["llama3", "mistral-windowed"]
GROUPS = chosen(["gemma3", "llama4", "qwen3-next", "granite-hybrid"], "gemma3", "qwen3-next")


@pytest.fixture(params=[*CHAINS, *GROUPS])
def oracle(request: pytest.FixtureRequest, oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles(request.param)


@pytest.fixture
def warm(oracle: Oracle, loaded: Callable[..., LoadedModel], stored_engine: Callable[..., Stored]) -> Stored:
    """An engine whose store has the prompt in the host tier, and some of it in HBM."""
    stored = stored_engine(loaded(str(oracle.folder)), plan="both-ends")
    stored.engine.generate([oracle.prompt], GREEDY)
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    return stored


def held_of(oracle: Oracle, warm: Stored) -> int:
    """How long a hit of the prompt is: with several groups it ends with a chunk."""
    with warm.store.lookup(oracle.prompt, max_tokens=len(oracle.prompt) - 1) as found:
        return found.tokens


@pytest.mark.parametrize("chunks", chosen([1, 2, 3, 4, 5, 6], 1, 3, 6))
def test_where_they_meet_the_rest_is_not_loaded(oracle: Oracle, warm: Stored, chunks: int) -> None:
    warm.store.planner = FixedPlanner(chunks * CHUNK)
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    held = held_of(oracle, warm)
    computed = min(chunks * CHUNK, held)
    loaded = {"host": held - computed} if held > computed else {}
    assert {tier: n for tier, n in again.metrics.reused_by_tier.items() if n} == loaded
    # Only the pages behind the meeting point are loaded, and of other groups those of the hit's end.
    parts = warm.store.spec.split()
    pages = -(-held // STORED_CHUNK) - -(-computed // STORED_CHUNK)
    nbytes = pages * parts[0].page_bytes
    for part, rule in zip(parts[1:], warm.store.rules[1:], strict=True):
        nbytes += len(rule.pages(held, STORED_CHUNK)) * part.page_bytes
    assert again.metrics.loaded_bytes == (nbytes if pages else 0)
    # What was computed and what was loaded is one prefix in HBM now.
    again_hit = warm.store.lookup(oracle.prompt)
    assert set(again_hit.by_tier) == {"hbm"}
    again_hit.release()


@pytest.mark.parametrize("oracle", CHAINS, indirect=True)
def test_what_is_in_hbm_is_not_loaded_and_the_front_begins_behind_it(oracle: Oracle, warm: Stored) -> None:
    warm.store.planner = Planner()
    first = [*oracle.prompt[:100], 3]
    warm.engine.generate([first], GREEDY)
    warm.store.planner = FixedPlanner(3 * CHUNK)
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    reused = again.metrics.reused_by_tier
    assert reused["hbm"] >= 80
    assert reused["host"] == len(oracle.prompt) - 1 - 3 * CHUNK


def test_a_load_that_does_not_come_is_given_up_at_the_deadline_and_computed(
    oracle: Oracle, warm: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm.store.planner = FixedPlanner(CHUNK, deadline_s=0.0)
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.loaded_bytes == 0


@pytest.mark.parametrize("oracle", GROUPS, indirect=True)
def test_what_is_in_hbm_of_one_group_alone_is_loaded_in_one_go(oracle: Oracle, warm: Stored) -> None:
    """The front could only begin at token 0: there are no windows and states for another place."""
    warm.store.planner = FixedPlanner(3 * CHUNK)
    warm.engine.generate([oracle.prompt], GREEDY)
    for group in range(1, len(warm.store.pools)):
        warm.store.evict("hbm", group=group)
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_tokens == held_of(oracle, warm)


@pytest.mark.parametrize("oracle", GROUPS, indirect=True)
def test_without_the_pages_of_the_hits_end_everything_is_computed(
    oracle: Oracle, warm: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm.store.planner = FixedPlanner(CHUNK)
    monkeypatch.setattr(hit.RulePart, "with_lease", lambda part, then: then(None))
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_tokens == 0


@pytest.mark.parametrize("oracle", CHAINS, indirect=True)
def test_a_block_that_comes_short_is_computed(
    oracle: Oracle, warm: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm.store.planner = FixedPlanner(CHUNK)
    locate = warm.store.backend.locate
    monkeypatch.setattr(
        warm.store.backend,
        "locate",
        lambda lease, first, count, *, wait_s: (
            locate(lease, first, count, wait_s=wait_s)
            if first >= 256 // STORED_CHUNK
            else Transfer.completed(None)
        ),
    )
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_by_tier["host"] == len(oracle.prompt) - 1 - 256


def test_a_request_that_is_cancelled_gives_everything_back(oracle: Oracle, warm: Stored) -> None:
    warm.store.planner = FixedPlanner(2 * CHUNK)
    request = warm.engine.add(oracle.prompt, GREEDY)
    warm.engine.step()
    assert warm.engine.computed_tokens(request) == CHUNK
    warm.engine.cancel(request)
    warm.engine.step()
    [again] = warm.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)


def test_many_at_once_with_few_pages(oracle: Oracle, warm: Stored) -> None:
    warm.store.planner = FixedPlanner(2 * CHUNK)
    for each in warm.engine.generate([oracle.prompt] * 6, GREEDY):
        assert_same(each, oracle)


def test_prefill_steps_are_reported(oracle: Oracle, warm: Stored) -> None:
    warm.store.planner = planner = Planner()
    began = time.monotonic()
    warm.engine.generate([oracle.prompt[::-1]], GREEDY)
    prefill = planner.prefill()
    assert prefill is not None
    assert 0 < prefill.seconds(CHUNK) < time.monotonic() - began
