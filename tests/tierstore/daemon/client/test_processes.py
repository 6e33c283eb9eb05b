"""Forks, spawns, and clients that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings

import pytest

import tierstore
from tests.daemons import SPEC, TOKENS, load_bytes, pages_of
from tierstore.errors import StoreClosedError
from tierstore.keys import Identity
from tierstore.testing.clock import wait_until


def fork(child) -> int:
    """Run ``child`` in a forked process and return its exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_told_to_connect_for_itself(shared_daemon, connect):
    store = connect(shared_daemon.url)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)

    def child():
        with pytest.raises(StoreClosedError, match="after fork"):
            store.lookup(TOKENS)
        store.close()  # harmless
        with tierstore.connect(shared_daemon.url, SPEC, identity=store.identity, lookup_s=5.0) as own:
            assert own.wait_connected(30)
            assert load_bytes(own, own.lookup(TOKENS)) == (70, pages_of(TOKENS))

    assert fork(child) == 0
    assert load_bytes(store, store.lookup(TOKENS)) == (70, pages_of(TOKENS))


def hold(url, identity, ready):
    store = tierstore.connect(url, SPEC, identity=identity, lookup_s=5.0)
    assert store.wait_connected(30)
    hit = store.lookup(TOKENS)
    assert load_bytes(store, hit) == (70, pages_of(TOKENS))
    kept = store.lookup(TOKENS)
    assert kept.tokens == 70
    ready.set()
    time.sleep(600)


def test_a_spawned_process_hits_and_its_death_gives_everything_back(shared_daemon, connect):
    store = connect(shared_daemon.url)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(shared_daemon.url, store.identity, ready))
    process.start()
    try:
        assert ready.wait(60)
        assert store.stats().tiers["host"].leased_pages > 0
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    wait_until(lambda: store.stats().tiers["host"].leased_pages == 0)


def test_a_forked_child_does_not_keep_its_parents_session(shared_daemon, connect):
    """A process with a session forks and is killed; the child lives on, and its leases are back."""
    store = connect(shared_daemon.url)
    store.save(TOKENS, pages_of(TOKENS)).wait(10)
    read, write = os.pipe()

    def parent():
        own = tierstore.connect(shared_daemon.url, SPEC, identity=store.identity, lookup_s=5.0)
        assert own.wait_connected(30)
        assert own.lookup(TOKENS).tokens == 70
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        os.write(write, child.to_bytes(4, "little"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert fork(parent) == -signal.SIGKILL
    child = int.from_bytes(os.read(read, 4), "little")
    try:
        wait_until(lambda: store.stats().tiers["host"].leased_pages == 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_file_descriptors_are_given_back(shared_daemon):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        identity = Identity.of(SPEC, model="descriptors")
        with tierstore.connect(shared_daemon.url, SPEC, identity=identity, lookup_s=5.0) as store:
            assert store.wait_connected(30)
            assert store.lookup(TOKENS).tokens == 0
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
