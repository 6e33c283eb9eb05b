"""One set of tests over every kind of store: embedded, and connected to a daemon on this host."""

from __future__ import annotations

import shutil
import tempfile

import pytest

import tierstore
from tierstore import Identity, KVSpec
from tierstore.testing import pages as testing_pages
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.group_pools import bytes_for

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages


def pages_of(tokens, spec=SPEC):
    return testing_pages.pages_of(tokens, spec)


def load_bytes(store, hit):
    """Load a hit into fresh buffers: the tokens that came, and the bytes of their pages."""
    buffers = [bytearray(store.spec.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers).wait(30)
    return loaded.tokens, [bytes(buffer) for buffer in buffers[: -(-loaded.tokens // hit.chunk_tokens)]]


@pytest.fixture(scope="session")
def daemon():
    """One daemon for all tests: each has an identity of its own."""
    directory = tempfile.mkdtemp(prefix="ts")  # short enough for a unix socket
    process = DaemonProcess(directory, host_bytes=32 << 20, disk=True).start()
    yield process
    process.end()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(params=["embedded", "connected"])
def open_store(request, tmp_path):
    """Opens stores of one kind that share their pages; they are checked and closed at the end of the test."""
    url = request.getfixturevalue("daemon").url if request.param == "connected" else None
    stores = []

    def open_(spec=SPEC, *, hbm_pages=0, identity=None):
        identity = identity or Identity.of(spec, model=request.node.nodeid)
        nbytes = bytes_for(spec.split(), [hbm_pages] * len(spec.groups)) if hbm_pages else 0
        pools = tierstore.open_pools(spec, nbytes) if hbm_pages else None
        if url is None:
            path = tmp_path / f"disk{len(stores)}"
            store = tierstore.open(path, spec, identity=identity, pools=pools, host_bytes=16 << 20)
        else:
            store = tierstore.connect(url, spec, identity=identity, pools=pools, lookup_s=5.0)
            assert store.wait_connected(30)
        stores.append(store)
        return store

    open_.tasks_fail = False  # a test that makes them fail says so
    yield open_
    for store in stores:
        if not store.closed:
            store.check()
        store.close()
        assert open_.tasks_fail or store.stats().failed_tasks == 0


@pytest.fixture
def store(open_store):
    return open_store()
