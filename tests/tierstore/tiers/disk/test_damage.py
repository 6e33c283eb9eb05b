"""Damage to what lies on disk is a miss, and never anything else."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk import DiskTier
from tierstore.units import KIB, MIB


def extent_file(shelf):
    return shelf.path / "extents" / "000000"


def overwrite(file, offset, data):
    with open(file, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def served(shelf):
    """Serials that are still served, each checked for its bytes."""
    records = [record for record, _ in shelf.saved.values()]
    found = set()
    for record, data in zip(records, shelf.read(records), strict=True):
        if data is not None:
            assert data == shelf.saved[record.serial][1], f"page {record.serial} is a lie"
            found.add(record.serial)
    return found


@pytest.mark.parametrize("nbytes", [64 * KIB, 300_000, 9 * MIB])
def test_a_flipped_bit_is_a_miss_and_costs_no_other_page(open_shelf, nbytes):
    shelf = open_shelf()
    records = shelf.save([64 * KIB, nbytes, 64 * KIB])
    chance = random.Random(nbytes)
    for _ in range(5):
        at = chance.randrange(nbytes)
        was = shelf.saved[records[1].serial][1][at]
        overwrite(extent_file(shelf), records[1].place + at, bytes([was ^ 1 << chance.randrange(8)]))
        assert served(shelf) == {records[0].serial, records[2].serial}
        overwrite(extent_file(shelf), records[1].place + at, bytes([was]))
        assert len(served(shelf)) == 3
    assert shelf.tier.stats().bad_pages == 5


def test_a_truncated_extent_file_costs_what_was_in_it_and_is_mended_by_writing(open_shelf):
    shelf = open_shelf(capacity_bytes=4 * MIB)
    records = shelf.save([64 * KIB] * 8)
    cut = records[3].place + 10_000
    os.truncate(extent_file(shelf), cut)
    whole = {record.serial for record in records if record.place + 64 * KIB <= cut}
    assert 0 < len(whole) < 8
    assert served(shelf) == whole
    shelf.reopen()
    assert served(shelf) == whole
    shelf.remove([record for record, _ in list(shelf.saved.values()) if record.serial not in whole])
    assert len(shelf.save([64 * KIB] * 8)) == 8
    shelf.verify()


def test_a_lost_extent_file_costs_its_pages_only(open_shelf):
    shelf = open_shelf()
    small, _ = shelf.save([4 * KIB, 64 * KIB])
    shelf.tier.close()
    extent_file(shelf).unlink()
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert served(shelf) == {small.serial}


def test_foreign_content_is_a_miss(open_shelf):
    shelf = open_shelf()
    a, b = shelf.save([64 * KIB, 64 * KIB])
    overwrite(extent_file(shelf), a.place, shelf.saved[b.serial][1])
    assert served(shelf) == {b.serial}
    overwrite(extent_file(shelf), 0, os.urandom(1 * MIB))
    assert served(shelf) == set()


def test_a_longer_file_with_foreign_content_is_cut(open_shelf):
    shelf = open_shelf(capacity_bytes=4 * MIB)
    shelf.save([64 * KIB] * 4)
    with open(extent_file(shelf), "ab") as stream:
        stream.write(os.urandom(8 * MIB))
    shelf.reopen()
    shelf.verify()
    shelf.tier.check()


def test_a_flipped_bit_in_an_inline_payload_is_a_miss(open_shelf):
    shelf = open_shelf()
    record, other = shelf.save([9000, 9000])
    shelf.tier.close()
    data = (shelf.path / "index.lmdb").read_bytes()
    at = data.index(shelf.saved[record.serial][1][:4000])
    overwrite(shelf.path / "index.lmdb", at + 1234, bytes([data[at + 1234] ^ 4]))
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert served(shelf) == {other.serial}


def test_a_flipped_bit_in_a_record_drops_the_page(open_shelf):
    shelf = open_shelf()
    record, _ = shelf.save([64 * KIB, 64 * KIB])
    shelf.tier.close()
    data = (shelf.path / "index.lmdb").read_bytes()
    start = 0
    while (at := data.find(record.tokens, start)) >= 0:  # also in tree pages that are no longer live
        overwrite(shelf.path / "index.lmdb", at + 7, bytes([data[at + 7] ^ 16]))
        start = at + 1
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert record.serial not in {found.serial for found in shelf.records()}
    chunk = (record.key, record.tokens)
    assert shelf.tier.find(record.parent, record.identity, [chunk]) == []
    shelf.saved.pop(record.serial)
    shelf.verify()


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.7])
def test_a_truncated_index_is_refused_with_what_to_do(open_shelf, tmp_path, share):
    shelf = open_shelf()
    for _ in range(4):
        shelf.save([4 * KIB] * 20)
    copy = tmp_path / "copy"
    shutil.copytree(shelf.path, copy)
    index = copy / "index.lmdb"
    os.truncate(index, int(index.stat().st_size * share))
    with pytest.raises(StoreUnavailableError, match="remove the directory to start afresh"):
        DiskTier.open(copy, **shelf.options)


def test_two_records_of_one_place_are_one(open_shelf):
    shelf = open_shelf()
    record, other = shelf.save([64 * KIB, 64 * KIB])
    copy = shelf.record(64 * KIB, record.place)
    copy.checksum = record.checksum
    shelf.tier._index_db.apply(type_of_change(copy))
    found = {each.serial for each in shelf.reopen()}
    assert found == {record.serial, other.serial}


def type_of_change(record):
    from tierstore.tiers.disk.index_db import Change

    return Change(added=[(record, None)], next_serial=record.serial + 1)
