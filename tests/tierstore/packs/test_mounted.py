"""A mounted pack behind a store's tiers: its pages are found, and read when they are wanted."""

from __future__ import annotations

import os
import sys

import pytest

import tierstore
from tests.tierstore.daemon.client.conftest import DaemonProcess, wait_until
from tests.tierstore.packs import conftest as c
from tierstore import memory
from tierstore.core.backend import LocalBackend, open_core
from tierstore.keys import Identity
from tierstore.packs import PackError, PageHash, Trust, mount
from tierstore.packs.mounted import MountedBackend
from tierstore.testing import store as like
from tierstore.testing.backend import BackendTests
from tierstore.testing.pages import pages_of
from tierstore.tiers.hbm import PagePool


@pytest.fixture
def path(made, tmp_path):
    return tmp_path / "a.tskv"


def in_host(store, tokens):
    """Tokens of a prompt in the host tier: pages that were read get there in passing."""
    with store.lookup(tokens) as hit:
        return hit.by_tier.get("host", 0)


def test_pages_come_from_the_pack_as_far_as_they_are_wanted(path, signer):
    with c.open_store(mounts=[mount(path, Trust.read(signer[1]))]) as store:
        assert store.stats().pages == 0
        hit = store.lookup(c.FIRST[:40])
        assert (hit.tokens, hit.by_tier) == (40, {"disk": 40})
        hit.release()
        assert c.held(store, c.FIRST[:40]) == (40, pages_of(c.FIRST[:40], c.SPEC))
        wait_until(lambda: in_host(store, c.FIRST) == 40)  # what was read is in the store, and nothing else
        assert store.lookup(c.FIRST).by_tier == {"host": 40, "disk": 40}
        assert c.held(store, c.SECOND) == (56, pages_of(c.SECOND[:56], c.SPEC))
        assert c.held(store, c.FIRST) == (80, pages_of(c.FIRST, c.SPEC))
        assert store.lookup(list(range(3000, 3080))).tokens == 0
        store.check()


def test_what_is_saved_behind_a_packs_pages_is_found(path):
    longer = [*c.FIRST, *range(900, 916)]
    with c.open_store(mounts=[mount(path)]) as store:
        c.held(store, c.FIRST)
        wait_until(lambda: in_host(store, c.FIRST) == 80)
        assert store.save(longer, pages_of(longer, c.SPEC)[10:], first=10).wait(30) == 16
        assert c.held(store, longer) == (96, pages_of(longer, c.SPEC))


def test_into_a_page_pool(path):
    pool = PagePool(c.SPEC, 16)
    with c.open_store(pools=pool, mounts=[mount(path)]) as store:
        loaded = store.load(store.lookup(c.FIRST)).wait(30)
        assert loaded.tokens == 80
        copy = bytearray(c.SPEC.page_bytes)
        address = memory.address_of(memoryview(copy), writable=True)
        for page, expected in zip(loaded.pages, pages_of(c.FIRST, c.SPEC), strict=True):
            pool.read_pages([(page, address)])
            assert copy == expected
        store.release_hbm(loaded.pages)
        assert store.lookup(c.FIRST).by_tier == {"hbm": 80}


def test_a_daemon_has_what_its_clients_have_read(path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("d")
    directory.chmod(0o700)
    daemon = DaemonProcess(directory, disk=False).start()
    try:
        with tierstore.connect(
            daemon.url, c.SPEC, identity=c.IDENTITY, lookup_s=5.0, mounts=[mount(path)]
        ) as store:
            assert store.wait_connected(30)
            assert c.held(store, c.FIRST[:64]) == (64, pages_of(c.FIRST[:64], c.SPEC))
            wait_until(lambda: in_host(store, c.FIRST) == 64)
        with tierstore.connect(daemon.url, c.SPEC, identity=c.IDENTITY, lookup_s=5.0) as store:
            assert store.wait_connected(30)
            assert c.held(store, c.FIRST) == (64, pages_of(c.FIRST[:64], c.SPEC))
    finally:
        daemon.kill()


def test_without_a_daemon_the_pack_is_there_all_the_same(path, tmp_path):
    with tierstore.connect(
        f"ipc://{tmp_path}/nobody", c.SPEC, identity=c.IDENTITY, lookup_s=0.2, mounts=[mount(path)]
    ) as store:
        assert c.held(store, c.FIRST) == (80, pages_of(c.FIRST, c.SPEC))


def test_a_file_that_changes_under_a_mount_is_a_miss(path, made):
    pack = mount(path)
    at = made.index(pages_of(c.FIRST, c.SPEC)[3])
    with c.open_store(mounts=[pack]) as store:
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"x", at + 5)
        assert c.held(store, c.FIRST)[0] == 24
        assert (pack.damaged_pages, store.lookup(c.FIRST).tokens) == (1, 24)
        os.truncate(path, at)
        assert c.held(store, c.SECOND)[0] == 24
        store.check()


def test_a_pack_whose_hash_is_not_installed_is_not_mounted(path, hash, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    if hash is PageHash.BLAKE3:
        with pytest.raises(ModuleNotFoundError, match="blake3"):
            mount(path)
    else:
        assert mount(path).manifest.pages == 13


def test_another_models_pack_is_not_mounted(path):
    other = Identity.of(c.SPEC, model="m", revision="2")
    with pytest.raises(PackError, match="another model: revision '1', not '2'"):
        c.open_store(other, mounts=[mount(path)])
    with pytest.raises(PackError, match="no pack"):
        mount(path.with_name("b").write_bytes(b"x" * 200) and path.with_name("b"))


class TestMountedBackend(BackendTests):
    """A backend with a pack behind it that has nothing of what is asked for is that backend."""

    @pytest.fixture
    def open_backend(self, tmp_path):
        identity = Identity.of(like.SPEC, model="packed")
        with c.open_store(identity, spec=like.SPEC) as store:
            c.save(store, like.TOKENS, like.SPEC)
            c.exported(store, [c.prompt(like.TOKENS, identity, like.SPEC)], tmp_path / "a.tskv")
        opened = []

        def open_(*, identity, host_pages=64):
            path, nbytes = tmp_path / f"disk {len(opened)}", like.SPEC.page_bytes
            core = open_core(path, nbytes, host_bytes=host_pages * nbytes, disk_bytes=8 << 20)
            inner = LocalBackend(core, owns_core=True)
            opened.append(MountedBackend(inner, mount(tmp_path / "a.tskv")))
            return opened[-1]

        yield open_
        for backend in opened:
            backend.close()
