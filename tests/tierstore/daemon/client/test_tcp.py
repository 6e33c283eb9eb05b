"""Clients without an arena: pages as frames, over TCP."""

from __future__ import annotations

import os
import signal

import pytest

from tests.daemons import SPEC, TOKENS, daemon_stats, in_threads, load_bytes, pages_of
from tierstore.spec import KVSpec
from tierstore.store import save
from tierstore.testing.clock import wait_until
from tierstore.testing.processes import DaemonProcess, free_port
from tierstore.wire import keys


@pytest.fixture
def tcp_daemon(make_daemon):
    url = f"tcp://127.0.0.1:{free_port()}"
    daemon = make_daemon(listen=(url,))
    daemon.tcp = url
    return daemon


def test_pages_go_as_frames(tcp_daemon, connect, monkeypatch):
    monkeypatch.setattr("tierstore.store.save._WRITE_BYTES", 2 * SPEC.page_bytes)
    monkeypatch.setattr("tierstore.client.reading._FETCH_BYTES", 2 * SPEC.page_bytes)
    remote, local = connect(tcp_daemon.tcp), connect(tcp_daemon.url)
    tokens = list(range(16 * 20 + 5))
    assert remote.save(tokens, pages_of(tokens)).wait(10) == len(tokens)
    assert load_bytes(remote, remote.lookup(tokens)) == (len(tokens), pages_of(tokens))
    assert load_bytes(local, local.lookup(tokens)) == (len(tokens), pages_of(tokens))
    assert remote.flush(10)
    local.evict("host")
    hit = remote.lookup(tokens)
    assert hit.by_tier == {"disk": len(tokens)}
    assert load_bytes(remote, hit) == (len(tokens), pages_of(tokens))


def test_pages_that_are_written_over_before_they_are_sent_are_not_stored(
    make_daemon, connect, stopped, monkeypatch
):
    spec = KVSpec.uniform(layers=4, kv_heads=8, head_dim=64, dtype="float32", chunk_tokens=64)
    url = f"tcp://127.0.0.1:{free_port()}"
    daemon = make_daemon(listen=(url,), host_bytes=256 << 20, disk=False)
    store = connect(url, spec=spec)
    tokens = list(range(16 * spec.chunk_tokens))
    pages = [bytearray(os.urandom(spec.page_bytes)) for _ in range(16)]
    saved = [bytes(page) for page in pages]
    monkeypatch.setattr(save, "_FIRST_BATCH_BYTES", 16 << 20)  # more than sockets take
    send, sent = save.Save._send, []

    def send_to_a_stopped_daemon(*args):
        stopped(daemon)
        send(*args)
        sent.append(args)

    monkeypatch.setattr(save.Save, "_send", send_to_a_stopped_daemon)
    saving = store.save(tokens, pages)
    wait_until(lambda: len(sent) == 2)
    saving.cancel()  # from here on the buffers are the caller's again
    for page in pages:
        page[:] = bytes(spec.page_bytes)
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: not store.stats().pending_saves)

    hit = store.lookup(tokens)
    assert daemon_stats(store)["store"]["counters"]["torn_pages"] > 0
    assert hit.tokens < len(tokens)
    buffers = [bytearray(spec.page_bytes) for _ in range(hit.tokens // spec.chunk_tokens)]
    assert store.load(hit, buffers).wait(10).tokens == hit.tokens
    assert buffers == saved[: len(buffers)]


def test_several_threads_and_hbm(tcp_daemon, connect):
    store = connect(tcp_daemon.tcp, hbm_pages=60)
    # What others are still saving counts as stored, and cannot be found yet.
    store.save(TOKENS[:32], pages_of(TOKENS[:32])).wait(10)

    def work(number):
        tokens = [*TOKENS[:40], *range(1000 * number, 1000 * number + 60)]
        for _ in range(8):
            assert store.save(tokens, pages_of(tokens)).wait(10) == 100
            loaded = store.load(store.lookup(tokens)).wait(10)
            assert [store.pool.array[page].tobytes() for page in loaded.pages] == pages_of(tokens)
            store.release_hbm(loaded.pages)

    in_threads(*(lambda number=number: work(number) for number in range(4)))
    assert store.available_hbm() == 60


def test_a_daemon_that_is_killed_is_noticed_at_once(tcp_daemon, connect):
    store = connect(tcp_daemon.tcp)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    assert store.flush(10)
    hit = store.lookup(TOKENS)
    tcp_daemon.kill()
    wait_until(lambda: store.backend.connection.link is None)
    assert load_bytes(store, hit)[0] == 0
    tcp_daemon.start()
    assert store.wait_connected(30)
    assert load_bytes(store, store.lookup(TOKENS)) == (70, pages_of(TOKENS))


def test_a_store_that_is_closed_is_gone_at_once(tcp_daemon, connect):
    monitor, store = connect(tcp_daemon.url), connect(tcp_daemon.tcp)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit = store.lookup(TOKENS)
    assert hit.tokens == 70
    assert daemon_stats(monitor)["service"]["connections"] == 2
    store.close()
    wait_until(lambda: daemon_stats(monitor)["service"]["connections"] == 1)
    assert daemon_stats(monitor)["server"]["silent_clients"] == 0
    assert daemon_stats(monitor)["service"]["leases"] == 0


def test_a_tenant_is_told_of_itself_only(short_directory, connect, tmp_path):
    server, server_key = keys.generate(tmp_path, "daemon")
    pair, _ = keys.generate(tmp_path / "tenants", "anna")
    url = f"tcp://127.0.0.1:{free_port()}"
    options = [f"--server-key={server}", f"--tenants={tmp_path / 'tenants'}"]
    daemon = DaemonProcess(short_directory, *options, listen=(url,), disk=False).start()
    try:
        anna = connect(url, keys=pair, server_key=server_key)
        assert anna.save(TOKENS, pages_of(TOKENS)).wait(10) == 70
        assert anna.evict("host") == 0
        stats = anna.stats()
        assert (stats.tiers, stats.health_line) == ({}, "")
        assert anna.lookup(TOKENS).tokens == 70
    finally:
        daemon.kill()


def test_keys_and_tenants(short_directory, connect, tmp_path):
    server, server_key = keys.generate(tmp_path, "daemon")
    (tmp_path / "tenants").mkdir(mode=0o700)
    tenants = []
    for name in ("anna", "bert"):
        pair, half = keys.generate(tmp_path, name)
        half.rename(tmp_path / "tenants" / half.name)
        tenants.append(pair)
    stranger, _ = keys.generate(tmp_path, "stranger")
    url = f"tcp://127.0.0.1:{free_port()}"
    options = [f"--server-key={server}", f"--tenants={tmp_path / 'tenants'}"]
    daemon = DaemonProcess(short_directory, *options, listen=(url,), disk=False).start()
    try:
        anna, bert = (connect(url, keys=pair, server_key=server_key) for pair in tenants)
        assert anna.save(TOKENS, pages_of(TOKENS)).wait(10) == 70
        assert load_bytes(anna, anna.lookup(TOKENS)) == (70, pages_of(TOKENS))
        assert bert.lookup(TOKENS).tokens == 0
        other = connect(url, keys=stranger, server_key=server_key, connected=False)
        assert not other.wait_connected(0.5)
        assert other.lookup(TOKENS).tokens == 0
    finally:
        daemon.kill()
