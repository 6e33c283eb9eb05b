"""KV events: whoever follows them knows what the daemon holds."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
import zmq

import tierstore
from tests.tierstore.daemon.server.conftest import RunningDaemon
from tierstore.core.change_log import ChangeLog, Lost, Removed, Stored
from tierstore.daemon.events import AllBlocksCleared, BlockRemoved, BlockStored, block_hash, events_of
from tierstore.daemon.settings import Settings
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.index import Tier
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.testing.pages import pages_of

SPEC = KVSpec.uniform(layers=2, kv_heads=1, head_dim=32, dtype="float32", chunk_tokens=16)  # 8 KiB pages
IDENTITY = Identity.of(SPEC, model="m")
HASHED = Identity.of(KVSpec.opaque(8192, chunk_tokens=16, hashed=True), model="m")
END = (-1).to_bytes(8, "big", signed=True)


class Follower:
    """What a router would know: the blocks of each medium, and their tokens."""

    def __init__(self, context, running):
        self.sub = context.socket(zmq.SUB)
        self.sub.linger = 0
        self.sub.subscribe(b"")
        self.sub.connect(running.settings.events)
        self.replay_url = running.settings.events_replay
        self.context = context
        self.held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        self.tokens: dict[int, list[int]] = {}
        self.next = 0
        self.began = None
        self.cleared = 0

    def take(self, sequence, batch):
        if sequence < self.next:
            return
        if self.began is None:
            self.began = sequence
        else:
            assert sequence == self.next, "a batch was missed, and not asked for"
        self.next = sequence + 1
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0
        for event in events:
            self.apply(event)

    def apply(self, event):
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.cleared += 1
            for held in self.held.values():
                held.clear()
        elif kind == "BlockRemoved":
            self.held[event["medium"]] -= set(event["block_hashes"])
        else:
            assert kind == "BlockStored"
            size, tokens = event["block_size"], event["token_ids"]
            assert len(tokens) == size * len(event["block_hashes"])
            self.held[event["medium"]].update(event["block_hashes"])
            for at, block in enumerate(event["block_hashes"]):
                self.tokens[block] = tokens[at * size : (at + 1) * size]

    def listen(self, until, timeout_ms=10_000):
        while not until():
            assert self.sub.poll(timeout_ms), f"{self.next} batches, and no more come"
            topic, sequence, batch = self.sub.recv_multipart()
            assert topic == b"kv"
            if int.from_bytes(sequence, "big") > self.next:
                self.catch_up()
            self.take(int.from_bytes(sequence, "big"), batch)

    def ask(self):
        """For what was missed."""
        socket = self.context.socket(zmq.REQ)
        socket.linger = 0
        socket.connect(self.replay_url)
        socket.send(self.next.to_bytes(8, "big"))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        assert poller.poll(10_000)
        first = socket.recv_multipart()
        socket.close()
        return first

    def catch_up(self):
        """All that was ever told, and is still known."""
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self.replay_url)
        socket.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert socket.poll(10_000)
            empty, _, sequence, batch = socket.recv_multipart()
            assert empty == b""
            if sequence == END:
                break
            self.take(int.from_bytes(sequence, "big"), batch)
        socket.close()


@pytest.fixture
def follow():
    """Makes followers of a running daemon."""
    context = zmq.Context()
    followers = []

    def follow_(running):
        followers.append(Follower(context, running))
        return followers[-1]

    yield follow_
    for each in followers:
        each.sub.close()
    context.term()


@pytest.fixture
def running(tmp_path):
    daemon = RunningDaemon(
        Settings(
            listen=(f"ipc://{tmp_path}/s",),
            host_bytes=4 << 20,
            disk=tmp_path / "disk",
            disk_bytes=6 << 20,
            page_bytes=SPEC.page_bytes,
            events=f"ipc://{tmp_path}/events",
            events_replay=f"ipc://{tmp_path}/replay",
            events_topic="kv",
        )
    )
    yield daemon
    daemon.stop()


def connected(running):
    store = tierstore.connect(running.url, SPEC, identity=IDENTITY, lookup_s=10)
    store.wait_ready()
    return store


def held_by(running):
    """What the daemon itself says it holds of whole chunks: tier → block hashes."""
    assembly = running.daemon.core
    with assembly.state.lock:
        pages = [page for page in assembly.state.index.tree.walk() if page.num_tokens == SPEC.chunk_tokens]
        host = {block_hash(page.key) for page in pages if page.copies[Tier.HOST] is not None}
    records = [record for _, record in assembly.disk.scan() if record is not None]
    whole = [record for record in records if len(record.tokens) == SPEC.chunk_tokens * 4]
    return {"CPU": host, "STORAGE": {block_hash(record.key) for record in whole}}


def test_a_follower_knows_what_is_held_while_pages_come_and_go(running, follow):
    follower = follow(running)
    draw = random.Random(5)
    with connected(running) as store:
        for prompt in range(150):
            # Prompts branch off one another, and end inside a chunk.
            tokens = np.arange(draw.randrange(1, 40) * 16 + draw.randrange(16)) + draw.randrange(6) * 1000
            tokens[draw.randrange(len(tokens)) :] += prompt
            store.save(tokens, pages_of(tokens, SPEC)).wait(10)
            with store.lookup(tokens) as hit:
                hit.prefetch().wait(10)
        assert store.flush(30)
    stats = running.stats()
    assert stats.store.counters["evicted_pages"]["host"] > 0, "nothing ever left the arena"
    assert stats.store.counters["evicted_pages"]["disk"] > 0, "nothing ever left the disk"
    follower.catch_up()
    follower.listen(lambda: follower.held == held_by(running))
    assert follower.cleared == 1
    # And the tokens are those that the pages hold.
    records = [record for _, record in running.daemon.core.disk.scan() if record is not None]
    for record in records:
        if len(record.tokens) == SPEC.chunk_tokens * 4:
            tokens = np.frombuffer(record.tokens, np.uint32).tolist()
            assert follower.tokens[block_hash(record.key)] == tokens


def test_what_was_missed_is_told_again_from_the_number_asked_for(running, follow):
    with connected(running) as store:
        for start in (0, 5000):
            tokens = np.arange(start, start + 64)
            store.save(tokens, pages_of(tokens, SPEC)).wait(10)
            store.flush(10)
            running.wait_for(lambda stats, start=start: stats.events.events >= 3 + (start > 0) * 2)
    follower = follow(running)
    _, first, batch = follower.ask()
    assert msgspec.msgpack.decode(batch)[1] == [{"type": "AllBlocksCleared"}]
    follower.next = int.from_bytes(first, "big") + 2
    _, sequence, _ = follower.ask()
    assert int.from_bytes(sequence, "big") == follower.next
    assert running.stats().events.replays == 2


def test_numbers_go_on_from_life_to_life(running, follow):
    first = follow(running)
    first.catch_up()
    running.stop()
    again = RunningDaemon(running.settings)
    try:
        second = follow(again)
        second.catch_up()
        assert second.began > first.next
    finally:
        again.stop()


def test_pages_of_an_earlier_life_are_told_of_when_they_are_asked_for(running, follow):
    tokens = np.arange(64)
    with connected(running) as store:
        store.save(tokens, pages_of(tokens, SPEC)).wait(10)
        assert store.flush(10)
    running.stop()
    again = RunningDaemon(running.settings)
    try:
        follower = follow(again)
        with connected(again) as store:
            assert store.lookup(tokens).tokens == 64
        follower.catch_up()
        follower.listen(lambda: len(follower.held["STORAGE"]) == 4)
    finally:
        again.stop()


def test_pages_that_follow_one_another_share_an_event():
    identity = Identity.of(SPEC, model="m", tenant="t", adapter="a")
    feed = ChangeLog(lambda: None)
    feed.register(identity, 2)
    digest = identity.digest
    keys = [bytes(8) + bytes([0] * 7 + [n]) for n in range(4)]
    tokens = [np.array([n, n + 1], np.uint32).tobytes() for n in range(4)]
    changes = [
        Stored(Tier.HOST, digest, keys[1], b"", tokens[1]),
        Stored(Tier.HOST, digest, keys[2], keys[1], tokens[2]),
        Stored(Tier.DISK, digest, keys[1], b"", tokens[1]),
        Stored(Tier.DISK, digest, keys[3], keys[2], tokens[3]),
        Removed(Tier.HOST, digest, keys[2]),
        Removed(Tier.HOST, digest, keys[1]),
        Lost(),
        Removed(Tier.DISK, digest, keys[3]),
    ]
    common = {"group_idx": 0, "locality": "LOCAL"}
    assert list(events_of(changes, feed)) == [
        BlockStored(
            [1, 2], None, [1, 2, 2, 3], 2, None, "CPU", "a", extra_keys=[["a", "t"], ["a"]], **common
        ),
        BlockStored([1], None, [1, 2], 2, None, "STORAGE", "a", extra_keys=[["a", "t"]], **common),
        BlockStored([3], 2, [3, 4], 2, None, "STORAGE", "a", extra_keys=[["a"]], **common),
        BlockRemoved([2, 1], "CPU", **common),
        AllBlocksCleared(),
        BlockRemoved([3], "STORAGE", **common),
    ]


def test_a_feed_that_nobody_takes_from_is_bounded_and_says_so():
    identity = Identity.of(SPEC, model="m")
    woken = []
    feed = ChangeLog(lambda: woken.append(1), most=4)
    feed.register(identity, 2)
    for n in range(10):
        feed.removed(Tier.HOST, identity.digest, bytes([n] * 16), bytes(8))
    changes = feed.take()
    assert isinstance(changes[0], Lost)
    assert 1 < len(changes) <= 5
    assert feed.lost == 10 - (len(changes) - 1) + 1 or feed.lost > 0
    assert [change.key[0] for change in changes[1:]] == list(range(11 - len(changes), 10))
    feed.removed(Tier.HOST, identity.digest, bytes(16), bytes(4))  # part of a chunk
    feed.removed(Tier.HOST, bytes(32), bytes(16), bytes(8))  # nobody knows whose
    assert feed.take() == []


@pytest.mark.parametrize(
    ("url", "error"),
    [("tcp://0.0.0.0:5557", UsageError), ("ipc:///nowhere/at/all", StoreUnavailableError)],
)
def test_an_address_that_will_not_do_is_refused_in_a_line(tmp_path, url, error):
    settings = Settings(listen=(f"ipc://{tmp_path}/s",), host_bytes=1 << 20, events=url)
    with pytest.raises(error, match=url):
        RunningDaemon(settings)


def test_followers_of_older_vllm_get_arrays(tmp_path, follow):
    settings = Settings(
        listen=(f"ipc://{tmp_path}/s",),
        host_bytes=1 << 20,
        events=f"ipc://{tmp_path}/events",
        events_replay=f"ipc://{tmp_path}/replay",
        events_encoding="array",
    )
    running = RunningDaemon(settings)
    try:
        with connected(running) as store:
            store.save(range(16), pages_of(range(16), SPEC)).wait(10)
            prompt = store.prompt(range(16))
        running.wait_for(lambda stats: stats.events.events == 2)
        follower = follow(running)
        _, first, _ = follower.ask()
        follower.next = int.from_bytes(first, "big") + 1
        _, _, batch = follower.ask()
        _, [event], _ = msgspec.msgpack.decode(batch)
        stored = [
            "BlockStored",
            [block_hash(prompt.keys[0])],
            None,
            list(range(16)),
            16,
            None,
            "CPU",
            None,
            None,
        ]
        assert event == stored
    finally:
        running.stop()


def test_pages_named_by_a_hash_are_not_told():
    woken = []
    log = ChangeLog(lambda: woken.append(True))
    for identity in (IDENTITY, HASHED):
        log.register(identity, 16)
        log.removed(Tier.HOST, identity.digest, bytes(16), bytes(64))
    assert [change.identity for change in log.take()] == [IDENTITY.digest]
