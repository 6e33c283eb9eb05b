"""Keys: files, who is let in, and which tenant a key stands for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat

import pytest
import zmq

from tests.tierstore.daemon.server.client import PAGE_BYTES, part, positions, prompt_of, sums_of
from tierstore.errors import UsageError
from tierstore.wire import keys
from tierstore.wire import messages as p

TOKENS = list(range(64))


def test_key_files_are_the_users_own_and_never_overwritten(tmp_path):
    pair, half = keys.generate(tmp_path, "bob")
    for file in (pair, half):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keys.read_pair(pair).public == keys.read_public(half)
    assert b"secret" not in half.read_bytes()
    assert keys.read_pair(pair).secret.decode() not in repr(keys.read_pair(pair))
    with pytest.raises(UsageError, match="already exists"):
        keys.generate(tmp_path, "bob")
    with pytest.raises(UsageError, match="cannot be a key's name"):
        keys.generate(tmp_path, "../bob")


def test_key_files_that_will_not_do(tmp_path):
    pair, half = keys.generate(tmp_path, "bob")
    with pytest.raises(UsageError, match="no secret key"):
        keys.read_pair(half)
    pair.chmod(0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        keys.read_pair(pair)
    (tmp_path / "eve.key").write_bytes(half.read_bytes())
    with pytest.raises(UsageError, match="has the same key as"):
        asyncio.run(keys.read_tenants(tmp_path))
    (tmp_path / "eve.key").write_text("nonsense\n")
    with pytest.raises(UsageError, match="no key file"):
        asyncio.run(keys.read_tenants(tmp_path))
    with pytest.raises(UsageError, match="cannot read the tenants"):
        asyncio.run(keys.read_tenants(tmp_path / "nowhere"))


def save(client):
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 4))
    pages = [bytes(PAGE_BYTES)] * len(positions(reserved))
    client.ask(p.Write(0, reserved.reservation, 0), *pages)
    return client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of(pages))).pages


def test_a_keys_name_is_its_tenant(curve):
    daemon, connect_as = curve
    bob, eve = connect_as("bob"), connect_as("eve")
    for client in (bob, eve):
        client.register()
    assert save(bob) == 4
    assert bob.lookup(prompt_of(TOKENS)).tokens == 64
    assert eve.lookup(prompt_of(TOKENS)).tokens == 0
    tenants = daemon.stats().service.tenants
    assert tenants["bob"].hit_tokens["host"] == 64
    assert (tenants["bob"].host_bytes, tenants["eve"].host_bytes) == (4 * PAGE_BYTES, 0)
    assert tenants["bob"].quota_bytes == 8 * PAGE_BYTES


def test_a_tenant_sees_and_moves_nothing_of_the_others(curve):
    daemon, connect_as = curve
    bob, eve = connect_as("bob"), connect_as("eve")
    for client in (bob, eve):
        client.register()
        assert save(client) == 4
    bob.lookup(prompt_of(TOKENS))
    for tier in ("host", "disk"):
        refused = eve.ask(p.Evict(0, tier, -1))
        assert (type(refused), refused.kind) == (p.Refused, "denied")
    assert daemon.stats().store.tiers["host"].pages == 8
    seen = json.loads(eve.ask(p.Stats(0)).json)
    assert list(seen["service"]["tenants"]) == ["eve"]
    assert seen["service"]["tenants"]["eve"]["host_bytes"] == 4 * PAGE_BYTES
    assert [each["number"] for each in seen["service"]["clients"]] == [eve.welcome.connection]
    assert "bob" not in json.dumps(seen)
    assert "store" not in seen


@pytest.mark.parametrize("curve", ["with a socket"], indirect=True)
def test_a_tenant_is_told_of_its_own_missed_requests_only(curve, connect, tmp_path):
    daemon, connect_as = curve
    bob, eve = connect_as("bob"), connect_as("eve")
    for client, tokens in ((bob, TOKENS), (eve, TOKENS[:32])):
        client.register()
        client.lookup(prompt_of(tokens))
    daemon.wait_for(lambda stats: stats.store.missed_last_hour == {"never_saved": len(TOKENS) + 32})
    operator = connect(f"ipc://{tmp_path}/s")

    def told(client, most=10):
        return [each.prompt_tokens for each in client.ask(p.MissedRequests(0, most)).requests]

    assert told(bob) == [len(TOKENS)]
    assert told(eve) == [32]
    assert told(operator) == [32, len(TOKENS)]
    assert told(operator, most=1) == [32]
    assert told(operator, most=0) == []
    refused = eve.ask(p.MissedRequests(0, -1))
    assert (type(refused), refused.kind) == (p.Refused, "usage")


def test_an_unknown_key_is_not_let_in(curve):
    daemon, connect_as = curve
    mallory = connect_as("mallory", hello=False)
    mallory.socket.setsockopt(zmq.SNDTIMEO, 1000)  # who has been turned away has nobody to send to
    with contextlib.suppress(zmq.Again):
        mallory.tell(p.Hello(1))
    assert mallory.hear(1.0) == (None, [])
    daemon.wait_for(lambda stats: stats.server.denied > 0)
    assert daemon.stats().service.connections == 0


def test_a_client_without_keys_is_not_let_in(curve, connect):
    daemon, _ = curve
    client = connect(daemon.address, hello=False)
    client.tell(p.Hello(1))
    assert client.hear(1.0) == (None, [])


def test_keys_without_tenants_let_nobody_in(tmp_path, start):
    server, _ = keys.generate(tmp_path, "server")
    with pytest.raises(UsageError, match="admits no client"):
        start(server_key=server)
