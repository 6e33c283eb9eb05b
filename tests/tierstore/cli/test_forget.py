"""``tierstore forget`` and ``tierstore disk-key``, and a daemon with an encrypted disk."""

from __future__ import annotations

import json

import pytest

import tierstore
from tests.small_store import SPEC, load_bytes, pages_of
from tests.tierstore.cli.commands import run
from tierstore.cli.forget import receipt_digest
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess

pytest.importorskip("cryptography")

TOKENS = list(range(64))


@pytest.fixture
def key(tmp_path):
    code, out, _ = run("disk-key", "new", tmp_path / "key")
    assert code == 0
    assert str(tmp_path / "key") in out
    assert (tmp_path / "key").read_text().strip() not in out
    return tmp_path / "key"


@pytest.fixture
def daemon(tmp_path, key):
    process = DaemonProcess(str(tmp_path), f"--disk-key={key}", host_bytes=2 << 20, disk=True)
    process.start()
    yield process
    process.kill()


def connected(daemon, tenant):
    identity = Identity.of(SPEC, model="a model", tenant=tenant)
    return tierstore.connect(daemon.url, SPEC, identity=identity, lookup_s=10.0)


def test_an_operator_forgets_a_tenant_and_gets_a_signed_receipt(daemon, tmp_path):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    assert run("pack", "keygen", "operator", "--dir", tmp_path)[0] == 0
    with connected(daemon, "acme") as acme, connected(daemon, "globex") as globex:
        for store in (acme, globex):
            assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == 64
            assert store.flush(30)
        forget = ("forget", "--connect", daemon.url, "--tenant", "acme")
        code, out, err = run(*forget, "--sign", tmp_path / "operator.pem")
        assert (code, err) == (0, "")
        document = json.loads(out)
        receipt = document["receipt"]
        assert (receipt["tenant"], receipt["keys"], receipt["host_pages"]) == ("acme", 1, 4)
        signer = Ed25519PublicKey.from_public_bytes(bytes.fromhex(document["signer"]))
        signer.verify(bytes.fromhex(document["signature"]), receipt_digest(receipt))
        assert acme.lookup(TOKENS).tokens == 0
        with globex.lookup(TOKENS) as hit:
            assert load_bytes(globex, hit)[1] == pages_of(TOKENS)
        code, out, _ = run(*forget)
        assert (code, out.startswith("forgot tenant 'acme' in ")) == (0, True)
        assert "1 identity, 0 pages in host memory, 0 keys dropped" in out


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["forget"], "say what to forget: a tenant, a model or a session"),
        (["forget", "--session", "a", "--model", "b"], "leave model out"),
        (["forget", "--tenant", "a", "--sign", "nothing.pem"], "cannot read a private key in nothing.pem"),
        (["serve", "--disk-key", "nothing"], "encrypts the disk tier, and there is none"),
        (["serve", "--disk", "d", "--disk-key", "nothing"], "cannot read the disk key in nothing"),
        (["serve", "--disk", "d", "--disk-keyring", "ring"], "disk_keyring needs disk_key"),
        (["serve", "--disk", "d", "--disk-key", "k", "--cluster", "etcd://h:1"], "leave one of the two out"),
        (["disk-key", "rotate", "nothing", "new"], "there is no keyring nothing.ring: give --keyring"),
    ],
)
def test_bad_usage_is_one_line(arguments, advice, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert advice in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_key_is_rotated(key, tmp_path):
    disk = {"host_bytes": 1 << 20, "disk_bytes": 8 << 20}
    ring = tmp_path / "key.ring"
    with tierstore.open(tmp_path / "store", SPEC, disk_key=str(key), **disk) as store:
        assert store.save(TOKENS, pages_of(TOKENS)).wait(30) == 64
    assert run("disk-key", "new", tmp_path / "newer")[0] == 0
    code, out, _ = run("disk-key", "rotate", key, tmp_path / "newer")
    assert (code, str(ring) in out) == (0, True)
    code, _, err = run("disk-key", "rotate", key, tmp_path / "newer")
    assert (code, "does not open" in err) == (2, True)
    newer = {"disk_key": str(tmp_path / "newer"), "disk_keyring": ring}
    with tierstore.open(tmp_path / "store", SPEC, **newer, **disk) as store:
        assert store.lookup(TOKENS).tokens == 64
    with tierstore.open(tmp_path / "store", SPEC, disk_key=str(key), **disk) as store:
        assert store.lookup(TOKENS).tokens == 0
        assert store.flush(30)
        line = store.stats().health_line
        assert f"the disk key does not open {ring}" in line
        assert "\n" not in line
