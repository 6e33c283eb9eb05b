"""Directories that earlier versions have written open, and give back what was saved in them.

``713856d.tar.xz`` was written by commit 713856d: three pages of 192 tokens, each filled with its number (1,
2, 3), saved with the spec and identity below, flushed and closed. ``ee6812b.tar.xz`` was written by commit
ee6812b: three directories of five pages, in the extents, in the index, and kept by the codec ``lossless``.
Page ``n`` is filled with the float16 1 + n / 64.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tierstore import Identity, KVSpec
from tierstore.tiers.disk.fsck import fsck

DATA = Path(__file__).parents[3] / "data" / "directories"
BIG = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float16")
SMALL = KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=16)


def unpack(name, path):
    with tarfile.open(DATA / name) as archive:
        for member in archive:
            archive.extract(member, path)


def assert_held(path, spec, identity, pages, disk_bytes=8 << 20):
    tokens = list(range(len(pages) * spec.chunk_tokens))
    with tierstore.open(path, spec, identity=identity, host_bytes=1 << 20, disk_bytes=disk_bytes) as store:
        with store.lookup(tokens) as hit:
            assert hit.by_tier == {"disk": len(tokens)}
            buffers = [bytearray(spec.page_bytes) for _ in pages]
            assert store.load(hit, buffers, deadline_s=30.0).wait().tokens == len(tokens)
        assert buffers == pages
        store.check()


def test_directory_of_commit_713856d(tmp_path):
    unpack("713856d.tar.xz", tmp_path / "store")
    identity = Identity.of(BIG, model="example", revision="1")
    assert_held(tmp_path / "store", BIG, identity, [bytes([n]) * BIG.page_bytes for n in (1, 2, 3)])


@pytest.mark.parametrize("disk_bytes", [8 << 20, 5 << 20])
@pytest.mark.parametrize(("name", "spec"), [("extents", BIG), ("inline", SMALL), ("encoded", BIG)])
def test_directories_of_commit_ee6812b(tmp_path, name, spec, disk_bytes):
    unpack("ee6812b.tar.xz", tmp_path)
    assert fsck(tmp_path / name).clean
    pages = [np.full(spec.page_bytes // 2, 1 + n / 64, np.float16).tobytes() for n in range(5)]
    assert_held(tmp_path / name, spec, Identity.of(spec, model=name), pages, disk_bytes)
    assert fsck(tmp_path / name).clean
