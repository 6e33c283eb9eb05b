"""An encrypted directory: what is sealed, and that everything else than what was saved is a miss."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.portions import portion
from tests.tierstore.tiers.disk.shelf import IDENTITY, MASTER_KEY, Shelf
from tests.tierstore.tiers.disk.test_model import TierAgainstDict
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.keys import Identity
from tierstore.memory import address_of
from tierstore.tiers.disk import INLINE, DiskTier, PageRecord
from tierstore.tiers.disk.fsck import fsck
from tierstore.tiers.disk.records import SEALED_BYTES, decode, encode, page_key
from tierstore.units import KIB, MIB

pytest.importorskip("cryptography")

from tierstore.tiers.disk.keyring import (
    Keyring,
    Scope,
    SecretMemory,
    make_master_key,
    open_keyring,
    read_master_key,
)
from tierstore.tiers.disk.sealing import Sealing

OTHER = Identity("model", "layout", tenant="other")
SIZES = [3000, 16 * KIB, 64 * KIB, 100_000, 300_000]


@pytest.fixture
def shelf(open_shelf):
    return open_shelf(encrypted=True)


def raw_bytes(*paths):
    """Everything in these files, and in the files of these directories."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return b"".join(file.read_bytes() for file in files if file.is_file())


def change_index(path, change):
    """Let ``change`` edit the trees of a closed index: name → its database, and a transaction."""
    with lmdb.open(str(path / "index.lmdb"), subdir=False, max_dbs=8, map_size=8 * MIB) as env:
        names = (b"pages", b"children", b"payload", b"facts")
        trees = {name: env.open_db(name) for name in names}
        with env.begin(write=True) as txn:
            change(trees, txn)


def stored(tier, record):
    [found] = tier.stored_records([record.serial])
    return found


def test_nothing_that_was_saved_can_be_seen(shelf):
    shelf.save(SIZES, chained=True)
    shelf.verify()
    shelf.tier.keep_departures(b"the memory of evicted pages")
    raw = raw_bytes(shelf.path, shelf.keyring_path)
    for record, data in shelf.saved.values():
        for secret in (record.tokens[:8], record.tokens[-8:], record.key, data[:16], data[-16:]):
            assert secret not in raw
    assert b"evicted pages" not in raw
    assert MASTER_KEY not in raw


def test_keys_are_in_no_repr(shelf):
    shelf.save([64 * KIB])
    keyring = shelf.tier.keyring
    key = keyring.find(Scope(IDENTITY.tenant, IDENTITY.model))
    for secret in (bytes(key.secret), bytes(keyring._ring_key), MASTER_KEY):
        for shown in (repr(keyring), repr(key), repr(vars(keyring)), repr(shelf.tier)):
            assert secret.hex() not in shown
            assert repr(secret)[2:-1] not in shown


@pytest.mark.parametrize("nbytes", [1, 63, 64, 65, 3000, 16 * KIB, 20_000, 64 * KIB, 100_001])
def test_pages_of_any_size_come_back(shelf, nbytes):
    [record] = shelf.save([nbytes])
    assert (record.place == INLINE) == (nbytes <= 16 * KIB)
    shelf.verify()
    assert shelf.reopen() == [record]
    shelf.verify()


@pytest.mark.parametrize("flips", portion(300, 10_000))
def test_a_page_with_any_bit_flipped_is_a_miss(shelf, flips):
    """In its payload, in the index or in an extent, and in its record."""
    chance = random.Random(flips)
    records = shelf.save(SIZES)
    for _ in range(flips):
        record = chance.choice(records)
        seal, payload = _sealed(shelf.tier, record)
        if chance.random() < 0.5:
            flip(payload, chance)
            out = memoryview(bytearray(record.nbytes))
            assert not shelf.tier._sealing.open_payload(record, memoryview(payload), out)
        else:
            data = bytearray(encode(seal))
            at = flip(data, chance)
            found = decode_unchecked(record.serial, bytes(data))
            opened = shelf.tier._sealing.opened(found) if found is not None else None
            # The place is not sealed, and a checksum of the record itself is not used here.
            assert opened is None or 8 <= at < 16 or at >= len(data) - 8
    shelf.verify()


def _sealed(tier, record):
    """A page as it is stored: its record and its payload."""
    found = stored(tier, record)
    payload = memoryview(bytearray(found.nbytes))
    if found.place == INLINE:
        assert tier._index_db.read_payload(found, payload)
    else:
        assert tier._payloads.read([(found, payload)], encoded=True).all_good
    return found, bytearray(payload)


def flip(data, chance):
    at = chance.randrange(len(data))
    data[at] ^= 1 << chance.randrange(8)
    return at


def decode_unchecked(serial, data):
    """Decode a record whose own checksum an attacker has made right."""
    import xxhash

    body = data[:-8]
    return decode(serial, body + xxhash.xxh3_64_intdigest(body, serial).to_bytes(8, "little"))


def test_a_flipped_bit_on_disk_is_a_miss_and_fsck_needs_no_key(shelf):
    records = shelf.save([64 * KIB] * 8)
    shelf.tier.close()
    assert fsck(shelf.path).clean
    hit = records[3]
    with open(shelf.path / "extents" / "000000", "r+b") as file:
        file.seek(hit.place + 1000)
        byte = file.read(1)
        file.seek(hit.place + 1000)
        file.write(bytes([byte[0] ^ 4]))
    assert not fsck(shelf.path).clean
    shutil.copytree(shelf.path, shelf.path.with_name("repaired"))
    assert fsck(shelf.path.with_name("repaired"), repair=True).clean
    shelf.tier = shelf._open()
    assert shelf.read(records) == [
        shelf.saved[record.serial][1] if record is not hit else None for record in records
    ]
    del shelf.saved[hit.serial]


# -- attacks on the files --------------------------------------------------------------------------------


def test_swapped_payloads_are_misses(shelf):
    one, two = shelf.save([64 * KIB] * 2)
    shelf.tier.close()
    extent = shelf.path / "extents" / "000000"
    data = bytearray(extent.read_bytes())
    size = 64 * KIB
    first, second = data[one.place : one.place + size], data[two.place : two.place + size]
    data[one.place : one.place + size], data[two.place : two.place + size] = second, first
    extent.write_bytes(data)
    shelf.tier = shelf._open()
    assert shelf.read([one, two]) == [None, None]


def edited(record: PageRecord, **fields) -> bytes:
    return encode(replace(record, **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"created_s": 5.0},
        {"nbytes": 32 * KIB},
        {"checksum": 5},
        {"key": bytes(16)},
        {"identity": OTHER.digest},
        {"codec": 1, "encoded_bytes": 1000},
        {"tokens": bytes(256)},
        {"tokens": bytes(SEALED_BYTES + 256)},
    ],
    ids=str,
)
def test_a_changed_record_is_not_found(path, fields):
    """Although its own checksum is right again."""
    shelf = Shelf(path, encrypted=True)
    [record] = shelf.save([64 * KIB])
    seal = stored(shelf.tier, record)
    shelf.tier.close()
    change_index(
        shelf.path,
        lambda trees, txn: txn.put(page_key(record.serial), edited(seal, **fields), db=trees[b"pages"]),
    )
    shelf.tier = shelf._open()
    assert shelf.tier.find(record.parent, IDENTITY.digest, [(record.key, record.tokens)]) == []
    shelf.tier.close()


def test_a_record_under_another_serial_or_tenant_is_not_found(shelf):
    """Copied with its payload, its link, and everything that can be made to fit."""
    [mine] = shelf.save([64 * KIB])
    [theirs] = shelf.save([64 * KIB], identity=OTHER)
    seal, other = stored(shelf.tier, mine), stored(shelf.tier, theirs)
    sealing = shelf.tier._sealing
    moved = replace(seal, serial=other.serial, parent=other.parent, identity=OTHER.digest)
    assert sealing.opened(seal) == mine
    assert sealing.opened(moved) is None
    assert sealing.opened(replace(seal, serial=seal.serial + 7)) is None
    assert sealing.opened(replace(seal, parent=seal.parent + 1)) is None
    # Also with the key's id of the other tenant, or the other's whole prefix.
    for tokens in (
        seal.tokens[:16] + other.tokens[16:24] + seal.tokens[24:],
        other.tokens[:56] + seal.tokens[56:],
    ):
        assert sealing.opened(replace(seal, tokens=tokens)) is None
        assert sealing.opened(replace(moved, tokens=tokens)) is None


def test_an_older_payload_of_a_page_is_a_miss(shelf):
    """The same page, saved twice under the same serial, as after damage."""
    [record] = shelf.save([64 * KIB])
    older, payload = _sealed(shelf.tier, record)
    again = replace(record, seal=b"")
    view = shelf._memory.view(0, 64 * KIB)
    view[:] = os.urandom(64 * KIB)
    shelf.tier.write([(again, view)])
    assert again.seal != record.seal
    sealing, out = shelf.tier._sealing, memoryview(bytearray(64 * KIB))
    assert not sealing.open_payload(again, memoryview(payload), out)
    assert shelf.read([again, record]) == [bytes(view), None]
    newer = sealing.sealed(again)
    mixed = replace(newer, tokens=newer.tokens[:56] + older.tokens[56:])
    assert sealing.opened(mixed) is None
    shelf.saved.clear()


def test_no_page_key_is_used_twice(shelf):
    """Over restarts, and after an old copy of directory and keyring was restored."""
    salts = []

    def note():
        salts.extend(stored(shelf.tier, record).tokens[24:56] for record in shelf.save([20_000] * 8))

    note()
    shelf.tier.close()
    copies = [(path, path.with_name(f"{path.name} copy")) for path in (shelf.path, shelf.keyring_path)]
    shutil.copytree(*copies[0])
    shutil.copy(*copies[1])
    shelf.tier = shelf._open()
    note()
    shelf.tier.close()
    shutil.rmtree(shelf.path)
    shutil.copytree(*copies[0][::-1])
    shutil.copy(*copies[1][::-1])
    shelf.saved.clear()
    shelf.tier = shelf._open()
    note()
    assert len(set(salts)) == len(salts) == 24


# -- keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["master", "keyring"])
def test_a_store_without_its_keys_opens_and_misses(open_shelf, caplog, lost):
    shelf = open_shelf(encrypted=True)
    [record] = shelf.save([64 * KIB])
    shelf.tier.close()
    if lost == "keyring":
        shelf.keyring_path.unlink()
    master = bytes(32) if lost == "master" else MASTER_KEY
    keyring = Keyring.open(shelf.keyring_path, master, directory=shelf.path)
    assert keyring.locked == (lost == "master")
    caplog.clear()
    shelf.tier = DiskTier.open(shelf.path, keyring=keyring, **shelf.options)
    assert len(caplog.records) == (lost == "keyring")
    find = [(record.key, record.tokens)]
    assert shelf.tier.find(record.parent, IDENTITY.digest, find) == []
    assert shelf.tier.find_similar(record.parent, IDENTITY.digest, record.tokens) == []
    assert shelf.read([record]) == [None]
    if lost == "keyring":
        shelf.saved.clear()
        [newer] = shelf.save([64 * KIB])
        assert shelf.read([newer]) == [shelf.saved[newer.serial][1]]
    else:
        with pytest.raises(OSError, match="does not open the keyring"):
            shelf.save([64 * KIB])
        shelf.tier.close()
        shelf.tier = shelf._open()  # and with the right one everything is there
        shelf.verify()


def test_a_directory_is_encrypted_or_not(open_shelf, tmp_path):
    open_shelf(tmp_path / "plain").save([64 * KIB])
    open_shelf(tmp_path / "sealed", encrypted=True).save([64 * KIB])
    options = {"capacity_bytes": 64 * MIB, "page_bytes": 64 * KIB}
    for name in ("plain", "sealed"):
        shutil.copytree(tmp_path / name, tmp_path / f"copy of {name}")
    with pytest.raises(StoreUnavailableError, match="are encrypted: give --disk-key"):
        DiskTier.open(tmp_path / "copy of sealed", **options)
    keyring = Keyring.open(tmp_path / "ring", MASTER_KEY)
    with pytest.raises(StoreUnavailableError, match="are not encrypted, and would stay readable"):
        DiskTier.open(tmp_path / "copy of plain", keyring=keyring, **options)
    Keyring.open(tmp_path / "ring", MASTER_KEY).close()  # the refused store has closed it


def test_a_dropped_key_is_gone_from_the_file(tmp_path):
    path = tmp_path / "ring"
    keyring = Keyring.open(path, MASTER_KEY)
    scopes = [Scope(f"tenant {number}", "model") for number in range(5)]
    keys = [keyring.key(scope) for scope in scopes]
    before = path.read_bytes()
    page_key_before = keys[2].page_key(b"salt")
    assert keyring.drop(lambda scope: scope == scopes[2]) == 1
    assert keyring.drop(lambda scope: scope == scopes[2]) == 0
    after = path.read_bytes()
    slot = slice(1024 * keys[2].slot, 1024 * (keys[2].slot + 1))
    assert before[slot].strip(b"\0")
    assert not after[slot].strip(b"\0")
    assert before[: slot.start] + bytes(1024) + before[slot.stop :] == after
    assert keyring.find(scopes[2]) is keyring.by_id(keys[2].id) is None
    assert keys[2].page_key(b"salt") not in (page_key_before, keys[2].page_key(b"salt"))  # random from now on
    newer = keyring.key(scopes[2])
    assert newer.id != keys[2].id
    assert keyring.key(scopes[2], drops=0) is None
    keyring.close()
    again = Keyring.open(path, MASTER_KEY)
    assert {key.id for scope in scopes if (key := again.find(scope))} == {newer.id} | {
        key.id for key in keys if key is not keys[2]
    }
    again.close()


def test_another_master_key_opens_the_keyring_after_a_rotation(tmp_path):
    path = tmp_path / "ring"
    keyring = Keyring.open(path, MASTER_KEY)
    page_key = keyring.key(Scope("a", "b")).page_key(b"")
    keyring.key(Scope("forgotten", "b"))
    entries = path.read_bytes()
    keyring.drop(lambda scope: scope.tenant == "forgotten")
    keyring.rotate(bytes(32))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    old = Keyring.open(path, MASTER_KEY)
    assert old.locked
    with pytest.raises(StoreUnavailableError, match="in use by another store"):
        Keyring.open(path, bytes(32))
    old.close()
    new = Keyring.open(path, bytes(32))
    assert new.find(Scope("a", "b")).page_key(b"") == page_key
    new.close()
    # Blocks of the old file that the device has kept: the new key does not open the forgotten entry.
    path.write_bytes(path.read_bytes()[:1024] + entries[1024:])
    mixed = Keyring.open(path, bytes(32))
    assert not mixed.locked
    assert len(mixed) == 0
    mixed.close()


def test_an_interrupted_rotation_leaves_no_keys(tmp_path, monkeypatch):
    """They would open with the new master key after their tenant was forgotten."""
    path, left = tmp_path / "ring", tmp_path / "ring.new"
    keyring = Keyring.open(path, MASTER_KEY)
    keyring.key(Scope("a", "b"))
    written = []

    def fails(*paths):
        written.append(left.read_bytes())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(OSError, match="No space"):
            keyring.rotate(bytes(32))
    assert not left.exists()
    keyring.close()
    left.write_bytes(written[0])  # as after a crash
    with left.open("rb") as before:
        Keyring.open(path, MASTER_KEY).close()
        assert not before.read().strip(b"\0"), "the blocks still have the keys"
    assert not left.exists()
    left.write_text("another file")
    Keyring.open(path, MASTER_KEY).close()
    assert left.read_text() == "another file"


def test_keys_that_cannot_be_written_take_no_memory(tmp_path, monkeypatch):
    keyring = Keyring.open(tmp_path / "ring", MASTER_KEY)

    def fails(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        for number in range(300):
            with pytest.raises(OSError, match="No space"):
                keyring.key(Scope(f"tenant {number}", ""))
    assert repr(keyring._memory) == "SecretMemory(1 blocks)"
    keyring.close()


@settings(max_examples=30, deadline=None)
@given(tenant=st.text(max_size=600), model=st.text(max_size=600))
def test_scopes_of_any_name_are_kept(tmp_path_factory, tenant, model):
    path = tmp_path_factory.mktemp("rings") / "ring"
    keyring = Keyring.open(path, MASTER_KEY)
    key = keyring.key(Scope(tenant, model))
    keyring.close()
    again = Keyring.open(path, MASTER_KEY)
    assert again.find(Scope(tenant, model)).id == key.id
    again.close()


@pytest.mark.parametrize("cut", [0, 1, 100, 1023, 1024, 1500, 2048])
def test_a_keyring_whose_writing_was_interrupted_opens(tmp_path, cut):
    path = tmp_path / "ring"
    keyring = Keyring.open(path, MASTER_KEY)
    keyring.key(Scope("a", "b"))
    keyring.close()
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    if 0 < cut < 100:
        with pytest.raises(StoreUnavailableError, match="no keyring"):
            Keyring.open(path, MASTER_KEY)
        return
    again = Keyring.open(path, MASTER_KEY)
    assert len(again) == (cut == 2048)
    again.key(Scope("c", "d"))
    again.close()


def test_the_kernel_keeps_keys_out_of_swap_dumps_and_children():
    memory = SecretMemory()
    address = address_of(memory.keep(bytes(range(32))), writable=True)
    with open("/proc/self/smaps") as maps:
        lines = iter(maps.read().splitlines())
    for line in lines:
        first, *_ = line.split()
        if "-" in first and (span := [int(part, 16) for part in first.split("-")]) and len(span) == 2:
            inside = span[0] <= address < span[1]
        if line.startswith("VmFlags:") and inside:
            flags = line.split()
            assert {"lo", "dd", "wf"} <= set(flags), flags
            break
    else:
        pytest.fail("the memory of the keys is in no mapping")
    memory.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_opens_none_of_the_files(request):
    """Neither the master key, nor the keyring, nor anything in the directory, although the way is open."""
    place = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(place))
    place.chmod(0o755)
    make_master_key(place / "key")
    keyring = Keyring.open(place / "key.ring", read_master_key(str(place / "key")))
    tier = DiskTier.open(place / "disk", capacity_bytes=8 * MIB, page_bytes=64 * KIB, keyring=keyring)
    assert keyring.key(Scope("a", "b")) is not None
    files = [path for path in place.rglob("*") if path.is_file()]
    assert len(files) >= 4
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        opened = []
        for path in files:
            try:
                path.read_bytes()
                opened.append(path.name)
            except PermissionError:
                pass
        os.write(there, f"read {opened}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(here, 4096) == b"read []"
    os.close(here)
    os.close(there)
    tier.close()


def test_a_forked_child_neither_has_the_keys_nor_keeps_the_keyring_locked(tmp_path):
    path = tmp_path / "ring"
    keyring = Keyring.open(path, MASTER_KEY)
    key = keyring.key(Scope("a", "b"))
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        os.write(there, b"erased" if bytes(key.secret) == bytes(32) else b"readable")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(here, 16) == b"erased"
        keyring.close()
        Keyring.open(path, MASTER_KEY).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(here)
        os.close(there)


def test_keys_are_read_from_a_file_or_a_command(tmp_path):
    make_master_key(tmp_path / "key")
    key = read_master_key(str(tmp_path / "key"))
    assert len(key) == 32
    assert read_master_key(f"command:cat '{tmp_path / 'key'}'") == key
    with pytest.raises(UsageError, match="is there already"):
        make_master_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(UsageError, match="can be read by others: chmod 600"):
        read_master_key(str(tmp_path / "key"))
    (tmp_path / "short").write_text("secret")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(UsageError, match="64 hexadecimal digits") as error:
        read_master_key(str(tmp_path / "short"))
    assert "secret" not in str(error.value)
    with pytest.raises(UsageError, match="command for the disk key failed"):
        read_master_key("command:false")
    for name in ("missing", "zero\0byte"):
        with pytest.raises(UsageError, match="cannot read the disk key"):
            read_master_key(str(tmp_path / name))


def test_a_key_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    def fails(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(UsageError, match=r"cannot write .*: No space"):
            make_master_key(tmp_path / "key")
    make_master_key(tmp_path / "key")


def test_a_missing_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(StoreUnavailableError, match=r"pip install 'tierstore\[encryption\]'"):
        Keyring.open(tmp_path / "ring", MASTER_KEY)
    assert not list(tmp_path.iterdir())


def test_a_keyring_in_the_directory_is_refused(tmp_path):
    make_master_key(tmp_path / "key")
    source = str(tmp_path / "key")
    with pytest.raises(UsageError, match="inside of the disk directory"):
        open_keyring(source, tmp_path / "store" / "ring", tmp_path / "store")
    with pytest.raises(UsageError, match="give disk_keyring"):
        open_keyring(f"command:cat {source}", None, tmp_path / "store")
    with pytest.raises(UsageError, match="disk_keyring needs disk_key"):
        open_keyring("", tmp_path / "ring", tmp_path / "store")
    with pytest.raises(UsageError, match="there is none"):
        open_keyring(source, None, None)


def test_a_page_sealed_after_its_tenant_was_forgotten_opens_for_nobody(tmp_path):
    keyring = Keyring.open(tmp_path / "ring", MASTER_KEY)
    sealing = Sealing(keyring, {IDENTITY.digest: IDENTITY}.get)
    page, out = memoryview(bytearray(5000)), memoryview(bytearray(5000))
    record = PageRecord(2, 1, bytes(16), IDENTITY.digest, bytes(64), 5000, 0, seal=sealing.moment())
    sealing.seal_payload(record, page, out)
    assert len(keyring) == 1
    keyring.drop(lambda scope: True)
    late = replace(record, seal=sealing.seal_payload(record, page, out).pack())
    assert len(keyring) == 0
    assert not sealing.open_payload(late, out, page)
    assert sealing.opened(sealing.sealed(late)) is None
    keyring.close()


class EncryptedTierAgainstDict(TierAgainstDict):
    encrypted = True


TestEncryptedTierAgainstDict = EncryptedTierAgainstDict.TestCase
TestEncryptedTierAgainstDict.settings = TierAgainstDict.TestCase.settings
