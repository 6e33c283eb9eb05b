"""With the setting ``explain`` the scheduler's half says why tokens are missed."""

from __future__ import annotations

import itertools
import logging

import pytest

from tests.connectors.vllm.conftest import Request
from tests.connectors.vllm.test_halves import OTHER, TABLE, load
from tierstore import Store
from tierstore.errors import UsageError
from tierstore.testing.clock import wait_until
from tierstore_connectors.vllm.config import VllmSettings

LOG = "vllm.tierstore"
_prompts = itertools.count(9)


def misses(engine, count):
    """The missed tokens by reason, when there are ``count`` of them."""
    counts = {}

    def complete():
        for name, more in engine.counters.take().items():
            if name.startswith("missed_tokens:"):
                reason = name.partition(":")[2]
                counts[reason] = counts.get(reason, 0) + more
        return sum(counts.values()) >= count

    wait_until(complete)
    return counts


@pytest.fixture
def tokens():
    """70 tokens of this test: the daemon holds those of others under other identities."""
    first = 1000 * next(_prompts)
    return list(range(first, first + 70))


@pytest.fixture(params=[(False,), (False, True)], ids=["full", "with a window"])
def windowed(request):
    return request.param


def test_a_new_prompt_and_one_that_diverges(engine, tokens, caplog, windowed):
    caplog.set_level(logging.INFO, LOG)
    explaining = engine(explain=True, windowed=windowed)
    table = TABLE * len(windowed)
    first = Request("a", tokens)
    assert explaining.matched(first) == 0
    assert misses(explaining, 70) == {"never_saved": 64, "tail": 6}
    explaining.scheduler.matched(first, 0)  # vLLM asks again and again
    second = Request("b", tokens)
    explaining.matched(second)
    assert misses(explaining, 70) == {"never_saved": 64, "tail": 6}
    explaining.save(second, table, 70)
    changed = [*tokens[:40], 7, *tokens[41:]]
    explaining.matched(Request("c", changed))
    assert misses(explaining, 38) == {"diverged": 32, "tail": 6}

    def lines():
        return [record.getMessage() for record in caplog.records if "missed:" in record.getMessage()]

    wait_until(lambda: len(lines()) == 3)  # a reason is counted before it is logged
    assert [line.split(": ")[1] for line in lines()] == ["request a", "request b", "request c"]
    assert "diverges from a held prompt at token 40" in lines()[-1]


def test_tokens_of_vllms_own_cache_are_not_missed(engine, tokens):
    explaining = engine(explain=True)
    explaining.matched(Request("a", tokens), local=24)
    assert misses(explaining, 46) == {"never_saved": 40, "tail": 6}


def test_a_hit_misses_its_tail_only(engine, tokens, caplog):
    caplog.set_level(logging.INFO, LOG)
    engine().save(Request("a", tokens), TABLE, 70)
    explaining = engine(explain=True)
    load(explaining, Request("b", tokens), OTHER)
    assert misses(explaining, 6) == {"tail": 6}
    assert "missed:" not in caplog.text


def test_without_a_daemon_tokens_are_late(engine, tokens, tmp_path):
    explaining = engine(explain=True, url=f"ipc://{tmp_path}/none")
    assert explaining.matched(Request("a", tokens)) == 0
    assert misses(explaining, 70) == {"late": 64, "tail": 6}


def test_without_the_setting_nothing_is_asked(engine, tokens, monkeypatch):
    asked = []
    monkeypatch.setattr(Store, "explain", lambda *args, **options: asked.append(args))
    plain = engine()
    assert plain.matched(Request("a", tokens)) == 0
    assert not asked
    assert plain.scheduler.misses is None
    assert not [name for name in plain.counters.take() if name.startswith("missed_tokens")]


def test_the_setting_is_true_or_false():
    assert VllmSettings.parse({"explain": True}).explain is True
    with pytest.raises(UsageError, match="explain must be true or false, got 1"):
        VllmSettings.parse({"explain": 1})
