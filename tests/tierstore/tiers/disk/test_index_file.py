"""An index that LMDB would die of is refused before it is opened."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from functools import partial

import lmdb
import pytest

from tests.portions import portion
from tests.tierstore.tiers.disk import damaged_opener
from tests.tierstore.tiers.disk.test_directory import fingerprint
from tierstore.errors import StoreUnavailableError
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.disk.fsck import fsck
from tierstore.tiers.disk.index_file import DamagedIndexError, check_index
from tierstore.tiers.disk.listing import list_store
from tierstore.units import KIB, MIB

PAGE = 4096


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "store"
    damaged_opener.make(path)
    return path


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def leaf_pages(index):
    """Offsets of the pages that the tree of records consists of."""
    data = index.read_bytes()
    return [
        at for at in range(2 * PAGE, len(data), PAGE) if data[at + 10] == 2 and data[at : at + 4] != bytes(4)
    ]


def free_lists(data, transaction):
    """Offsets of the keys of the free lists, whose tree is one leaf."""
    meta = PAGE * (int.from_bytes(data[PAGE + 144 : PAGE + 152], "little") == transaction)
    leaf = PAGE * int.from_bytes(data[meta + 80 : meta + 88], "little")
    pointers = range(leaf + 16, leaf + int.from_bytes(data[leaf + 12 : leaf + 14], "little"), 2)
    return [leaf + int.from_bytes(data[at : at + 2], "little") + 8 for at in pointers]


def swap(index, one, other):
    data = bytearray(index.read_bytes())
    data[one : one + PAGE], data[other : other + PAGE] = data[other : other + PAGE], data[one : one + PAGE]
    index.write_bytes(data)


def zero(index, at):
    data = bytearray(index.read_bytes())
    data[at : at + PAGE] = bytes(PAGE)
    index.write_bytes(data)


@pytest.mark.parametrize("damage", ["swapped", "zeroed"])
def test_a_damaged_index_is_one_line_with_what_to_do_embedded_and_in_a_daemon(copy, damage):
    index = copy / "index.lmdb"
    leaves = leaf_pages(index)
    for one, other in itertools.pairwise(leaves):
        if damage == "swapped":
            swap(index, one, other)
        else:
            zero(index, one)
    before = fingerprint(copy)
    with pytest.raises(StoreUnavailableError, match=rf"tierstore fsck --repair {copy}"):
        damaged_opener.open_store(copy)
    command = [sys.executable, "-m", "tierstore.cli", "serve", "--listen=tcp://127.0.0.1:0"]
    command += [f"--disk={copy}", "--host-bytes=16MiB", "--disk-bytes=16MiB", "--page-bytes=8KiB"]
    daemon = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert daemon.returncode == 1
    assert daemon.stderr.count("\n") == 1, daemon.stderr
    assert f"tierstore fsck --repair {copy}" in daemon.stderr
    assert fingerprint(copy) == before


@pytest.mark.parametrize("damages", portion(12, 60))
def test_no_damage_ends_the_process_that_opens_the_store(original, tmp_path, damages):
    """In a process of its own, since LMDB aborts."""
    command = [sys.executable, "-m", "tests.tierstore.tiers.disk.damaged_opener"]
    done = subprocess.run(
        [*command, str(original), str(tmp_path), "0", str(damages)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    outcomes = done.stdout.splitlines()
    assert done.returncode == 0, (outcomes[-1:], done.stderr)
    assert "Traceback" not in done.stderr
    assert len(outcomes) == damages
    assert 0 < sum(line.endswith("refused") for line in outcomes) < damages


def test_a_good_index_of_any_history_passes(tmp_path, open_shelf):
    """The check must not take what LMDB does for damage: trees that grow, shrink, and are empty again."""
    shelf = open_shelf(capacity_bytes=24 * MIB, page_bytes=4 * KIB)
    for round_ in range(6):
        shelf.save([4 * KIB, 9000, 20 * KIB] * 60, chained=round_ % 2 == 0)
        records = [record for record, _ in shelf.saved.values()]
        shelf.remove(records if round_ == 3 else records[round_ % 3 :: 2])
        shutil.copy(shelf.path / "index.lmdb", tmp_path / "index.lmdb")
        check_index(tmp_path / "index.lmdb").check_payloads()
    shelf.remove([record for record, _ in shelf.saved.values()])
    shutil.copy(shelf.path / "index.lmdb", tmp_path / "index.lmdb")
    check_index(tmp_path / "index.lmdb").check_payloads()


def test_a_free_list_that_names_a_page_in_use_is_damage(copy):
    """LMDB would give that page away, and overwrite what is in it."""
    index = copy / "index.lmdb"
    with lmdb.open(str(index), subdir=False, map_size=4 * MIB, max_dbs=6) as env, env.begin() as txn:
        root = txn.get(b"facts")[40:48]
        transaction = env.info()["last_txnid"]
    data = bytearray(index.read_bytes())
    first = free_lists(data, transaction)[0] + 16  # the list's largest number, behind its key and its count
    assert int.from_bytes(data[first - 8 : first], "little") > 0
    data[first : first + 8] = root
    index.write_bytes(data)
    with pytest.raises(DamagedIndexError, match=r"used twice|out of order"):
        check_index(index)


@pytest.mark.parametrize("damage", ["swapped", "equal", "none", "to come"])
def test_free_lists_in_another_order_are_damage(copy, damage):
    """LMDB would end the process at the first commit that uses them."""
    index = copy / "index.lmdb"
    with lmdb.open(str(index), subdir=False, map_size=4 * MIB, max_dbs=6) as env:
        transaction = env.info()["last_txnid"]
    check_index(index)
    data = bytearray(index.read_bytes())
    first, *_, last = free_lists(data, transaction)
    assert first != last
    keys = [data[at : at + 8] for at in (first, last)]
    if damage == "swapped":
        data[first : first + 8], data[last : last + 8] = reversed(keys)
    elif damage == "equal":
        data[last : last + 8] = keys[0]
    elif damage == "none":
        data[first : first + 8] = bytes(8)
    else:
        data[last : last + 8] = (transaction + 1).to_bytes(8, "little")
    index.write_bytes(data)
    with pytest.raises(DamagedIndexError, match="its list of free pages is out of order"):
        check_index(index)


def test_a_damaged_payload_page_in_a_large_index_stops_writing_and_nothing_else(
    open_shelf, monkeypatch, caplog
):
    """Its head says how many pages a removal frees. Lookups continue if it is found beside them."""
    from tierstore.tiers.disk import opening

    shelf = open_shelf()
    records = shelf.save([9000] * 8)
    shelf.tier.close()
    index = shelf.path / "index.lmdb"
    data = bytearray(index.read_bytes())
    at = data.index(shelf.saved[records[3].serial][1][:4000]) - 16
    data[at + 12 : at + 16] = (1000).to_bytes(4, "little")
    index.write_bytes(data)
    with pytest.raises(DamagedIndexError, match="has wrong contents"):
        DiskTier.open(shelf.path, **shelf.options)
    monkeypatch.setattr(opening, "_QUICKLY_SCANNED", 0)
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert not shelf.tier.wait_scanned(10)
    assert shelf.tier.page_table is None
    assert "tierstore fsck --repair" in caplog.text
    shelf.verify()


def test_a_page_that_lists_an_entry_twice_is_damage(copy):
    """LMDB would move other entries when it deletes this one, and fsck would make the damage worse."""
    index = copy / "index.lmdb"
    data = bytearray(index.read_bytes())
    found = 0
    for at in leaf_pages(index):
        first = int.from_bytes(data[at + 16 : at + 18], "little")
        second = int.from_bytes(data[at + 18 : at + 20], "little")
        nodes = (int.from_bytes(data[at + 12 : at + 14], "little") - 16) // 2
        sizes = [bytes(data[at + node : at + node + 8]) for node in (first, second)]
        if nodes > 2 and sizes[0] == sizes[1]:  # equal heads: equal sizes
            data[at + 16 : at + 18] = second.to_bytes(2, "little")
            found += 1
    assert found
    index.write_bytes(data)
    with pytest.raises(DamagedIndexError, match=r"listed twice|has wrong contents"):
        check_index(index)
    assert fsck(copy, repair=True).clean
    damaged_opener.open_store(copy).close()


def test_another_lmdb_is_named_and_no_index_called_damaged(copy, monkeypatch):
    before = fingerprint(copy)
    monkeypatch.setattr(lmdb, "version", lambda: (1, 0, 0))
    for use in (damaged_opener.open_store, fsck, partial(fsck, repair=True), list_store):
        with pytest.raises(StoreUnavailableError, match=r"LMDB 1\.0\.0") as raised:
            use(copy)
        assert not isinstance(raised.value, DamagedIndexError)
        assert "damaged" not in str(raised.value)
    assert fingerprint(copy) == before
    with pytest.raises(StoreUnavailableError, match=r"LMDB 1\.0\.0"):
        damaged_opener.open_store(copy.with_name("new"))
    assert not (copy.with_name("new") / "index.lmdb").exists()


def test_an_index_of_another_data_version_is_not_called_damaged(copy):
    index = copy / "index.lmdb"
    data = bytearray(index.read_bytes())
    for page in (0, PAGE):
        data[page + 20 : page + 24] = (2).to_bytes(4, "little")
    index.write_bytes(data)
    for use in (damaged_opener.open_store, partial(fsck, repair=True)):
        with pytest.raises(StoreUnavailableError, match="data version 2") as raised:
            use(copy)
        assert not isinstance(raised.value, DamagedIndexError)
    assert index.read_bytes() == data
