"""Named pages of other hosts, as a daemon speaks of them: one that lies, and one that knows nothing of it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierstore
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore.wire import messages as p

SPEC = KVSpec.opaque(4096, chunk_tokens=16)
IDENTITY = Identity.of(SPEC, model="m")
PAGES = 6


@pytest.fixture
def daemon(fake):
    daemon = fake()
    daemon.answers[p.Hello] = lambda m: p.Welcome(m.id, 1, "fake", 60.0, 1 << 20, True)
    return daemon


@pytest.fixture
def store(daemon):
    with tierstore.connect(daemon.url, SPEC, identity=IDENTITY, lookup_s=5) as store:
        assert store.wait_connected(10)
        yield store


def pages(count=PAGES):
    return Prompt.named_pages(IDENTITY, [bytes([number]) * 32 for number in range(count)], chunk_tokens=16)


def look(store, gain=1000):
    [hit] = tierstore.lookup_all([(store, pages())], gain=gain)
    return hit


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=40) | st.lists(st.integers(0, 8), max_size=8), st.sets(st.integers(0, 5)))
def test_positions_that_cannot_be_are_passed_over(daemon, store, said, held):
    """Whatever a daemon says: pages that were asked for and are not held, each once, in order."""
    raw = said if isinstance(said, bytes) else b"".join(at.to_bytes(4, "little") for at in said)
    there = b"".join(at.to_bytes(4, "little") for at in sorted(held))
    tiers = [("host", len(held))] if held else []
    daemon.answers[p.Find] = lambda m: p.Found(
        m.id, 16 * len(held), 16, 7 if held else 0, tiers, 0, 0, there, {}, raw
    )
    hit = look(store)
    assert list(hit.positions) == sorted(held)
    named = (
        set()
        if len(raw) % 4
        else {int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)}
    )
    assert hit.remote_positions == sorted(named & set(range(PAGES)) - held)
    assert hit.remote_tokens == 0, "nothing lies behind pages that follow nothing"
    hit.release()


def test_those_and_no_others_are_brought(daemon, store):
    daemon.answers[p.Find] = lambda m: p.Found(
        m.id, 16, 16, 7, [("host", 1)], 0, 0, b"\2\0\0\0", {}, b"\0\0\0\0\4\0\0\0"
    )
    daemon.answers[p.FetchRemote] = lambda m: p.FetchedRemote(m.id, m.count)
    hit = look(store)
    assert daemon.of(p.Find)[-1].gain == 1000
    assert hit.fetch_remote(1.0).wait(10) == 2
    [asked] = daemon.of(p.FetchRemote)
    assert (asked.first, asked.count, asked.prompt.named) == (0, 2, True)
    assert asked.prompt.keys == bytes(16) + b"\4" * 16
    hit.release()


def test_a_daemon_that_names_none_is_not_asked_for_any(daemon, store):
    hit = look(store)
    assert daemon.of(p.Find)[-1].gain == 1000
    assert (hit.tokens, hit.remote_tokens, list(hit.remote_positions)) == (0, 0, [])
    assert store.fetch_remote(hit) is None
    assert hit.fetch_remote(1.0).wait(10) == 0
    assert not daemon.of(p.FetchRemote)
