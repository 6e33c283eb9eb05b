"""Two hosts and a shared store that does everything wrong that a shared store can: real daemons, real agents,
a fake shared store."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.forked import run
from tests.tierstore.cli import commands
from tests.tierstore.cluster.hosts import IDENTITY, SPEC, Host, alive, check, prompt, published
from tierstore.backend import Registration
from tierstore.cluster import supervisor
from tierstore.core.clients import MOST_EXPECTED_TOKENS, Client
from tierstore.core.prompts import ChainView
from tierstore.keys import Identity, Prompt
from tierstore.testing.clock import wait_until
from tierstore.testing.fake_shared_store import set_faults
from tierstore.testing.pages import pages_of
from tierstore.transfer import Transfer, TransferState
from tierstore.types import Hint, Promise


def test_what_one_host_has_used_twice_another_one_brings(start, pool):
    one, other = start(), start()
    one.save(prompt(1), again=False)
    one.save(prompt(2))
    published(one, 8)
    assert other.fetch_remote(prompt(2)) == (128, 128)
    assert other.fetch_remote(prompt(1)) == (0, 0), "used once: nobody else's"
    other.has_counted("fetched_pages", 8)
    # And what was brought is not published again, nor asked for.
    assert other.fetch_remote(prompt(2)) == (0, 128)
    assert "published_pages" not in other.counts()
    assert len(list(pool.glob("ts1-*"))) == 8


def test_pages_behind_a_prefix_that_is_held(start):
    one, other = start(), start()
    one.save(prompt(1, pages=20))
    published(one, 20)
    other.save(prompt(1, pages=7), again=False)
    assert other.fetch_remote(prompt(1, pages=20)) == (13 * 16, 20 * 16)
    other.has_counted("fetched_pages", 13)
    # A prompt that goes another way behind it gets what is common.
    tokens = np.concatenate([prompt(1, pages=10), prompt(5, pages=5)])
    assert other.fetch_remote(tokens) == (0, 160)


def test_everything_is_published_where_that_is_asked_for(start):
    one, other = start("--cluster-publish=all"), start("--cluster-publish=none")
    one.save(prompt(1), again=False)
    published(one, 8)
    assert other.fetch_remote(prompt(1)) == (128, 128)
    other.save(prompt(2))
    time.sleep(0.5)
    assert "published_pages" not in other.counts()


def test_tenants_and_other_models_find_nothing(start):
    one, other = start(), start()
    tenant = Identity.of(SPEC, model="m", tenant="t")
    one.save(prompt(1), identity=tenant)
    one.save(prompt(2))
    published(one, 8)
    assert other.fetch_remote(prompt(1), identity=tenant) == (0, 0)
    assert other.fetch_remote(prompt(2), identity=tenant) == (0, 0)
    assert other.fetch_remote(prompt(2), identity=Identity.of(SPEC, model="n")) == (0, 0)
    assert other.fetch_remote(prompt(2)) == (128, 128)


def test_a_forget_says_that_it_reaches_one_host(start):
    code, _, err = commands.run("forget", "--connect", start().url, "--tenant", "acme")
    assert code == 0
    assert "pages on other hosts or in a bucket are not forgotten" in err


def test_a_secret_keeps_others_out(start, tmp_path):
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(f"the {name} secret of this cluster")
    one = start(f"--cluster-secret={tmp_path}/right")
    one.save(prompt(1))
    published(one, 8)
    assert start(f"--cluster-secret={tmp_path}/wrong").fetch_remote(prompt(1)) == (0, 0)
    assert start().fetch_remote(prompt(1)) == (0, 0)
    assert start(f"--cluster-secret={tmp_path}/right").fetch_remote(prompt(1)) == (128, 128)


def test_an_agent_that_meets_an_error_of_its_own_goes_on(start, pool):
    one, other = start(), start()
    set_faults(pool, broken=True)
    one.save(prompt(1))
    one.wait_for(lambda stats: stats.cluster.counts.get("unforeseen_errors", 0) >= 1)
    set_faults(pool)
    one.save(prompt(2))
    published(one, 8)
    assert other.fetch_remote(prompt(2)) == (128, 128)
    assert not one.counts().get("agent_ends")


def test_a_pool_that_lies_is_a_miss(start, pool):
    one, other = start(), start()
    damaged = 0
    for number, lie in enumerate(["flip", "tear", "short", "swap"], 1):
        one.save(prompt(number))
        published(one, 8 * number)
        set_faults(pool, **{lie: True})
        assert other.fetch_remote(prompt(number)) == (128, 0), lie
        stats = other.stats()
        damaged += lie != "short"
        assert stats.cluster.counts.get("damaged_pages", 0) == damaged, lie
        assert stats.service.reserved_bytes == 0, lie
        set_faults(pool)


def test_what_stands_under_another_name_is_a_miss(start, pool):
    """Objects exchanged by somebody who can write to the shared store; and pages after a bad one are not
    kept."""
    one, other = start(), start()
    one.save(prompt(1))
    published(one, 8)
    one.save(prompt(2))
    published(one, 16)
    first, second = sorted(pool.glob("ts1-*"))[:2]
    with one.store() as store:
        assert check(store, prompt(1)) == 128
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    held = {}
    for number in (1, 2):
        remote, found = other.fetch_remote(prompt(number))
        assert remote == 128
        held[number] = found
    assert sum(held.values()) < 256
    pages = other.stats().store.pages
    assert pages * 16 == sum(held.values()), "pages behind a bad one are kept by nobody"


def test_bytes_that_come_after_the_call_change_nothing(start, pool):
    """The call has failed, slots have been given to others, and then the shared store writes."""
    one, other = start(), start()
    one.save(prompt(1, pages=40))
    published(one, 40)
    set_faults(pool, late_s=1.0)
    assert other.fetch_remote(prompt(1, pages=40)) == (640, 0)
    set_faults(pool)
    began = time.monotonic()
    with other.store() as store:
        for number in range(2, 30):  # every slot is used
            tokens = prompt(number, pages=40)
            store.save(tokens, pages_of(tokens, SPEC)).wait(10)
        time.sleep(max(began + 1.5 - time.monotonic(), 0))
        assert sum(check(store, prompt(number, pages=40)) for number in range(2, 30)) > 0
    other.has_counted("poisoned_lanes", 1)
    assert other.fetch_remote(prompt(1, pages=40)) == (640, 640)


def test_an_agent_that_hangs_is_killed_and_costs_a_miss(start, pool):
    one, other = start(), start("--cluster-look-s=0.1")
    one.save(prompt(1))
    published(one, 8)
    with other.store() as store:
        hit = store.lookup(prompt(1))
        assert hit.remote_tokens == 128
        set_faults(pool, hang=True)
        began = time.monotonic()
        assert store.fetch_remote(hit, deadline_s=0.3).wait(30) == 0
        assert time.monotonic() - began < 5
        # Lookups come late three times, and then it is left alone.
        for number in range(10, 20):
            assert store.lookup(prompt(number)).remote_tokens == 0
        other.has_counted("late_looks", 3)
    agents = other.agents()
    other.wait_for(lambda stats: stats.cluster.counts.get("agent_kills", 0) >= 1)
    set_faults(pool)
    other.wait_online()
    assert set(other.agents()) != set(agents)
    assert other.fetch_remote(prompt(1)) in ((128, 128), (0, 0))  # or the looking still pauses
    assert other.stats().service.reserved_bytes == 0


def test_an_agent_that_crashes_is_started_again(start, pool):
    one, other = start(), start()
    one.save(prompt(1))
    published(one, 8)
    set_faults(pool, crash=True)
    assert other.fetch_remote(prompt(1)) == (128, 0)
    set_faults(pool)
    other.wait_for(lambda stats: stats.cluster.counts.get("agent_ends", 0) >= 1)
    other.wait_online()
    assert other.fetch_remote(prompt(1)) == (128, 128)
    assert other.stats().service.reserved_bytes == 0


def test_what_the_pool_has_lost_meanwhile_is_no_failed_call(start, pool):
    """Objects that were there when it was asked are not when they are got: what comes before them does come,
    and the memory is used again."""
    one, other = start(), start()
    one.save(prompt(1))
    published(one, 8)
    with other.store() as store:
        for _ in range(6):  # more than would wear staging memory out
            with store.lookup(prompt(1)) as hit:
                assert hit.remote_tokens == 128
                for each in pool.glob("ts1-*"):
                    each.rename(each.with_name(f"away-{each.name}"))
                assert store.fetch_remote(hit, deadline_s=5).wait(30) == 0
                for each in pool.glob("away-*"):
                    each.rename(each.with_name(each.name.removeprefix("away-")))
    assert other.fetch_remote(prompt(1)) == (128, 128)
    counts = other.counts()
    assert "poisoned_lanes" not in counts
    assert "agent_ends" not in counts


def test_what_the_pool_has_lost_is_published_again_by_the_next_agent(start, pool):
    one = start()
    one.save(prompt(1))
    published(one, 8)
    for each in pool.glob("ts1-*"):
        each.unlink()
    for agent in one.agents():
        os.kill(agent, signal.SIGKILL)
    one.wait_for(lambda stats: stats.cluster.counts.get("agent_ends", 0) == 2)
    one.wait_online()
    with one.store() as store:
        store.lookup(prompt(1)).release()
    published(one, 16)
    assert start().fetch_remote(prompt(1)) == (128, 128)


def test_an_agent_that_cannot_be_started_is_tried_again(monkeypatch):
    """The supervisor outlives a moment without processes, and leaks nothing."""
    tries = []

    def no_process(*args, **kwargs):
        tries.append(args)
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(supervisor.subprocess, "Popen", no_process)

    async def run():
        cluster = supervisor.Cluster(supervisor.ClusterOptions("fake:///tmp"), "ipc:///none")
        cluster.start()
        while len(tries) < 4:  # two agents, twice
            await asyncio.sleep(0.01)
        assert "no process" in cluster.stats().trouble
        await cluster.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_agents_end_with_their_daemon(start):
    one, other = start(), start()
    agents = one.agents() + other.agents()
    assert len(agents) == 4
    one.kill()
    assert other.end() == 0
    wait_until(lambda: not any(map(alive, agents)))


def test_a_pool_that_is_not_there_is_a_daemon_without_one(tmp_path):
    host = Host(f"fake://{tmp_path}/not-yet")
    try:
        host.wait_for(lambda stats: "no directory" in stats.cluster.trouble)
        assert "offline" in host.stats().cluster.line
        host.save(prompt(1))
        with host.store() as store:
            assert check(store, prompt(1)) == 128
        (tmp_path / "not-yet").mkdir()
        host.wait_online()
    finally:
        host.close()


def test_a_full_pool_and_one_that_refuses(start, pool):
    one = start()
    set_faults(pool, full=True)
    one.save(prompt(1))
    one.wait_for(lambda stats: stats.cluster.counts.get("refused_pages", 0) == 8)
    set_faults(pool, refuse=True)
    one.save(prompt(2))
    one.wait_for(lambda stats: stats.cluster.counts.get("failed_calls", 0) >= 1)
    set_faults(pool)
    one.save(prompt(3))
    published(one, 8)


def test_kills_at_random(start, pool):
    """Agents are killed while pages go back and forth, and the shared store does what it likes: no wrong
    byte, no call that does not end, nothing held at the end."""
    hosts = [start(), start()]
    stop = threading.Event()
    failures = []
    rounds = [0, 0]  # of each worker

    def work(host, seed):
        draw = random.Random(seed)
        try:
            with host.store() as store:
                while not stop.is_set():
                    tokens = prompt(draw.randrange(12), pages=draw.randrange(1, 40))
                    with store.lookup(tokens) as hit:
                        fetching = store.fetch_remote(hit, deadline_s=0.2)
                        if fetching is not None:
                            fetching.wait(60)
                    check(store, tokens)
                    if draw.random() < 0.3:
                        store.save(tokens, pages_of(tokens, SPEC)).wait(10)
                    if draw.random() < 0.05:
                        store.evict("host")
                    rounds[seed] += 1
        except Exception as error:  # noqa: BLE001  # told below
            failures.append(error)

    workers = [threading.Thread(target=work, args=(host, at)) for at, host in enumerate(hosts)]
    for worker in workers:
        worker.start()
    draw = random.Random(7)

    def one_more_each(after):
        return failures or all(now > then for now, then in zip(rounds, after, strict=True))

    for _ in range(25):
        fault = draw.choice(["flip", "tear", "refuse", "crash", "late_s", "slow_s", "kill", "none"])
        if fault == "kill":
            for agent in draw.choice(hosts).agents()[:1]:
                os.kill(agent, signal.SIGKILL)
        set_faults(pool, **({fault: 0.05} if fault.endswith("_s") else {fault: True}))
        wait_until(lambda after=tuple(rounds): one_more_each(after))
    set_faults(pool)
    wait_until(lambda: failures or any(host.counts().get("fetched_pages") for host in hosts))
    stop.set()
    for worker in workers:
        worker.join()
    assert not failures
    for host in hosts:
        host.wait_online()
        stats = host.wait_for(lambda stats: stats.service.reserved_bytes == 0)
        assert stats.service.failed_requests == 0
        assert stats.store.failed_tasks == 0


def test_agents_that_end_leave_nothing_behind(start):
    host = start()
    process = f"/proc/{host.process.pid}"

    def held() -> tuple[int, int]:
        return len(os.listdir(f"{process}/fd")), len(os.listdir(f"{process}/task"))

    rounds = 4
    before: list[tuple[int, int]] = []
    for round_ in range(2 + rounds):
        if round_ >= 2:  # an agent that is online may still be connecting: the most counts
            before.append(held())
        ends = host.counts().get("agent_ends", 0)
        for agent in host.agents():
            os.kill(agent, signal.SIGKILL)
        host.wait_for(lambda stats, ends=ends: stats.cluster.counts.get("agent_ends", 0) >= ends + 2)
        host.wait_online()
    most, threads = max(descriptors for descriptors, _ in before), before[0][1]
    # The daemon's pools of threads grow to their sizes when they please; a thread a round would be more. What
    # belongs to an agent that has ended goes a moment later.
    wait_until(lambda: held()[0] <= most and held()[1] < threads + rounds)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--cluster=http://x", "must be mooncake://"),
        ("--cluster-secret=/no/such", "cannot read the cluster's secret"),
        ("--cluster-publish=some", "must be one of"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, option, message):
    code, _, said = run("tierstore.daemon", f"--listen=ipc://{tmp_path}/s", "--cluster=fake:///tmp", option)
    assert code != 0
    assert message in said
    assert said.count("\n") == 1


def test_without_a_cluster_nothing_of_it_is_imported(tmp_path):
    code = (
        "import sys, asyncio; from tierstore.daemon.daemon import Daemon; "
        "from tierstore.daemon.settings import Settings\n"
        f"async def go():\n d = Daemon(Settings(listen=('ipc://{tmp_path}/s',), host_bytes=1<<20))\n"
        " await d.start()\n await d.stop()\n"
        "asyncio.run(go()); print([m for m in sys.modules if 'cluster' in m])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert output == "[]\n"


# -- promised pages --------------------------------------------------------------------------------------


def test_promised_pages_come_as_they_are_published(start):
    one, other = start("--cluster-publish=all"), start()
    tokens = prompt(1, pages=20)
    with other.store() as store:
        expected = store.expect(tokens, Promise(320, 10.0))
        one.save(tokens[:128], again=False)
        other.wait_for(lambda stats: stats.store.pages == 8)  # half of them need not wait for the rest
        assert not expected.done
        one.save(tokens, again=False)
        expected.wait(30)
        assert expected.state is TransferState.DONE
        assert check(store, tokens) == 320
    assert other.stats().service.broken_promises == 0


def test_pages_that_come_from_this_host_end_the_wait_for_the_pool(start):
    other = start()
    tokens = prompt(1)
    with other.store() as store:
        expected = store.expect(tokens, Promise(128, 10.0))
        other.wait_for(lambda stats: stats.service.promised_lookups == 1)
        other.save(tokens, again=False)
        expected.wait(30)
        assert expected.state is TransferState.DONE
        other.wait_for(lambda stats: stats.cluster.counts.get("promised_fetches") == 1)
        assert check(store, tokens) == 128


def test_promised_pages_that_cannot_be_had_cost_what_was_said(start, pool):
    one, other = start("--cluster-publish=all"), start()
    faults = ["flip", "refuse", "crash", "hang"]
    for number in range(len(faults)):
        one.save(prompt(number), again=False)
    published(one, 8 * len(faults))
    for number, fault in enumerate(faults):
        other.wait_online()
        set_faults(pool, **{fault: True})
        with other.store() as store:
            store.expect(prompt(number), Promise(128, 0.5)).wait(30)
            assert check(store, prompt(number)) == 0, fault
            # A client that leaves takes its promise with it, and its own clock may be ahead of the daemon's.
            other.wait_for(lambda stats, broken=number + 1: stats.service.broken_promises == broken)
        set_faults(pool)
        other.wait_for(lambda stats: stats.service.reserved_bytes == 0)


def test_a_prompt_that_is_told_of_after_each_step_is_queued_once(start, pool):
    """100 pages in as many steps, while the shared store is slow: nothing is dropped, so the promise is
    kept."""
    one, other = start("--cluster-publish=all"), start()
    set_faults(pool, slow_s=0.2)
    tokens = prompt(1, pages=100)
    pages = pages_of(tokens, SPEC)
    with one.store() as store:
        for page in range(100):
            store.save(tokens[: (page + 1) * 16], pages[: page + 1]).wait(10)
    with other.store() as store:
        expected = store.expect(tokens, Promise(1600, 10.0))
        set_faults(pool)
        expected.wait(30)
        assert expected.state is TransferState.DONE
    assert not one.counts().get("dropped_pages")


def test_what_another_host_goes_on_with_is_published_at_once(start):
    """By default it would have to be used twice first. It may have been here before that was said."""
    one, other, reader = start(), start(), start("--cluster-publish=none")
    new, old, kept = prompt(1), prompt(2), prompt(3)
    elsewhere = Hint(elsewhere=True)
    one.save(old, again=False)
    with one.store() as store:
        store.save(new, pages_of(new, SPEC), hint=elsewhere).wait(10)
        store.save(old, [], first=8, hint=elsewhere)
    with reader.store() as store:
        store.save(kept, pages_of(kept, SPEC), hint=elsewhere).wait(10)
    published(one, 16)
    with other.store() as store:
        store.expect(new, Promise(128, 10.0)).wait(30)
        store.expect(old, Promise(128, 10.0)).wait(30)
        assert (check(store, new), check(store, old)) == (128, 128)
        store.expect(kept, Promise(128, 0.1)).wait(30)
        assert check(store, kept) == 0
    one.has_counted("published_pages", 16)
    assert one.stats().service.refused == reader.stats().service.refused == {}
    assert "published_pages" not in reader.counts()


def test_a_promise_that_is_not_wanted_any_more_is_not_asked_for(start):
    """Of a request that was given up: the session goes on."""
    other = start()
    with other.store() as store:
        expected = store.expect(prompt(1), Promise(128, 10.0))
        other.wait_for(lambda stats: stats.service.promised_lookups == 1)
        assert expected.cancel()
        stats = other.wait_for(lambda stats: stats.cluster.counts.get("promised_fetches") == 1)
        assert stats.service.broken_promises == 0  # as it would be at its end
        assert store.lookup(prompt(1)).tokens == 0


def test_promised_prompts_are_bounded_by_their_tokens():
    client = Client()
    assert client.may_expect(2 * MOST_EXPECTED_TOKENS)  # one prompt may be as long as any
    client.expecting[Transfer.completed(None)] = MOST_EXPECTED_TOKENS - 1000
    assert client.may_expect(1000)
    assert not client.may_expect(1001)


def test_a_host_waits_for_no_more_promised_tokens_than_it_may(pool, monkeypatch):
    monkeypatch.setattr(supervisor, "_MOST_PROMISED_TOKENS", 200)

    def view(number):
        whole = Prompt(IDENTITY, prompt(number), chunk_tokens=16)
        registration = Registration(IDENTITY, SPEC.page_bytes, 16)
        return ChainView(registration, whole.keys, whole.token_bytes)

    async def until(condition):
        while not condition():
            await asyncio.sleep(0.01)

    async def run():
        cluster = supervisor.Cluster(supervisor.ClusterOptions(f"fake://{pool}"), "ipc:///none")
        cluster.start()
        await until(lambda: cluster.stats().online)
        stop = cluster.expect(view(1), 0, 8, 10.0)
        cluster.expect(view(2), 0, 8, 10.0)
        assert cluster.stats().counts["refused_promises"] == 1
        stop()
        await until(lambda: cluster.stats().counts.get("promised_fetches") == 1)
        cluster.expect(view(2), 0, 8, 10.0)
        assert cluster.stats().counts["refused_promises"] == 1
        await cluster.stop()

    asyncio.run(asyncio.wait_for(run(), 30))


def test_promises_that_nobody_keeps_cost_others_nothing(start):
    """As many as a client may wait for, of one client; another one's is kept."""
    one, other = start(), start()
    with other.store() as liar, other.store() as store:
        false = [liar.expect(prompt(number), Promise(128, 10.0)) for number in range(100, 164)]
        other.wait_for(lambda stats: stats.service.promised_lookups == len(false))
        for number in range(1, 21):
            tokens = prompt(number)
            expected = store.expect(tokens, Promise(128, 10.0))
            with one.store() as computes:
                computes.save(tokens, pages_of(tokens, SPEC), hint=Hint(elsewhere=True)).wait(10)
            expected.wait(30)
            assert expected.state is TransferState.DONE
            assert check(store, tokens) == 128
        for each in false:
            each.cancel()


def test_many_promises_of_one_client_are_kept_together(start):
    one, other = start(), start()
    prompts = [prompt(number, pages=1) for number in range(1, 41)]  # little to save: promises last 10 s
    with other.store() as store, one.store() as computes:
        expected = [store.expect(tokens, Promise(16, 10.0)) for tokens in prompts]
        other.wait_for(lambda stats: stats.service.promised_lookups == len(prompts))
        for tokens in prompts:
            computes.save(tokens, pages_of(tokens, SPEC), hint=Hint(elsewhere=True)).wait(10)
        for each in expected:
            each.wait(30)
        assert {each.state for each in expected} == {TransferState.DONE}
        assert all(check(store, tokens) == 16 for tokens in prompts)
    assert other.stats().service.broken_promises == 0
    other.wait_for(lambda stats: stats.cluster.counts["promised_fetches"] == len(prompts))
