"""Pages in host memory that somebody wrote over: a local client maps the arena, and may be wrong."""

from __future__ import annotations

import ctypes
import shutil
import tempfile

import pytest

import tierstore
from tierstore import PagePool
from tierstore.testing.backend import request_of
from tierstore.testing.processes import DaemonProcess
from tierstore.testing.store import CHUNK, SPEC, TOKENS, new_identity, pages_of, wait_until

PAGES = 5


@pytest.fixture(params=["buffers", "pool"])
def store(request):
    pool = PagePool(SPEC, 16) if request.param == "pool" else None
    directory = tempfile.mkdtemp(prefix="ts")
    daemon = DaemonProcess(directory, host_bytes=1 << 20, disk=False)
    daemon.start()
    try:
        with tierstore.connect(
            daemon.url, SPEC, identity=new_identity(), pools=pool, lookup_s=10.0, verify=True
        ) as store:
            assert store.wait_connected(30)
            yield store
    finally:
        daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)


def scribble(store, page):
    backend = store.backend
    lease = backend.find(request_of(store.identity, TOKENS), patience_s=30).wait(30)
    located = backend.locate(lease, 0, PAGES, wait_s=30).wait(30)
    ctypes.memset(located.addresses[page] + SPEC.page_bytes // 2, 0x55, 1)
    located.release()
    backend.release(lease)


def load(store):
    hit = store.lookup(TOKENS)
    if store.pool is not None:
        loaded = store.load(hit).wait(30)
        got = [store.pool.array[page].tobytes() for page in loaded.pages]
        store.release_hbm(loaded.pages)
        while store.evict("hbm"):
            pass
        return hit.tokens, got
    buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
    loaded = store.load(hit, buffers).wait(30)
    pages = -(-loaded.tokens // CHUNK)
    return hit.tokens, [bytes(each) for each in buffers[:pages]]


@pytest.mark.parametrize("page", [0, 2, PAGES - 1])
def test_a_page_with_one_wrong_byte_is_not_loaded_and_can_be_saved_again(store, page):
    content = pages_of(TOKENS)
    assert store.save(TOKENS, content).wait(30) == len(TOKENS)
    assert load(store) == (len(TOKENS), content)
    scribble(store, page)
    held, got = load(store)
    assert held == len(TOKENS)
    assert got == content[:page]
    # The backend has looked for itself, and gives the page away no more.
    wait_until(lambda: store.lookup(TOKENS).tokens == page * CHUNK)
    wait_until(lambda: store.save(TOKENS, content).wait(30) == len(TOKENS))
    assert load(store) == (len(TOKENS), content)
