"""A directory that an earlier version has written opens, and gives back what was saved in it.

``directory_713856d.tar.xz`` was written by commit 713856d: three pages of 192 tokens, each filled with its
number (1, 2, 3), saved with the spec and identity below, flushed and closed.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import tierstore
from tierstore import Identity, KVSpec

WRITTEN = Path(__file__).with_name("directory_713856d.tar.xz")


def test_directory_of_an_earlier_version(tmp_path):
    with tarfile.open(WRITTEN) as archive:
        for member in archive:
            archive.extract(member, tmp_path / "store")
    spec = KVSpec.uniform(layers=4, kv_heads=2, head_dim=64, dtype="float16")
    identity = Identity.of(spec, model="example", revision="1")
    with tierstore.open(
        tmp_path / "store", spec, identity=identity, host_bytes=1 << 20, disk_bytes=8 << 20
    ) as store:
        with store.lookup(range(192)) as hit:
            assert hit.by_tier == {"disk": 192}
            buffers = [bytearray(spec.page_bytes) for _ in range(3)]
            assert store.load(hit, buffers).wait().tokens == 192
        assert buffers == [bytearray([number]) * spec.page_bytes for number in (1, 2, 3)]
        store.check()
