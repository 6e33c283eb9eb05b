"""``tierstore pack`` between two real daemons."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

import tierstore
from tests.daemons import SPEC, load_bytes, pages_of
from tests.tierstore.cli.commands import PAGES, TOKENS, command, load_groups, run, save_groups
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess

IDENTITY = Identity.of(SPEC, model="m")


@pytest.fixture
def second(directory):
    """Another daemon, which has nothing."""
    (directory / "b").mkdir(mode=0o700)
    process = DaemonProcess(directory / "b").start()
    with tierstore.connect(process.url, SPEC, identity=IDENTITY) as store:
        assert store.wait_connected(30)
    yield process
    process.kill()


@pytest.fixture
def prompt(tmp_path):
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(TOKENS))
    return file


@pytest.fixture
def pack(tmp_path, daemon, prompt):
    """A pack of the first daemon's pages, signed."""
    assert run("pack", "keygen", "me", "--dir", tmp_path)[0] == 0
    code, out, err = run(
        *("pack", "export", tmp_path / "a.tskv", "--prompt-file", prompt),
        *("--sign", tmp_path / "me.pem", "--connect", daemon.url),
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"{len(TOKENS)} of {len(TOKENS)} tokens are packed: ")
    return tmp_path / "a.tskv"


def pages_at(url, identity=IDENTITY):
    with tierstore.connect(url, SPEC, identity=identity, lookup_s=5.0) as store:
        assert store.wait_connected(30)
        return load_bytes(store, store.lookup(TOKENS))


def test_a_second_daemon_has_the_same_bytes(pack, second, tmp_path):
    public = tmp_path / "me.pub"
    code, out, err = run("pack", "import", pack, "--signer", public, "--connect", second.url)
    assert (code, err) == (0, "")
    assert out.startswith("all pages are in the store: 320 tokens of 1 prompts, 20 pages, ")
    assert pages_at(second.url) == (len(TOKENS), pages_of(TOKENS))
    again = run("pack", "import", pack, "--signer", public, "--connect", second.url)
    assert again[0] == 0
    assert f"{PAGES} of them already were" in again[1]
    second.kill()
    second.start()  # and it is on disk
    assert pages_at(second.url) == (len(TOKENS), pages_of(TOKENS))


def test_an_encrypted_pack_needs_its_key(daemon, second, prompt, tmp_path):
    pytest.importorskip("cryptography")
    for name in ("key", "other"):
        assert run("disk-key", "new", tmp_path / name)[0] == 0
    pack = tmp_path / "a.tskv"
    key = ("--key", tmp_path / "key")
    code, _, err = run("pack", "export", pack, *key, "--prompt-file", prompt, "--connect", daemon.url)
    assert (code, err) == (0, "")
    data = pack.read_bytes()
    assert not any(page[:64] in data for page in pages_of(TOKENS))
    for wrong, why in (
        ((), "the pack is encrypted: give --key"),
        (("--key", tmp_path / "other"), "the key does not open the pack"),
    ):
        code, _, err = run("pack", "import", pack, *wrong, "--connect", second.url)
        assert (code, why in err, err.count("\n")) == (1, True, 1)
    assert run("pack", "verify", pack, *key)[0] == 0
    store = tmp_path / "store"
    store_key = ("--store", store, "--disk-key", tmp_path / "other")
    code, _, err = run("pack", "import", pack, *key, *store_key)  # from key to key
    assert (code, err) == (0, "")
    code, _, err = run("pack", "export", tmp_path / "b.tskv", "--prompt-file", prompt, *store_key)
    assert (code, err) == (0, "")
    code, _, err = run("pack", "import", tmp_path / "b.tskv", "--connect", second.url)
    assert (code, err) == (0, "")
    assert pages_at(second.url) == (len(TOKENS), pages_of(TOKENS))
    code, _, err = run("pack", "import", pack, *store_key[2:])
    assert (code, "give it, too" in err) == (2, True)


def test_all_layer_groups_of_a_model(daemon, second, prompt, tmp_path):
    save_groups(daemon.url)
    pack = tmp_path / "groups.tskv"
    told = ("--prompt-file", prompt, "--model", "groups", "--connect", daemon.url)
    code, out, err = run("pack", "export", pack, *told)
    assert (code, err) == (0, "")
    assert "2 packs of further layer groups" in out
    assert run("pack", "verify", pack)[0] == 0
    assert load_groups(second.url) == 0
    code, out, err = run("pack", "import", pack, "--new-model", "--connect", second.url)
    assert (code, err) == (0, "")
    assert load_groups(second.url) == len(TOKENS)


def test_from_one_daemon_to_another_through_a_pipe(daemon, second, prompt):
    export = subprocess.Popen(
        command("pack", "export", "-", "--prompt-file", prompt, "--connect", daemon.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    taken = subprocess.run(
        command("pack", "import", "-", "--connect", second.url),
        stdin=export.stdout,
        capture_output=True,
        check=False,
        timeout=60,
    )
    _, said = export.communicate(timeout=60)
    assert (export.returncode, taken.returncode, taken.stderr) == (0, 0, b"")
    assert b"320 of 320 tokens are packed" in said
    assert pages_at(second.url) == (len(TOKENS), pages_of(TOKENS))


def test_a_directory_that_nobody_has_open(pack, daemon, directory, prompt, tmp_path):
    daemon.store.close()
    daemon.end()
    code, _, err = run(
        *("pack", "export", tmp_path / "b.tskv", "--prompt-file", prompt, "--sign", tmp_path / "me.pem"),
        *("--store", directory / "disk"),
    )
    assert (code, err) == (0, "")
    assert (tmp_path / "b.tskv").read_bytes() == pack.read_bytes()
    assert run("pack", "import", pack, "--store", tmp_path / "new")[0] == 0
    with tierstore.open(tmp_path / "new", SPEC, identity=IDENTITY, host_bytes=4 << 20) as store:
        assert load_bytes(store, store.lookup(TOKENS)) == (len(TOKENS), pages_of(TOKENS))


def test_a_pack_of_another_model_is_one_line(pack, second):
    other = replace(IDENTITY, revision="2")
    with tierstore.connect(second.url, SPEC, identity=other, lookup_s=5.0) as store:
        assert store.wait_connected(30)
        assert store.save(TOKENS[:16], pages_of(TOKENS[:16])).wait(30) == 16
        code, out, err = run("pack", "import", pack, "--connect", second.url)
        assert (code, out) == (1, "")
        line = "the pack is of another model: revision '', not '2' (--new-model imports it anyway)"
        assert err == f"tierstore: {line}\n"
        assert store.lookup(TOKENS).tokens == 16
        assert store.stats().pages == 1
    assert run("pack", "import", pack, "--new-model", "--connect", second.url)[0] == 0
    assert pages_at(second.url) == (len(TOKENS), pages_of(TOKENS))


def test_verify_says_what_it_is_and_what_is_wrong(pack, tmp_path):
    code, out, _ = run("pack", "verify", pack)
    assert (code, out.startswith("good: 320 tokens of 1 prompts, 20 pages, ")) == (0, True)
    document = json.loads(run("pack", "verify", pack, "--json", "--signer", tmp_path / "me.pub")[1])
    assert (document["pages"], document["identity"]["model"]) == (PAGES, "m")
    assert document["pack_bytes"] == pack.stat().st_size
    run("pack", "keygen", "other", "--dir", tmp_path)
    data = bytearray(pack.read_bytes())
    data[-9000] ^= 1
    pack.write_bytes(data)
    for options, words in (([], "has changed"), (["--signer", tmp_path / "other.pub"], "signed by")):
        code, out, err = run("pack", "verify", pack, *options)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert words in err


def test_mistakes_are_one_line(pack, daemon, prompt, tmp_path, directory):
    other = tmp_path / "other.json"
    other.write_text(json.dumps([7] * 64))
    connect = ("--connect", daemon.url)
    for arguments, code, words in (
        (("export", pack, "--prompt-file", prompt, *connect), 2, "is there already"),
        (("export", tmp_path / "c", "--prompt-file", other, *connect), 2, "nothing to pack"),
        (
            ("export", tmp_path / "c", "--prompt-file", prompt, "--model", "x", *connect),
            2,
            "no stored pages match",
        ),
        (("export", tmp_path / "no" / "c", "--prompt-file", prompt, *connect), 2, "cannot write"),
        (("import", pack, "--connect", f"ipc://{directory}/nobody"), 1, "no daemon at"),
        (("import", pack, "--store", tmp_path / "d", *connect), 2, "not both"),
        (("import", prompt, *connect), 1, "not a pack"),
        (("verify", tmp_path / "missing"), 2, "cannot read"),
    ):
        got, out, err = run("pack", *arguments)
        assert (got, out, err.count("\n")) == (code, "", 1), (arguments, err)
        assert words in err
