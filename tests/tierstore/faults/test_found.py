"""What the campaign has found. What is marked is not mended yet."""

from __future__ import annotations

import errno

import pytest

from tests.campaigns.prompts import Life, load, prompt_tokens, save, small_pages
from tierstore.testing.faulty_io import Fail, Fault, FaultyIO, Stall
from tierstore.units import MIB

LIFE = Life(small_pages(), disk_bytes=1 * MIB, mover_threads=4)
TOKENS = 64


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def test_a_read_error_that_passes_costs_no_page(path):
    io = FaultyIO()
    with LIFE.open(path, io) as store:
        save(store, 0, TOKENS)
        assert store.flush(30)
        store.evict("host")
        io.set(Fault(lambda call: call.kind == "preadv", Fail(errno.EIO)))
        assert load(store, 0, TOKENS).served_tokens == 0
        io.clear()
        assert load(store, 0, TOKENS).served_tokens == TOKENS


def test_a_close_that_fails_still_gives_the_directory_back(path):
    io = FaultyIO()
    store = LIFE.open(path, io)
    save(store, 0, TOKENS)
    assert store.flush(30)
    io.set(Fault(lambda call: call.kind == "close", Fail(errno.EIO)))
    try:
        store.close()
    finally:
        io.clear()
        LIFE.open(path, io).close()


def test_a_stalled_disk_does_not_hold_up_hits_in_the_host_tier(path):
    io = FaultyIO()
    stall = Stall()
    with LIFE.open(path, io) as store:
        for number in range(0, 16, 2):
            save(store, number, TOKENS)
        assert store.flush(30)
        store.evict("host")
        save(store, 100, TOKENS)  # this one is in the host tier
        assert store.flush(30)
        io.set(Fault(lambda call: call.kind == "preadv", stall))
        try:
            hits = [store.lookup(prompt_tokens(number, TOKENS, LIFE.spec)) for number in range(0, 16, 2)]
            transfers = [hit.prefetch() for hit in hits]
            assert stall.entered.wait(30)
            answer = load(store, 100, TOKENS, deadline_s=1.0)
        finally:
            stall.release()
        for transfer in transfers:
            transfer.wait(30)
        assert answer.served_tokens == TOKENS


def test_a_partial_page_is_found_by_a_longer_prompt_in_the_next_life(path):
    with LIFE.open(path) as store:
        save(store, 0, 65)
        assert store.lookup(prompt_tokens(0, 90, LIFE.spec)).tokens == 65
    with LIFE.open(path) as store:
        assert store.lookup(prompt_tokens(0, 90, LIFE.spec)).tokens == 65


def test_a_store_that_has_lost_a_damaged_page_passes_its_check(path):
    with LIFE.open(path) as store:
        save(store, 0, TOKENS)
        assert store.flush(30)
    file = path / "extents" / "000000"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    with LIFE.open(path) as store:
        assert load(store, 0, TOKENS).served_tokens == 0
        save(store, 2, TOKENS)
        assert store.flush(30)
        store.check()
