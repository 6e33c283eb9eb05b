"""What clients can make a daemon hold: memory beyond the arena, whatever they send."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from tests.tierstore.daemon.server.client import (
    IDENTITY,
    PAGE_BYTES,
    page_bytes,
    part,
    positions,
    prompt_of,
    sums_of,
)
from tierstore.errors import SpecError
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.wire import messages as p

TINY = 1  # bytes of a page that takes a slot of 4 KiB
SLOT = 4096


def save_tiny(client, prompt):
    """Over TCP; the pages that are stored."""
    chunks = -(-len(prompt) // prompt.chunk_tokens)
    reserved = client.ask(p.Reserve(0, part(prompt), 0, chunks))
    assert isinstance(reserved, p.Reserved), reserved
    pages = [bytes(TINY)] * len(positions(reserved))
    if not pages:
        return 0
    client.ask(p.Write(0, reserved.reservation, 0), *pages)
    return client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of(pages))).pages


@pytest.mark.parametrize(("nbytes", "chunk_tokens"), [(1, 129), (1, 65536), (4096, 256), (1 << 20, 65536)])
def test_pages_must_not_be_smaller_than_their_tokens(start, connect, nbytes, chunk_tokens):
    daemon = start()
    client = connect(daemon.url, line=True)
    refused = client.ask(p.Register(0, asdict(IDENTITY), nbytes, chunk_tokens))
    assert isinstance(refused, p.Refused)
    assert refused.kind == "usage"
    assert f"pages of {nbytes} bytes hold" in refused.message
    with pytest.raises(SpecError, match=f"pages of {nbytes} bytes hold"):
        KVSpec.opaque(nbytes, chunk_tokens=chunk_tokens)
    assert client.register(page_bytes=1, chunk_tokens=128) == 0


def test_a_quota_counts_what_pages_take(curve):
    """Not what they say: in a quota of 64 KiB there is room for 16 pages of one byte."""
    daemon, connect_as = curve
    bob = connect_as("bob")
    bob.register(page_bytes=TINY)
    for first in range(0, 100_000, 1000):
        save_tiny(bob, prompt_of(range(first, first + 64)))
    assert daemon.stats().service.tenants["bob"].host_bytes == 8 * PAGE_BYTES
    assert daemon.stats().store.tiers["host"].pages == 8 * PAGE_BYTES // SLOT


def test_reservations_count_what_pages_take(start, connect):
    daemon = start(reserve_bytes=4 * PAGE_BYTES)
    client = connect(daemon.url, line=True)
    client.register(page_bytes=TINY)
    reserved = client.ask(p.Reserve(0, part(prompt_of(range(16 * 64))), 0, 64))
    assert len(positions(reserved)) == 4 * PAGE_BYTES // SLOT
    assert daemon.stats().service.reserved_bytes == 4 * PAGE_BYTES


def test_pages_that_are_only_on_disk_are_known_up_to_a_limit(start, connect, monkeypatch):
    """However long their prompts are. They are found all the same."""
    monkeypatch.setattr("tierstore.core.state._LOADED_BYTES", 200 * 2048)
    daemon = start(disk=True, disk_bytes=64 << 20)
    client = connect(daemon.url, line=True)
    client.register()
    prompts = [prompt_of(range(10_000 * n, 10_000 * n + 32 * 16)) for n in range(40)]
    for prompt in prompts:
        client.save(np.frombuffer(prompt.token_bytes, np.uint32), prompt=prompt)
        assert client.ask(p.Flush(0, 10.0)).done
    assert client.ask(p.Evict(0, "host", -1)).pages == 64
    for prompt in prompts:
        found = client.lookup(prompt)
        assert found.tokens == len(prompt)
        client.tell(p.Release([found.lease]))
    daemon.wait_for(lambda stats: stats.store.pages <= 300 and not stats.store.open_hits)
    daemon.check()


def test_lookups_end_where_memory_ends_rather_than_know_too_many_pages(start, connect, monkeypatch):
    """Leases keep pages known: a client that releases none could have all of the disk in memory."""
    monkeypatch.setattr("tierstore.core.state._LOADED_BYTES", 100 * 2048)
    monkeypatch.setattr("tierstore.core.state._MOST_LOADED_BYTES", 200 * 2048)
    daemon = start(disk=True, disk_bytes=64 << 20)
    client = connect(daemon.url, line=True)
    client.register()
    prompts = [prompt_of(range(10_000 * n, 10_000 * n + 32 * 16)) for n in range(40)]
    for prompt in prompts:
        client.save(np.frombuffer(prompt.token_bytes, np.uint32), prompt=prompt)
        assert client.ask(p.Flush(0, 10.0)).done
    client.ask(p.Evict(0, "host", -1))
    found = [client.lookup(prompt) for prompt in prompts]
    assert {answer.tokens for answer in found} == {0, len(prompts[0])}
    assert daemon.stats().store.pages <= 400
    client.tell(p.Release([answer.lease for answer in found if answer.lease]))
    missed = next(prompt for prompt, answer in zip(prompts, found, strict=True) if not answer.tokens)
    client.lookup(missed)  # what sleeps makes room behind the answer …
    daemon.wait_for(lambda stats: stats.store.pages <= 200)
    found_later = client.lookup(missed)
    assert found_later.tokens == len(missed)  # … for the next one
    pages = client.load(found_later.lease, 2)
    tokens = np.frombuffer(missed.token_bytes, np.uint32)
    assert pages == [page_bytes(tokens[: 16 * n]) for n in (1, 2)]


# -- pins ----------------------------------------------------------------------------------------------


def prompt_at(n, chunks=4):
    return prompt_of(range(1000 * n, 1000 * n + 16 * chunks))


def save_pages(client, prompt):
    """Over TCP; the pages that are stored."""
    reserved = client.ask(p.Reserve(0, part(prompt), 0, len(prompt) // 16))
    pages = [bytes(PAGE_BYTES)] * len(positions(reserved))
    client.ask(p.Write(0, reserved.reservation, 0), *pages)
    return client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of(pages))).pages


def pin(client, prompt, *, undo=False):
    """Tokens that were pinned, or the kind of the refusal."""
    answer = client.ask(p.Pin(0, part(prompt), undo))
    return answer.kind if isinstance(answer, p.Refused) else answer.tokens


def test_a_tenant_pins_half_of_its_quota_and_no_more(curve):
    daemon, connect_as = curve  # bob has a quota of 8 pages
    bob = connect_as("bob")
    bob.register()
    pinned = []
    for n in range(20):
        assert save_pages(bob, prompt_at(n, 1)) == 1
        pinned.append(pin(bob, prompt_at(n, 1)))
    assert pinned == [16] * 4 + ["busy"] * 16
    tenant = daemon.stats().service.tenants["bob"]
    assert (tenant.pinned_pages, tenant.pinned_bytes) == (4, 4 * PAGE_BYTES)
    assert pin(bob, prompt_at(0, 1)) == 16  # the same once more takes no more room …
    assert pin(bob, prompt_at(0, 1), undo=True) == 16
    assert pin(bob, prompt_at(19, 1)) == "busy"
    assert pin(bob, prompt_at(0, 1), undo=True) == 16  # … and is undone by the second
    assert pin(bob, prompt_at(19, 1)) == 16
    assert pin(bob, prompt_at(0, 1), undo=True) == 0


@pytest.mark.parametrize("curve", ["with a disk"], indirect=True)
def test_a_tenant_cannot_fill_the_tiers_with_pins_for_the_others(curve):
    daemon, connect_as = curve
    eve = connect_as("eve")  # has no quota: an eighth of the arena's 64 pages
    eve.register()
    pinned = 0
    for n in range(100):
        save_pages(eve, prompt_at(n))
        eve.ask(p.Flush(0, 10.0))
        pinned += pin(eve, prompt_at(n)) == 64
    assert pinned == 2
    eve.close()  # its pins last longer than its session
    bob = connect_as("bob")
    bob.register()
    assert save_pages(bob, prompt_at(0)) == 4
    bob.ask(p.Flush(0, 10.0))
    tenants = daemon.stats().service.tenants
    assert tenants["eve"].pinned_bytes == 8 * PAGE_BYTES
    assert bob.lookup(prompt_at(0)).tokens == 64


def test_a_tenants_pins_end_by_themselves(curve, monkeypatch):
    monkeypatch.setattr("tierstore.core.quotas.TENANT_PIN_S", 0.2)
    daemon, connect_as = curve
    bob = connect_as("bob")
    bob.register()
    save_pages(bob, prompt_at(0))
    assert pin(bob, prompt_at(0)) == 64
    daemon.wait_for(lambda stats: not stats.service.tenants["bob"].pinned_bytes)
    assert pin(bob, prompt_at(0), undo=True) == 0
    daemon.check()


@pytest.mark.parametrize("curve", ["with a socket"], indirect=True)
def test_an_operator_lifts_the_pins_of_tenants(curve, connect, tmp_path):
    daemon, connect_as = curve
    bob, eve = connect_as("bob"), connect_as("eve")
    for client in (bob, eve):
        client.register()
        save_pages(client, prompt_at(0))
        assert pin(client, prompt_at(0)) == 64
    refused = eve.ask(p.Unpin(0, "bob"))
    assert (type(refused), refused.kind) == (p.Refused, "denied")
    operator = connect(f"ipc://{tmp_path}/s", line=True)
    assert operator.ask(p.Unpin(0, "bob")).pages == 4
    assert operator.ask(p.Unpin(0, "bob")).pages == 0
    tenants = daemon.stats().service.tenants
    assert (tenants["bob"].pinned_bytes, tenants["eve"].pinned_bytes) == (0, 4 * PAGE_BYTES)
    assert operator.ask(p.Unpin(0, None)).pages == 4
    assert operator.ask(p.Evict(0, "host", -1)).pages == 8


def test_pinned_pages_take_a_bounded_amount_of_memory(start, connect, monkeypatch):
    monkeypatch.setattr("tierstore.core.quotas._MOST_MEMORY_BYTES", 8 * 2048)
    daemon = start()
    client = connect(daemon.url, line=True)
    client.register()
    for n in range(4):
        client.save(list(range(1000 * n, 1000 * n + 64)))
    assert [pin(client, prompt_at(n)) for n in range(4)] == [64, 64, "busy", "busy"]
    assert pin(client, prompt_at(0), undo=True) == 64
    assert pin(client, prompt_at(3)) == 64


# -- identities ----------------------------------------------------------------------------------------


def identities_of(client):
    """All pieces of the list, by model."""
    known, after, pieces = [], b"", 0
    while True:
        answer = client.ask(p.Identities(0, after))
        assert len(p.encode(answer)) < 2 * p.MAX_LIST_BYTES
        known += [fields["model"] for fields in answer.identities]
        after, pieces = answer.more, pieces + 1
        if not after:
            return sorted(known), pieces


def test_identities_without_pages_and_without_a_session_go(start, connect):
    daemon = start()
    for session in range(8):
        client = connect(daemon.url, line=True)
        client.register(IDENTITY)
        for n in range(300):
            client.register(Identity(model=f"{session}-{n}", layout="chunk=16"))
        client.save(list(range(64)))
        client.close()
        daemon.wait_for(lambda stats: stats.service.connections == 0)
    client = connect(daemon.url, line=True)
    assert identities_of(client)[0] == [IDENTITY.model]  # which has pages
    client.ask(p.Evict(0, "host", -1))
    client.register(Identity(model="0-0", layout="chunk=16"), page_bytes=4096)  # forgotten: the size, too
    assert "0-0" in identities_of(client)[0]


def test_a_long_list_of_identities_comes_in_pieces(start, connect):
    daemon = start()
    client = connect(daemon.url, line=True)
    models = sorted(f"{n:04}" + "x" * 3900 for n in range(600))
    for model in models:
        client.register(Identity(model=model, layout="chunk=16"))
    known, pieces = identities_of(client)
    assert known == models
    assert pieces == 3


def test_a_tenant_has_a_bounded_number_of_identities(start, connect, monkeypatch):
    monkeypatch.setattr("tierstore.core.core.MOST_TENANT_IDENTITIES", 10)
    daemon = start()
    first, second = (connect(daemon.url, line=True) for _ in range(2))
    for n in range(10):
        first.register(Identity(model=str(n), layout="chunk=16"))
    message = p.Register(0, asdict(Identity(model="10", layout="chunk=16")), PAGE_BYTES, 16)
    refused = second.ask(message)
    assert (type(refused), refused.kind) == (p.Refused, "busy")
    assert second.register(Identity(model="3", layout="chunk=16")) == 0  # is known
    first.close()
    daemon.wait_for(lambda stats: stats.service.connections == 1)
    assert second.register(Identity(model="10", layout="chunk=16")) == 1
    assert identities_of(second)[0] == ["10", "3"]


def test_identities_whose_pages_have_left_go_when_there_are_too_many(start, connect, monkeypatch):
    monkeypatch.setattr("tierstore.core.core.MOST_TENANT_IDENTITIES", 10)
    daemon = start()
    for n in range(40):
        client = connect(daemon.url, line=True)
        identity = Identity(model=str(n), layout="chunk=16")
        client.register(identity)
        client.save(list(range(64)), prompt=prompt_of(range(64), identity))
        if n % 10 == 9:
            client.ask(p.Evict(0, "host", -1))
        client.close()
        daemon.wait_for(lambda stats: stats.service.connections == 0)
    assert len(identities_of(connect(daemon.url, line=True))[0]) <= 10
    daemon.check()
