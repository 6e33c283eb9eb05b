"""What ls knows of a store: the same whether it is in use or not, and nothing is changed by looking."""

from __future__ import annotations

import os
import threading

import pytest

from tests.tierstore.tiers.disk.shelf import IDENTITY
from tests.tierstore.tiers.disk.test_directory import fingerprint
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.tiers.disk import listing
from tierstore.tiers.disk.listing import list_store
from tierstore.units import KIB


def test_pages_tokens_prompts_and_bytes_of_an_identity(open_shelf, path):
    shelf = open_shelf()
    trunk = shelf.save([64 * KIB, 4 * KIB], chained=True)
    shelf.save([64 * KIB], parent=trunk[-1].serial)
    shelf.save([64 * KIB], parent=trunk[-1].serial)
    shelf.save([4 * KIB])
    in_use = list_store(path)
    shelf.tier.close()
    before = fingerprint(path)
    found = list_store(path)
    assert fingerprint(path) == before
    assert in_use.in_use
    assert in_use.holdings == found.holdings
    assert not found.in_use
    (holding,) = found.holdings
    assert holding.identity == IDENTITY
    assert (holding.pages, holding.prompts, holding.tokens) == (5, 3, 5 * 64)
    assert holding.bytes == 3 * 64 * KIB + 2 * 4 * KIB
    assert holding.inline_pages == 2
    assert (holding.oldest_s, holding.newest_s) == (
        trunk[0].created_s,
        max(r.created_s for r, _ in shelf.saved.values()),
    )
    assert found.lost_pages == 0
    assert found.allocated_bytes >= found.extent_bytes + found.index_bytes
    shelf.reopen()


def test_a_store_without_pages(open_shelf, path):
    open_shelf()
    assert list_store(path).holdings == []


def test_pages_that_have_lost_their_parents_are_counted_apart(open_shelf, path):
    shelf = open_shelf()
    first = shelf.save([64 * KIB] * 3, chained=True)[0]
    shelf.tier._catalog.forget([first.serial])
    shelf.tier.close()
    found = list_store(path)
    assert found.lost_pages == 2
    assert found.holdings == []
    shelf.reopen()


def test_a_store_that_is_being_written_is_listed_truly(open_shelf, path):
    shelf = open_shelf()
    shelf.save([4 * KIB] * 20)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            records = shelf.save([4 * KIB] * 20)
            shelf.remove(records)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            found = list_store(path)
            # Each tree is read at a moment of its own: pages that came or went meanwhile may be in it.
            pages = sum(holding.pages for holding in found.holdings)
            assert 20 <= pages <= 40
            assert all(holding.identity == IDENTITY for holding in found.holdings)
    finally:
        stop.set()
        writer.join()
    shelf.verify()


def test_many_bursts_read_what_one_does(open_shelf, path, monkeypatch):
    shelf = open_shelf()
    shelf.save([4 * KIB] * 50)
    shelf.tier.close()  # LMDB opens a file once in a process
    whole = listing._read(path, in_use=False)
    monkeypatch.setattr(listing, "_BURST", 7)
    assert listing._read(path, in_use=True).holdings == whole.holdings
    assert whole.holdings[0].pages == 50
    shelf.reopen()


def test_what_cannot_be_listed_is_one_clear_error(open_shelf, path, tmp_path):
    with pytest.raises(UsageError, match="holds no store"):
        list_store(tmp_path)
    shelf = open_shelf()
    shelf.save([64 * KIB] * 20)
    shelf.tier.close()
    index = path / "index.lmdb"
    whole = index.read_bytes()
    os.truncate(index, 3 * 4096)
    with pytest.raises(StoreUnavailableError, match="remove the directory"):
        list_store(path)
    index.write_bytes(whole)
    shelf.reopen()
