"""Dynamo's indexer and selector follow daemons: whatever has happened, they end in the truth."""

from __future__ import annotations

import asyncio
import random
import shutil
import time

import numpy as np
import pytest

import tierstore
from tests.tierstore.daemon.server.running import RunningDaemon
from tierstore.daemon import event_publisher
from tierstore.daemon.settings import Settings
from tierstore.index import Tier
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.testing.pages import pages_of
from tierstore.testing.processes import free_port

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages
IDENTITY = Identity.of(SPEC, model="m")
SETTLED_S = 20.0


def prompt(number: int, pages: int = 8) -> np.ndarray:
    return np.arange(pages * 16) + number * 10_000


class Host:
    """A daemon with endpoints on loopback, which can be started again."""

    def __init__(self, directory, *models: str, **settings) -> None:
        self.events = {model: f"tcp://127.0.0.1:{free_port()}" for model in models or ("",)}
        self.replay = {model: f"tcp://127.0.0.1:{free_port()}" for model in models or ("",)}
        defaults = {"host_bytes": 2 << 20, "disk": directory / "disk", "disk_bytes": 6 << 20}
        self.settings = Settings(
            listen=(f"ipc://{directory}/s",),
            page_bytes=SPEC.page_bytes,
            events=self.events,
            events_replay=self.replay,
            **(defaults | settings),
        )
        self.running = RunningDaemon(self.settings)

    def restart(self, *, empty: bool = False) -> None:
        self.running.stop()
        if empty:
            shutil.rmtree(self.settings.disk)
        self.running = RunningDaemon(self.settings)

    def store(self, identity=IDENTITY, *, page_spec=SPEC, **options):
        store = tierstore.connect(self.running.url, page_spec, identity=identity, lookup_s=10, **options)
        store.wait_ready()
        return store

    def save(self, *prompts, identity=IDENTITY, **options) -> None:
        with self.store(identity, **options) as store:
            for tokens in prompts:
                store.save(tokens, pages_of(tokens, SPEC)).wait(10)
            assert store.flush(20)

    def held(self, tokens, identity=IDENTITY) -> tuple[int, int]:
        """The leading tokens in host memory, and those that are there or on disk: as the daemon has it."""
        with self.store(identity) as store:
            hit = store.lookup(tokens)
            hit.release()
            keys = store.prompt(tokens).keys
        core = self.running.daemon.core
        with core.state.lock:
            walked = {page.key: page for page in core.state.index.tree.walk()}
            in_host = [
                key in walked and walked[key].copies[Tier.HOST] is not None
                for key in keys[: hit.tokens // 16]
            ]
        return 16 * [*in_host, False].index(False), hit.tokens


@pytest.fixture
def host(tmp_path):
    """Starts daemons, each in a directory of its own."""
    hosts = []

    def start(*models, **settings):
        directory = tmp_path / str(len(hosts))
        directory.mkdir()
        hosts.append(Host(directory, *models, **settings))
        return hosts[-1]

    yield start
    for each in hosts:
        each.running.stop()


def follow(indexer, host, *, model="m", endpoint="", number=1, block_tokens=16) -> None:
    indexer.follow(
        number, host.events[endpoint], host.replay[endpoint], model=model, block_tokens=block_tokens
    )


def settles(indexer, host, prompts, *, model="m", number=1, identity=IDENTITY) -> None:
    """Until the indexer says of every prompt what the daemon does."""
    deadline = time.monotonic() + SETTLED_S
    truth = [host.held(tokens, identity) for tokens in prompts]
    while True:
        said = [indexer.held(each.tolist(), number=number, model=model, block_tokens=16) for each in prompts]
        if said == truth:
            return
        assert time.monotonic() < deadline, f"the indexer says {said}, the daemon {truth}"
        time.sleep(0.05)


def says(indexer, tokens, expected, *, model="m", number=1, block_tokens=16) -> None:
    deadline = time.monotonic() + SETTLED_S
    while True:
        said = indexer.held(tokens.tolist(), number=number, model=model, block_tokens=block_tokens)
        if said == expected:
            return
        assert time.monotonic() < deadline, f"the indexer says {said}, not {expected}"
        time.sleep(0.05)


def test_it_follows_while_pages_come_and_leave_either_tier(indexer, host):
    one = host()
    follow(indexer, one)
    prompts = [prompt(number, pages=1 + number % 24) for number in range(100)]
    draw = random.Random(1)
    for _ in range(8):
        one.save(*draw.sample(prompts, 30))
    counters = one.running.stats().store.counters["evicted_pages"]
    assert counters["host"] > 0, "nothing left host memory"
    assert counters["disk"] > 0, "nothing left the disk"
    settles(indexer, one, prompts)
    held = [one.held(each) for each in prompts]
    assert any(host < both for host, both in held), "some are on disk only"
    assert any(both == 0 for _, both in held), "some are nowhere"


def test_one_who_comes_late_learns_all_of_it(indexer, host):
    one = host()
    prompts = [prompt(number) for number in range(60)]  # more than host memory has room for
    one.save(*prompts)
    follow(indexer, one)
    settles(indexer, one, prompts)


@pytest.mark.parametrize("empty", [False, True])
def test_a_restarted_daemon_is_known_again(indexer, host, empty):
    one = host()
    follow(indexer, one)
    one.save(prompt(1), prompt(2))
    settles(indexer, one, [prompt(1), prompt(2)])
    one.restart(empty=empty)
    one.save(prompt(3))
    settles(indexer, one, [prompt(1), prompt(2), prompt(3)])
    assert one.held(prompt(1)) == (0, 0 if empty else 128)


@pytest.mark.parametrize("kept", [10_000, 3])
def test_what_was_missed_is_asked_for(indexer, host, monkeypatch, kept):
    """While the indexer is stopped more happens than sockets have room for. Where only three batches are
    known any more, it is told all that is held."""
    monkeypatch.setattr(event_publisher, "_KEPT_BATCHES", kept)
    monkeypatch.setattr(event_publisher, "_UNREAD_BATCHES", 1)
    one = host(disk=None)
    follow(indexer, one)
    one.save(prompt(0))
    settles(indexer, one, [prompt(0)])
    before = one.running.stats().events[0]
    indexer.stop()
    prompts = [prompt(number, pages=200) for number in range(1, 400)]
    with one.store() as store:
        pages = pages_of(prompts[0], SPEC)
        for tokens in prompts:
            batches = one.running.stats().events[0].batches
            store.save(tokens, pages).wait(10)
            one.running.wait_for(lambda stats, batches=batches: stats.events[0].batches > batches)
    indexer.go_on()
    settles(indexer, one, [prompt(0), *prompts])
    after = one.running.stats().events[0]
    assert after.replays > before.replays, "nothing was missed"
    assert (after.snapshots > before.snapshots) == (kept == 3)


def test_two_models_are_told_apart(indexer, host):
    one = host("first", "second")
    for model in ("first", "second"):
        follow(indexer, one, model=model, endpoint=model, number=1 if model == "first" else 2)
    identities = {model: Identity.of(SPEC, model=f"{model} weights") for model in ("first", "second")}
    one.save(prompt(1), identity=identities["first"], model_name="first")
    one.save(prompt(2), identity=identities["second"], model_name="second")
    for number, (model, identity) in enumerate(identities.items(), start=1):
        settles(indexer, one, [prompt(1), prompt(2)], model=model, number=number, identity=identity)


def test_a_tenants_pages_are_nobodys_hit(indexer, host):
    one = host()
    follow(indexer, one)
    one.save(prompt(1), identity=Identity.of(SPEC, model="m", tenant="t"))
    one.save(prompt(2))
    says(indexer, prompt(2), (128, 128))
    says(indexer, prompt(1), (0, 0))


@pytest.mark.parametrize("part", ["tp{}/2,pp0/1,group0", "tp0/1,pp0/1,group{}/2"])
def test_blocks_of_an_engine_in_two_parts(indexer, host, part):
    """Of two workers, or of two KV cache groups, and windows beside them."""
    one = host()
    follow(indexer, one)
    opaque = KVSpec.opaque(SPEC.page_bytes, chunk_tokens=16)
    shards = [part.format(0), part.format(1), "tp0/1,pp0/1,window2"]
    parts = [Identity.of(opaque, model="m", shard=shard) for shard in shards]
    tokens = prompt(1)
    keys = [PageKey(bytes([at] * 16)) for at in range(8)]

    def save(identity: Identity, pages: int) -> None:
        data = tokens[: pages * 16].astype("<u4").tobytes()
        whole = Prompt.with_keys(identity, data, keys[:pages], chunk_tokens=16)
        with one.store(identity, page_spec=opaque) as store:
            store.save(whole, pages_of(tokens[: pages * 16], SPEC)).wait(10)
            assert store.flush(10)

    save(parts[2], 8)
    save(parts[0], 8)
    says(indexer, tokens, (0, 0))
    save(parts[1], 5)
    says(indexer, tokens, (80, 80))
    save(parts[1], 8)
    says(indexer, tokens, (128, 128))
    with one.store(parts[1], page_spec=opaque) as store:
        store.evict("host")
    says(indexer, tokens, (0, 128))


def test_blocks_smaller_than_pages(indexer, host):
    one = host(events_block_tokens=4)
    follow(indexer, one, block_tokens=4)
    one.save(prompt(1))
    says(indexer, prompt(1), (128, 128), block_tokens=4)
    says(indexer, prompt(1)[:22], (20, 20), block_tokens=4)
    one.restart()
    with one.store():
        says(indexer, prompt(1), (0, 128), block_tokens=4)


def test_the_selector_sends_a_prompt_to_where_it_is_held(selector, host):
    hosts = [host() for _ in range(3)]
    for number, each in enumerate(hosts):
        selector.add(number, each.events[""], each.replay[""], model="m", block_tokens=16)
        each.save(prompt(number, pages=16))
    for number in range(3):
        tokens = prompt(number, pages=16).tolist()
        deadline = time.monotonic() + SETTLED_S
        while selector.held(tokens, number=number, model="m") < 16:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert selector.select(f"r{number}", tokens, model="m") == number


def test_the_proxy_hears_from_the_selector_what_each_engine_holds(selector, host):
    pytest.importorskip("httpx")
    from tierstore_proxy.residency import Selector

    hosts = [host(), host()]
    for number, each in enumerate(hosts):
        selector.add(number, each.events[""], each.replay[""], model="m", block_tokens=16)
    hosts[1].save(prompt(1))
    tokens = prompt(1, pages=12).astype(np.uint32)
    engines = [f"http://127.0.0.1:{8000 + number}" for number in (2, 1, 0)]

    async def ask() -> list[int | None]:
        asked = Selector(f"http://127.0.0.1:{selector.port}", engines)
        deadline = time.monotonic() + SETTLED_S
        while (held := await asked.held(tokens, "m", 10.0)) != [None, 128, 0]:
            assert time.monotonic() < deadline, (held, asked.problem)
            await asyncio.sleep(0.05)
        gone = Selector(f"http://127.0.0.1:{free_port()}", engines)
        nothing = await gone.held(tokens, "m", 10.0)
        assert gone.problem
        await asked.close()
        await gone.close()
        return nothing

    assert asyncio.run(ask()) == [None, None, None]
