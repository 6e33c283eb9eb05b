"""A directory that an earlier version has written opens, and gives back what was saved in it.

``tests/data/directories`` has the directories, and says what they hold.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.data.directories.pages import MODELS, page, tokens_of
from tierstore import Identity, KVSpec
from tierstore.tiers.disk.fsck import fsck
from tierstore.tiers.disk.fsck.findings import Category
from tierstore.tiers.group_pools import bytes_for

WRITTEN = Path(__file__).parents[3] / "data" / "directories"
HITS = json.loads((WRITTEN / "hits.json").read_text())
POOL_PAGES = 16


def unpacked(name, to):
    with tarfile.open(WRITTEN / f"{name}.tar.xz") as archive:
        archive.extractall(to, filter="data")
    return to


# -- the calls of the public API that the tests make ------------------------------------------------------


def identity_of(spec, **fields):
    return Identity.of(spec, model="example", revision="1", **fields)


def open_store(path, spec, identity):
    """A store over this directory, and the pool of each layer group."""
    parts = spec.split()
    pools = tierstore.open_pools(spec, bytes_for(parts, [POOL_PAGES] * len(parts)))
    options = {"identity": identity, "host_bytes": 4 << 20, "disk_bytes": 16 << 20}
    return tierstore.open(path, spec, pools=pools, **options), pools


def load(store, tokens):
    """The tokens of the hit that a prompt has, once it is loaded, and the pages of each group."""
    loaded = store.load(store.lookup(store.prompt(tokens))).wait()
    return loaded.tokens, loaded.groups


def release(store, groups):
    for group, each in enumerate(groups):
        store.release_hbm(each.pages, group=group)


# -- the tests -------------------------------------------------------------------------------------------


def compare(spec, pools, groups, tokens):
    """The loaded pages of these tokens are those that were saved."""
    for group, (part, pool, each) in enumerate(zip(spec.split(), pools, groups, strict=True)):
        for chunk, number in enumerate(each.pages, each.first):
            saved = page(part, group, tokens, chunk)
            loaded = pool.array[number].reshape(saved.shape[0], -1, saved.shape[2])
            # Behind the hit's last token a page holds what was saved behind it.
            assert np.array_equal(loaded[:, : saved.shape[1]], saved), (len(tokens), group, chunk)


@pytest.mark.parametrize("codec", ["none", "lossless"])
@pytest.mark.parametrize("model", MODELS)
def test_directory_of_an_earlier_version(tmp_path, model, codec):
    path, spec = unpacked(f"ee6812b_{model}_{codec}", tmp_path / "store"), KVSpec.parse(MODELS[model])
    store, pools = open_store(path, spec, identity_of(spec))
    with store:
        for expected in HITS[model]:
            tokens = tokens_of(expected["prompt"])
            hit, groups = load(store, tokens)
            assert hit == expected["hit"], expected
            assert [[each.first, len(each.pages)] for each in groups] == expected["pages"], expected
            compare(spec, pools, groups, tokens[:hit])
            release(store, groups)
        store.check()


def test_pages_of_a_removed_codec_are_misses(tmp_path, caplog):
    """The directory's other pages are found. Only the first opening says how many pages it removes."""
    path, spec = unpacked("ee6812b_lossy", tmp_path / "store"), KVSpec.parse(MODELS["full"])
    found = fsck(path)
    assert (found.pages, found.good_pages) == (12, 3)
    assert {(finding.category, finding.what) for finding in found.findings} == {(Category.ORPHANED, "codec")}
    tokens = list(range(130))
    for _ in range(2):
        for codec in ("lossless", "fp8", "int8", "int4"):
            kept = {} if codec == "lossless" else {"codec": f"raw;disk={codec}"}
            store, pools = open_store(path, spec, identity_of(spec, tenant=codec, **kept))
            with store:
                hit, groups = load(store, tokens)
                assert hit == (130 if codec == "lossless" else 0)
                compare(spec, pools, groups, tokens)
                release(store, groups)
                store.check()
    [line] = [record.getMessage() for record in caplog.records]
    assert line == (
        f"disk tier: removed 9 pages from {path}: earlier versions encoded them with a lossy disk codec "
        "(fp8, int8, int4)"
    )
    found = fsck(path)
    assert (found.pages, found.good_pages, found.findings) == (3, 3, [])


def test_fsck_removes_pages_of_a_removed_codec(tmp_path):
    path = unpacked("ee6812b_lossy", tmp_path / "store")
    assert fsck(path, repair=True).good_pages == 3
    found = fsck(path)
    assert (found.pages, found.good_pages, found.findings) == (3, 3, [])


def test_directory_of_the_first_version(tmp_path):
    path = unpacked("713856d", tmp_path / "store")
    spec = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float16")
    with tierstore.open(
        path, spec, identity=identity_of(spec), host_bytes=1 << 20, disk_bytes=8 << 20
    ) as store:
        with store.lookup(range(192)) as hit:
            assert hit.by_tier == {"disk": 192}
            buffers = [bytearray(spec.page_bytes) for _ in range(3)]
            assert store.load(hit, buffers).wait().tokens == 192
        assert buffers == [bytearray([number]) * spec.page_bytes for number in (1, 2, 3)]
        store.check()
