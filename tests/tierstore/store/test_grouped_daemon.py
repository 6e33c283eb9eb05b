"""Layer groups over a daemon: whatever happens to it is a shorter hit or a miss for all groups, never an
error or pages that do not belong together."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import socket
import tempfile

import pytest

import tierstore
from tests.tierstore.cli.test_operations import run
from tests.tierstore.store.grouped_model import GEMMA, HYBRID, Engine
from tierstore import Identity
from tierstore.testing.processes import DaemonProcess

TOKENS = list(range(500, 700))
_names = itertools.count()


@pytest.fixture(scope="module")
def shared():
    """A daemon that nobody harms."""
    directory = tempfile.mkdtemp(prefix="ts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        tcp = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    daemon = DaemonProcess(directory, listen=(tcp,))
    daemon.tcp = tcp
    yield daemon.start()
    daemon.kill()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def daemons():
    """Two daemons of this test's own."""
    directories = [tempfile.mkdtemp(prefix="ts") for _ in range(2)]
    daemons = [DaemonProcess(directory).start() for directory in directories]
    yield daemons
    for daemon, directory in zip(daemons, directories, strict=True):
        if daemon.process is not None:
            daemon.signal(signal.SIGCONT)
        daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)


def connected(url, spec=GEMMA, name=""):
    """An engine over a daemon."""
    identity = Identity.of(spec, model=name or f"played {next(_names)}")

    def connect(pools):
        return tierstore.connect(url, spec, identity=identity, pools=pools, lookup_s=10.0)

    engine = Engine(spec, store=connect)
    assert engine.store.wait_connected(30)
    return engine


@pytest.mark.parametrize("way", ["ipc", "tcp"])
@pytest.mark.parametrize("spec", [GEMMA, HYBRID], ids=["windows", "states"])
def test_what_one_engine_saved_another_loads(shared, spec, way):
    url, name = shared.tcp if way == "tcp" else shared.url, f"shared {next(_names)}"
    with connected(url, spec, name) as first:
        for end in (96, 192):
            first.save_to(TOKENS, end)
        with connected(url, spec, name) as second:
            hit = second.lookup(TOKENS)
            assert (hit.tokens, hit.branch, hit.by_tier) == (192, 200, {"host": 192})
            assert second.load(hit) == 192
            with second.lookup(TOKENS) as hit:
                assert hit.by_tier == {"hbm": 192}
            second.check()
        assert first.store.flush(30)
        first.evict("hbm")
        first.evict("host")
        hit = first.lookup(TOKENS, max_tokens=191)
        assert (hit.tokens, hit.by_tier) == (96, {"disk": 96})
        assert hit.prefetch(deadline_s=30).wait(30) == 96
        assert first.load(hit, deadline_s=30) == 96
        first.check()


def test_turns_leave_the_daemon_too(shared):
    with connected(shared.url) as engine:
        engine.store.checkpoint_tokens = 1 << 20
        for end in (96, 192):
            prompt = engine.store.prompt(TOKENS[:end])
            engine.store.lookup(prompt).release()
            engine.save_to(TOKENS[:end], end, prompt=prompt, session="s")
        assert engine.store.flush(30)
        engine.evict("hbm")
        with engine.lookup(TOKENS) as hit:
            assert hit.tokens == 192
        with engine.lookup(TOKENS, max_tokens=191) as hit:
            assert (hit.tokens, hit.branch) == (0, 191)
        engine.check()


def test_stats_say_what_each_kind_of_layers_has_in_memory(daemons):
    with connected(daemons[0].url, name="gemma") as engine:
        engine.save_to(TOKENS, 192)
        document = json.loads(run("stats", "--connect", daemons[0].url, "--json")[1])
        kept = [(each["model"], each["layers"]) for each in document["service"]["layers"]]
        assert kept == [("gemma", "full attention"), ("gemma", "sliding window 40")]
        assert "sliding window 40" in run("stats", "--connect", daemons[0].url)[1]


def test_no_time_no_pages(shared):
    with connected(shared.url) as engine:
        engine.save_to(TOKENS, 192)
        engine.evict("hbm")
        loaded = engine.store.load(engine.lookup(TOKENS), deadline_s=0.0).wait(30)
        engine.verify(TOKENS, loaded)
        engine.release(loaded)
        engine.check()


def test_a_daemon_that_stands_still_is_a_miss_in_time(daemons):
    with connected(daemons[0].url) as engine:
        engine.save_to(TOKENS, 192)
        assert engine.store.flush(30)
        engine.evict("hbm")
        engine.evict("host")
        hit = engine.lookup(TOKENS)
        assert hit.by_tier == {"disk": 192}
        daemons[0].signal(signal.SIGSTOP)
        loaded = engine.store.load(hit, deadline_s=0.3).wait(30)
        assert (loaded.tokens, loaded.pages) == (0, ())
        daemons[0].signal(signal.SIGCONT)
        assert engine.load(engine.lookup(TOKENS), deadline_s=30) == 192
        engine.check()


def test_a_daemon_that_is_killed_leaves_what_is_in_hbm(daemons):
    with connected(daemons[0].url) as engine:
        engine.save_to(TOKENS, 192)
        engine.save_to(TOKENS[:100], 96)
        engine.evict("hbm")
        assert engine.load(engine.lookup(TOKENS, max_tokens=100)) == 96  # which is in HBM now
        hit = engine.lookup(TOKENS)
        assert hit.tokens == 192
        daemons[0].kill()
        loaded = engine.store.load(hit, deadline_s=20).wait(30)
        engine.verify(TOKENS, loaded)
        assert loaded.tokens <= 192
        engine.release(loaded)
        hit = engine.lookup(TOKENS)
        assert hit.tokens == loaded.tokens or hit.tokens == 96
        engine.load(hit)


def test_a_daemon_that_starts_anew_gives_no_pages_of_its_former_life(daemons):
    with connected(daemons[0].url) as engine:
        engine.save_to(TOKENS, 192)
        engine.evict("hbm")
        hit = engine.lookup(TOKENS)
        assert hit.tokens == 192
        daemons[0].kill()
        loaded = engine.store.load(hit, deadline_s=20).wait(30)
        engine.verify(TOKENS, loaded)
        assert loaded.tokens in (0, 192)  # its pages may still be mapped
        engine.release(loaded)
        engine.evict("hbm")
        with engine.lookup(TOKENS) as hit:
            assert (hit.tokens, hit.branch) == (0, 0)
        daemons[0].start()
        assert engine.store.wait_connected(30)
        engine.save_to(TOKENS, 144)
        engine.evict("hbm")
        assert engine.load(engine.lookup(TOKENS), deadline_s=20) >= 144
        engine.check()
