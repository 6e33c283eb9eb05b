"""vLLM's half plans: what the disk would bring later than computing is not promised."""

from __future__ import annotations

from types import SimpleNamespace

from tests.connectors.vllm.conftest import step
from tests.connectors.vllm.test_halves import TABLE
from tests.tierstore.daemon.client.conftest import (  # noqa: F401  # fixtures
    make_daemon,
    shared_daemon,
    short_directory,
)
from tierstore.keys import PageKey
from tierstore.planner import Plan
from tierstore_connectors.vllm.lookup import PromptLookup, _Question


def test_a_prompt_that_is_computed_alone_is_timed(engine):
    made = engine()
    scheduler = made.scheduler
    assert scheduler.lookups.planner.prefill() is None
    scheduler._time_prefill(step(new=[("a", 0, TABLE)], scheduled={"a": 40}))
    scheduler._time_prefill(step(new=[("a", 40, TABLE)], scheduled={"a": 1}))
    assert scheduler.lookups.planner.prefill() is None
    scheduler._time_prefill(step(new=[("a", 41, TABLE)], scheduled={"a": 1}))
    assert scheduler.lookups.planner.prefill() is not None


def test_what_a_plan_declines_is_not_found(engine):
    lookup = PromptLookup([PageKey(bytes(16))] * 8, lambda: b"", 8)
    declined = []
    store = SimpleNamespace(
        plan=lambda hit, tokens: Plan(24, 0, 0.0, 0.0, 0.0, {"disk": 40}),
        decline=lambda hit, plan: declined.append(plan.declined),
    )
    hit = SimpleNamespace(by_tier={"host": 24, "disk": 40}, tokens=64)
    question = _Question(lookup, store, None, False, hit)
    engine().scheduler.lookups._plan([question])
    assert declined == [{"disk": 40}]
    assert lookup.found == 24
    assert lookup.declined == 40
