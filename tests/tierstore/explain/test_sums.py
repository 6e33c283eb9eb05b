"""The reasons sum exactly to the missed tokens: over random runs, and over a trace of conversations."""

from __future__ import annotations

import gzip
import json
import random
from itertools import islice
from pathlib import Path

import pytest

from tests.portions import chosen, portion
from tests.small_store import SPEC, pages_of
from tierstore import Hint
from tierstore.cli.operator import Operator
from tierstore.testing.layouts import CHUNK, LAYOUTS
from tierstore.testing.opening import connect_store, open_store
from tierstore.testing.store import new_identity

_MIB = 1 << 20
_TRACE = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_2000.jsonl.gz"


def run(store, layout, draw, steps):
    """Random saves, evictions, sessions and lookups. The explanations assert their own sums."""
    stems = [[draw.randrange(1 << 17) for _ in range(12 * CHUNK)] for _ in range(6)]

    def prompt():
        stem = draw.choice(stems)
        at = draw.randrange(1, len(stem))
        tail = [draw.randrange(1 << 17) for _ in range(draw.choice((0, 1, CHUNK, 3 * CHUNK)))]
        return [*stem[:at], *tail]

    for _ in range(steps):
        action = draw.random()
        if action < 0.4:
            hint = draw.choice((None, Hint(ttl_s=0.0), Hint(reuse="done"), Hint(reuse="likely")))
            layout.save(store, prompt(), hint=hint, session=draw.choice((None, "a", "b")))
        elif action < 0.5:
            store.evict("host", draw.randint(1, 40))
        elif action < 0.55:
            store.evict("disk", draw.randint(1, 40))
        elif action < 0.6:
            store.finish(draw.choice(("a", "b")))
        elif action < 0.8:
            tokens = prompt()
            explanation = store.explain(tokens, max_tokens=draw.choice((None, len(tokens) - 1)))
            assert sum(explanation.by_reason.values()) == len(tokens) - explanation.hit_tokens
        else:
            store.lookup(prompt(), max_tokens=draw.choice((None, 40))).release()


@pytest.mark.parametrize(("seed", "steps"), chosen([(0, 120), (0, 300), (1, 300), (2, 300)], (0, 120)))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_runs_embedded(layout, seed, steps, tmp_path):
    with open_store(
        tmp_path / "kv",
        layout.spec,
        identity=new_identity(layout.spec),
        host_bytes=40 * layout.chunk_bytes,
        disk_bytes=16 * _MIB,
    ) as store:
        run(store, layout, random.Random(seed), steps)
        counters = store.stats().counters
        assert sum(counters["missed_tokens"].values()) == counters["lookup_tokens"] - sum(
            counters["hit_tokens"].values()
        )


@pytest.mark.parametrize("steps", portion(80, 300))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_random_runs_over_a_daemon(layout, steps, make_daemon):
    daemon = make_daemon(host_bytes=40 * layout.chunk_bytes)
    with connect_store(daemon.url, layout.spec, identity=new_identity(layout.spec), lookup_s=60.0) as store:
        assert store.wait_connected(30)
        run(store, layout, random.Random(7), steps)
        with Operator(daemon.url) as operator:
            counters = operator.stats().store.counters
    assert sum(counters["missed_tokens"].values()) == counters["lookup_tokens"] - sum(
        counters["hit_tokens"].values()
    )


def requests(path):
    """The prompts of a trace, a chunk of 16 tokens for each block of it."""
    with gzip.open(path, "rt") as lines:
        for line in lines:
            blocks = json.loads(line)["hash_ids"]
            yield [block * CHUNK + at & 0xFFFFFFFF for block in blocks for at in range(CHUNK)]


@pytest.mark.parametrize("count", portion(150, 2000))
def test_a_trace_of_conversations(count, tmp_path):
    """The first requests of a public trace. A page is 8 KiB, and the store has no room for all pages."""
    prompts = list(islice(requests(_TRACE), count))
    explained = asked = hits = 0
    with open_store(
        tmp_path / "kv", SPEC, identity=new_identity(), host_bytes=4 * _MIB, disk_bytes=16 * _MIB
    ) as store:
        for number, tokens in enumerate(prompts):
            if number % 10 == 0:
                explanation = store.explain(tokens)
                assert sum(explanation.by_reason.values()) == len(tokens) - explanation.hit_tokens
                explained += 1
            with store.lookup(tokens) as hit:
                asked += len(tokens)
                hits += hit.tokens
                first = hit.tokens // CHUNK
            store.save(tokens, pages_of(tokens[first * CHUNK :]), first=first).wait(30)
        counters = store.stats().counters
    assert counters["lookup_tokens"] == asked
    assert sum(counters["missed_tokens"].values()) == asked - hits
    assert {"never_saved", "diverged", "evicted"} <= set(counters["missed_tokens"])
