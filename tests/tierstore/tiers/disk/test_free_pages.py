"""What LMDB's file says of its free pages, against LMDB itself."""

from __future__ import annotations

import errno
import os
import random

import lmdb
import numpy as np
import pytest

from tierstore.tiers.disk.free_pages import PAGE_BYTES, free_pages, runs
from tierstore.tiers.disk.io import FileIO


@pytest.fixture
def index(tmp_path):
    """(environment, tree, content): an index that was written to and removed from many times."""
    env = lmdb.open(str(tmp_path / "index"), subdir=False, map_size=32 << 20, max_dbs=2)
    tree = env.open_db(b"tree")
    chance = random.Random(0)
    content = {}
    for _ in range(60):
        with env.begin(write=True, db=tree) as txn:
            for _ in range(20):
                key, value = chance.randbytes(8), chance.randbytes(chance.choice([30, 500, 4080, 20_000]))
                txn.put(key, value)
                content[key] = value
            for key in chance.sample(sorted(content), len(content) // 6):
                txn.delete(key)
                del content[key]
    yield env, tree, content
    env.close()


def used_pages(env, tree):
    with env.begin() as txn:
        stat = txn.stat(tree)
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]


def test_every_page_is_used_or_free(index, tmp_path):
    env, tree, _ = index
    free = free_pages(tmp_path / "index")
    rest = env.info()["last_pgno"] + 1 - used_pages(env, tree) - len(free)
    assert len(free) > 50
    assert 4 <= rest <= 12, "two meta pages, the tree of trees, and the list itself"


def test_holes_in_their_place_change_nothing(index, tmp_path):
    env, tree, content = index
    io = FileIO()
    before = os.stat(tmp_path / "index")
    fd = io.open(tmp_path / "index", os.O_RDWR)
    freed = 0
    for first, count in runs(free_pages(tmp_path / "index")):
        io.punch(fd, first * PAGE_BYTES, count * PAGE_BYTES)
        freed += count * PAGE_BYTES
    io.sync(fd)
    io.close(fd)
    after = os.stat(tmp_path / "index")
    assert after.st_size == before.st_size
    assert after.st_blocks * 512 <= before.st_blocks * 512 - freed + 64 * PAGE_BYTES
    for _ in range(8):  # what was free is used again
        with env.begin(write=True, db=tree) as txn:
            for _ in range(20):
                key, value = os.urandom(8), os.urandom(5000)
                txn.put(key, value)
                content[key] = value
    with env.begin(db=tree) as txn:
        assert {bytes(key): bytes(value) for key, value in txn.cursor()} == content


def test_an_index_that_nothing_was_removed_from_has_none(tmp_path):
    with lmdb.open(str(tmp_path / "index"), subdir=False, map_size=1 << 20):
        assert not len(free_pages(tmp_path / "index"))


@pytest.mark.parametrize("at", [10, 16, 20])  # the kind of page, the magic number, the version
def test_a_file_that_is_laid_out_otherwise_is_refused(index, tmp_path, at):
    env, _, _ = index
    env.close()
    data = bytearray((tmp_path / "index").read_bytes())
    for page in (0, PAGE_BYTES):
        data[page + at : page + at + 4] = bytes(4)
    (tmp_path / "strange").write_bytes(data)
    with pytest.raises(OSError, match="not laid out as LMDB does it") as raised:
        free_pages(tmp_path / "strange")
    assert raised.value.errno == errno.EIO


def test_runs_of_numbers():
    assert list(runs(np.array([2, 3, 4, 8, 10, 11]))) == [(2, 3), (8, 1), (10, 2)]
    assert list(runs(np.array([], np.int64))) == []
