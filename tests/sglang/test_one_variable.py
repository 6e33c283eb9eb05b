"""``TIERSTORE=…`` and nothing else: SGLang's own command runs over a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.homes import Home, install_plug_ins, until
from tests.sglang.engine import HIERARCHICAL, Server, arguments, storage
from tests.sglang.one_variable import RESULT

pytestmark = pytest.mark.timeout(1500)

# None of its arguments, but one that makes a request wait for its pages, also on a busy machine.
NO_CACHE = dict.fromkeys(HIERARCHICAL) | {"hicache_storage_prefetch_policy": "wait_complete"}
TOKENS = 600


@pytest.fixture
def home(tmp_path, monkeypatch):
    found = Home()
    del found.variables["XDG_CACHE_HOME"]  # SGLang's compiled parts are there
    found.variables["TIERSTORE_DISK"] = str(found.disk)
    for name, value in (found.variables | {"PYTHONPATH": install_plug_ins(tmp_path / "installed")}).items():
        monkeypatch.setenv(name, value)
    yield found
    found.remove()


def test_a_server_with_the_variable_hits_after_kill_9_of_everything(model, home: Home, monkeypatch, capfd):
    monkeypatch.setenv("TIERSTORE", "auto")
    with Server(model, NO_CACHE) as server:
        expected, stored = server.generate(TOKENS)
        assert stored == 0
        until(lambda: home.stats().store.pages >= TOKENS // 16)  # SGLang saves behind the answer
        home.flush()
    home.kill()  # the server is dead: Server ends with SIGKILL
    with Server(model, NO_CACHE) as server:
        assert server.generate(TOKENS) == (expected, 592)  # pages of 16
    said = capfd.readouterr().err
    assert said.count("tierstore: TIERSTORE sets enable_hierarchical_cache=True") == 2  # one line per server
    assert home.daemons() == [home.stats().pid]  # SGLang's end has not ended it


def test_what_the_plug_in_sets_and_leaves(model, home: Home):
    own = {name: value for name, value in arguments(model).items() if name != "page_size"}
    theirs = own | HIERARCHICAL | storage("ipc:///somewhere")
    url = "ipc:///nowhere/s"
    cases = [
        (url, own),
        (url, own | {"page_size": 32}),
        (url, own | {"disable_radix_cache": True}),
        (url, theirs),
        ("on", own),
        ("off", own),  # after the plug-in was loaded
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.one_variable", json.dumps(cases)],
        env={**os.environ, "TIERSTORE": url, "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert lines, done.stderr[-4000:]
    plain, paged, radix, explicit, wrong, off = json.loads(lines[0].removeprefix(RESULT))
    assert plain["enable_hierarchical_cache"] is True
    assert plain["page_size"] == 64
    assert plain["hicache_storage_backend"] == "dynamic"
    assert plain["hicache_mem_layout"] == "page_first_direct"
    assert plain["hicache_host_memory_mode"] == "buffer_only"
    assert json.loads(plain["hicache_storage_backend_extra_config"])["store"] == url
    assert paged == plain | {"page_size": 32}
    assert json.loads(explicit["hicache_storage_backend_extra_config"])["store"] == "ipc:///somewhere"
    for none in (radix, wrong, off):
        assert not none["enable_hierarchical_cache"]
        assert none["hicache_storage_backend"] is None
    said = [line for line in done.stderr.splitlines() if line.startswith("tierstore: ")]
    assert [line.partition(" page_size")[0].partition(", because ")[2] or line[:40] for line in said] == [
        "tierstore: TIERSTORE sets enable_hierarc",
        "tierstore: TIERSTORE sets enable_hierarc",
        "--disable-radix-cache is given",
        "--enable-hierarchical-cache is given",
        "tierstore: runs without the cache: TIERS",
        "tierstore: runs without the cache: TIERS",
    ]
