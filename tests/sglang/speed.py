"""Measure the storage's calls: 512 pages of 1 MiB, in batches of 128 as SGLang's, beside a plain client of
the same daemon in the same minute; queries about the 1,563 pages of 100,000 tokens; and calls while the
daemon is stopped, its memory is full of pages that others hold, and it is gone. Prints a line of JSON.

    PYTHONPATH=tests/sglang/cpu python -m tests.sglang.speed FOLDER
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tierstore
from tests.sglang.caches import CacheConfig, Caches, Watched
from tierstore import KVSpec, Prompt
from tierstore.testing.processes import DaemonProcess
from tierstore.units import GIB, MIB
from tierstore_connectors.sglang.identity import pages_named

PAGES, BATCH, ROUNDS = 512, 128, 5
ASKED = 1563
_CALLS = 50


class Speed(Caches):
    """A page is 64 tokens of K and of V, 512 KiB each."""

    __test__ = True
    cfg = CacheConfig(page_size=64, num_layers=4, head_num=8, head_dim=128, kv_size=PAGES * 64)

    def runTest(self) -> None:
        raise AssertionError("a program and no test")


def names(round_: int, pages: int) -> list[str]:
    return [hashlib.sha256(b"%d %d" % (round_, page)).hexdigest() for page in range(pages)]


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def moved(storage: Watched, pool: Any) -> dict[str, float]:
    """GB/s of sets and gets, and milliseconds of a set of what is there."""
    slots = pool.alloc(PAGES * 64)
    assert slots is not None, "the host pool holds them all"
    page_bytes = sum(pool.get_page_buffer_meta(slots[:64])[1])
    assert page_bytes == MIB

    def all_of(call: Callable[[list[str], Any], list[bool]], keys: list[str]) -> float:
        parts = [(keys[at : at + BATCH], slots[at * 64 : (at + BATCH) * 64]) for at in range(0, PAGES, BATCH)]
        return timed(lambda: [_expect_all(call(*part)) for part in parts])

    sets, gets, there = [], [], []
    for round_ in range(ROUNDS):
        keys = names(round_, PAGES)
        sets.append(all_of(storage.batch_set_v1, keys))
        there.append(all_of(storage.batch_set_v1, keys))
        storage.batch_exists(keys)
        gets.append(all_of(storage.batch_get_v1, keys))
    pool.free(slots)
    nbytes = PAGES * page_bytes
    return {
        "set_gb_per_s": nbytes / statistics.median(sets) / 1e9,
        "get_gb_per_s": nbytes / statistics.median(gets) / 1e9,
        "set_there_ms": 1e3 * statistics.median(there),
    }


def _expect_all(done: list[bool]) -> None:
    assert all(done), f"{done.count(False)} pages were left out"


def asked(url: str) -> dict[str, float]:
    """Milliseconds of a query about 1,563 pages that are there, as named pages and as a chain."""
    spec = KVSpec.opaque(4096, chunk_tokens=64, hashed=True)
    tokens = list(range(ASKED * 64))
    with tierstore.connect(url, spec) as store:
        assert store.wait_connected(60)
        named = pages_named(store.identity, names(99, ASKED), 64)
        prompts: dict[str, list[int] | Prompt] = {"chained": tokens, "named": named}
        took: dict[str, list[float]] = {}
        for name, prompt in prompts.items():
            store.save(prompt, [bytes(4096)] * ASKED).wait()
            took[name] = []
            for _ in range(21):
                began = time.perf_counter()
                hit = store.lookup(prompt)
                took[name].append(time.perf_counter() - began)
                assert hit.num_pages == ASKED
                hit.release()
    return {f"exists_{name}_ms": 1e3 * statistics.median(times) for name, times in took.items()}


def calls(storage: Watched, pool: Any) -> dict[str, float]:
    """Milliseconds of calls once the storage has found out; the first ones are what that costs."""
    slots = pool.alloc(4 * 64)
    keys = names(7000, 4)
    every: dict[str, Callable[[], Any]] = {
        "exists": lambda: storage.batch_exists(keys),
        "get": lambda: storage.batch_get_v1(keys, slots),
        "set": lambda: storage.batch_set_v1(keys, slots),
    }
    first = sum(timed(call) for call in every.values() for _ in range(2))
    after = {name: [timed(call) for _ in range(_CALLS)] for name, call in every.items()}
    pool.free(slots)
    return {
        "first_calls_ms": 1e3 * first,
        **{f"{name}_ms": 1e3 * statistics.median(times) for name, times in after.items()},
        **{f"{name}_slowest_ms": 1e3 * max(times) for name, times in after.items()},
    }


@contextmanager
def full(url: str) -> Iterator[None]:
    """The daemon's memory is full of pages that somebody is about to read."""
    with tierstore.connect(url, KVSpec.opaque(MIB, chunk_tokens=64)) as store:
        assert store.wait_connected(60)
        held = []
        while True:
            prompt = [len(held)] * (64 * 128)
            if store.save(prompt, [bytes(MIB)] * 128).wait() < len(prompt):
                break
            held.append(store.lookup(prompt))
        yield
        for hit in held:
            hit.release()


def fill(url: str, nbytes: int) -> None:
    """Save ``nbytes`` that no later call asks for: the daemon's memory is then touched everywhere."""
    with tierstore.connect(url, KVSpec.opaque(MIB, chunk_tokens=64)) as store:
        assert store.wait_connected(60)
        for number in range(nbytes // MIB // BATCH):
            store.save([number + 1_000_000] * (64 * BATCH), [bytes(MIB)] * BATCH).wait()


def _save(store: tierstore.Store, prompt: list[int], pages: list[bytes]) -> None:
    store.save(prompt, pages).wait()


def _load(store: tierstore.Store, prompt: list[int], pages: list[bytearray]) -> None:
    with store.lookup(prompt) as hit:
        store.load(hit, pages).wait()


def beside(url: str) -> dict[str, float]:
    """GB/s of a plain client that saves and loads pages of 1 MiB."""
    source = [bytes([page % 256]) * MIB for page in range(PAGES)]
    target = [bytearray(MIB) for _ in range(PAGES)]
    puts, gets = [], []
    with tierstore.connect(url, KVSpec.opaque(MIB, chunk_tokens=64)) as store:
        assert store.wait_connected(60)
        for number in range(ROUNDS):
            prompt = [number + 2_000_000] * (64 * PAGES)
            puts.append(timed(partial(_save, store, prompt, source)))
            gets.append(timed(partial(_load, store, prompt, target)))
            assert target == source
    return {
        name: PAGES * MIB / statistics.median(times) / 1e9 for name, times in (("put", puts), ("get", gets))
    }


def main(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True)
    daemon = DaemonProcess(folder, host_bytes=2 * GIB, disk=False)
    daemon.start()
    case = Speed()
    case.url = daemon.url
    case.setUp()
    try:
        cache, *_ = case._l3_consumer(str(folder / "s"))
        storage = Watched.made[-1]
        pool = cache.cache_controller.mem_pool_host.anchor_entry.host_pool
        fill(daemon.url, 2 * GIB)
        told: dict[str, Any] = {"moved": moved(storage, pool), **asked(daemon.url)}
        told["client"] = beside(daemon.url)
        told["set_of_client"] = told["moved"]["set_gb_per_s"] / told["client"]["put"]
        told["get_of_client"] = told["moved"]["get_gb_per_s"] / told["client"]["get"]
        with full(daemon.url):
            told["full"] = calls(storage, pool)
        daemon.signal(signal.SIGSTOP)
        told["stopped"] = calls(storage, pool)
        daemon.kill()
        told["away"] = calls(storage, pool)
    finally:
        case.doCleanups()
        daemon.kill()
    print(json.dumps(told, indent=1), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
