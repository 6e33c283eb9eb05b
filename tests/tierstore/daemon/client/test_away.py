"""A daemon that is not there, dies, hangs, or comes back: misses, never an error, never a wrong byte."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from dataclasses import replace
from importlib.metadata import version

import numpy as np

import tierstore
from tests.daemons import SPEC, TOKENS, in_threads, load_bytes, pages_of, right_bytes
from tierstore.keys import Prompt
from tierstore.testing.clock import ManualClock, wait_until


def test_without_a_daemon_everything_is_a_miss(short_directory, connect):
    store = connect(f"ipc://{short_directory}/s", connected=False, hbm_pages=8)
    for _ in range(100):
        assert store.lookup(TOKENS).tokens == 0
    assert store.save(TOKENS, pages_of(TOKENS)).wait(1) == 0
    assert store.pin(TOKENS) == 0
    assert store.evict("host") == 0
    assert store.flush(1) is False
    assert not store.wait_connected(0.01)
    assert store.stats().health_line == "the daemon is away"
    # What is in HBM is found all the same.
    pages = store.allocate_hbm(5)
    for page, content in zip(pages, pages_of(TOKENS), strict=True):
        store.pool.array[page] = np.frombuffer(content, np.uint8)
    assert store.save_hbm(store.prompt(TOKENS), pages).wait(1) == 0
    hit = store.lookup(TOKENS)
    assert hit.by_tier == {"hbm": 70}
    assert load_bytes(store, hit) == (70, pages_of(TOKENS))
    store.release_hbm(pages)
    assert store.available_hbm() == 8


def test_a_daemon_that_comes_later_is_found(make_daemon, connect, short_directory):
    store = connect(f"ipc://{short_directory}/s", connected=False)
    assert store.lookup(TOKENS).tokens == 0
    make_daemon()
    assert store.wait_connected(30)
    assert store.save(TOKENS, pages_of(TOKENS)).wait(10) == 70
    assert store.lookup(TOKENS).tokens == 70


def test_killed_and_started_again(make_daemon, connect):
    daemon = make_daemon()
    store = connect(daemon.url)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    assert store.flush(10)
    hit = store.lookup(TOKENS)
    daemon.kill()
    wait_until(lambda: store.backend.connection.link is None)
    assert load_bytes(store, hit)[0] == 0
    assert store.lookup(TOKENS).tokens == 0
    daemon.start()
    assert store.wait_connected(30)
    hit = store.lookup(TOKENS)
    assert hit.by_tier == {"disk": 70}
    assert load_bytes(store, hit) == (70, pages_of(TOKENS))


def test_a_logger_hears_when_the_daemon_comes_and_goes(make_daemon, caplog):
    log = logging.getLogger("an engine's")
    caplog.set_level(logging.INFO, logger=log.name)
    daemon = make_daemon()
    with tierstore.connect(daemon.url, SPEC, log=log) as store:
        daemon.kill()
        wait_until(lambda: store.backend.connection.link is None)
        daemon.start()
        assert store.wait_connected(30)
        wait_until(lambda: len(caplog.records) == 3)
    connected = f"tierstore: connected to the daemon at {daemon.url} (tierstore {version('tierstore')})"
    gone = f"tierstore: the daemon at {daemon.url} is gone: every lookup misses until it is back"
    assert [record.getMessage() for record in caplog.records] == [connected, gone, connected]


def test_all_identities_are_known_to_the_next_daemon(make_daemon, connect):
    daemon = make_daemon()
    store = connect(daemon.url)
    prompts = [
        Prompt(replace(store.identity, adapter=str(number)), TOKENS, chunk_tokens=SPEC.chunk_tokens)
        for number in range(150)  # more than are registered at once
    ]
    for prompt in prompts:
        assert store.save(prompt, pages_of(TOKENS)[:1]).wait(10) == SPEC.chunk_tokens
    assert store.flush(10)
    daemon.kill()
    wait_until(lambda: store.backend.connection.link is None)
    daemon.start()
    assert store.wait_connected(30)
    assert len(store.backend.connection.link.identities) == 1 + len(prompts)
    for prompt in prompts:
        assert store.lookup(prompt).tokens == SPEC.chunk_tokens


def test_clients_are_served_again_soon_after_the_socket_is_back(make_daemon, connect):
    """While they go on asking, and after they have been without a daemon for longer than their longest
    pause."""
    daemon = make_daemon()
    stores = [connect(daemon.url) for _ in range(8)]
    stores[0].save(TOKENS, pages_of(TOKENS)).wait(10)
    assert stores[0].flush(10)
    stop = threading.Event()
    served = [0.0] * len(stores)  # when last

    def ask(which):
        while not stop.is_set():
            with stores[which].lookup(TOKENS) as hit:
                if hit.tokens == len(TOKENS):
                    served[which] = time.monotonic()
            time.sleep(0.001)

    def failures():
        return [store.backend.connection.counters.failed_handshakes for store in stores]

    def restart():
        try:
            wait_until(lambda: all(served))
            daemon.kill()
            wait_until(lambda: min(failures()) > 4)
            daemon.start()
            wait_until(lambda: listens(f"{daemon.socket}.arena"))
            back, failed = time.monotonic(), failures()
            wait_until(lambda: all(when > back for when in served))
            tries = [now - then for now, then in zip(failures(), failed, strict=True)]
            assert max(tries) <= 2, "one that was under way, and one more"
        finally:
            stop.set()

    in_threads(restart, *(lambda which=which: ask(which) for which in range(len(stores))))


def listens(path):
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def test_killed_and_started_again_under_load(make_daemon, connect):
    """Random verbs from several threads of two clients while the daemon is killed again and again."""
    daemon = make_daemon(host_bytes=1 << 20)  # 128 pages
    stores = [connect(daemon.url, lookup_s=1.0), connect(daemon.url, lookup_s=1.0, hbm_pages=60)]
    prompts = [[*range(16 * (n % 3)), *range(1000 * n, 1000 * n + 20 + 9 * n)] for n in range(12)]
    contents = [pages_of(tokens) for tokens in prompts]
    stop = threading.Event()
    loaded = [0]

    def work(seed):
        rng = random.Random(seed)
        while not stop.is_set():
            store, which = rng.choice(stores), rng.randrange(len(prompts))
            tokens = prompts[which]
            if rng.random() < 0.4:
                assert 0 <= store.save(tokens, contents[which]).wait(20) <= len(tokens)
            elif rng.random() < 0.3 and store.pool is not None:
                result = store.load(store.lookup(tokens), deadline_s=5).wait(20)
                got = [store.pool.array[page].tobytes() for page in result.pages]
                assert right_bytes(tokens, result.tokens, got)
                store.release_hbm(result.pages)
            else:
                count, pages = load_bytes(store, store.lookup(tokens), deadline_s=rng.choice([None, 0.001]))
                assert right_bytes(tokens, count, pages)
                loaded[0] += count

    def kill():
        try:
            for _ in range(3):
                before = loaded[0]
                wait_until(lambda before=before: loaded[0] > before + 1000)
                daemon.kill()
                wait_until(lambda: all(store.backend.connection.link is None for store in stores))
                daemon.start()
                assert all(store.wait_connected(30) for store in stores)
            before = loaded[0]
            wait_until(lambda: loaded[0] > before + 1000)
        finally:
            stop.set()

    in_threads(kill, *(lambda seed=seed: work(seed) for seed in range(4)))
    for store in stores:
        assert store.stats().counters["connection"]["links"] == 4
        assert store.stats().pending_saves == 0
    assert stores[1].available_hbm() == 60


def test_a_hung_daemon_costs_no_more_than_the_deadline(make_daemon, connect, stopped):
    daemon = make_daemon()
    store = connect(daemon.url, lookup_s=0.3)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit = store.lookup(TOKENS)
    stopped(daemon)
    pages = pages_of(TOKENS)
    assert load_bytes(store, hit, deadline_s=0.1)[0] == 0
    assert store.lookup(TOKENS).tokens == 0
    # Once it is known to hang, nobody waits for it any more.
    late = store.backend.connection.counters.late_requests
    for _ in range(50):
        assert store.lookup(TOKENS).tokens == 0
        assert store.save(TOKENS, pages).wait() == 0
    assert store.backend.connection.counters.late_requests <= late + 1  # what the load had asked for
    daemon.signal(18)  # SIGCONT
    wait_until(lambda: store.wait_connected(0))
    wait_until(lambda: store.lookup(TOKENS).tokens == 70)  # on a busy machine not in the first .3 s
    assert load_bytes(store, store.lookup(TOKENS), deadline_s=30) == (70, pages_of(TOKENS))


def test_bytes_copied_after_the_lease_are_not_used(make_daemon, connect):
    daemon = make_daemon("--lease-s=60")
    clock = ManualClock(1000.0)
    store = connect(daemon.url, clock=clock)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit = store.lookup(TOKENS)

    original = hit.backend.connection.call

    def slowly(*args, **kwargs):
        clock.advance(61)  # the answer to the load takes that long
        return original(*args, **kwargs)

    hit.backend.connection.call = slowly
    try:
        assert load_bytes(store, hit)[0] == 0
    finally:
        hit.backend.connection.call = original
    assert store.stats().counters["expired_leases"] > 0
    assert load_bytes(store, hit) == (70, pages_of(TOKENS))  # by a new lease


def test_a_stopped_reader_does_not_use_what_was_overwritten(make_daemon, connect):
    """The lease ends between the daemon's answer and the copy, and the pages are somebody else's by then."""
    daemon = make_daemon("--lease-s=0.3", host_bytes=16 * SPEC.page_bytes, disk=False)
    reader, writer = connect(daemon.url), connect(daemon.url)
    writer.save(TOKENS, pages_of(TOKENS)).wait(10)
    hit = reader.lookup(TOKENS)
    submit = reader._mover.submit

    def late(priority, task):
        time.sleep(0.5)
        for n in range(8):
            other = [*range(1000 * n, 1000 * n + 64)]
            writer.save(other, pages_of(other)).wait(10)
        submit(priority, task)

    reader._mover.submit = late
    count, pages = load_bytes(reader, hit)
    assert (count, pages) == (0, [])


def test_close_does_not_wait_for_a_hung_daemon(make_daemon, connect, stopped):
    daemon = make_daemon()
    store = connect(daemon.url, lookup_s=0.3)
    stopped(daemon)
    transfer = store.save(TOKENS, pages_of(TOKENS))
    store.close()
    assert transfer.wait(0) == 0
