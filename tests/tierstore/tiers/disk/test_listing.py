"""What ls knows of a store; nothing is changed by looking."""

from __future__ import annotations

import os

import pytest

from tests.tierstore.tiers.disk.shelf import IDENTITY
from tests.tierstore.tiers.disk.test_directory import fingerprint
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.tiers.disk.listing import list_store
from tierstore.units import KIB


def test_pages_tokens_prompts_and_bytes_of_an_identity(open_shelf, path):
    shelf = open_shelf()
    trunk = shelf.save([64 * KIB, 4 * KIB], chained=True)
    shelf.save([64 * KIB], parent=trunk[-1].serial)
    shelf.save([64 * KIB], parent=trunk[-1].serial)
    shelf.save([4 * KIB])
    shelf.tier.close()
    before = fingerprint(path)
    found = list_store(path)
    assert fingerprint(path) == before
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
    shelf = open_shelf()
    shelf.tier.close()
    assert list_store(path).holdings == []
    shelf.reopen()


def test_pages_that_have_lost_their_parents_are_counted_apart(open_shelf, path):
    shelf = open_shelf()
    first = shelf.save([64 * KIB] * 3, chained=True)[0]
    shelf.tier._index_db.forget([first.serial])
    shelf.tier.close()
    found = list_store(path)
    assert found.lost_pages == 2
    assert found.holdings == []
    shelf.reopen()


def test_a_store_in_use_is_its_owners_to_ask(open_shelf, path):
    shelf = open_shelf()
    shelf.save([64 * KIB])
    before = fingerprint(path)
    with pytest.raises(StoreUnavailableError, match=rf"in use by process {os.getpid()}: ask it with"):
        list_store(path)
    assert fingerprint(path) == before


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
