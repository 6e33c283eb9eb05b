"""What a tenant learns from explanations: nothing about other tenants' prompts, not even that they exist."""

from __future__ import annotations

import random

import pytest

from tests.small_store import SPEC, pages_of
from tierstore import Identity, Store
from tierstore.core.departures import Cause, Departures
from tierstore.index import Tier
from tierstore.keys import Prompt
from tierstore.testing.opening import open_store

_MIB = 1 << 20
WIDTH = SPEC.chunk_tokens


def identity(tenant, **fields):
    return Identity.of(SPEC, model="m", tenant=tenant, **fields)


@pytest.fixture
def stores(tmp_path):
    """The stores of a victim and of an attacker, who know everything about each other but the prompts."""
    with open_store(
        tmp_path / "kv", SPEC, identity=identity("victim"), host_bytes=2 * _MIB, disk_bytes=32 * _MIB
    ) as victim:
        yield victim, Store(victim.backend, SPEC, identity=identity("attacker"), lookup_s=60.0)


def held(victim, tokens):
    victim.save(tokens, pages_of(tokens)).wait(30)


def evicted(victim, tokens):
    held(victim, tokens)
    victim.flush(30)
    victim.evict("host")
    victim.evict("disk")
    victim.flush(30)


def ended(victim, tokens):
    victim.save(tokens, pages_of(tokens), session="s").wait(30)
    victim.finish("s")
    victim.flush(30)
    victim.evict("host")
    victim.evict("disk")


@pytest.mark.parametrize("happens", [held, evicted, ended])
def test_explanations_are_the_same_whether_the_victim_exists_or_not(stores, happens):
    victim, attacker = stores
    draw = random.Random(1)
    tokens = [draw.randrange(1 << 17) for _ in range(5 * WIDTH)]
    guesses = [tokens, [*tokens, 1, 2], tokens[:WIDTH], [*tokens[:20], 9, *tokens[21:]], tokens[: WIDTH + 3]]
    before = [attacker.explain(guess) for guess in guesses]
    happens(victim, tokens)
    assert victim.explain([*tokens, 1]) != before[1]
    assert [attacker.explain(guess) for guess in guesses] == before


def test_keys_of_the_victims_pages_help_nobody(stores):
    """An engine chooses the keys of its pages. Equal keys under another tenant are other pages."""
    victim, attacker = stores
    tokens = list(range(4 * WIDTH))
    evicted(victim, tokens)
    stolen = Prompt.with_keys(
        identity("attacker"),
        victim.prompt(tokens).token_bytes,
        victim.prompt(tokens).keys,
        chunk_tokens=WIDTH,
    )
    assert {miss.reason.value for miss in attacker.explain(stolen).misses} == {"never_saved"}
    assert {miss.reason.value for miss in victim.explain(tokens).misses} == {"evicted"}


def test_another_identity_of_the_victim_is_not_named(stores):
    victim, attacker = stores
    tokens = list(range(4 * WIDTH))
    other = Store(victim.backend, SPEC, identity=identity("victim", revision="secret"), lookup_s=60.0)
    held(other, tokens)
    assert attacker.explain(tokens).misses[0].reason.value == "never_saved"
    own = victim.explain(tokens).misses[0]
    assert (own.reason.value, own.fields) == ("other_identity", ("revision",))


def test_fingerprints_differ_between_stores():
    """Otherwise a tenant could compute them, and choose a key that collides with another tenant's page."""
    first, second = Departures(0, lambda: 1), Departures(0, lambda: 1)
    for table in (first, second):
        table.note(bytes(32), bytes(16), Cause.EVICTED, Tier.HOST)
    assert first.dump()[16:] != second.dump()[16:]
