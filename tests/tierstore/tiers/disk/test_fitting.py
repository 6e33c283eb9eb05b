"""Another capacity than in the last life: the pages that are worth most stay, wherever they lay."""

from __future__ import annotations

import errno
import random
import shutil
import signal
import subprocess
import sys

import pytest

import tierstore
from tests.portions import chosen
from tests.tierstore.tiers.disk.shelf import Shelf
from tests.tierstore.tiers.disk.test_capacity import sizes
from tierstore import KVSpec
from tierstore.errors import StoreUnavailableError
from tierstore.keys import Identity
from tierstore.policy import POLICIES, Policy
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO
from tierstore.tiers.disk import DiskTier, PageUse
from tierstore.tiers.disk.fsck import fsck
from tierstore.units import GIB, KIB, MIB


def fill(shelf, page_sizes, nbytes, seed=0):
    """Save pages until so many bytes are there, or no more find room."""
    chance = random.Random(seed)
    saved = 0
    while saved < nbytes:
        batch = [chance.choice(page_sizes) for _ in range(8)]
        records = shelf.save(batch)
        saved += sum(record.nbytes for record in records)
        if len(records) < len(batch):
            return


def use(shelf, serials):
    """These were asked for last."""
    shelf.tick += 1
    used = {serial: PageUse(shelf.tick, 0.0, 1) for serial in serials}
    shelf.tier.page_table.touch(used)
    shelf.tier.commit([], [], used, shelf.tick)


def fill_ratio(shelf):
    return sum(record.nbytes for record, _ in shelf.saved.values()) / shelf.options["capacity_bytes"]


def test_a_tenth_of_the_cap_keeps_the_pages_that_were_used_last(open_shelf, caplog):
    shelf = open_shelf(capacity_bytes=100 * MIB, page_bytes=256 * KIB)
    fill(shelf, [256 * KIB], 100 * MIB)
    saved = list(shelf.saved)
    wanted = random.Random(0).sample(saved, 30)  # they lie all over the extents
    use(shelf, wanted)
    shelf.reopen(capacity_bytes=10 * MIB)
    assert set(wanted) <= set(shelf.saved)
    assert max(sizes(shelf.path)) <= 10 * MIB
    shelf.verify()
    assert shelf.tier.fitted.evicted_pages == len(saved) - len(shelf.saved)
    assert shelf.tier.fitted.lost_pages == 0
    assert f"{len(saved) - len(shelf.saved)} pages without room were evicted" in caplog.text


class _Worth(Policy):
    """The pages that are worth least leave first."""

    name = "worth"

    def score(self, facts):
        return facts.worth


def test_what_a_page_is_worth_is_known_in_every_life(open_shelf, monkeypatch):
    """To the table when it is saved, when the directory is opened, and when it is opened with another cap."""
    monkeypatch.setitem(POLICIES, _Worth.name, _Worth)
    shelf = open_shelf(capacity_bytes=40 * MIB, page_bytes=256 * KIB, policy=_Worth.name)
    costly = Identity.of(KVSpec.embedding(width=8, dtype="int8", worth=1), model="m")
    wanted = {record.serial for record in shelf.save([256 * KIB] * 4, identity=costly)}
    fill(shelf, [256 * KIB], 40 * MIB)
    for _ in range(2):
        order = shelf.tier.page_table.next_to_leave(_Worth(), len(shelf.saved))
        assert set(order[-4:]) == wanted
        shelf.reopen()
    shelf.reopen(capacity_bytes=4 * MIB)
    assert wanted <= set(shelf.saved)
    assert shelf.tier.fitted.evicted_pages


def test_pages_that_lie_beyond_a_much_smaller_cap_are_kept(open_shelf):
    """10 GiB have other units than 64 MiB, so no page of this size lies in a slot of the smaller space."""
    shelf = open_shelf(capacity_bytes=10 * GIB, page_bytes=1000 * KIB)
    fill(shelf, [1000 * KIB], 150 * MIB)
    newest = sorted(shelf.saved)[-50:]
    shelf.reopen(capacity_bytes=64 * MIB)
    assert set(newest) <= set(shelf.saved)
    assert fill_ratio(shelf) > 0.9
    assert shelf.tier.fitted.lost_pages == 0
    shelf.verify()


def test_a_larger_cap_keeps_every_page(open_shelf):
    shelf = open_shelf(capacity_bytes=40 * MIB, page_bytes=1000 * KIB)
    fill(shelf, [1000 * KIB, 44 * KIB], 40 * MIB)
    before = set(shelf.saved)
    shelf.reopen(capacity_bytes=10 * GIB)
    assert set(shelf.saved) == before
    shelf.verify()
    shelf.reopen(capacity_bytes=40 * MIB)  # and back
    assert len(before) - len(shelf.saved) <= len(before) / 10
    shelf.verify()


@pytest.mark.parametrize(("mine", "others"), [(8 * KIB, 44 * KIB), (256 * KIB, 8 * KIB)])
def test_pages_of_another_size_keep_their_room_up_to_half_of_the_cap(open_shelf, mine, others):
    """Small pages lie in the index and large ones in the extents: whose pages a life writes says how the cap
    is shared out."""
    shelf = open_shelf(capacity_bytes=64 * MIB, page_bytes=others)
    fill(shelf, [others], 20 * MIB)
    for page_bytes in (mine, others, mine):
        before = set(shelf.saved)
        shelf.reopen(page_bytes=page_bytes)
        assert set(shelf.saved) == before
        fill(shelf, [mine], 7 * MIB)
        assert max(sizes(shelf.path)) <= 64 * MIB
        shelf.verify()
        shelf.tier.check()
    fill(shelf, [mine], 64 * MIB)
    assert fill_ratio(shelf) > 0.7
    before = len(shelf.saved)
    shelf.reopen(page_bytes=others)  # too many for half of the cap
    assert len(shelf.saved) > before / 4
    assert max(sizes(shelf.path)) <= 64 * MIB
    shelf.verify()


def fresh(open_shelf, tmp_path, **options):
    """How many pages an empty store takes."""
    shelf = open_shelf(tmp_path / "fresh", **options)
    fill(shelf, [options["page_bytes"]], options["capacity_bytes"])
    return len(shelf.saved)


@pytest.mark.parametrize("page_bytes", chosen([2 * KIB, 8 * KIB, 16 * KIB], 8 * KIB))
def test_pages_in_the_index_leave_by_the_policy_too(open_shelf, tmp_path, page_bytes):
    """LMDB's file never shrinks, and a full one leaves no room for another beside it under the cap."""
    shelf = open_shelf(capacity_bytes=64 * MIB, page_bytes=page_bytes)
    fill(shelf, [page_bytes], 64 * MIB)
    saved = sorted(shelf.saved)
    shelf.reopen(capacity_bytes=24 * MIB)
    fitting = fresh(open_shelf, tmp_path, capacity_bytes=24 * MIB, page_bytes=page_bytes)
    assert len(shelf.saved) > 0.85 * fitting
    assert sorted(shelf.saved) == saved[-len(shelf.saved) :]
    assert max(sizes(shelf.path)) <= 24 * MIB
    shelf.verify()
    shelf.tier.check()


@pytest.mark.parametrize(("call", "kept"), [("free", 0.02), ("rename", 0.85)])
def test_a_full_index_is_made_smaller_though_the_disk_fails(open_shelf, path, call, kept):
    """A file system that cannot free a part of a file costs pages. A disk that fails costs only those that
    were to leave."""
    shelf = open_shelf(capacity_bytes=64 * MIB, page_bytes=8 * KIB)
    fill(shelf, [8 * KIB], 64 * MIB)
    shelf.tier.close()
    io = FaultyIO()
    io.set(Fault(lambda made: made.kind == call, Fail(errno.EOPNOTSUPP)))
    options = {**shelf.options, "capacity_bytes": 24 * MIB}
    if call == "free":
        shelf.tier = DiskTier.open(path, **options, io=io)
    else:
        with pytest.raises(StoreUnavailableError):
            DiskTier.open(path, **options, io=io)
        found = fsck(path)
        assert found.pages == found.good_pages
        shelf.tier = DiskTier.open(path, **options)
    shelf.saved = {record.serial: (record, shelf.saved[record.serial][1]) for record in shelf.records()}
    assert len(shelf.saved) * 8 * KIB > kept * 22 * MIB
    shelf.verify()
    shelf.tier.check()


def test_a_page_that_was_used_keeps_those_before_it(open_shelf):
    shelf = open_shelf(capacity_bytes=64 * MIB, page_bytes=256 * KIB)
    prompt = shelf.save([256 * KIB] * 20, chained=True)
    fill(shelf, [256 * KIB], 64 * MIB)
    use(shelf, [record.serial for record in prompt])
    shelf.reopen(capacity_bytes=8 * MIB)
    assert {record.serial for record in prompt} <= set(shelf.saved)
    shelf.verify()


@pytest.mark.parametrize("seed", chosen(range(6), 0, 3))
def test_any_sequence_of_caps_keeps_what_finds_room(open_shelf, seed):
    chance = random.Random(seed)
    shelf = open_shelf(capacity_bytes=48 * MIB, page_bytes=256 * KIB)
    for _ in range(6):
        page_sizes = chance.sample([20_000, 44 * KIB, 100_000, 256 * KIB, 700_000, 1792 * KIB], k=3)
        fill(shelf, page_sizes, shelf.options["capacity_bytes"], seed)
        some = chance.sample(list(shelf.saved), len(shelf.saved) // 3)
        shelf.remove([shelf.saved[serial][0] for serial in some if serial in shelf.saved])
        held = sum(record.nbytes for record, _ in shelf.saved.values())
        capacity = chance.choice([12, 24, 47, 48, 100]) * MIB
        shelf.reopen(capacity_bytes=capacity)
        assert shelf.tier.fitted.lost_pages == 0
        assert max(sizes(shelf.path)) <= capacity
        kept = sum(record.nbytes for record, _ in shelf.saved.values())
        assert kept >= min(held, capacity) * 0.4  # small pages fill the index first, and large ones few slabs
        shelf.verify()
        shelf.tier.check()


_CHANGES = ("pwritev", "sync", "truncate", "unlink", "sync_directory")


def test_an_opening_that_fails_anywhere_loses_nothing(open_shelf, path, tmp_path):
    """It goes on the next time, whatever the capacity is then, and ends with the same pages."""
    shelf = open_shelf(capacity_bytes=32 * MIB, page_bytes=700_000)
    fill(shelf, [700_000, 44 * KIB], 32 * MIB)
    use(shelf, random.Random(1).sample(list(shelf.saved), 20))
    shelf.tier.close()

    def outcome(where, **options):
        copied = shutil.copytree(path, where) if not where.exists() else where
        with DiskTier.open(copied, **{**shelf.options, "capacity_bytes": 12 * MIB, **options}) as tier:
            shelf.tier = tier
            shelf.saved = {record.serial: (record, saved[record.serial][1]) for record in shelf.records()}
            shelf.verify()
            return set(shelf.saved)

    saved = shelf.saved
    whole = FaultyIO()
    expected = outcome(tmp_path / "whole", io=whole)
    changes = [call.number for call in whole.calls if call.kind in _CHANGES]
    for at in random.Random(2).sample(changes[:-2], 5):  # the last ones are about the directory's name
        io = FaultyIO()
        io.set(Fault(lambda call, at=at: call.kind in _CHANGES and call.number >= at, Fail(errno.EIO)))
        with pytest.raises(StoreUnavailableError):
            outcome(tmp_path / f"fails{at}", io=io)
        assert fsck(tmp_path / f"fails{at}").clean
        if at % 2:  # with the old capacity in between
            outcome(tmp_path / f"fails{at}", capacity_bytes=32 * MIB)
        assert outcome(tmp_path / f"fails{at}") == expected
    shelf.saved = saved
    shelf.tier = DiskTier.open(path, **shelf.options)


SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=64)  # 32 KiB a page


def save_prompts(path, capacity_bytes, nbytes):
    """Save prompts of 16 pages, ``nbytes`` in all. Returns them, and how many pages are kept."""
    prompts = [list(range(100_000 * n, 100_000 * n + 1024)) for n in range(nbytes // (16 * SPEC.page_bytes))]
    with tierstore.open(path, SPEC, host_bytes=32 * MIB, disk_bytes=capacity_bytes) as store:
        for number, tokens in enumerate(prompts):
            store.save(tokens, [bytes([number % 256]) * SPEC.page_bytes] * 16).wait(60)
            if number % 16 == 0:
                assert store.flush(60)
        assert store.flush(60)
        return prompts, store.stats().tiers["disk"].pages


@pytest.mark.parametrize("smaller", chosen([8 * MIB, 24 * MIB, 60 * MIB], 24 * MIB))
def test_a_smaller_cap_keeps_as_many_pages_as_a_new_directory_and_the_newest(tmp_path, smaller):
    _, fitting = save_prompts(tmp_path / "new", smaller, smaller + 4 * MIB)
    prompts, _ = save_prompts(tmp_path / "kv", 64 * MIB, 60 * MIB)
    with tierstore.open(tmp_path / "kv", SPEC, host_bytes=32 * MIB, disk_bytes=smaller) as store:
        kept = store.stats().tiers["disk"].pages
        assert kept >= 0.95 * min(fitting, 16 * len(prompts))
        found = []
        for number, tokens in enumerate(prompts):
            with store.lookup(tokens) as hit:
                buffers = [bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)]
                loaded = store.load(hit, buffers).wait(60)
            assert buffers == [bytes([number % 256]) * SPEC.page_bytes] * (loaded.tokens // 64)
            found.append(loaded.tokens // 64)
    assert sum(found) == kept
    whole = kept // 16
    assert found[-whole:] == [16] * whole  # the newest, and of one older prompt its beginning


_DIES = """
import os, signal, sys
from pathlib import Path
from tierstore.testing.faulty_io import Effect, Fault, FaultyIO
from tierstore.tiers.disk import DiskTier

class Die(Effect):
    def begin(self):
        os.kill(os.getpid(), signal.SIGKILL)

io = FaultyIO()
at = int(sys.argv[2])
io.set(Fault(lambda call: call.kind in %r and call.number >= at, Die()))
DiskTier.open(Path(sys.argv[1]), capacity_bytes=12 << 20, page_bytes=700_000, io=io).close()
"""


def test_a_process_that_is_killed_while_it_makes_room_loses_no_page_that_stays(open_shelf, path, tmp_path):
    shelf = open_shelf(capacity_bytes=32 * MIB, page_bytes=700_000)
    fill(shelf, [700_000, 44 * KIB], 32 * MIB)
    use(shelf, random.Random(1).sample(list(shelf.saved), 20))
    shelf.tier.close()
    options = {**shelf.options, "capacity_bytes": 12 * MIB}
    whole = FaultyIO()
    shutil.copytree(path, tmp_path / "whole")
    with DiskTier.open(tmp_path / "whole", **options, io=whole) as tier:
        expected = {serial for serial, _ in tier.scan()}
    changes = [call.number for call in whole.calls if call.kind in _CHANGES]
    assert len(changes) > 20
    for at in random.Random(3).sample(changes[:-2], 3):
        killed = shutil.copytree(path, tmp_path / f"killed{at}")
        command = [sys.executable, "-c", _DIES % (_CHANGES,), str(killed), str(at)]
        assert subprocess.run(command, timeout=120, check=False).returncode == -signal.SIGKILL
        assert fsck(killed).clean
        again = Shelf(killed, **options)
        again.saved = {record.serial: shelf.saved[record.serial] for record in again.records()}
        assert set(again.saved) == expected
        again.saved = {record.serial: (record, again.saved[record.serial][1]) for record in again.records()}
        again.verify()
        again.close()
    shelf.tier = DiskTier.open(path, **shelf.options)
