"""An engine on one host and the daemon on another, over a link that is slow, loses packets, or is cut."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

import tierstore
from tests.e2e.second_host import SecondHost, Unavailable
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing.pages import pages_of
from tierstore.wire import keys

SPEC = KVSpec.uniform(layers=16, kv_heads=2, head_dim=64, dtype="float16")  # 512 KiB pages
TOKENS = np.arange(40 * SPEC.chunk_tokens)
PORT = 7321
WAIT_S = 60


@pytest.fixture
def other_host(request, tmp_path):
    """The other host, with a daemon that lets one tenant in."""
    try:
        host = SecondHost(**getattr(request, "param", {}))
    except Unavailable as error:
        pytest.skip(f"no second host can be made here: {error}")
    keys.generate(tmp_path, "daemon")
    keys.generate(tmp_path / "tenants", "engine")
    host.keys = {
        "keys": tmp_path / "tenants" / "engine.secret",
        "server_key": tmp_path / "daemon.key",
    }
    host.url = f"tcp://{host.address}:{PORT}"
    arguments = [
        f"--listen=ipc://{tmp_path}/s",
        f"--listen={host.url}",
        f"--server-key={tmp_path}/daemon.secret",
        f"--tenants={tmp_path}/tenants",
        "--host-bytes=96MiB",
        "--log-level=warning",
    ]
    daemon = subprocess.Popen(host.run(sys.executable, "-m", "tierstore.daemon", *arguments))
    yield host
    daemon.kill()
    daemon.wait(10)
    host.close()


@pytest.fixture
def store(other_host):
    identity = Identity.of(SPEC, model="m")
    with tierstore.connect(
        other_host.url, SPEC, identity=identity, lookup_s=10.0, **other_host.keys
    ) as connected:
        assert connected.wait_connected(WAIT_S)
        yield connected


def load(store, hit, **kwargs):
    buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers, **kwargs).wait(WAIT_S)
    return loaded.tokens, buffers


@pytest.mark.parametrize(
    "other_host", [{}, {"queue": "limit 20kb burst 16kb"}], ids=["slow", "lossy"], indirect=True
)
def test_pages_are_the_same_at_the_other_end(other_host, store, request):
    pages = pages_of(TOKENS, SPEC)
    assert store.save(TOKENS, pages).wait(WAIT_S) == len(TOKENS)
    assert load(store, store.lookup(TOKENS)) == (len(TOKENS), pages)
    if "lossy" in request.node.name:
        assert other_host.lost_packets() > 0


def test_a_link_that_is_cut_is_a_miss_in_time_and_comes_back(other_host, store):
    pages = pages_of(TOKENS, SPEC)
    assert store.save(TOKENS, pages).wait(WAIT_S) == len(TOKENS)
    hit = store.lookup(TOKENS)
    buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    loading = store.load(hit, buffers, deadline_s=2.0)
    while not loading.progress.pages_done:
        time.sleep(0.001)
    other_host.cut()
    loaded = loading.wait(WAIT_S)
    whole = loaded.tokens // SPEC.chunk_tokens
    assert [bytes(buffer) for buffer in buffers[:whole]] == pages[:whole]
    assert store.lookup(TOKENS, max_tokens=64).tokens in (0, 64)  # whatever it is, it is there in time
    other_host.mend()
    ends = time.monotonic() + WAIT_S
    while load(store, store.lookup(TOKENS)) != (len(TOKENS), pages):
        assert time.monotonic() < ends, "the daemon was not found again"
