"""The store over a real disk tier: restarts, prefetches, damage, a host tier smaller than the hit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import tierstore
from tests.small_store import SPEC, load_bytes, pages_of
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.keys import Identity
from tierstore.testing.backend import request_of
from tierstore.testing.faulty_io import Fault, FaultyIO, Stall

TOKENS = list(range(100, 170))
LONG = list(range(16 * 32))


def save(store, tokens, **kwargs):
    stored = store.save(tokens, pages_of(tokens), **kwargs).wait(10)
    assert store.flush(10)
    return stored


def test_what_was_flushed_is_there_in_the_next_life(open_store):
    first = open_store()
    assert save(first, TOKENS) == 70
    first.close()
    second = open_store()
    hit = second.lookup(TOKENS)
    assert hit.by_tier == {"disk": 70}
    assert load_bytes(second, hit) == (70, pages_of(TOKENS))
    assert second.lookup(TOKENS).by_tier == {"host": 70}


def test_closing_writes_what_is_queued(open_store):
    first = open_store()
    first.save(LONG, pages_of(LONG)).wait(10)
    first.close()
    assert open_store().lookup(LONG).tokens == len(LONG)


def test_pages_are_written_beside_others_that_take_long(open_store, monkeypatch):
    monkeypatch.setattr("tierstore.core.write_behind._LEAST_BESIDE", 1)
    io = FaultyIO()
    store = open_store(io=io, inline_bytes=0)
    writes = Stall(), Stall()
    prompts = TOKENS, list(range(900, 970))
    for stall, tokens in zip(writes, prompts, strict=True):
        io.set(Fault(lambda call: call.kind == "pwritev", stall))
        store.save(tokens, pages_of(tokens)).wait(10)
        assert stall.entered.wait(10)
    io.clear()
    for stall in writes:
        stall.release()
    assert store.flush(10)
    store.evict("host")
    for tokens in prompts:
        assert load_bytes(store, store.lookup(tokens)) == (len(tokens), pages_of(tokens))


def test_another_identity_finds_nothing_in_the_same_directory(open_store):
    first = open_store()
    save(first, TOKENS)
    first.close()
    second = open_store(identity=Identity.of(SPEC, model="test", revision="2"))
    assert second.lookup(TOKENS).tokens == 0
    save(second, TOKENS)
    second.close()
    assert open_store().lookup(TOKENS).tokens == 70


def test_both_branches_of_a_prompt_survive(open_store):
    other = [*TOKENS[:40], *range(900, 930)]
    first = open_store()
    save(first, TOKENS)
    save(first, other)
    first.close()
    second = open_store()
    for tokens in (TOKENS, other):
        assert load_bytes(second, second.lookup(tokens)) == (70, pages_of(tokens))


def test_a_hit_larger_than_the_host_tier_passes_through_it(open_store):
    first = open_store()
    save(first, LONG)
    first.close()
    second = open_store(pages=4)
    assert load_bytes(second, second.lookup(LONG)) == (len(LONG), pages_of(LONG))
    assert second.stats().tiers["host"].used_bytes <= 4 * SPEC.page_bytes


def test_a_hit_larger_than_the_host_tier_passes_through_it_into_hbm(open_store):
    first = open_store()
    save(first, LONG)
    first.close()
    second = open_store(pages=4, hbm_pages=40)
    loaded = second.load(second.lookup(LONG)).wait(10)
    assert loaded.tokens == len(LONG)
    assert [second.pool.array[page].tobytes() for page in loaded.pages] == pages_of(LONG)
    second.release_hbm(loaded.pages)


def test_a_prefetch_cancelled_half_way_leaves_nothing_held(open_store):
    first = open_store()
    save(first, LONG)
    first.close()
    second = open_store()
    for _ in range(10):
        with second.lookup(LONG) as hit:
            transfer = hit.prefetch()
            transfer.cancel()
            assert transfer.wait(10) == 0
        second.evict("host")
    second.backend.core.mover.drain(10)
    assert all(tier.leased_pages == 0 for tier in second.stats().tiers.values())


def test_many_loads_of_one_prefix_read_it_once(open_store):
    first = open_store()
    save(first, LONG)
    first.close()
    second = open_store()
    hits = [second.lookup(LONG) for _ in range(12)]
    buffers = [[bytearray(SPEC.page_bytes) for _ in range(hit.num_pages)] for hit in hits]
    transfers = [second.load(hit, into) for hit, into in zip(hits, buffers, strict=True)]
    assert [transfer.wait(10).tokens for transfer in transfers] == [len(LONG)] * 12
    assert all([bytes(page) for page in into] == pages_of(LONG) for into in buffers)
    assert second.stats().counters["disk_read_pages"] == 32


def damage(directory):
    """Flip a byte in the middle of every extent file."""
    for path in (directory / "extents").iterdir():
        with path.open("r+b") as file:
            data = bytearray(file.read())
            marks = [at for at in range(4000, len(data), SPEC.page_bytes) if any(data[at - 100 : at + 100])]
            for at in marks[2:]:
                data[at] ^= 1
            file.seek(0)
            file.write(data)


def test_a_damaged_page_is_a_miss_and_can_be_saved_again(open_store, tmp_path):
    first = open_store(inline_bytes=0)
    save(first, LONG)
    first.close()
    damage(tmp_path / "disk")
    second = open_store(inline_bytes=0)
    tokens, pages = load_bytes(second, second.lookup(LONG))
    assert tokens == 32
    assert pages == pages_of(LONG)[:2]
    assert second.stats().counters["damaged_pages"] > 0
    assert second.lookup(LONG).tokens == 32
    for _ in range(40):  # each attempt finds further damaged pages below
        save(second, LONG)
        if load_bytes(second, second.lookup(LONG)) == (len(LONG), pages_of(LONG)):
            break
    second.evict("host")
    second.close()
    third = open_store(inline_bytes=0)
    assert load_bytes(third, third.lookup(LONG)) == (len(LONG), pages_of(LONG))


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_disk_capacity_holds_and_the_oldest_leave(open_store, tmp_path, inline_bytes):
    store = open_store(disk_bytes=2 << 20, pages=128, inline_bytes=inline_bytes)
    for n in range(30):
        save(store, list(range(1000 * n, 1000 * n + 256)))
        disk = store.stats().tiers["disk"]
        assert disk.used_bytes <= disk.capacity_bytes
        assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "disk").rglob("*")) <= 2 << 20
    assert store.stats().counters["evicted_pages"]["disk"] > 0
    store.evict("host")
    held = [store.lookup(range(1000 * n, 1000 * n + 256)).tokens for n in range(30)]
    assert held[-1] == 256
    assert held[0] == 0
    assert sum(held) // 16 == store.stats().tiers["disk"].pages


def test_what_was_used_last_survives_a_restart_longest(open_store):
    first = open_store(disk_pages=64, pages=128)
    prompts = [list(range(1000 * n, 1000 * n + 64)) for n in range(4)]
    for tokens in prompts:
        save(first, tokens)
    first.lookup(prompts[0]).release()
    first.close()
    second = open_store(disk_pages=64, pages=128)
    pages = second.stats().tiers["disk"].pages
    assert pages == 16
    second.evict("disk", 12)
    assert [second.lookup(tokens).tokens for tokens in prompts] == [64, 0, 0, 0]


KILLED = """
import sys, time
sys.path[:0] = sys.argv[3:]
from tests.small_store import SPEC, pages_of
from tierstore.keys import Identity
from tierstore.store import Store
identity = Identity.of(SPEC, model="test")
import tierstore
store = tierstore.open(sys.argv[1], SPEC, identity=identity, host_bytes=1 << 20, disk_bytes=16 << 20)
for n in range(1000):
    tokens = list(range(1000 * n, 1000 * n + 64))
    store.save(tokens, pages_of(tokens)).wait()
    store.flush()
    print(n, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(open_store, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "disk"), "", *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = [int(process.stdout.readline()) for _ in range(25)]
        process.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in process.stdout.read().split()]
    store = open_store()
    for n in acknowledged:
        tokens = list(range(1000 * n, 1000 * n + 64))
        assert load_bytes(store, store.lookup(tokens)) == (64, pages_of(tokens))


def test_a_store_in_use_is_refused(open_store, tmp_path):
    open_store()
    with pytest.raises(StoreUnavailableError, match="in use"):
        tierstore.open(tmp_path / "disk", SPEC, host_bytes=1 << 20, disk_bytes=16 << 20)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"disk_bytes": 10}, "less than one page"), ({"host_bytes": 0}, "needs a host tier")],
)
def test_what_cannot_work_leaves_no_directory_behind(tmp_path, kwargs, message):
    with pytest.raises(UsageError, match=message):
        tierstore.open(tmp_path / "new", SPEC, **{"host_bytes": 1 << 20, "disk_bytes": 16 << 20, **kwargs})
    assert not (tmp_path / "new").exists()


def test_a_failing_disk_is_only_a_missing_tier(open_store, monkeypatch):
    store = open_store(inline_bytes=0)
    save(store, TOKENS)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store.backend.core.disk, "write", fail)
    assert store.save(LONG, pages_of(LONG)).wait(10) == len(LONG)
    assert store.flush(10)
    stats = store.stats()
    assert stats.counters["disk_write_errors"] == 1
    assert not stats.disk_writable
    assert load_bytes(store, store.lookup(LONG)) == (len(LONG), pages_of(LONG))
    assert load_bytes(store, store.lookup(TOKENS)) == (70, pages_of(TOKENS))
    store.check()


@pytest.mark.parametrize("host_pages", [8, 16, 27])
def test_a_hit_larger_than_the_host_tier_is_loaded_whole(open_store, host_pages):
    store = open_store(pages=host_pages, hbm_pages=40)
    for first in range(0, 32, 4):
        end = (first + 4) * 16
        assert store.save(LONG[:end], pages_of(LONG[:end])[first:], first=first).wait(10) == 4 * 16
        assert store.flush(10)
    for first in (None, 28, 10, 0):  # what is in host memory before: what the saves have left, or one part
        if first is not None:
            store.evict("host")
            part = store.load_part(store.lookup(LONG), first, first + 4, deadline_s=None, last=True).wait(10)
            store.release_hbm(part.pages)
            store.evict("hbm")
        assert load_bytes(store, store.lookup(LONG)) == (len(LONG), pages_of(LONG))


def test_a_load_waits_for_room_that_pages_being_copied_leave(open_store):
    store = open_store(pages=8)
    one, other = list(range(128)), list(range(1000, 1128))
    for tokens in (one, other):
        save(store, tokens)
    lease = store.backend.find(request_of(store.identity, one), patience_s=10).wait(10)
    copied = store.backend.locate(lease, 0, 8, wait_s=10).wait(10)
    store.backend.release(lease)
    buffers = [bytearray(store.spec.page_bytes) for _ in range(8)]
    loading = store.load(store.lookup(other), buffers)
    with pytest.raises(TimeoutError):
        loading.wait(0.2)
    copied.release()
    assert loading.wait(30).tokens == len(other)
    assert [bytes(buffer) for buffer in buffers] == pages_of(other)


def test_a_page_that_is_long_being_copied_is_in_no_load_s_way(open_store):
    store = open_store(pages=8)
    for first in range(0, 32, 4):
        end = (first + 4) * 16
        assert store.save(LONG[:end], pages_of(LONG[:end])[first:], first=first).wait(10) == 4 * 16
        assert store.flush(10)
    save(store, TOKENS[:16])
    lease = store.backend.find(request_of(store.identity, TOKENS[:16]), patience_s=10).wait(10)
    copied = store.backend.locate(lease, 0, 1, wait_s=10).wait(10)
    store.backend.release(lease)
    buffers = [bytearray(store.spec.page_bytes) for _ in range(32)]
    loaded = store.load(store.lookup(LONG), buffers, deadline_s=8).wait(30)
    assert loaded.tokens == len(LONG)  # before its deadline, and so without waiting for the copy
    assert [bytes(buffer) for buffer in buffers] == pages_of(LONG)
    copied.release()
    store.check()


def test_a_prefetch_larger_than_the_host_tier_brings_the_beginning(open_store):
    store = open_store(pages=8, hbm_pages=40)
    for first in range(0, 32, 4):
        end = (first + 4) * 16
        assert store.save(LONG[:end], pages_of(LONG[:end])[first:], first=first).wait(10) == 4 * 16
        assert store.flush(10)
    store.evict("host")
    part = store.load_part(store.lookup(LONG), 24, 32, deadline_s=None, last=True).wait(10)
    store.release_hbm(part.pages)
    store.evict("hbm")
    with store.lookup(LONG) as hit:
        assert hit.by_tier["host"] >= 4 * 16
        assert hit.prefetch().wait(10) >= 4 * 16
    with store.lookup(LONG) as hit:
        assert next(iter(hit.by_tier)) == "host"


def test_a_save_larger_than_the_queue_is_written_whole(open_store):
    """What does not fit into the queue to disk is put off, and flush waits for it."""
    store = open_store(pages=48)
    count = 40  # the queue has half of the host tier
    tokens = list(range(16 * count))
    assert store.save(tokens, pages_of(tokens)).wait(10) == len(tokens)
    assert store.flush(30)
    counters = store.stats().counters
    assert counters["disk_dropped_pages"] == 0
    assert counters["disk_written_pages"] == count
    store.evict("host")
    hit = store.lookup(tokens)
    assert hit.by_tier == {"disk": len(tokens)}
    assert load_bytes(store, hit) == (len(tokens), pages_of(tokens))


def test_what_was_put_off_and_left_host_memory_is_counted(open_store):
    io, stall = FaultyIO(), Stall()
    store = open_store(io=io, pages=32, inline_bytes=0)
    io.set(Fault(lambda call: call.kind == "pwritev", stall))
    tokens = list(range(16 * 28))
    assert store.save(tokens, pages_of(tokens)).wait(10) == len(tokens)
    assert stall.entered.wait(10)
    store.evict("host")  # what the queue has stays, what was put off goes
    with store.lookup(tokens) as hit:
        assert hit.tokens < len(tokens)
    io.clear()
    stall.release()
    assert store.flush(30)
    counters = store.stats().counters
    assert counters["disk_written_pages"] + counters["disk_dropped_pages"] == 28
    assert counters["disk_dropped_pages"] > 0
