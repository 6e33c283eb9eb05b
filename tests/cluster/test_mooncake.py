"""Two hosts, a real master and a real lender."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.cluster.network import MASTER, inside
from tests.tierstore.cluster.hosts import SPEC, check, prompt
from tierstore.testing.pages import pages_of

MINUTES = 10


def publish(host, tokens):
    before = host.counts().get("published_pages", 0)
    host.save(tokens)
    pages = len(tokens) // SPEC.chunk_tokens
    host.wait_for(lambda stats: stats.cluster.counts.get("published_pages", 0) >= before + pages)


def test_pages_behind_a_prefix_that_is_held(start):
    one, other = start(1), start(2)
    publish(one, prompt(1, pages=200))
    other.save(prompt(1, pages=30), again=False)
    assert other.fetch_remote(prompt(1, pages=200)) == (170 * 16, 200 * 16)
    other.has_counted("fetched_pages", 170)


_GET_ONE_OF_TWO = """
import ctypes, os
from tierstore.cluster.orders import Origin, PromptPages
from tierstore.cluster.shared_store import SharedStoreOptions, open_shared_store
pool = open_shared_store(SharedStoreOptions("mooncake://MASTER"))
memory = ctypes.create_string_buffer(bytes(range(100)) * 2, 200)
at = ctypes.addressof(memory)
origin = Origin(PromptPages({}, 0, 0, b"", b""), 1)
assert pool.put(["there"], [(at, 100)], origin) == [True]
ctypes.memset(at, 0, 200)
assert pool.get(["there", "not there"], [(at, 100), (at + 100, 100)]) == [100, 0]
assert memory.raw == bytes(range(100)) + bytes(100)
print("as expected", flush=True)
os._exit(0)
"""


def test_an_object_that_is_not_there_is_no_failure(network):
    """Beside one that is: the memory for it is left alone."""
    command = [*inside(2), sys.executable, "-c", _GET_ONE_OF_TWO.replace("MASTER", MASTER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "as expected" in done.stdout, done.stderr


def test_a_lender_that_stops_and_goes_on_changes_no_byte(network, start):
    """It is stopped in the middle, the call ends, all slots are given to others, and then it goes on
    sending."""
    one, other = start(1), start(2)
    publish(one, prompt(1, pages=400))
    network.slow("40mbit")
    with other.store() as store:
        hit = store.lookup(prompt(1, pages=400))
        assert hit.remote_tokens == 400 * 16
        fetching = store.fetch_remote(hit, deadline_s=1.0)
        stopping = threading.Timer(0.2, network.stop_lender)
        stopping.start()
        assert fetching.wait(60) < 400
        stopping.join()
        held = {}
        for number in range(2, 8):  # the arena has room for 1,000 pages: every slot is used
            tokens = prompt(number, pages=200)
            store.save(tokens, pages_of(tokens, SPEC)).wait(10)
        network.slow("1gbit")
        network.continue_lender()
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            held = {number: check(store, prompt(number, pages=200)) for number in range(2, 8)}
            check(store, prompt(1, pages=400))
            time.sleep(0.2)
        assert sum(held.values()) > 0
    other.wait_for(lambda stats: stats.service.reserved_bytes == 0)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_link_that_is_slow_beyond_the_library_s_patience_changes_no_byte(network, start):
    """Mooncake gives up after 60 s and goes on writing."""
    one, other = start(1), start(2)
    for number in range(10):
        publish(one, prompt(number, pages=400))
    network.slow("2mbit")
    ends = time.monotonic() + 120
    with other.store() as store:
        for number in range(10):
            hit = store.lookup(prompt(number, pages=400))
            fetching = store.fetch_remote(hit, deadline_s=1.0)
            if fetching is not None:
                fetching.wait(60)
            hit.release()
        while time.monotonic() < ends:
            for number in range(20, 25):
                tokens = prompt(number, pages=200)
                store.save(tokens, pages_of(tokens, SPEC)).wait(10)
                check(store, tokens)
            for number in range(10):
                check(store, prompt(number, pages=400))
            time.sleep(0.5)
    other.wait_for(lambda stats: stats.service.reserved_bytes == 0)


def test_a_master_that_dies_is_a_miss_and_comes_back(network, start):
    one, other = start(1), start(2)
    publish(one, prompt(1))
    network.kill_master()
    began = time.monotonic()
    with other.store() as store:
        with store.lookup(prompt(1)) as hit:
            assert hit.tokens == hit.remote_tokens == 0
        store.save(prompt(2), pages_of(prompt(2), SPEC)).wait(10)
        assert check(store, prompt(2)) == 128
    assert time.monotonic() - began < 10
    network.start_master()
    network.kill_lender()
    network.start_lender()
    number = 10
    ends = time.monotonic() + 60
    while other.fetch_remote(prompt(number))[1] == 0:
        assert time.monotonic() < ends, (one.stats().cluster, other.stats().cluster)
        number += 1
        one.save(prompt(number))
        time.sleep(0.5)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_master_that_lost_everything_is_given_it_again(network, start):
    """What was published before is published once more, when it is asked for a minute later."""
    one, other = start(1), start(2)
    publish(one, prompt(1))
    network.kill_master()
    network.kill_lender()
    network.start_master()
    network.start_lender()
    ends = time.monotonic() + 150
    while other.fetch_remote(prompt(1))[1] == 0:
        assert time.monotonic() < ends, (one.stats().cluster, other.stats().cluster)
        with one.store() as store:
            assert check(store, prompt(1)) == 128
        time.sleep(1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_kills(network, start):
    """Of master, lender, agents and daemons: no wrong byte, no call beyond its deadline and .1 s, nothing
    held at the end."""
    hosts = [start(1, "--cluster-publish=all", "--cluster-look-s=0.003"), start(2, "--cluster-look-s=0.003")]
    ends = time.monotonic() + MINUTES * 60
    deadline_s = 0.5
    failures, slow, brought = [], [], [0]

    def work(host, seed):
        draw = random.Random(seed)
        try:
            with host.store() as store:
                while time.monotonic() < ends:
                    tokens = prompt(draw.randrange(200), pages=draw.randrange(1, 60))
                    began = time.monotonic()
                    with store.lookup(tokens) as hit:
                        fetching = store.fetch_remote(hit, deadline_s=deadline_s)
                        if fetching is not None:
                            brought[0] += fetching.wait(60)
                    took_s = time.monotonic() - began
                    if took_s > deadline_s + 0.1:
                        slow.append(took_s)
                    check(store, tokens)
                    if draw.random() < 0.5:
                        store.save(tokens, pages_of(tokens, SPEC)).wait(30)
                    time.sleep(0.01)
        except Exception as error:  # noqa: BLE001  # told below
            failures.append(error)

    workers = [threading.Thread(target=work, args=(hosts[at % 2], at)) for at in range(4)]
    for worker in workers:
        worker.start()
    draw = random.Random(5)
    kills = Counter()
    while time.monotonic() < ends:
        time.sleep(draw.uniform(1, 6))
        victim = draw.choice(["master", "lender", "agent", "agent", "agent", "daemon"])
        kills[victim] += 1
        if victim == "master":
            network.kill_master()
            time.sleep(draw.uniform(0, 3))
            network.start_master()
        elif victim == "lender":
            network.kill_lender()
            time.sleep(draw.uniform(0, 3))
            network.start_lender()
        elif victim == "agent":
            for agent in draw.choice(hosts).agents()[:1]:
                os.kill(agent, signal.SIGKILL)
        else:
            host = draw.choice(hosts)
            host.kill()
            host.start()
    for worker in workers:
        worker.join()
    assert not failures
    for host in hosts:
        host.wait_for(lambda stats: stats.service.reserved_bytes == 0 and stats.service.failed_requests == 0)
    told = f"{dict(kills)}, {brought[0]} chunks brought, beyond {deadline_s + 0.1} s: {sorted(slow)[-5:]}\n"
    sys.stderr.write(told)
    assert brought[0] > 0
    assert not slow


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_200_agents_leave_nothing_behind(start):
    host = start(1)
    process = f"/proc/{host.process.pid}"

    def held():
        status = Path(f"{process}/status").read_text()
        kib = int(status.split("RssAnon:")[1].split()[0])
        return len(os.listdir(f"{process}/fd")), len(os.listdir(f"{process}/task")), kib

    before = None
    while True:
        ends = host.counts().get("agent_ends", 0)
        if ends >= 20 and before is None:
            before = held()
        if ends >= 220:
            break
        for agent in host.agents():
            os.kill(agent, signal.SIGKILL)
        host.wait_for(lambda stats, ends=ends: stats.cluster.counts.get("agent_ends", 0) >= ends + 1)
        host.wait_online()
        time.sleep(2.1)  # after a shorter life the next one waits longer
    after = held()
    sys.stderr.write(f"descriptors, threads, KiB: {before} before, {after} after\n")
    assert after[:2] <= before[:2]
    assert after[2] < before[2] + 2048
