"""Digests of files: every byte counts, and what is remembered is what was hashed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tierstore_connectors.common.contents import contents, default_cache, model_files

EPOCH = 10**18  # one time for all files, as in images


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "contents.json"


def put(file, data):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    os.utime(file, ns=(EPOCH, EPOCH))
    return file


def settle(*files):
    """Wait until the files' last change is old enough to be remembered."""
    youngest = max(each.stat().st_ctime_ns for each in files)
    while time.time_ns() - youngest <= 2_100_000_000:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def settled(tmp_path_factory):
    """A file of 300,000 bytes whose digest may be remembered."""
    file = put(tmp_path_factory.mktemp("settled") / "a", b"a" * 300_000)
    settle(file)
    return file


def test_one_byte_in_the_middle_makes_another_digest(tmp_path):
    data = bytearray(8 << 20)
    file = put(tmp_path / "model.safetensors", data)
    before = contents({"model": file}, remembered=None)
    data[3_000_001] = 1
    put(file, data)
    assert contents({"model": file}, remembered=None).digest != before.digest
    sampled = contents({"model": file}, remembered=None, sampled=True)
    assert (sampled.hashed_bytes, sampled.nbytes) == (0, 8 << 20)
    put(file, bytes(8 << 20))
    assert contents({"model": file}, remembered=None, sampled=True).digest == sampled.digest  # what it costs


def test_parts_and_names_are_told_apart(tmp_path):
    a, b = put(tmp_path / "a", b"12"), put(tmp_path / "b", b"3")
    c, d = put(tmp_path / "c", b"1"), put(tmp_path / "d", b"23")
    digests = {
        contents(files, remembered=None).digest
        for files in ({"a": a, "b": b}, {"a": c, "b": d}, {"b": a, "a": b}, {"a": a}, {})
    }
    assert len(digests) == 5
    assert contents({"b": b, "a": a}, remembered=None).digest in digests


def test_what_was_hashed_is_remembered(tmp_path, cache):
    files = {"a": put(tmp_path / "a", b"a" * 300_000), "b": put(tmp_path / "b", b"")}
    settle(*files.values())
    first = contents(files, remembered=cache)
    again = contents(files, remembered=cache)
    assert (first.hashed_bytes, again.hashed_bytes) == (300_000, 0)
    assert first.digest == again.digest == contents(files, remembered=None).digest
    assert cache.stat().st_mode & 0o777 == 0o600
    # Another file under the same name, of the same size and time, as an image's layer brings it.
    put(tmp_path / "new", b"b" * 300_000).replace(tmp_path / "a")
    assert contents(files, remembered=cache).digest != first.digest


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path, cache):
    file = put(tmp_path / "a", b"a" * 300_000)
    first = contents({"a": file}, remembered=cache)
    put(file, b"b" * 300_000)
    assert contents({"a": file}, remembered=cache).digest != first.digest


@pytest.mark.parametrize(
    "damage",
    ["text", "binary", "list", "version", "types", "link", "writable by others", "folder", "fifo", "large"],
)
def test_a_cache_file_that_cannot_be_trusted_is_ignored(tmp_path, cache, settled, damage):
    file = settled
    truth = contents({"a": file}, remembered=cache)
    document = json.loads(cache.read_text())
    lie = json.dumps({**document, "digests": dict.fromkeys(document["digests"], "0" * 64)})
    cache.unlink()
    if damage == "link":
        (tmp_path / "lie").write_text(lie)
        cache.symlink_to(tmp_path / "lie")
    elif damage == "folder":
        cache.mkdir()
    elif damage == "fifo":
        os.mkfifo(cache)
    elif damage == "large":
        cache.write_text(lie + " " * (5 << 20))
    else:
        wrong = {
            "text": "no JSON",
            "binary": "\x00\x01",
            "list": "[]",
            "version": lie.replace('"version": 1', '"version": 2'),
            "types": '{"version": 1, "digests": {"a": 3}}',
        }
        cache.write_text(wrong.get(damage, lie))
        cache.chmod(0o666 if damage == "writable by others" else 0o600)
    found = contents({"a": file}, remembered=cache)
    assert (found.digest, found.hashed_bytes) == (truth.digest, 300_000)
    if damage == "link":
        assert (tmp_path / "lie").read_text() == lie


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_cache_file_of_another_user_is_ignored(tmp_path, cache):
    file = put(tmp_path / "a", b"a" * 300_000)
    settle(file)
    contents({"a": file}, remembered=cache)
    os.chown(cache, 12345, -1)
    assert contents({"a": file}, remembered=cache).hashed_bytes == 300_000


def test_a_cache_folder_that_cannot_be_made_costs_a_hash(tmp_path):
    file = put(tmp_path / "a", b"abc")
    settle(file)
    for _ in range(2):
        assert contents({"a": file}, remembered=file / "contents.json").hashed_bytes == 3


def test_the_cache_file_stays_small(tmp_path, cache):
    file = put(tmp_path / "a", b"abc")
    settle(file)
    cache.parent.mkdir()
    old = {f"[{at}]": "0" * 64 for at in range(20_000)}
    cache.write_text(json.dumps({"version": 1, "digests": old}))
    cache.chmod(0o600)
    contents({"a": file}, remembered=cache)
    digests = json.loads(cache.read_text())["digests"]
    assert len(digests) == 8192
    assert contents({"a": file}, remembered=cache).hashed_bytes == 0


def test_processes_and_threads_hash_a_set_once_together(tmp_path, cache):
    files = {f"f{at}": put(tmp_path / f"f{at}", bytes([at]) * 3_000_000) for at in range(8)}
    settle(*files.values())
    code = (
        "import sys; from pathlib import Path\n"
        "from tierstore_connectors.common.contents import contents\n"
        "files = {p.name: p for p in Path(sys.argv[1]).iterdir() if p.is_file()}\n"
        "found = contents(files, remembered=Path(sys.argv[2]))\n"
        "print(found.digest, found.hashed_bytes)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(cache)]
    engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = [engine.communicate(timeout=120)[0].split() for engine in engines]
    assert {digest for digest, _ in found} == {contents(files, remembered=None).digest}
    assert sorted(int(hashed) for _, hashed in found) == [0, 0, 0, 24_000_000]
    # Different sets at once: nobody's entries are lost for good, and nobody fails.
    digests: dict[str, str] = {}

    def one(name):
        digests[name] = contents({name: files[name]}, remembered=cache).digest

    threads = [threading.Thread(target=one, args=(name,)) for name in files]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert digests == {name: contents({name: files[name]}, remembered=None).digest for name in files}


def test_a_file_that_cannot_be_read_is_an_error(tmp_path, cache):
    with pytest.raises(OSError, match="missing"):
        contents({"a": tmp_path / "missing"}, remembered=cache)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        contents({"a": tmp_path / "fifo"}, remembered=cache)
    with pytest.raises(OSError, match="not a regular file"):
        contents({"a": tmp_path}, remembered=cache)


def test_everything_beside_the_weights_belongs_to_a_model(tmp_path):
    for name in ("config.json", "model.safetensors", "code/rope.py", "mmproj.gguf", "vocab.txt"):
        put(tmp_path / name, b"x")
    for name in ("README.md", "LICENSE.txt", ".git/HEAD", ".cache/huggingface/x.metadata", "code/.x"):
        put(tmp_path / name, b"x")
    (tmp_path / "code" / "up").symlink_to(tmp_path)
    (tmp_path / "linked.json").symlink_to(tmp_path / "config.json")
    assert set(model_files(tmp_path)) == {
        *("config.json", "model.safetensors", "code/rope.py", "mmproj.gguf", "vocab.txt", "linked.json"),
    }


def test_the_cache_file_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tierstore" / "contents.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert str(default_cache()) == "/home/x/.cache/tierstore/contents.json"
