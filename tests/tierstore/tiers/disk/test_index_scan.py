"""Facts have no checksum of their own: whatever they say, a directory opens, and what is whole is served."""

from __future__ import annotations

import lmdb
import pytest

from tierstore.tiers.disk import DiskTier
from tierstore.tiers.disk.records import TREES
from tierstore.units import KIB


def change(shelf, tree, edit):
    """Edit a tree of the closed tier's index."""
    env = lmdb.open(str(shelf.path / "index.lmdb"), subdir=False, max_dbs=len(TREES), map_size=1 << 30)
    with env, env.begin(write=True, db=env.open_db(tree)) as txn:
        edit(txn)


def replace_parent(serial, parent):
    def edit(txn):
        key = serial.to_bytes(8, "big")
        facts = txn.get(key)
        txn.put(key, parent.to_bytes(8, "little") + facts[8:])

    return edit


def move(serial, to):
    def edit(txn):
        facts = txn.pop(serial.to_bytes(8, "big"))
        txn.put(to.to_bytes(8, "big"), facts)

    return edit


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", ["its own parent", "a later one as parent", "a serial that is none"])
def test_damaged_facts_cost_their_page_only(open_shelf, damage):
    shelf = open_shelf()
    page, other, third = (record.serial for record in shelf.save([64 * KIB] * 3))
    shelf.tier.close()
    edit = {
        "its own parent": replace_parent(page, page),
        "a later one as parent": replace_parent(page, third),
        "a serial that is none": move(page, 1 << 63 | page),
    }[damage]
    change(shelf, b"facts", edit)
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert {record.serial for record in shelf.records()} == {other, third}
    del shelf.saved[page]
    shelf.verify()
    shelf.tier.page_table.check()
    shelf.tier.close()
    shelf.tier = DiskTier.open(shelf.path.with_name("fresh"), **shelf.options)


def test_an_identity_that_is_damaged_hides_its_pages_and_nothing_else(open_shelf):
    shelf = open_shelf()
    shelf.save([64 * KIB])
    root = shelf.tier.serials.root(shelf.records()[0].identity)
    shelf.tier.close()
    change(shelf, b"roots", lambda txn: txn.put(root.to_bytes(8, "big"), b"{"))
    shelf.tier = DiskTier.open(shelf.path, **shelf.options)
    assert shelf.tier.serials.root(next(iter(shelf.saved.values()))[0].identity) is None
