"""What was reproduced on the best-known peer, one test each: none of it may happen here."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

from tests.campaigns.prompts import (
    Life,
    inline_life,
    load,
    page_count,
    prompt_tokens,
    save,
    small_pages,
)
from tests.campaigns.recording import allocated_bytes
from tests.campaigns.verdict import judge
from tierstore.errors import UsageError
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO
from tierstore.units import KIB, MIB

LIFE = Life(small_pages(), disk_bytes=1 * MIB)
TOKENS = 64
PAGES = page_count(TOKENS, LIFE.spec)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def durable(path, life=LIFE, prompts=(0,)):
    """A closed store that holds some prompts."""
    with life.open(path) as store:
        for number in prompts:
            save(store, number, TOKENS)
        assert store.flush(30)


def extent_file(path):
    return path / "extents" / "000000"


def served(path, life=LIFE, number=0):
    with life.open(path) as store:
        answer = load(store, number, TOKENS)
        assert answer.wrong_pages == 0
        return answer.served_tokens


def test_flipped_bytes_are_never_served(path):
    durable(path)
    data = bytearray(extent_file(path).read_bytes())
    for at in range(100, PAGES * LIFE.spec.page_bytes, 4096):
        data[at] ^= 0xFF
    extent_file(path).write_bytes(data)
    assert served(path) == 0


@pytest.mark.parametrize("size", [0, 1, 5000, 20_000])
def test_a_truncated_file_does_not_poison_its_keys(path, size):
    durable(path)
    with extent_file(path).open("r+b") as file:
        file.truncate(size)
    whole = size // LIFE.spec.page_bytes * LIFE.spec.chunk_tokens
    with LIFE.open(path) as store:
        assert load(store, 0, TOKENS).served_tokens == whole
        for _ in range(PAGES):  # each load finds out about one more page
            save(store, 0, TOKENS)
            assert store.flush(30)
            store.evict("host")
            if load(store, 0, TOKENS).served_tokens == TOKENS:
                break
            assert load(store, 0, TOKENS).wrong_pages == 0
        store.evict("host")
        assert load(store, 0, TOKENS).served_tokens == TOKENS
    assert served(path) == TOKENS


@pytest.mark.parametrize(
    "other",
    [
        replace(LIFE, spec=replace(LIFE.spec, dtype="float16")),
        replace(LIFE, spec=small_pages(layers=4)),
        replace(LIFE, spec=small_pages(layers=4, head_dim=16)),  # pages of the same size
    ],
    ids=["dtype", "layers", "same size"],
)
def test_one_model_name_with_another_layout_finds_nothing(path, other):
    durable(path)
    with other.open(path) as store:
        assert store.lookup(prompt_tokens(0, TOKENS, other.spec)).tokens == 0
        with pytest.raises(UsageError, match="another page layout"):
            store.lookup(replace(LIFE, model="faults").open(path.with_name("x")).prompt([1] * TOKENS))
    assert served(path) == TOKENS


@pytest.mark.parametrize("life", [LIFE, inline_life()], ids=["extents", "inline"])
def test_the_cap_holds_over_three_lives(path, life):
    written = 0
    for lifetime in range(3):
        with life.open(path) as store:
            for number in range(40):
                save(store, 1000 * lifetime + 2 * number, TOKENS)
                assert store.flush(30)
                assert allocated_bytes(path) <= life.disk_bytes
            counters = store.stats().counters
            written += counters["disk_written_pages"] * life.spec.page_bytes
            store.check()
        assert allocated_bytes(path) <= life.disk_bytes
    assert written > 3 * life.disk_bytes


def test_a_full_disk_leaks_no_staging_memory(path):
    io = FaultyIO()
    with replace(LIFE, host_bytes=256 * KIB).open(path, io) as store:
        io.set(Fault(lambda call: call.kind in ("pwritev", "allocate", "sync"), Fail(errno.ENOSPC)))
        for number in range(0, 200, 2):
            assert save(store, number, TOKENS) == TOKENS, "the host tier is stuck"
            assert store.flush(30)
        assert store.stats().tiers["host"].leased_pages == 0
        store.evict("host")
        assert store.stats().tiers["host"].used_bytes == 0


def test_a_longer_file_with_foreign_content_is_not_served(path):
    durable(path)
    noise = bytes(range(256)) * 8192
    extent_file(path).write_bytes(noise)
    assert len(noise) > LIFE.disk_bytes
    assert served(path) == 0
    assert allocated_bytes(path) <= LIFE.disk_bytes


def test_foreign_bytes_behind_the_pages_change_nothing(path):
    durable(path)
    with extent_file(path).open("ab") as file:
        file.write(b"\xee" * MIB)
    assert served(path) == TOKENS
    assert allocated_bytes(path) <= LIFE.disk_bytes


def test_stale_temporaries_are_removed(path):
    durable(path)
    for name in ("index.lmdb.new", "index.lmdb.new-lock"):
        (path / name).write_bytes(b"half a rebuilt index" * 10_000)
    assert served(path) == TOKENS
    assert {entry.name for entry in path.iterdir()} == {"lock", "index.lmdb", "index.lmdb-lock", "extents"}
    assert allocated_bytes(path) <= LIFE.disk_bytes


def test_everything_is_synced_before_it_is_acknowledged(path):
    io = FaultyIO()
    with LIFE.open(path, io) as store:
        for number in range(0, 12, 2):
            before = len(io.calls)
            save(store, number, TOKENS)
            assert store.flush(30)
            kinds = [call.kind for call in io.calls[before:]]
            assert "pwritev" in kinds
            last_write = len(kinds) - 1 - kinds[::-1].index("pwritev")
            assert "sync" in kinds[last_write:], f"acknowledged with writes that nobody synced: {kinds}"
        written = store.stats().counters["disk_written_pages"]
    assert written == 6 * PAGES
    made = [call for call in io.calls if call.kind == "open" and call.path == extent_file(path)]
    synced = [
        call.number for call in io.calls if call.kind == "sync_directory" and call.path == path / "extents"
    ]
    first_write = next(call.number for call in io.calls if call.kind == "pwritev")
    assert made[0].number < synced[0] < first_write, "the new file's name was not made durable"


def test_what_is_flushed_survives_a_restart(path):
    durable(path, prompts=(0, 2, 4))
    verdict = judge(path, [LIFE], {(0, n): TOKENS for n in (0, 2, 4)}, {(0, n): TOKENS for n in (0, 2, 4)})
    assert verdict.good, f"{verdict}"
