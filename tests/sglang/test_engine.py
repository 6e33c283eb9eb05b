"""Whole engines: what one has computed another has, and whatever happens to the store the answers stay
right."""

from __future__ import annotations

import pytest

from tests.sglang.engine import Server, ask

pytestmark = pytest.mark.timeout(1500)  # an engine starts in 10 s on an idle machine


def same(one, other):
    return [(each.tokens, each.logprobs) for each in one] == [(each.tokens, each.logprobs) for each in other]


@pytest.fixture(scope="module")
def without(model):
    """The answers of an engine without a store."""
    return ask(model, None)


def damage(daemon):
    """Change a byte in every KiB of all pages."""
    files = list((daemon.disk / "extents").iterdir())
    assert files, "no page is in an extent"
    for file in files:
        data = bytearray(file.read_bytes())
        data[100::1024] = bytes(each ^ 0xFF for each in data[100::1024])
        file.write_bytes(data)


def test_an_engine_and_its_daemon_come_back_after_kill_9(model, daemon, without):
    assert same(ask(model, daemon.url), without)
    daemon.flush()
    daemon.kill()
    daemon.start()
    warm = ask(model, daemon.url)
    assert warm[0].stored == 192  # of 200, in pages of 16
    assert same(warm, without)


def test_damaged_pages_are_computed_again(model, daemon, without):
    assert same(ask(model, daemon.url), without)
    daemon.flush()
    daemon.kill()
    damage(daemon)
    daemon.start()
    warm = ask(model, daemon.url)
    assert warm[0].stored == 0
    assert same(warm, without)
    assert ask(model, daemon.url)[0].stored == 192  # they were saved again


def test_two_ranks_and_staging_only(model, daemon):
    options = {"ranks": 2, "hicache_host_memory_mode": "buffer_only"}
    alone = ask(model, None, ranks=2)
    assert same(ask(model, daemon.url, **options), alone)
    warm = ask(model, daemon.url, **options)
    assert warm[0].stored == 192
    assert same(warm, alone)


def test_an_engine_without_its_daemon_computes(model, tmp_path, without):
    assert same(ask(model, f"ipc://{tmp_path}/nobody"), without)


def test_a_server_attaches_and_detaches_the_storage_while_it_runs(model, daemon, without):
    expected = without[0].tokens
    with Server(model) as server:
        assert server.generate(200) == (expected, 0)
        server.flush()
        server.attach(daemon.url)
        assert server.generate(200) == (expected, 0)  # computed, and saved
        server.detach()
        server.flush()
        assert server.generate(200) == (expected, 0)  # no storage, nothing comes
        server.flush()
        server.attach(daemon.url)
        assert server.generate(200) == (expected, 192)
