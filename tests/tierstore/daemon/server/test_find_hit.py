"""One message asks for the longest hit of all layer groups, and what does not fit together is refused."""

from __future__ import annotations

import threading
from dataclasses import asdict

import numpy as np
import pytest

from tests.tierstore.daemon.server.client import (
    CHUNK_TOKENS,
    PAGE_BYTES,
    offsets,
    page_bytes,
    part,
    prompt_of,
    sums_of,
)
from tierstore.keys import Identity, Prompt, page_name
from tierstore.spec import KVSpec
from tierstore.testing.clock import wait_until
from tierstore.tiers.disk import DiskTier
from tierstore.wire import messages as p

TOKENS = list(range(100, 100 + 5 * CHUNK_TOKENS + 7))
PROMPT = prompt_of(TOKENS)
ROOT = bytes(32)
STATES = Identity(model="test", layout=KVSpec.opaque(PAGE_BYTES, chunk_tokens=CHUNK_TOKENS).describe())


def names() -> list[bytes]:
    known: list[bytes] = []
    for chunk in PROMPT.chunks():
        known.append(page_name(known[-1] if known else ROOT, chunk))
    return known


def find(**changes):
    """A question that fits together, but for ``changes``."""
    fields = {
        "id": 0,
        "chains": [part(PROMPT)],
        "here": [0],
        "named": [p.NamedPart(1, "state", 0)],
        "names": b"".join(names()),
        "root": ROOT,
        "tail": PROMPT.tail,
        "num_tokens": len(TOKENS),
        "wait_s": 5.0,
    }
    return p.FindHit(**{**fields, **changes})


@pytest.fixture
def daemon(start):
    return start(disk=True, pages=64)


@pytest.fixture
def client(daemon, connect):
    client = connect(daemon.url)
    assert client.register() == 0
    assert client.register(STATES) == 1
    client.save(TOKENS)
    return client


def inputs(*numbers):
    return np.array(numbers, "<u4").tobytes()


def test_a_hit_ends_where_an_input_is_missing(client):
    group = p.NamedPart(1, "cross", 0, b"", inputs(20, 16, 50, 48), b"".join(names())[: 3 * 32])
    assert client.ask(find(named=[group])).tokens == 20 // CHUNK_TOKENS * CHUNK_TOKENS
    save_states(client, [16])
    found = client.ask(find(named=[group]))
    assert (found.tokens, found.named[0].tokens) == (48, CHUNK_TOKENS)
    save_states(client, [32, 48])
    found = client.ask(find(named=[group]))
    assert (found.tokens, found.named[0].tokens) == (len(TOKENS), 3 * CHUNK_TOKENS)


def save_states(client, ends):
    known = names()
    saved = [known[end // CHUNK_TOKENS - 1] for end in ends if end % CHUNK_TOKENS == 0]
    saved += [page_name(known[-1], PROMPT.tail) for end in ends if end == len(TOKENS)]
    prompt = Prompt.named_pages(STATES, saved, chunk_tokens=CHUNK_TOKENS)
    states = p.PromptPart(1, b"".join(prompt.keys), prompt.token_bytes, named=True)
    reserved = client.ask(p.Reserve(0, states, 0, len(ends)))
    pages = [page_bytes([end]) for end in ends]
    for offset, page in zip(offsets(reserved.offsets), pages, strict=True):
        client.arena.map[offset : offset + PAGE_BYTES] = page
    done = np.arange(len(ends), dtype=np.uint32).tobytes()
    assert client.ask(p.Commit(0, reserved.reservation, done, sums_of(pages))).pages == len(ends)


@pytest.mark.parametrize(
    ("states", "hit"), [([], 0), ([16], 16), ([16, 48], 48), ([16, 87], 87), ([80, 87], 87), ([64], 64)]
)
def test_a_hit_ends_where_there_is_a_state(client, states, hit):
    if states:
        save_states(client, states)
    found = client.ask(find())
    assert isinstance(found, p.HitFound), found
    assert (found.tokens, found.branch) == (hit, len(TOKENS))
    [chain], [state] = found.chains, found.named
    assert chain.tokens == hit
    assert state.tokens == (CHUNK_TOKENS if hit else 0)
    assert bool(chain.lease) == bool(state.lease) == bool(hit)
    tail = PROMPT.chunk(40 // CHUNK_TOKENS)
    assert client.ask(find(num_tokens=40, tail=tail)).tokens == max(
        (end for end in states if end <= 40), default=0
    )


def test_a_lookup_of_all_groups_is_one_message(daemon, client):
    save_states(client, [48])
    before = daemon.stats()
    assert client.ask(find()).tokens == 48
    after = daemon.stats()
    assert after.service.requests["FindHit"] == before.service.requests.get("FindHit", 0) + 1
    assert "Find" not in after.service.requests
    assert after.store.counters["lookups"] == before.store.counters["lookups"] + 1
    assert after.store.counters["hit_tokens"]["host"] == before.store.counters["hit_tokens"]["host"] + 48


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"chains": [part(PROMPT, 7)]}, "identity"),
        ({"named": [p.NamedPart(7, "state", 0)]}, "identity"),
        ({"here": []}, "usage"),
        ({"chains": [], "here": [], "named": []}, "usage"),
        ({"named": [p.NamedPart(1, "state", 0)] * 1024}, "usage"),
        ({"named": [p.NamedPart(1, "window", -1)]}, "usage"),
        ({"named": [p.NamedPart(1, "all", 0)]}, "usage"),
        ({"named": [p.NamedPart(1, "tomorrow", 0)]}, "usage"),
        ({"named": [p.NamedPart(1, "state", 0, b"\x10")]}, "usage"),
        ({"named": [p.NamedPart(0, "state", 0)]}, "usage"),  # whose pages are not found whole
        ({"named": [p.NamedPart(1, "state", 0, b"", bytes(8), bytes(32))]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 1)]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 0, b"", bytes(4), bytes(32))]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 0, b"", inputs(0, 16), bytes(31))]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 0, b"", inputs(0, 16), bytes(64))]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 0, b"", inputs(0, 17), bytes(32))]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 0, b"", inputs(5, 16, 5, 32), bytes(64))]}, "usage"),
        ({"named": [p.NamedPart(1, "cross", 0, b"", inputs(5, 1 << 31), b"")]}, "usage"),
        ({"names": bytes(31)}, "usage"),
        ({"names": bytes(4 * 32)}, "usage"),
        ({"num_tokens": len(TOKENS) + 1}, "usage"),
        ({"num_tokens": -1}, "usage"),
        ({"chains": [], "here": [], "tail": b""}, "usage"),
        ({"wait_s": -1.0}, "usage"),
    ],
)
def test_a_question_that_does_not_fit_together_is_refused(client, changes, kind):
    refused = client.ask(find(**changes))
    assert isinstance(refused, p.Refused), refused
    assert refused.kind == kind
    assert isinstance(client.ask(find()), p.HitFound)


def test_groups_of_other_chunks_are_not_of_one_model(client):
    other = client.ask(p.Register(0, asdict(Identity(model="x", layout=STATES.layout)), PAGE_BYTES, 32))
    refused = client.ask(find(named=[p.NamedPart(other.identity, "state", 0)]))
    assert isinstance(refused, p.Refused)
    assert refused.kind == "usage"


def test_chains_with_equal_keys_and_tokens_are_said_once(client):
    """As an engine has them that names its chunks itself, in groups and on workers of its own."""
    tokens = TOKENS[: 5 * CHUNK_TOKENS]
    second = client.register(Identity(model="second", layout=STATES.layout))
    whole = prompt_of(tokens)
    one, two = (p.PromptPart(number, b"".join(whole.keys), whole.token_bytes) for number in (1, second))
    for chain, pages in ((one, 5), (two, 3)):
        reserved = client.ask(p.Reserve(0, chain, 0, pages))
        for offset in offsets(reserved.offsets):
            client.arena.map[offset : offset + PAGE_BYTES] = bytes(PAGE_BYTES)
        done = np.arange(pages, dtype=np.uint32).tobytes()
        sums = sums_of([bytes(PAGE_BYTES)] * pages)
        assert client.ask(p.Commit(0, reserved.reservation, done, sums)).pages == pages
    question = {"here": [0, 0], "named": [], "num_tokens": len(tokens), "tail": b""}
    apart = client.ask(find(chains=[one, two], **question))
    once = client.ask(find(chains=[one, p.PromptPart(second, b"", b"")], **question))
    for found in (apart, once):
        assert isinstance(found, p.HitFound), found
        assert (found.tokens, found.branch) == (3 * CHUNK_TOKENS, 3 * CHUNK_TOKENS)
        assert [chain.tokens for chain in found.chains] == [3 * CHUNK_TOKENS] * 2
    chains = [p.PromptPart(1, b"", b"", once.chains[0].path, 3), p.PromptPart(second, b"", b"")]
    refused = client.ask(find(chains=chains, **question))
    assert isinstance(refused, p.Refused), "what the first one leaves out is not there for the second"


def test_a_deadline_during_a_look_at_the_disk_ends_the_search(start, connect, monkeypatch):
    """The search had stopped for the disk. After the deadline it must conclude with what memory holds; it
    repeated the same step for ever, and the daemon answered no client."""
    first = start(disk=True, pages=64)
    client = connect(first.url)
    client.register()
    client.register(STATES)
    client.save(TOKENS)
    save_states(client, [48, 87])
    assert client.ask(p.Flush(0, 10.0)).done
    client.close()
    first.stop()

    second = start(disk=True, pages=64)
    client = connect(second.url)
    client.register()
    client.register(STATES)
    answered, find_on_disk = threading.Event(), DiskTier.find

    def slow(self, parent, identity, chunks):
        if identity == STATES.digest:
            assert answered.wait(30)
        return find_on_disk(self, parent, identity, chunks)

    monkeypatch.setattr(DiskTier, "find", slow)
    found = client.ask(find(wait_s=0.2))
    assert isinstance(found, p.HitFound), found
    assert found.tokens == 0, "the disk has not said yet which states it holds"
    answered.set()
    wait_until(lambda: client.ask(find()).tokens == 87)
