"""Hosts that share a bucket of a real S3 server: daemons, agents, and the command that fills a new host."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.forked import run
from tests.tierstore.cluster.hosts import Host, alive, check, prompt, published
from tests.tierstore.cluster.seaweed import BUCKET, SECRET
from tests.tierstore.cluster.test_named import TOKENS, grouped, needed
from tests.tierstore.store.grouped_model import GEMMA, HYBRID
from tierstore.testing.clock import wait_until

pytestmark = pytest.mark.usefixtures("credentials")


@pytest.fixture
def url(seaweed, tmp_path):
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}?endpoint={seaweed.endpoint}&refresh_s=0.2"


@pytest.fixture
def start(url):
    hosts = []

    def start_(*options, url=url):
        hosts.append(Host(url, *options))
        hosts[-1].wait_online()
        return hosts[-1]

    yield start_
    for host in hosts:
        host.close()


def knows(host, bundles):
    """Wait until an agent has read so many heads since its start."""
    return host.wait_for(lambda stats: stats.cluster.counts.get("read_heads", 0) >= bundles)


def warm_up(host, url, *options) -> str:
    code, said, error = run("tierstore.cli", "prefetch", "--from", url, "--connect", host.url, *options)
    assert code == 0, error
    return said


def test_hosts_share_a_bucket_and_agents_may_die(start, url, proxy, seaweed):
    # With a number of days nothing is merged. Merging may keep good pages of a damaged bundle.
    days = "--cluster-days=30"
    one = start(days)
    other = start(days, url=url.replace(seaweed.endpoint, proxy.endpoint))
    one.save(prompt(1), again=False)
    one.save(prompt(2))
    published(one, 8)
    knows(other, 2)  # of both agents
    assert other.fetch_remote(prompt(2)) == (128, 128)
    assert other.fetch_remote(prompt(1)) == (0, 0), "used once: nobody else's"
    # A page with a wrong byte is a miss, and its bundle leaves the bucket.
    one.save(prompt(3))
    published(one, 16)
    knows(other, 4)
    proxy.only, proxy.fault = "/bundles/", "flip"
    assert other.fetch_remote(prompt(3)) == (128, 64), "the byte is in the fifth of eight pages"
    proxy.fault = ""
    other.has_counted("damaged_pages", 1)
    assert other.stats().service.reserved_bytes == 0
    # A server that fails is one line, and the daemon goes on.
    proxy.only, proxy.fault = "", "status"
    stats = other.wait_for(lambda stats: stats.cluster.trouble)
    assert "the server answers SlowDown" in stats.cluster.line
    other.save(prompt(4))
    proxy.fault = ""
    other.wait_online()
    # Agents that are killed are started again, and know what is there.
    ends = other.counts().get("agent_ends", 0)
    for agent in other.agents():
        os.kill(agent, signal.SIGKILL)
    other.wait_for(lambda stats: stats.cluster.counts.get("agent_ends", 0) == ends + 2)
    other.wait_online()
    # So is a daemon, whose agents end with it.
    agents = one.agents()
    one.kill()
    wait_until(lambda: not any(map(alive, agents)))
    one.start()
    one.wait_online()
    one.save(prompt(5))
    published(one, 8)
    third = start(days)
    assert third.fetch_remote(prompt(2)) == (128, 128)
    assert third.fetch_remote(prompt(5)) == (128, 128)
    assert third.fetch_remote(prompt(3)) == (0, 0)
    assert not any(SECRET in str(host.stats()) for host in (one, other, third))


def test_a_server_that_is_away_at_the_start_is_waited_for(url, proxy, seaweed):
    """By the same agents, with one line for people."""
    proxy.fault = "status"
    host = Host(url.replace(seaweed.endpoint, proxy.endpoint))
    try:
        stats = host.wait_for(lambda stats: "SlowDown" in stats.cluster.trouble)
        assert not stats.cluster.online
        assert stats.cluster.line.count("\n") == 0
        proxy.fault = ""
        host.wait_online()
        assert not host.counts().get("agent_ends")
        host.save(prompt(1))
        published(host, 8)
    finally:
        host.close()


def test_the_daemon_itself_does_not_load_the_client(start):
    host = start()
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (host.process.pid, *host.agents())}
    assert ["obstore" in each for each in maps.values()] == [False, True, True]


def replay(host, trace) -> float:
    """Look each prompt up and save what was missing: the share of tokens that were held."""
    hits = 0
    with host.store() as store:
        for tokens in trace:
            hits += check(store, tokens)
            host.save(tokens)
    return hits / sum(map(len, trace))


def test_a_new_host_has_the_hit_rate_of_the_one_that_was_deleted(start, url):
    """Three conversations over two system prompts, in turns."""
    systems = [np.arange(64) + number * 7919 for number in (1, 2)]
    draw = random.Random(5)
    talks = [[*systems[at % 2]] for at in range(3)]
    trace = []
    for talk in [0, 1, 2, 0, 1, 2, 0, 1]:
        talks[talk] += [draw.randrange(1 << 20) for _ in range(48)]
        trace.append(np.array(talks[talk]))
    old = start()
    replay(old, trace)
    before = replay(old, trace)
    pages = old.stats().store.pages
    published(old, pages)
    old.close()  # with its memory, and it had no disk
    new = start()
    said = warm_up(new, url)
    assert f"fetched {pages} pages" in said
    assert replay(new, trace) == before > 0.9
    assert "0 were held already" in said
    assert f"fetched 0 pages (0 B); {pages} were held already" in warm_up(new, url)


@pytest.mark.parametrize("spec", [GEMMA, HYBRID], ids=["windows", "states"])
def test_a_new_host_has_all_layer_groups(start, url, spec):
    old = start()
    with grouped(old, spec) as first:
        for end in (96, 192):
            first.save_to(TOKENS[: end + 8], end)
        assert first.load(first.lookup(TOKENS)) == 192
        published(old, needed(first, 192))
    old.close()
    new = start()
    warm_up(new, url)
    with grouped(new, spec) as second:
        assert second.load(second.lookup(TOKENS)) == 192


def test_a_warm_up_stops_at_its_limits_and_takes_the_most_used(start, url, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the secret of this cluster")
    old = start("--cluster-publish=all", "--host-bytes=16MiB", f"--cluster-secret={secret}")
    for number in range(20):
        old.save(prompt(number, pages=50), again=False)
        published(old, 50 * (number + 1))
    for number in (5, 11):
        for more in range(3):  # other prompts that begin like it
            old.save(np.concatenate([prompt(number, pages=50), [more] * 16]))
    published(old, 20 * 50 + 6)
    new = start("--host-bytes=4MiB", f"--cluster-secret={secret}")
    told = warm_up(new, url, "--top=900KiB", f"--cluster-secret={secret}")
    assert "fetched 10" in told  # two prompts of 50 pages, and what fits beside them
    with new.store() as store:
        assert (check(store, prompt(5, pages=50)), check(store, prompt(11, pages=50))) == (800, 800)
    assert "beyond the limits" in warm_up(new, url, f"--cluster-secret={secret}")
    stats = new.stats()
    assert stats.store.tiers["host"].used_bytes <= 4 << 20
    assert stats.store.counters["evicted_pages"]["host"] == 0
    # Without the secret nothing can be verified, so nothing comes.
    assert "fetched 0 pages" in warm_up(start(), url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give FILE with a prompt, or --from"),
        (["FILE", "--from", "s3://bucket/x"], "give FILE with a prompt, or --from"),
        (["FILE", "--top", "1GiB"], "need --from"),
        (["--from", "s3://key:topsecret@bucket/x"], "must have no credentials"),
        (["--from", "mooncake://b:1"], "must be s3://BUCKET/PREFIX"),
        (["--from", "s3://bucket/x", "--connect", "ipc:///no/such"], "no daemon at"),
    ],
)
def test_what_cannot_be_warmed_up_is_one_line(arguments, message):
    code, _, said = run("tierstore.cli", "prefetch", *arguments)
    assert code != 0
    assert message in said
    assert "topsecret" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cluster=s3://key:topsecret@bucket/x"], "must have no credentials"),
        (["--cluster=s3://bucket/x", "--cluster-protocol=rdma"], "are for Mooncake"),
        (["--cluster=mooncake://b:1", "--cluster-bytes=1GiB"], "are limits of an object store"),
        (["--cluster=s3://bucket/x", "--cluster-days=-1"], "give 0 to 36500 days"),
    ],
)
def test_settings_that_cannot_be_are_one_line(tmp_path, options, message):
    code, _, said = run("tierstore.daemon", f"--listen=ipc://{tmp_path}/s", *options)
    assert code != 0
    assert message in said
    assert "topsecret" not in said
    assert said.count("\n") == 1
