"""What an engine on another host has computed comes through the pool, and is the same."""

from __future__ import annotations

import time

import pytest

from tests.vllm import models
from tests.vllm.engines import Ask, Engine
from tests.vllm.harness import patient, same, wait_hit
from tests.vllm.models import prompt
from tierstore.testing.fake_shared_store import set_faults

pytestmark = pytest.mark.timeout(900)
LONG, OTHER = prompt(901), prompt(901, seed=5)
ALIGNED = 896


def wait_for(daemon, condition):
    ends = time.monotonic() + 60
    while not condition(daemon.stats().cluster):
        assert time.monotonic() < ends, daemon.stats().cluster
        time.sleep(0.05)


def test_prompts_of_another_host(model, make_daemon, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    options = (f"--cluster=fake://{pool}", "--cluster-publish=all", "--cluster-min-tokens=16")
    one, other = (make_daemon(options=(*options, "--cluster-look-s=1")) for _ in range(2))
    for daemon in (one, other):
        wait_for(daemon, lambda cluster: cluster.online and not cluster.trouble)
    with Engine(model(models.LLAMA), connector=patient(one.url)) as first:
        computed = [first.ask(Ask(tokens)) for tokens in (LONG, OTHER)]
        wait_hit(first, Ask(OTHER), ALIGNED)
        wait_for(one, lambda cluster: cluster.counts.get("published_pages", 0) >= 2 * ALIGNED // 64)
    with Engine(model(models.LLAMA), connector=patient(other.url)) as second:
        brought = second.ask(Ask(LONG))
        assert brought.external_hit_tokens == ALIGNED
        assert same(brought, computed[0])
        set_faults(pool, flip=True)
        alone = second.ask(Ask(OTHER))
        assert alone.external_hit_tokens == 0
        assert same(alone, computed[1])
    assert other.stats().cluster.counts["fetched_pages"] == ALIGNED // 64
