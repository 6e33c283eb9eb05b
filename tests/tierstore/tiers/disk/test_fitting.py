"""Another capacity than in the last life: the pages that are worth most stay, wherever they lay."""

from __future__ import annotations

import errno
import random
import shutil

import pytest

from tests.tierstore.tiers.disk.test_capacity import sizes
from tierstore.errors import StoreUnavailableError
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
    assert f"{len(saved) - len(shelf.saved)} pages left that found no room" in caplog.text


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


def test_a_page_that_was_used_keeps_those_before_it(open_shelf):
    shelf = open_shelf(capacity_bytes=64 * MIB, page_bytes=256 * KIB)
    prompt = shelf.save([256 * KIB] * 20, chained=True)
    fill(shelf, [256 * KIB], 64 * MIB)
    use(shelf, [record.serial for record in prompt])
    shelf.reopen(capacity_bytes=8 * MIB)
    assert {record.serial for record in prompt} <= set(shelf.saved)
    shelf.verify()


@pytest.mark.parametrize("seed", range(6))
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
    for at in random.Random(2).sample(changes[:-2], 10):  # the last ones are about the directory's name
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
