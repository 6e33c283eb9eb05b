"""fsck finds exactly what was damaged, mends it, and leaves everything else as it was."""

from __future__ import annotations

import os
import random
import shutil

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.tierstore.tiers.disk.shelf import Shelf
from tests.tierstore.tiers.disk.test_damage import overwrite, served, type_of_change
from tests.tierstore.tiers.disk.test_directory import fingerprint
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.disk.fsck import Category, fsck
from tierstore.tiers.disk.records import FORMAT_KEY, META, TREES, link_of
from tierstore.units import KIB, MIB

OPTIONS = {"capacity_bytes": 64 * MIB, "page_bytes": 64 * KIB}
SIZES = [64 * KIB, 300_000, 9000, 64 * KIB, 5 * MIB, 4 * KIB]


@pytest.fixture
def shelf(path):
    """A closed store: two prompts of several pages, and one of one."""
    shelf = Shelf(path, **OPTIONS)
    shelf.save(SIZES, chained=True)
    shelf.save([64 * KIB, 9000, 64 * KIB], chained=True)
    shelf.save([64 * KIB])
    shelf.tier.close()
    return shelf


def chain(shelf, number):
    """The records of one of its prompts, in order."""
    bounds = (0, 6, 9, 10)
    records = [record for record, _ in shelf.saved.values()]
    return records[bounds[number] : bounds[number + 1]]


def serials(report, category=None):
    return {
        finding.serial
        for finding in report.findings
        if finding.serial is not None and category in (None, finding.category)
    }


def kinds(report):
    return {category.value: counts for category, counts in report.counts.items() if counts}


def edit(shelf, tree, key, value):
    env = lmdb.open(str(shelf.path / "index.lmdb"), subdir=False, max_dbs=len(TREES), map_size=32 * MIB)
    with env, env.begin(write=True, db=env.open_db(tree)) as txn:
        if value is None:
            assert txn.delete(key)
        else:
            txn.put(key, value)


def stored(shelf, tree, key):
    env = lmdb.open(str(shelf.path / "index.lmdb"), subdir=False, max_dbs=len(TREES), readonly=True)
    with env, env.begin(db=env.open_db(tree, create=False)) as txn:
        return txn.get(key)


def key(serial):
    return serial.to_bytes(8, "big")


def repaired(shelf, *, lost):
    """Mend it: a second check is clean, and everything but ``lost`` is served."""
    report = fsck(shelf.path, repair=True)
    assert report.clean
    again = fsck(shelf.path)
    assert again.clean, again.findings
    assert again.good_pages == again.pages == len(shelf.saved) - len(lost)
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    expected = shelf.saved.keys() - lost
    assert {record.serial for record in shelf.records()} == expected
    for record, _ in shelf.saved.values():
        found = shelf.tier.find(record.parent, record.identity, [(record.key, record.tokens)])
        assert [each.serial for each in found] == ([record.serial] if record.serial in expected else [])
    shelf.saved = {serial: shelf.saved[serial] for serial in expected}
    assert served(shelf) == expected
    assert shelf.save([64 * KIB])
    shelf.verify()
    shelf.close()


def test_a_good_store_is_clean_and_not_touched(shelf):
    before = fingerprint(shelf.path)
    report = fsck(shelf.path)
    assert report.clean
    assert report.findings == []
    assert report.pages == report.good_pages == report.verified_pages == 10
    assert report.verified_bytes == sum(record.nbytes for record, _ in shelf.saved.values())
    assert fingerprint(shelf.path) == before
    repaired(shelf, lost=set())


def test_a_flipped_bit_in_an_extent_is_the_page_and_what_comes_after_it(shelf):
    broken = chain(shelf, 0)[3]
    below = {record.serial for record in chain(shelf, 0)[4:]}
    at = broken.place + 12_345
    overwrite(shelf.path / "extents" / "000000", at, bytes([shelf.saved[broken.serial][1][12_345] ^ 1]))
    before = fingerprint(shelf.path)
    report = fsck(shelf.path)
    assert kinds(report) == {"damaged": {"payload": 1}, "orphaned": {"page": 2}}
    assert serials(report, Category.DAMAGED) == {broken.serial}
    assert serials(report, Category.ORPHANED) == below
    name = report.pages_named[broken.serial]
    assert (name.model, name.start_tokens, name.stop_tokens) == ("model", 192, 256)
    assert fingerprint(shelf.path) == before
    repaired(shelf, lost={broken.serial} | below)


def test_a_page_larger_than_a_window_is_read_whole(shelf):
    large = chain(shelf, 0)[4]
    last = large.nbytes - 1
    overwrite(
        shelf.path / "extents" / "000000",
        large.place + last,
        bytes([shelf.saved[large.serial][1][last] ^ 128]),
    )
    assert serials(fsck(shelf.path), Category.DAMAGED) == {large.serial}


def test_a_flipped_bit_in_an_inline_payload(shelf):
    broken = chain(shelf, 1)[1]
    value = stored(shelf, b"payload", key(broken.serial) + bytes(4))
    edit(shelf, b"payload", key(broken.serial) + bytes(4), bytes([value[0] ^ 1]) + value[1:])
    report = fsck(shelf.path)
    assert serials(report, Category.DAMAGED) == {broken.serial}
    assert kinds(report) == {"damaged": {"payload": 1}, "orphaned": {"page": 1}}
    repaired(shelf, lost={record.serial for record in chain(shelf, 1)[1:]})


def test_a_damaged_record(shelf):
    broken = chain(shelf, 0)[1]
    data = bytearray(stored(shelf, b"pages", key(broken.serial)))
    data[100] ^= 4
    edit(shelf, b"pages", key(broken.serial), bytes(data))
    report = fsck(shelf.path)
    assert kinds(report) == {"damaged": {"record": 1}, "orphaned": {"page": 4}}
    assert serials(report, Category.DAMAGED) == {broken.serial}
    assert report.pages_named[broken.serial].start_tokens == 64  # from its facts
    assert report.pages_named[chain(shelf, 0)[2].serial].start_tokens is None
    repaired(shelf, lost={record.serial for record in chain(shelf, 0)[1:]})


def test_a_missing_record_leaves_what_was_its(shelf):
    gone = chain(shelf, 1)[1]
    edit(shelf, b"pages", key(gone.serial), None)
    report = fsck(shelf.path)
    assert kinds(report) == {"orphaned": {"page": 1}, "unaccounted": {"facts": 1, "link": 1, "pieces": 1}}
    repaired(shelf, lost={record.serial for record in chain(shelf, 1)[1:]})


@pytest.mark.parametrize("value", [None, "parent", "place", "used"])
def test_a_page_whose_facts_are_wrong_or_missing_leaves(shelf, value):
    record = chain(shelf, 1)[0]
    data = bytearray(stored(shelf, b"facts", key(record.serial)))
    if value == "used":
        data[32:40] = b"\xff" * 8  # not a number
    elif value:
        data[0 if value == "parent" else 10] ^= 2
    edit(shelf, b"facts", key(record.serial), bytes(data) if value else None)
    report = fsck(shelf.path)
    assert kinds(report) == {"damaged": {"facts": 1}, "orphaned": {"page": 2}}
    assert serials(report, Category.DAMAGED) == {record.serial}
    repaired(shelf, lost={each.serial for each in chain(shelf, 1)})


def test_a_page_without_its_link_leaves(shelf):
    record = chain(shelf, 0)[2]
    edit(shelf, b"children", link_of(record), None)
    report = fsck(shelf.path)
    assert kinds(report) == {"damaged": {"link": 1}, "orphaned": {"page": 3}}
    assert serials(report, Category.DAMAGED) == {record.serial}
    repaired(shelf, lost={each.serial for each in chain(shelf, 0)[2:]})


def test_a_link_to_nowhere_and_a_wrong_one_are_removed(shelf):
    record, other = chain(shelf, 0)[:2]
    edit(shelf, b"children", bytes(40) + key(999), b"")
    edit(shelf, b"children", link_of(record)[:40] + key(other.serial), b"")
    report = fsck(shelf.path)
    assert kinds(report) == {"unaccounted": {"link": 2}}
    repaired(shelf, lost=set())


def test_stray_pieces_and_odd_entries_are_removed(shelf):
    inline = chain(shelf, 1)[1]
    edit(shelf, b"payload", key(999) + bytes(4), b"x" * 4080)
    edit(shelf, b"payload", key(inline.serial) + (9).to_bytes(4, "big"), b"x")
    edit(shelf, b"pages", b"odd", b"x")
    edit(shelf, b"facts", key(12345), b"short")
    report = fsck(shelf.path)
    assert kinds(report) == {"unaccounted": {"entry": 2, "pieces": 2}}
    repaired(shelf, lost=set())


def test_an_identity_that_cannot_be_read_takes_its_pages_along(shelf):
    root = chain(shelf, 0)[0].parent
    edit(shelf, b"roots", key(root), b'{"model": 1}')
    report = fsck(shelf.path)
    assert kinds(report) == {"damaged": {"identity": 1}, "orphaned": {"page": 10}}
    repaired(shelf, lost=set(shelf.saved))


@pytest.mark.parametrize("value", [1, 1 << 63])
def test_a_wrong_next_serial_is_set_right(shelf, value):
    edit(shelf, b"meta", b"next_serial", key(value))
    assert kinds(fsck(shelf.path)) == {"damaged": {"counter": 1}}
    repaired(shelf, lost=set())


def test_a_parent_that_comes_later_is_an_orphan(shelf):
    # Two pages that name each other: their records are right, so it takes a bug to write this.
    from tierstore.tiers.disk.records import encode

    first, second = chain(shelf, 1)[:2]
    broken = type(first)(**{name: getattr(first, name) for name in first.__slots__})
    broken.parent = second.serial
    edit(shelf, b"pages", key(first.serial), encode(broken))
    report = fsck(shelf.path)
    assert serials(report) == {record.serial for record in chain(shelf, 1)}
    assert fsck(shelf.path, repair=True).clean
    assert fsck(shelf.path).clean


def test_of_two_pages_at_one_place_the_one_that_is_there_stays(path):
    shelf = Shelf(path, **OPTIONS)
    record, other = shelf.save([64 * KIB, 64 * KIB])
    twin = shelf.record(64 * KIB, record.place)
    twin.checksum = record.checksum
    shelf.tier._index_db.apply(type_of_change(twin))
    liar = shelf.record(64 * KIB, other.place)
    shelf.tier._index_db.apply(type_of_change(liar))
    shelf.tier.close()
    report = fsck(path)
    assert serials(report, Category.MISPLACED) == {twin.serial}
    assert liar.serial in serials(report, Category.DAMAGED)
    assert fsck(path, repair=True).clean
    assert fsck(path).clean
    shelf.tier = DiskTier.open(path, **shelf.options)
    shelf.verify()
    shelf.close()


@pytest.mark.parametrize("shift", [512, 4096])
def test_a_place_that_is_no_slot(path, shift):
    shelf = Shelf(path, **OPTIONS)
    records = shelf.save([64 * KIB] * 4)
    stray = shelf.record(64 * KIB, records[-1].place + 256 * KIB + shift)
    data = bytes(64 * KIB)
    import xxhash

    stray.checksum = xxhash.xxh3_64_intdigest(data)
    shelf.tier._index_db.apply(type_of_change(stray))
    shelf.tier.close()
    overwrite(path / "extents" / "000000", stray.place, data)
    report = fsck(path)
    assert serials(report, Category.MISPLACED) == {stray.serial}
    assert fsck(path, repair=True).clean
    assert fsck(path).good_pages == 4


def test_a_truncated_extent_file(shelf):
    whole = {record.serial for record, _ in shelf.saved.values() if record.place + record.nbytes <= 400_000}
    os.truncate(shelf.path / "extents" / "000000", 400_000)
    report = fsck(shelf.path)
    assert report.counts[Category.DAMAGED]["extent file"] == 1
    assert serials(report, Category.DAMAGED) == shelf.saved.keys() - whole
    kept = set()
    for number in range(3):
        for record in chain(shelf, number):
            if record.serial not in whole:
                break
            kept.add(record.serial)
    repaired(shelf, lost=shelf.saved.keys() - kept)


def test_a_deleted_extent_file_costs_what_was_in_it(shelf):
    (shelf.path / "extents" / "000000").unlink()
    report = fsck(shelf.path)
    assert report.counts[Category.DAMAGED] == {"extent file": 1, "payload": 7}
    repaired(shelf, lost=set(shelf.saved))


def test_a_file_missing_before_others_and_one_that_is_too_long(path, monkeypatch):
    from tierstore.tiers.disk import space

    monkeypatch.setattr(space, "_LEAST_FILE", 2 * MIB)
    shelf = Shelf(path, **OPTIONS)
    records = shelf.save([64 * KIB] * 120)
    shelf.tier.close()
    with open(path / "extents" / "000002", "ab") as file:
        file.write(b"more")
    (path / "extents" / "000001").unlink()
    lost = {record.serial for record in records if 2 * MIB <= record.place < 4 * MIB}
    assert lost
    report = fsck(path)
    assert serials(report) == lost
    assert report.counts[Category.UNACCOUNTED] == {"extent file": 1}
    assert report.counts[Category.DAMAGED]["extent file"] == 1
    repaired(shelf, lost=lost)


def test_foreign_files_are_named_and_left_alone(shelf):
    (shelf.path / "thesis.tex").write_text("do not touch")
    (shelf.path / "extents" / "notes").write_text("nor this")
    (shelf.path / "index.lmdb.new").write_bytes(b"left behind")
    report = fsck(shelf.path)
    assert kinds(report) == {"unaccounted": {"file": 2, "leftover": 1}}
    assert {finding.name for finding in report.findings} == {"thesis.tex", "extents/notes", "index.lmdb.new"}
    report = fsck(shelf.path, repair=True)
    assert not report.clean
    assert report.unmended == 2
    assert (shelf.path / "thesis.tex").read_text() == "do not touch"
    (shelf.path / "thesis.tex").unlink()
    (shelf.path / "extents" / "notes").unlink()
    assert fsck(shelf.path).clean


def test_an_entry_out_of_order_leaves_with_its_page(path):
    shelf = Shelf(path, **OPTIONS)
    for _ in range(10):
        shelf.save([64 * KIB, 9000] * 8)
    shelf.tier.close()
    # The key of one entry in a leaf of `facts`, moved past its neighbours.
    index = path / "index.lmdb"
    data = bytearray(index.read_bytes())
    middle = sorted(shelf.saved)[80]
    facts = stored(shelf, b"facts", key(middle))
    start = 0
    while (at := data.find(key(middle) + facts, start)) >= 0:
        data[at : at + 8] = key(5000)
        start = at + 1
    index.write_bytes(data)
    report = fsck(path)
    assert report.counts[Category.DAMAGED].get("tree") == 1
    assert middle in serials(report)
    assert report.good_pages > 100
    repaired(shelf, lost=serials(report))


@pytest.mark.parametrize("tree", ["facts", "pages", "children"])
def test_a_damaged_key_costs_its_page_and_no_neighbour(path, tree):
    """A search for other keys goes wrong at a damaged one: half a leaf may seem to be gone."""
    shelf = Shelf(path, **OPTIONS)
    for _ in range(10):
        shelf.save([64 * KIB] * 8)
    shelf.tier.close()
    whole = (path / "index.lmdb").read_bytes()
    record = shelf.saved[sorted(shelf.saved)[40]][0]
    serial = key(record.serial)
    entry = link_of(record) if tree == "children" else serial + stored(shelf, tree.encode(), serial)[:24]
    for bit in [*range(0, 24, 5), *range(56, 64)]:
        place = 40 * 8 + bit if tree == "children" else bit
        data = bytearray(whole)
        start = 0
        while (at := data.find(entry, start)) >= 0:
            data[at + place // 8] ^= 1 << place % 8
            start = at + 1
        (path / "index.lmdb").write_bytes(data)
        report = fsck(path, repair=True)
        assert report.clean
        assert report.counts[Category.DAMAGED]
        assert report.good_pages == len(shelf.saved) - 1, (bit, report.counts)
        assert fsck(path).total(Category.DAMAGED) == 0
    shelf.tier = DiskTier.open(path, **OPTIONS)
    assert {each.serial for each in shelf.records()} == shelf.saved.keys() - {record.serial}
    del shelf.saved[record.serial]
    shelf.verify()
    shelf.close()


def taken(path):
    """What a directory takes from its file system, itself included."""
    return sum(each.lstat().st_blocks * 512 for each in (path, *path.rglob("*")))


def test_a_full_store_is_mended_under_its_cap(path):
    shelf = Shelf(path, capacity_bytes=24 * MIB, page_bytes=64 * KIB)
    while len(shelf.save([64 * KIB] * 8)) == 8:
        pass
    shelf.tier.close()
    doomed = sorted(shelf.saved)[::2]
    for serial in doomed:
        edit(shelf, b"facts", key(serial), None)
    fsck(path, repair=True)
    assert taken(path) <= shelf.options["capacity_bytes"]
    repaired(shelf, lost=set(doomed))


def test_a_directory_over_its_cap_is_found(shelf):
    """The cap is in the directory; one of an earlier version does not say it."""
    meta = stored(shelf, b"meta", b"store")
    assert fsck(shelf.path).capacity_bytes == shelf.options["capacity_bytes"]
    edit(shelf, b"meta", b"store", meta.replace(b'"capacity_bytes":67108864', b'"capacity_bytes":1048576'))
    report = fsck(shelf.path)
    assert kinds(report) == {"unaccounted": {"capacity": 1}}
    assert not fsck(shelf.path, repair=True).clean
    edit(shelf, b"meta", b"store", meta.replace(b',"capacity_bytes":67108864', b""))
    assert fsck(shelf.path).clean
    assert fsck(shelf.path).capacity_bytes is None
    repaired(shelf, lost=set())
    assert fsck(shelf.path).capacity_bytes == shelf.options["capacity_bytes"]


def test_a_broken_tree_is_set_aside_with_all_its_pages(shelf):
    index = shelf.path / "index.lmdb"
    data = bytearray(index.read_bytes())
    pages = range(2 * 4096, len(data), 4096)
    for page in pages:
        data[page + 12 : page + 16] = b"\xff\xff\xff\xff"  # the bounds of its free space
    index.write_bytes(data)
    before = fingerprint(shelf.path)
    report = fsck(shelf.path)
    assert report.index_lost
    assert kinds(report) == {"damaged": {"index": 1}}
    assert fingerprint(shelf.path) == before
    assert fsck(shelf.path, repair=True).clean
    assert (shelf.path / "index.lmdb.damaged").read_bytes() == data
    assert taken(shelf.path) <= shelf.options["capacity_bytes"]
    again = fsck(shelf.path)
    assert again.clean
    assert again.pages == 0
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert not (shelf.path / "index.lmdb.damaged").exists()
    shelf.saved.clear()
    shelf.save(SIZES, chained=True)
    shelf.verify()
    shelf.close()


def test_pages_of_no_format_are_damage_and_not_an_unfinished_store(shelf):
    """LMDB opens such an index, so nothing but the missing key tells."""
    edit(shelf, META, FORMAT_KEY, None)
    with pytest.raises(StoreUnavailableError, match=r"is damaged .*no entry for their format.*fsck --repair"):
        Shelf(shelf.path, **OPTIONS)
    report = fsck(shelf.path)
    assert kinds(report) == {"damaged": {"index": 1}}
    assert report.good_pages == 0
    assert fsck(shelf.path, repair=True).clean
    assert fsck(shelf.path).clean
    Shelf(shelf.path, **OPTIONS).close()


def test_a_file_that_is_no_index_is_not_set_aside_where_no_store_was(path):
    path.mkdir()
    (path / "index.lmdb").write_bytes(b"somebody's" * 2000)
    before = fingerprint(path)
    with pytest.raises(StoreUnavailableError, match="not an index of tierstore"):
        fsck(path)
    assert fingerprint(path) == before
    with pytest.raises(StoreUnavailableError, match="not an index of tierstore"):
        fsck(path, repair=True)
    assert fingerprint(path).items() >= before.items()


def test_what_is_no_store_in_use_or_of_another_format_is_refused_untouched(shelf, tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(UsageError, match="holds no store"):
            fsck(path)
    assert not (tmp_path / "nothing").exists()
    edit(shelf, b"meta", b"format", b"99")
    before = fingerprint(shelf.path)
    for mend in (False, True):
        with pytest.raises(StoreUnavailableError, match="newer tierstore"):
            fsck(shelf.path, repair=mend)
    assert fingerprint(shelf.path) == before
    edit(shelf, b"meta", b"format", b"2")
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    with pytest.raises(StoreUnavailableError, match=f"in use by process {os.getpid()}"):
        fsck(shelf.path, repair=True)
    shelf.verify()
    shelf.close()


def test_a_directory_whose_first_opening_did_not_end(path):
    path.mkdir()
    (path / "lock").touch()
    (path / "index.lmdb").touch()
    (path / "index.lmdb.new").touch()
    assert kinds(fsck(path)) == {"unaccounted": {"leftover": 1}}
    assert fsck(path, repair=True).clean
    assert fsck(path).clean


def test_findings_are_all_counted_and_some_are_kept(shelf):
    overwrite(shelf.path / "extents" / "000000", 0, bytes(12 * MIB))
    report = fsck(shelf.path, limit=3)
    assert len(report.findings) == 3
    assert report.total(Category.DAMAGED) == 7


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store to damage copies of, and what is in it."""
    path = tmp_path_factory.mktemp("original") / "store"
    shelf = Shelf(path, capacity_bytes=32 * MIB, page_bytes=4 * KIB, inline_bytes=8 * KIB)
    for _ in range(8):
        shelf.save([20 * KIB, 4 * KIB, 6000, 20 * KIB, 33_000], chained=True)
    shelf.tier.close()
    return shelf


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    in_index=st.integers(0, 6),
    in_extents=st.integers(0, 4),
    cut=st.sampled_from([None, None, 0.2, 0.9]),
)
def test_any_damage_is_survived_and_mended(original, tmp_path_factory, seed, in_index, in_extents, cut):
    path = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(original.path, path)
    chance = random.Random(seed)
    for file, count in ((path / "index.lmdb", in_index), (path / "extents" / "000000", in_extents)):
        size = file.stat().st_size
        for _ in range(count):
            # Most of an extent file is empty, and so is half of a tree page: aim at what is not.
            at = chance.randrange(size)
            overwrite(file, at, bytes([chance.randrange(256)]))
    if cut is not None:
        os.truncate(path / "extents" / "000000", int((path / "extents" / "000000").stat().st_size * cut))
    before = fingerprint(path)
    found = fsck(path)
    assert fingerprint(path) == before
    assert fsck(path, repair=True).clean
    again = fsck(path)
    assert again.clean, again.findings
    assert again.good_pages == found.good_pages
    shelf = Shelf(path, **original.options)
    records = shelf.records()
    assert len(records) == found.good_pages
    for record, data in zip(records, shelf.read(records), strict=True):
        assert data == original.saved[record.serial][1], f"page {record.serial} was said to be good"
    shelf.close()
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("reach", [1, 2, -1])
def test_a_key_that_became_its_neighbours_is_mended(path, tmp_path, reach):
    """A search finds such a key, so that only the order tells of it. Every place of every tree."""
    options = OPTIONS | {"capacity_bytes": 24 * MIB}
    shelf = Shelf(path, **options)
    for _ in range(3):
        shelf.save([4 * KIB] * 5, chained=True)
    shelf.tier.close()
    data = (path / "index.lmdb").read_bytes()
    serial = list(shelf.saved)[7]
    places = [at for at in range(len(data)) if data.startswith(key(serial), at)]
    mended = 0
    for number, at in enumerate(places):
        copy = shutil.copytree(path, tmp_path / str(number))
        overwrite(copy / "index.lmdb", at, key(serial + reach))
        report = fsck(copy, repair=True)
        assert report.clean
        mended += Category.DAMAGED in {finding.category for finding in report.findings}
        assert fsck(copy).findings == []
        DiskTier.open(copy, **options).close()
        shutil.rmtree(copy)
    assert mended >= 2  # in the tree of records and in the one of facts
