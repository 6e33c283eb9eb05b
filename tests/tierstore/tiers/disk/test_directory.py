"""Who may use a directory, and what happens to one that is refused."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import lmdb
import pytest

from tierstore.errors import StoreUnavailableError, TierStoreError
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.disk.fsck import fsck
from tierstore.tiers.disk.index_db import FORMAT, SEALED_FORMAT
from tierstore.units import KIB, MIB

OPTIONS = {"capacity_bytes": 4 * MIB, "page_bytes": 64 * KIB}


def open_tier(path):
    return DiskTier.open(path, **OPTIONS)


def fingerprint(path):
    """Everything about the files of a directory that a visitor could change."""
    found = {}
    for root, _, names in os.walk(path):
        for name in names:
            file = os.path.join(root, name)
            with open(file, "rb") as stream:
                found[file] = (hashlib.sha256(stream.read()).hexdigest(), os.stat(file).st_mtime_ns)
    return found


def test_a_second_opener_is_told_who_the_first_is(open_shelf, path):
    shelf = open_shelf()
    shelf.save([64 * KIB])
    before = fingerprint(path)
    with pytest.raises(StoreUnavailableError, match=f"in use by process {os.getpid()}"):
        open_tier(path)
    code = (
        "import sys, pathlib\n"
        "from tierstore.tiers.disk import DiskTier\n"
        f"DiskTier.open(pathlib.Path(sys.argv[1]), capacity_bytes={4 * MIB}, page_bytes={64 * KIB})"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert f"in use by process {os.getpid()}: stop it" in other.stderr
    assert fingerprint(path) == before
    shelf.verify()


def test_a_removed_lock_file_lets_no_second_owner_in(open_shelf, path):
    """Cleaners of /tmp remove old files from directories in use, LMDB's lock among them."""
    shelf = open_shelf()
    shelf.save([64 * KIB])
    for name in ("lock", "index.lmdb-lock"):
        (path / name).unlink()
    with pytest.raises(StoreUnavailableError, match=r"in use by process \(unknown\)"):
        open_tier(path)
    code = "import sys, pathlib\nfrom tierstore.tiers.disk.fsck import fsck\nfsck(pathlib.Path(sys.argv[1]))"
    other = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert other.returncode == 1
    assert "in use by process" in other.stderr
    shelf.verify()
    shelf.reopen()
    shelf.verify()


def test_an_owner_that_locks_the_file_only_is_respected(path):
    """Earlier versions do not lock the directory."""
    open_tier(path).close()
    with open(path / "lock", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate()
        file.write(b"4711\n")
        file.flush()
        with pytest.raises(StoreUnavailableError, match="in use by process 4711"):
            open_tier(path)
        with pytest.raises(StoreUnavailableError, match="in use by process 4711"):
            fsck(path)
    open_tier(path).close()


@pytest.mark.parametrize(
    "name",
    ["lock", "index.lmdb", "index.lmdb-lock", "index.lmdb.new", "index.lmdb.damaged", "extents/000000"],
)
@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_among_the_files_is_refused_and_not_followed(path, tmp_path, name, there):
    precious = tmp_path / "precious"
    if there:
        precious.write_bytes(b"precious" * 1000)
    (path / "extents").mkdir(parents=True)
    (path / "lock").touch()
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(precious)
    for use in (open_tier, partial(fsck, repair=True)):
        with pytest.raises(TierStoreError, match=r"is a symbolic link|holds no store"):
            use(path)
    assert precious.exists() == there
    assert not there or precious.read_bytes() == b"precious" * 1000


def test_a_directory_may_be_named_by_a_symbolic_link(path, tmp_path):
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    with open_tier(tmp_path / "link"), pytest.raises(StoreUnavailableError, match="in use"):
        open_tier(path)


def test_a_forked_child_does_not_hold_the_directory(open_shelf, path):
    shelf = open_shelf()
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        there.send(b"running")
        there.recv(1)
        os._exit(0)
    here.recv(7)
    try:
        shelf.reopen()
    finally:
        here.send(b"x")
        os.waitpid(child, 0)
        here.close()
        there.close()


@pytest.mark.parametrize(
    ("found", "advice"),
    [(SEALED_FORMAT + 1, "newer tierstore .* upgrade"), (FORMAT - 1, "older tierstore .* remove")],
)
def test_another_format_is_refused_untouched(open_shelf, path, found, advice):
    open_shelf().save([64 * KIB, 4 * KIB])
    copy = path.with_name("newer")
    shutil.copytree(path, copy)
    _set_format(copy, str(found).encode())
    before = fingerprint(copy)
    with pytest.raises(StoreUnavailableError, match=advice):
        open_tier(copy)
    assert fingerprint(copy) == before


def _set_format(path, value):
    env = lmdb.open(str(path / "index.lmdb"), subdir=False, max_dbs=4)
    with env, env.begin(write=True, db=env.open_db(b"meta")) as txn:
        txn.put(b"format", value)


@pytest.mark.parametrize("content", [b"no index at all" * 1000, os.urandom(64 * KIB)])
def test_a_file_that_is_no_index_is_refused_untouched(path, content):
    path.mkdir()
    (path / "index.lmdb").write_bytes(content)
    (path / "lock").write_bytes(b"")
    before = fingerprint(path)
    with pytest.raises(StoreUnavailableError, match=r"damaged or not an index .* remove the directory"):
        open_tier(path)
    assert fingerprint(path) == before


def test_an_lmdb_file_of_somebody_else_is_refused(path):
    path.mkdir()
    _set_format(path, b"parquet")
    with pytest.raises(StoreUnavailableError, match="not written by tierstore"):
        open_tier(path)


def test_a_directory_with_other_files_is_refused_untouched(path):
    path.mkdir()
    (path / "thesis.tex").write_text("do not touch")
    with pytest.raises(StoreUnavailableError, match="holds other files and no store"):
        open_tier(path)
    assert os.listdir(path) == ["thesis.tex"]


def test_an_empty_directory_and_a_path_of_several_new_ones_are_made_stores(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        with open_tier(path) as tier:
            assert list(tier.scan()) == []
        assert oct(path.stat().st_mode)[-2:] in ("00", "55")


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(
            StoreUnavailableError, match=r"cannot use .* as a store directory: Not a directory"
        ):
            open_tier(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_refused(path):
    path.mkdir(mode=0o500)
    with pytest.raises(StoreUnavailableError, match=r"cannot use .* Permission denied"):
        open_tier(path)


def test_the_file_system_of_the_kernel_is_refused():
    with pytest.raises(StoreUnavailableError, match="cannot use /proc/tierstore as a store directory"):
        open_tier(Path("/proc/tierstore"))


def test_a_directory_that_was_begun_and_not_finished_is_taken(path):
    path.mkdir()
    (path / "lock").write_text("")
    (path / "index.lmdb").write_bytes(b"")
    (path / "index.lmdb.new").write_bytes(b"left behind")
    with open_tier(path) as tier:
        tier.check()
    assert sorted(os.listdir(path)) == ["extents", "index.lmdb", "index.lmdb-lock", "lock"]
