"""What is not written to disk: what nobody would load, and what is beyond a budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tierstore.core.write_admission import WriteBudget, WriteWorth
from tierstore.testing.clock import ManualClock

SPEC = tierstore.KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16", chunk_tokens=16)
PAGES = [bytes([number]) * SPEC.page_bytes for number in range(8)]


def prompt(number: int) -> list[int]:
    return list(range(number * 1000, number * 1000 + 16 * 8))


def opened(path, **options):
    return tierstore.open(str(path), SPEC, host_bytes=4 << 20, disk_bytes=16 << 20, **options)


@given(st.integers(1, 1 << 40), st.lists(st.tuples(st.floats(0, 5000), st.integers(1, 1 << 34)), max_size=60))
def test_no_more_is_written_than_the_budget_and_a_page(per_day, writes):
    clock = ManualClock()
    budget = WriteBudget(clock, bytes_per_day=per_day)
    began, written, largest = clock(), 0, 0
    for after_s, nbytes in writes:
        clock.advance(after_s)
        if budget.take(nbytes):
            written, largest = written + nbytes, max(largest, nbytes)
        assert written <= (clock() - began) * per_day / 86400 * (1 + 1e-9) + largest + 1


def test_evidence_fades():
    clock = ManualClock()
    worth = WriteWorth(clock)
    assert worth.is_given()
    worth.declined(100_000)
    assert not worth.is_given()
    worth.read(50_000)
    assert worth.is_given()
    worth.declined(1_000_000)
    assert not worth.is_given()
    clock.advance(3600.0)
    assert worth.is_given()


def test_what_is_over_the_budget_is_not_written_and_counted(tmp_path):
    with opened(tmp_path / "store", disk_write_budget=86400) as store:
        store.save(prompt(0), PAGES).wait()
        assert store.flush()
        counters = store.backend.core.state.counters
        assert counters.disk_written_pages <= 1
        assert counters.disk_declined_pages >= 1
        assert counters.disk_declined_pages + counters.disk_dropped_pages >= 7
        assert store.lookup(prompt(0)).by_tier["host"] == 128
        store.check()


def test_what_would_be_declined_is_not_written_until_it_is_wanted_again(tmp_path):
    with opened(tmp_path / "store") as store:
        store.save(prompt(0), PAGES).wait()
        assert store.flush()
        store.backend.declined({"disk slower": 1 << 20, "host slower": 5})
        store.save(prompt(1), PAGES).wait()
        assert store.flush()
        counters = store.backend.core.state.counters
        assert (counters.disk_written_pages, counters.disk_declined_pages) == (8, 8)
        store.evict("host")
        assert store.lookup(prompt(1)).tokens == 0
        buffers = [bytearray(SPEC.page_bytes) for _ in PAGES]
        assert store.load(store.lookup(prompt(0)), buffers).wait().tokens == 128
        store.backend.core.write_worth("").read(1 << 20)
        store.save(prompt(1), PAGES).wait()
        assert store.flush()
        store.evict("host")
        assert store.lookup(prompt(1)).by_tier["disk"] == 128
        store.check()
