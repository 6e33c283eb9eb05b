"""A store whose disk tier keeps pages by a codec: the same pages, in fewer bytes."""

from __future__ import annotations

import ctypes
import json

import numpy as np
import pytest

import tierstore
from tests.small_store import load_bytes
from tierstore import native
from tierstore.codec import Lossless, by_name
from tierstore.errors import StoreUnavailableError
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.disk import INLINE
from tierstore.tiers.disk.encoding import PageBytes, PageEncoder
from tierstore.tiers.disk.fsck import fsck
from tierstore.tiers.disk.index_db import ENCODED_FORMAT
from tierstore.units import MIB

SPEC = KVSpec.uniform(layers=4, kv_heads=4, head_dim=64, dtype="bfloat16")  # 256 KiB pages
OPAQUE = KVSpec.opaque(SPEC.page_bytes, chunk_tokens=SPEC.chunk_tokens)
TOKENS = np.arange(16 * SPEC.chunk_tokens)
MADE = 1.35  # what these pages come to at least, rooms included

pytestmark = pytest.mark.skipif(native.CODEC is None, reason="no C compiler")


def pages(count: int = 16, seed: int = 0) -> list[bytes]:
    """Numbers of like size, as KV is."""
    numbers = np.random.default_rng(seed).standard_normal((count, SPEC.page_bytes // 2)).astype(np.float32)
    return [(page.view(np.uint32) >> 16).astype(np.uint16).tobytes() for page in numbers]


def opened(path, codec="none", spec=SPEC, **options):
    identity = options.pop("identity", Identity.of(spec, model="test"))
    return tierstore.open(
        path, spec, identity=identity, host_bytes=16 * MIB, disk_bytes=64 * MIB, disk_codec=codec, **options
    )


def save(store, tokens=TOKENS, seed=0):
    saved = store.save(tokens, pages(len(tokens) // SPEC.chunk_tokens, seed)).wait(30)
    assert store.flush(30)
    return saved


def load(store, tokens=TOKENS):
    """What the disk gives."""
    store.evict("host")
    hit = store.lookup(tokens)
    assert hit.by_tier == ({"disk": hit.tokens} if hit.tokens else {})
    return load_bytes(store, hit)[1]


def extent_bytes(store) -> int:
    disk = store.backend.core.disk
    disk.check()
    return disk.stats().extent_used_bytes


def records(store):
    return [record for _, record in store.backend.core.disk.scan()]


@pytest.mark.parametrize("spec", [SPEC, OPAQUE], ids=["known", "opaque"])
@pytest.mark.parametrize("codec", ["lossless", "zstd"])
def test_pages_come_back_bit_for_bit_from_fewer_bytes(tmp_path, codec, spec):
    pytest.importorskip("zstandard")
    with opened(tmp_path / "store", codec, spec) as store:
        assert save(store) == len(TOKENS)
        assert load(store) == pages()
        assert extent_bytes(store) < 16 * SPEC.page_bytes / MADE
        assert all(record.codec for record in records(store))
        counters = store.stats().counters
        assert counters["disk_encoded_pages"] == 16
        assert counters["disk_saved_bytes"] == 16 * SPEC.page_bytes - extent_bytes(store)
    for life in ("none", codec):  # what is there is read whatever is written now
        with opened(tmp_path / "store", life, spec) as store:
            assert load(store) == pages()
            extent_bytes(store)
    report = fsck(tmp_path / "store")
    assert (report.good_pages, report.findings) == (16, [])


def test_a_directory_from_before_goes_on_with_a_codec(tmp_path):
    with opened(tmp_path / "store") as store:
        save(store)
    more = np.arange(32 * SPEC.chunk_tokens)
    with opened(tmp_path / "store", "lossless") as store:
        assert load(store) == pages()
        store.save(more, pages() + pages(seed=1)).wait(30)
        assert store.flush(30)
        assert load(store, more) == pages() + pages(seed=1)
        assert sorted(record.codec for record in records(store)) == [0] * 16 + [1] * 16


def test_pages_that_do_not_become_smaller_are_kept_as_they_are(tmp_path):
    noise = [np.random.default_rng(at).bytes(SPEC.page_bytes) for at in range(16)]
    with opened(tmp_path / "store", "lossless") as store:
        store.save(TOKENS, noise).wait(30)
        assert store.flush(30)
        assert load(store) == noise
        assert {record.codec for record in records(store)} == {0}


def test_small_pages_stay_in_the_index(tmp_path):
    with opened(tmp_path / "store", "lossless", inline_bytes=SPEC.page_bytes) as store:
        save(store)
        assert load(store) == pages()
        assert {(record.codec, record.place) for record in records(store)} == {(0, INLINE)}


def test_nothing_is_encoded_while_the_writer_is_behind(tmp_path, monkeypatch):
    with opened(tmp_path / "store", "lossless") as store:
        store.backend.core.write_behind._behind_bytes = -1
        save(store)
        assert load(store) == pages()
        assert {record.codec for record in records(store)} == {0}


def test_a_payload_that_is_damaged_is_a_miss_and_repaired_by_removal(tmp_path):
    with opened(tmp_path / "store", "lossless") as store:
        save(store)
        damaged = records(store)[5]
    [extent] = (tmp_path / "store" / "extents").iterdir()
    with open(extent, "r+b") as file:
        file.seek(damaged.place + damaged.encoded_bytes // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert fsck(tmp_path / "store").counts  # found, and nothing changed
    with opened(tmp_path / "store", "lossless") as store:
        assert load(store) == pages()[:5]
        with store.lookup(TOKENS) as hit:
            assert hit.tokens == 5 * SPEC.chunk_tokens
        assert save(store) == len(TOKENS)
        assert load(store) == pages()


def test_fsck_removes_what_cannot_be_decoded(tmp_path):
    with opened(tmp_path / "store", "lossless") as store:
        save(store)
        damaged = records(store)[5]
    [extent] = (tmp_path / "store" / "extents").iterdir()
    with open(extent, "r+b") as file:
        file.seek(damaged.place)
        file.write(b"\xff" * 64)
    assert fsck(tmp_path / "store", repair=True).repaired
    assert fsck(tmp_path / "store").findings == []
    with opened(tmp_path / "store", "lossless") as store:
        assert load(store) == pages()[:5]


def test_a_full_disk_holds_more_pages_and_makes_room_among_them(tmp_path):
    """Encoded and other pages of several sizes, far beyond the capacity."""
    held = {}
    for codec in ("none", "lossless"):
        identity = Identity.of(SPEC, model="test")
        with tierstore.open(
            tmp_path / codec,
            SPEC,
            identity=identity,
            host_bytes=8 * MIB,
            disk_bytes=24 * MIB,
            disk_codec=codec,
        ) as store:
            for turn in range(12):
                tokens = TOKENS + 10_000 * turn
                kept = pages(seed=turn)
                kept[::5] = [np.random.default_rng(turn).bytes(SPEC.page_bytes)] * len(kept[::5])
                store.save(tokens, kept).wait(30)
                assert store.flush(30)
            extent_bytes(store)
            held[codec] = len(records(store))
            assert load(store, tokens) == kept
    # Evictions go in portions, so the number of held pages varies by some percent with the timing.
    assert held["lossless"] > 1.05 * held["none"]


# -- versions ------------------------------------------------------------------------------------------


def test_a_codec_that_is_not_known_is_refused(tmp_path):
    with opened(tmp_path / "store", "lossless") as store:
        save(store)
        index = store.backend.core.disk._index_db
        meta = json.loads(index.get_meta(b"store"))
        assert meta["codecs"] == ["lossless"]
        meta["codecs"] += ["newer"]
        index.put_meta({b"store": json.dumps(meta).encode()}, format=ENCODED_FORMAT)
    with pytest.raises(StoreUnavailableError, match="'newer', which this tierstore does not know: upgrade"):
        opened(tmp_path / "store")


def test_earlier_versions_refuse_a_directory_with_encoded_pages_and_open_others(tmp_path):
    for codec, mark in (("none", b"2"), ("lossless", b"3")):
        with opened(tmp_path / codec, codec) as store:
            save(store)
            assert store.backend.core.disk._index_db.get_meta(b"format") == mark
    with opened(tmp_path / "lossless") as store:  # once is enough: its pages are still there
        assert store.backend.core.disk._index_db.get_meta(b"format") == b"3"


@pytest.mark.parametrize("codec", ["gzip", "int8"])
def test_an_unknown_codec_is_refused_before_anything_is_made(tmp_path, codec):
    with pytest.raises(tierstore.UsageError, match=f"no codec '{codec}' .*none, lossless, zstd"):
        opened(tmp_path / "store", codec)
    assert not (tmp_path / "store").exists()


def test_a_page_that_its_codec_fails_on_is_written_as_it_is(monkeypatch):
    """A library that is not there: no failure of the disk."""
    encoder = PageEncoder(by_name("lossless"), inline_bytes=0)
    monkeypatch.setattr(Lossless, "encode", lambda *_, **__: 1 // 0)
    page = PageBytes(memoryview(pages(1)[0]), Identity.of(SPEC, model="test"))
    assert encoder.encode([page]) == [None]
    monkeypatch.undo()
    assert encoder.encode([page]) != [None]
    encoder.close()


@pytest.mark.parametrize("group", range(3), ids=["full", "window", "state"])
def test_pages_of_every_kind_of_group_become_smaller(tmp_path, group):
    spec = KVSpec(
        (
            LayerGroup(LayerKind.FULL_ATTENTION, (0,), 4, 128),
            LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 4, 128, window=256),
            LayerGroup(LayerKind.RECURRENT_STATE, (2,), state_bytes=1 << 17),
        ),
        "bfloat16",
    )
    normal = np.random.default_rng(0).standard_normal(spec.split()[group].page_bytes // 2)
    page = (normal.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    used = {}
    for codec in ("none", "lossless"):
        sizes = {"host_bytes": 16 << 20, "disk_bytes": 16 << 20}
        with tierstore.open(tmp_path / codec, spec, disk_codec=codec, **sizes) as store:
            store.save(range(64), [page], group=group).wait(30)
            assert store.flush(30)
            used[codec] = store.stats().tiers["disk"].used_bytes
            store.evict("host")
            pages = store.prompt(range(64)).pages_of(group)
            came = Bytes()
            assert store.load_to(store.lookup(pages), came).wait(30).tokens == 64
            assert came.pages == [page]
    assert used["none"] - used["lossless"] > len(page) // 5  # the index has bytes of its own


class Bytes:
    """A target of loads that keeps the bytes."""

    def __init__(self):
        self.pages = []

    def write(self, pages):
        self.pages += [ctypes.string_at(address, 1 << 17) for _, address in pages]
