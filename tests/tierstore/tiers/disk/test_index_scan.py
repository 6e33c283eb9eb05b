"""Facts have no checksum of their own: whatever they say, a directory opens, and what is whole is served."""

from __future__ import annotations

import random
from dataclasses import asdict

import lmdb
import msgspec
import pytest

from tests.tierstore.tiers.disk.shelf import IDENTITY
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.disk.records import TREES, encode, link_of
from tierstore.units import KIB, MIB


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
def test_damaged_facts_cost_their_page_at_most(open_shelf, damage):
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
    kept = {record.serial for record in shelf.records()}
    if damage == "a serial that is none":
        assert kept == {other, third}
        del shelf.saved[page]
    else:
        assert kept == {page, other, third}  # its record says which parent is right
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


def bits_of(index, needle, length):
    """Where in the file ``needle`` is followed by ``length`` bytes, as bits, in pages of every age."""
    data = index.read_bytes()
    at, found = data.find(needle), []
    while at >= 0:
        found.append(at)
        at = data.find(needle, at + 1)
    return [[8 * at + bit for at in found] for bit in range(8 * length)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["record", "facts", "link", "root"])
def test_no_flipped_bit_of_an_index_entry_makes_a_lie(open_shelf, path, what):
    """Each bit of a page's entries, in turn: the page is a miss or right, the others are right, it opens."""
    shelf = open_shelf(capacity_bytes=4 * MIB)
    first, page, *_ = shelf.save([64 * KIB] * 4, chained=True)
    shelf.tier.close()
    index = path / "index.lmdb"
    key = page.serial.to_bytes(8, "big")
    root = first.parent.to_bytes(8, "big") + msgspec.json.encode(asdict(IDENTITY))
    needle, length = {
        "record": (key + encode(page), 8 + len(encode(page))),
        "facts": (key + page.parent.to_bytes(8, "little") + page.place.to_bytes(8, "little"), 56),
        "link": (link_of(page), len(link_of(page))),
        "root": (root, len(root)),
    }[what]
    bits = bits_of(index, needle, length)
    assert all(bits)
    whole = index.read_bytes()
    chain = [(record.key, record.tokens) for record, _ in shelf.saved.values()]
    for places in random.Random(0).sample(bits, min(len(bits), 150)):
        damaged = bytearray(whole)
        for at in places:
            damaged[at // 8] ^= 1 << at % 8
        index.write_bytes(damaged)
        shelf.tier = DiskTier.open(path, **shelf.options)
        found = shelf.tier.find(first.parent, first.identity, chain)
        assert found == [record for record, _ in shelf.saved.values()][: len(found)]
        for record, data in zip(found, shelf.read(found), strict=True):
            assert data in (None, shelf.saved[record.serial][1])
        kept = {record.serial for record in shelf.records()}
        assert kept <= shelf.saved.keys()
        assert what in ("record", "root") or kept == shelf.saved.keys() or page.serial not in kept
        assert shelf.tier.reserve(64 * KIB) is not None
        shelf.tier.close()
    index.write_bytes(whole)
    shelf.tier = DiskTier.open(path, **shelf.options)
    shelf.verify()
