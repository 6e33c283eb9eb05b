"""The conformance suites over every store and backend there is: of this process, a daemon's over ipc:// and tcp://."""

from __future__ import annotations

import shutil
import socket
import tempfile

import pytest

import tierstore
from tests.portions import chosen, portion
from tierstore.backend import Registration
from tierstore.client.backend import RemoteBackend
from tierstore.client.handshake import Address
from tierstore.core.backend import LocalBackend, open_core
from tierstore.testing.backend import BackendTests
from tierstore.testing.embeddings import CrossAttentionTests, EmbeddingTests
from tierstore.testing.layouts import LAYOUTS
from tierstore.testing.processes import DaemonProcess
from tierstore.testing.store import SPEC, StoreTests


class Portioned(StoreTests, EmbeddingTests, CrossAttentionTests):
    @pytest.fixture(params=portion(8, 200))
    def sequences(self, request):
        return request.param


class TestEmbedded(Portioned):
    @pytest.fixture
    def open_store(self, tmp_path):
        opened = []

        def open_(layout, *, host_chunks=256, disk=True, **options):
            path = tmp_path / f"disk {len(opened)}" if disk else None
            sizes = {"host_bytes": host_chunks * layout.chunk_bytes, "disk_bytes": 16 << 20}
            opened.append(tierstore.open(path, layout.spec, **sizes, **options))
            return opened[-1]

        yield open_
        for store in opened:
            store.close()


class TestEncrypted(Portioned):
    """An embedded store with an encrypted disk tier: layouts between the simplest and the richest are for the
    soak."""

    @pytest.fixture(params=chosen(LAYOUTS, LAYOUTS[0], LAYOUTS[-1]), ids=str)
    def layout(self, request):
        return request.param

    @pytest.fixture
    def open_store(self, tmp_path):
        pytest.importorskip("cryptography")
        from tierstore.tiers.disk.keyring import make_master_key

        make_master_key(tmp_path / "key")
        opened = []

        def open_(layout, *, host_chunks=256, disk=True, **options):
            if disk:
                number = len(opened)
                options["disk_key"] = str(tmp_path / "key")
                options["session_keys"] = True
                options["disk_keyring"] = tmp_path / f"ring {number}"
            path = tmp_path / f"disk {len(opened)}" if disk else None
            sizes = {"host_bytes": host_chunks * layout.chunk_bytes, "disk_bytes": 16 << 20}
            opened.append(tierstore.open(path, layout.spec, **sizes, **options))
            return opened[-1]

        yield open_
        for store in opened:
            store.close()


@pytest.fixture(scope="module")
def daemon_like():
    """Starts daemons, one for each set of options: they begin with nothing of a new identity."""
    daemons = {}
    directory = tempfile.mkdtemp(prefix="ts")

    def start(host_pages, disk, lease_s):
        key = (host_pages, disk, lease_s)
        if key not in daemons:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                tcp = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
            host_bytes = host_pages * SPEC.page_bytes
            own = tempfile.mkdtemp(dir=directory)
            options = (f"--lease-s={lease_s}", f"--reserve-bytes={host_bytes}")
            daemons[key] = DaemonProcess(own, *options, listen=(tcp,), host_bytes=host_bytes, disk=disk)
            daemons[key].tcp = tcp
            daemons[key].start()
        return daemons[key]

    yield start
    for daemon in daemons.values():
        daemon.kill()
    shutil.rmtree(directory, ignore_errors=True)


class Connected(Portioned):
    """The daemon has the core of an embedded store: layouts between the simplest and the richest are for the
    soak."""

    @pytest.fixture(params=chosen(LAYOUTS, LAYOUTS[0], LAYOUTS[-1]), ids=str)
    def layout(self, request):
        return request.param

    def url(self, daemon):
        raise NotImplementedError

    @pytest.fixture
    def open_store(self, daemon_like):
        opened = []

        def open_(layout, *, host_chunks=256, disk=True, lease_s=60.0, **options):
            url = self.url(daemon_like(host_chunks * len(layout.groups), disk, lease_s))
            opened.append(tierstore.connect(url, layout.spec, lookup_s=10.0, **options))
            assert opened[-1].wait_connected(30)
            return opened[-1]

        yield open_
        for store in opened:
            store.close()


class TestOverIpc(Connected):
    def url(self, daemon):
        return daemon.url


class TestOverTcp(Connected):
    """The same daemon and messages as over a socket."""

    def url(self, daemon):
        return daemon.tcp


class TestLocalBackend(BackendTests):
    @pytest.fixture
    def open_backend(self, tmp_path):
        opened = []

        def open_(*, identity, host_pages=64):
            path = tmp_path / f"disk {len(opened)}"
            nbytes = SPEC.page_bytes
            core = open_core(path, nbytes, host_bytes=host_pages * nbytes, disk_bytes=8 << 20)
            opened.append(LocalBackend(core, owns_core=True))
            return opened[-1]

        yield open_
        for backend in opened:
            backend.close()


class Remote(BackendTests):
    def url(self, daemon):
        raise NotImplementedError

    @pytest.fixture
    def open_backend(self, daemon_like):
        opened = []

        def open_(*, identity, host_pages=64):
            url = self.url(daemon_like(host_pages, True, 60.0))
            registration = Registration(identity, SPEC.page_bytes, SPEC.chunk_tokens)
            opened.append(RemoteBackend(Address.parse(url), registration, patience_s=10.0))
            return opened[-1]

        yield open_
        for backend in opened:
            backend.close()


class TestRemoteBackendOverIpc(Remote):
    def url(self, daemon):
        return daemon.url


class TestRemoteBackendOverTcp(Remote):
    shares_memory = False

    def url(self, daemon):
        return daemon.tcp
