"""KV events: whoever follows them knows what the daemon holds."""

from __future__ import annotations

import random
import threading

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.tierstore.daemon.server.running import RunningDaemon
from tierstore.backend import Registration
from tierstore.core.change_log import ChangeLog, Followed, Lost, Named, PageRemoved, Stored
from tierstore.daemon import event_publisher
from tierstore.daemon.events import BlockRemoved, BlockStored, EventBlocks, block_hash, block_hashes
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

    def __init__(self, context, running, model=""):
        self.sub = context.socket(zmq.SUB)
        self.sub.linger = 0
        self.sub.subscribe(b"")
        self.sub.connect(running.settings.events[model])
        self.replay_url = running.settings.events_replay[model]
        self.context = context
        self.held: dict[str, set[int]] = {"CPU": set(), "STORAGE": set()}
        self.tokens: dict[int, list[int]] = {}
        self.next = 0
        self.began = None
        self.cleared = 0
        self.heartbeats = 0

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
        self.heartbeats += not events
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
        beats = self.heartbeats
        while not until():
            assert self.sub.poll(timeout_ms), f"{self.next} batches, and no more come"
            assert self.heartbeats < beats + 5, "nothing happens any more, and it is not so"
            topic, sequence, batch = self.sub.recv_multipart()
            assert topic == b"kv"
            if int.from_bytes(sequence, "big") != self.next:
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
        """All that was missed; for who comes late, all that there is."""
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
            number = int.from_bytes(sequence, "big")
            if {"type": "AllBlocksCleared"} in msgspec.msgpack.decode(batch)[1]:
                self.next = number  # a snapshot begins
            self.take(number, batch)
        socket.close()


@pytest.fixture
def follow():
    """Makes followers of a running daemon."""
    context = zmq.Context()
    followers = []

    def follow_(running, model=""):
        followers.append(Follower(context, running, model))
        return followers[-1]

    yield follow_
    context.destroy(0)


def endpoints(tmp_path, *models):
    """Settings that publish at an endpoint for each model."""
    return {
        "events": {model: f"ipc://{tmp_path}/events{model}" for model in models or ("",)},
        "events_replay": {model: f"ipc://{tmp_path}/replay{model}" for model in models or ("",)},
        "events_topic": "kv",
    }


@pytest.fixture
def running(tmp_path):
    daemon = RunningDaemon(
        Settings(
            listen=(f"ipc://{tmp_path}/s",),
            host_bytes=4 << 20,
            disk=tmp_path / "disk",
            disk_bytes=6 << 20,
            page_bytes=SPEC.page_bytes,
            **endpoints(tmp_path),
        )
    )
    yield daemon
    daemon.stop()


def connected(running, identity=IDENTITY, **options):
    store = tierstore.connect(running.url, SPEC, identity=identity, lookup_s=10, **options)
    store.wait_ready()
    return store


def save(running, tokens, *identities, **options):
    """Pages of ``tokens`` under each identity, in host memory and on disk."""
    for identity in identities or (IDENTITY,):
        with connected(running, identity, **options) as store:
            store.save(tokens, pages_of(tokens, SPEC)).wait(10)
            assert store.flush(10)


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
    follower = follow(running)
    follower.catch_up()
    save(running, np.arange(64))
    follower.listen(lambda: follower.held == held_by(running))
    before = follower.next
    save(running, np.arange(5000, 5064))
    replays = running.stats().events[0].replays
    follower.catch_up()
    follower.listen(lambda: follower.held == held_by(running))
    assert follower.next > before
    assert follower.cleared == 1, "what is known is told again, and no more"
    assert running.stats().events[0].replays > replays
    assert running.stats().events[0].snapshots == 1, "the first time there was nothing known"


def test_one_who_comes_late_is_told_all_that_is_held(running, follow, monkeypatch):
    monkeypatch.setattr(event_publisher, "_KEPT_BATCHES", 4)
    draw = random.Random(1)
    for prompt in range(120):  # more than host memory holds
        save(running, np.arange(draw.randrange(1, 12) * 16) + prompt * 1000)
    follower = follow(running)
    follower.catch_up()
    follower.listen(lambda: follower.held == held_by(running))
    assert running.stats().events[0].snapshots == 1
    assert follower.held["STORAGE"] - follower.held["CPU"], "some of them are on disk only"
    # And goes on with what comes.
    save(running, np.arange(100_000, 100_064))
    follower.listen(lambda: follower.held == held_by(running))


def test_snapshots_are_right_while_pages_come_and_go(running, follow, monkeypatch):
    monkeypatch.setattr(event_publisher, "_KEPT_BATCHES", 4)
    ended = threading.Event()

    def churn():
        draw = random.Random(2)
        with connected(running) as store:
            while not ended.is_set():
                tokens = np.arange(draw.randrange(1, 12) * 16) + draw.randrange(200) * 1000
                store.save(tokens, pages_of(tokens, SPEC)).wait(10)
                with store.lookup(tokens) as hit:
                    hit.prefetch().wait(10)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        running.wait_for(lambda stats: stats.store.counters["evicted_pages"]["disk"] > 100)
        followers = []
        for _ in range(4):
            followers.append(follow(running))
            followers[-1].catch_up()
            behind = running.stats().events[0].batches
            running.wait_for(lambda stats, behind=behind: stats.events[0].batches > behind + 5)
    finally:
        ended.set()
        thread.join()
    assert running.daemon.core.flush(30)
    for each in followers:
        each.listen(lambda each=each: each.held == held_by(running))


def test_numbers_go_on_from_life_to_life(running, follow):
    first = follow(running)
    first.catch_up()
    running.stop()
    again = RunningDaemon(running.settings)
    try:
        second = follow(again)
        second.catch_up()
        assert second.next > first.next
        # A follower of the first life sees a gap, asks, and knows.
        save(again, np.arange(64))
        first.sub.close()
        third = follow(again)
        third.next, third.held = first.next, {"CPU": {1}, "STORAGE": {2}}
        third.listen(lambda: third.held == held_by(again))
    finally:
        again.stop()


def test_a_disk_that_fails_ends_neither_an_answer_nor_the_reports(running, follow, monkeypatch):
    def fail(serial, count):
        raise OSError(5, "Input/output error")

    save(running, np.arange(64))
    monkeypatch.setattr(running.daemon.core.disk, "records_from", fail)
    follower = follow(running)
    follower.catch_up()  # the answer has an end
    assert follower.held["CPU"] == held_by(running)["CPU"]
    before = running.stats().events[0].unread_listings
    assert before >= 1  # of the answer, and of the publisher, if it had not listed the pages before
    other = Identity.of(SPEC, model="m", revision="2")  # a new identity makes the publisher list its pages
    save(running, np.arange(64), other)
    running.wait_for(lambda stats: stats.events[0].unread_listings > before)
    save(running, np.arange(64, 80), other)
    follower.listen(lambda: len(follower.held["CPU"]) == 9)  # the publisher goes on


def test_a_daemon_that_ends_answers_first(running, follow, monkeypatch):
    save(running, np.arange(64))
    disk, publisher = running.daemon.core.disk, running.daemon._events[0]
    asked, closed = threading.Event(), []
    records_from = disk.records_from

    def read_late(serial, count):
        asked.set()
        assert publisher._closing.wait(10)
        closed.append(disk._closed)
        return records_from(serial, count)

    monkeypatch.setattr(disk, "records_from", read_late)
    follower = follow(running)
    asking = threading.Thread(target=follower.catch_up)
    asking.start()
    assert asked.wait(10)
    running.stop()
    asking.join(20)
    assert not asking.is_alive(), "the answer has no end"
    assert closed
    assert not any(closed), "the publisher read a disk that was closed"
    assert follower.held["CPU"]


def test_while_nothing_happens_a_heartbeat_goes_out(running, follow, monkeypatch):
    follower = follow(running)
    follower.catch_up()
    save(running, np.arange(64))
    follower.listen(lambda: follower.held == held_by(running))
    beats = follower.heartbeats
    follower.listen(lambda: follower.heartbeats >= beats + 2)


def test_pages_of_an_earlier_life_are_told_of_when_their_identity_is_named(running, follow):
    tokens = np.arange(64)
    save(running, tokens)
    running.stop()
    again = RunningDaemon(running.settings)
    try:
        follower = follow(again)
        follower.catch_up()
        assert follower.held["STORAGE"] == set()
        with connected(again):
            follower.listen(lambda: len(follower.held["STORAGE"]) == 4)
        late = follow(again)
        late.catch_up()
        assert late.held == held_by(again)
    finally:
        again.stop()


def test_an_endpoint_tells_of_its_model_and_of_no_tenants(tmp_path, follow):
    names = ("first", "second")
    settings = Settings(
        listen=(f"ipc://{tmp_path}/s",), host_bytes=4 << 20, **endpoints(tmp_path, *names, "third")
    )
    running = RunningDaemon(settings)
    try:
        followers = {name: follow(running, name) for name in (*names, "third")}
        for at, name in enumerate(names):
            save(
                running,
                np.arange(at * 1000, at * 1000 + 64),
                Identity.of(SPEC, model=name * 9),
                model_name=name,
            )
        save(running, np.arange(64), Identity.of(SPEC, model="first", tenant="t"), model_name="first")
        save(running, np.arange(64), Identity.of(SPEC, model="third"))  # by its identity's own
        for at, name in enumerate((*names, "third")):
            follower = followers[name]
            follower.catch_up()
            follower.listen(lambda follower=follower: len(follower.held["CPU"]) == 4)
            first = {tokens[0] for tokens in follower.tokens.values()}
            assert min(first) == (at % 2) * 1000
            assert max(first) < (at % 2) * 1000 + 64
    finally:
        running.stop()


def test_tenants_are_told_of_where_that_is_asked_for(tmp_path, follow):
    settings = Settings(
        listen=(f"ipc://{tmp_path}/s",), host_bytes=4 << 20, events_tenants=True, **endpoints(tmp_path)
    )
    running = RunningDaemon(settings)
    try:
        save(running, np.arange(64), Identity.of(SPEC, model="m", tenant="t"))
        follower = follow(running)
        follower.catch_up()
        follower.listen(lambda: len(follower.held["CPU"]) == 4)
    finally:
        running.stop()


def test_the_daemon_connects_to_a_follower_that_listens(tmp_path):
    """As llm-d's does, with the model in the topic. It may have to wait for it."""
    context = zmq.Context()
    try:
        url = f"ipc://{tmp_path}/listening"
        settings = Settings(
            listen=(f"ipc://{tmp_path}/s",),
            host_bytes=1 << 20,
            events={"m": url},
            events_connect=True,
            events_topic="kv@pod@{model}",
        )
        running = RunningDaemon(settings)
        try:
            sub = context.socket(zmq.SUB)
            sub.subscribe(b"kv@")
            sub.bind(url)
            assert sub.poll(10_000)
            save(running, np.arange(64))
            events = []
            while not events:
                assert sub.poll(10_000)
                topic, _, batch = sub.recv_multipart()
                events = [each for each in msgspec.msgpack.decode(batch)[1] if each["type"] == "BlockStored"]
            assert topic == b"kv@pod@m"
            assert events[0]["token_ids"] == list(range(64))
        finally:
            running.stop()
    finally:
        context.destroy(0)


def test_events_leave_the_machine_where_a_person_says_so(tmp_path):
    settings = Settings(
        listen=(f"ipc://{tmp_path}/s",),
        host_bytes=1 << 20,
        events={"": "tcp://0.0.0.0:0"},
        events_anywhere=True,
    )
    RunningDaemon(settings).stop()


def test_a_follower_that_asks_and_does_not_read_holds_nobody_up(running, follow):
    save(running, np.arange(64))
    context = zmq.Context()
    silent = context.socket(zmq.DEALER)
    silent.linger = 0
    silent.rcvhwm = 1
    silent.connect(running.settings.events_replay[""])
    for _ in range(50):
        silent.send_multipart([b"", bytes(8)])
        silent.send_multipart([b"what is this"])
    running.wait_for(lambda stats: stats.events[0].replays >= 1)
    silent.close()
    context.term()
    follower = follow(running)
    follower.catch_up()
    follower.listen(lambda: follower.held == held_by(running))


def followed(log_identity, chunk_tokens=2):
    return log_identity.digest, Followed(log_identity, chunk_tokens)


def test_pages_that_follow_one_another_share_an_event():
    identity = Identity.of(SPEC, model="m", tenant="t", adapter="a")
    blocks = EventBlocks()
    assert blocks.add(*followed(identity)) == [identity.digest]
    digest = identity.digest
    keys = [bytes(8) + bytes([0] * 7 + [n]) for n in range(4)]
    tokens = [np.array([n, n + 1], np.uint32).tobytes() for n in range(4)]
    changes = [
        Stored(Tier.HOST, digest, keys[1], b"", tokens[1]),
        Stored(Tier.HOST, digest, keys[2], keys[1], tokens[2]),
        Stored(Tier.DISK, digest, keys[1], b"", tokens[1]),
        Stored(Tier.DISK, digest, keys[3], keys[2], tokens[3]),
        PageRemoved(Tier.HOST, digest, keys[2]),
        PageRemoved(Tier.HOST, digest, keys[1]),
        PageRemoved(Tier.DISK, digest, keys[3]),
    ]
    common = {"group_idx": 0, "locality": "LOCAL"}
    assert list(blocks.events(changes)) == [
        BlockStored(
            [1, 2], None, [1, 2, 2, 3], 2, None, "CPU", "a", extra_keys=[["a", "t"], ["a"]], **common
        ),
        BlockStored([1], None, [1, 2], 2, None, "STORAGE", "a", extra_keys=[["a", "t"]], **common),
        BlockStored([3], 2, [3, 4], 2, None, "STORAGE", "a", extra_keys=[["a"]], **common),
        BlockRemoved([2, 1], "CPU", **common),
        BlockRemoved([3], "STORAGE", **common),
    ]


def test_a_page_is_told_of_as_smaller_blocks():
    identity = Identity.of(SPEC, model="m")
    blocks = EventBlocks(block_tokens=2)
    blocks.add(*followed(identity, 8))
    assert blocks.add(*followed(Identity.of(SPEC, model="other"), 9)) == [], "no multiple of the blocks"
    first, second = bytes(15) + b"\1", bytes(15) + b"\2"
    tokens = np.arange(16, dtype=np.uint32)
    stored, removed = blocks.events(
        [
            Stored(Tier.HOST, identity.digest, first, b"", tokens[:8].tobytes()),
            Stored(Tier.HOST, identity.digest, second, first, tokens[8:].tobytes()),
            PageRemoved(Tier.HOST, identity.digest, second),
        ]
    )
    assert stored.token_ids == tokens.tolist()
    assert stored.block_size == 2
    assert len(set(stored.block_hashes)) == 8
    assert stored.block_hashes == block_hashes(first, 4) + block_hashes(second, 4)
    assert stored.block_hashes[3] == 1, "the last one has the page's name: the next page's parent"
    assert removed.block_hashes == stored.block_hashes[4:]
    [third] = blocks.events([Stored(Tier.HOST, identity.digest, second, first, tokens[8:].tobytes())])
    assert third.parent_block_hash == 1


SHARDS = [f"tp{rank}/2,pp0/1,group{group}/2" for group in range(2) for rank in range(2)]


@given(
    st.lists(
        st.tuples(
            st.booleans(), st.sampled_from((Tier.HOST, Tier.DISK)), st.integers(0, 3), st.integers(0, 4)
        ),
        max_size=80,
    ),
    st.permutations(range(4)),
)
def test_a_block_is_told_of_while_all_its_parts_are_there(changes, order):
    """Against a model that knows who has what: two workers, two groups of full attention, and a window, of
    which nothing is told."""
    identities = [Identity.of(SPEC, model="m", shard=shard) for shard in SHARDS]
    blocks = EventBlocks()
    window = Identity.of(SPEC, model="m", shard="tp0/2,pp0/1,window2")
    assert blocks.add(*followed(window)) == []
    assert not list(blocks.events([Stored(Tier.HOST, window.digest, bytes(16), b"", bytes(8))]))
    ready = [blocks.add(*followed(identities[at])) for at in order]
    assert [len(each) for each in ready] == [0, 0, 0, 4], "all of them, once the last is known"
    held: set[tuple[Tier, int, int]] = set()
    told: set[tuple[str, int]] = set()
    for comes, tier, who, page in changes:
        if comes == ((tier, who, page) in held):
            continue
        held ^= {(tier, who, page)}
        key, tokens = bytes(15) + bytes([page]), bytes(8)
        digest = identities[who].digest
        change = Stored(tier, digest, key, b"", tokens) if comes else PageRemoved(tier, digest, key)
        for event in blocks.events([change]):
            names = {(event.medium, name) for name in event.block_hashes}
            told = told | names if isinstance(event, BlockStored) else told - names
        media = {Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
        assert told == {
            (media[tier], page)
            for tier in media
            for page in range(5)
            if {(tier, who, page) for who in range(4)} <= held
        }


def test_a_log_that_nobody_takes_from_is_bounded_and_says_so():
    identity = Identity.of(SPEC, model="m")
    woken = []
    log = ChangeLog(lambda: woken.append(1), most=4)
    log.register(Registration(identity, 8192, 2))
    assert log.take() == [Named(identity.digest)]
    for n in range(10):
        log.removed(Tier.HOST, identity.digest, bytes([n] * 16), bytes(8))
    changes = log.take()
    assert isinstance(changes[0], Lost)
    assert 1 < len(changes) <= 5
    assert log.lost + len(changes) - 1 - log.lost // 5 >= 0
    assert log.lost > 0
    assert [change.key[0] for change in changes[1:]] == list(range(11 - len(changes), 10))
    log.removed(Tier.HOST, identity.digest, bytes(16), bytes(4))  # part of a chunk
    log.removed(Tier.HOST, bytes(32), bytes(16), bytes(8))  # nobody knows whose
    assert log.take() == []


def test_a_telling_that_fell_behind_begins_anew(running, follow, monkeypatch):
    """Changes that were lost are told of by telling all again."""
    monkeypatch.setattr(event_publisher.EventPublisher, "_gather", lambda self: self._closing.wait(0.3))
    publisher = running.daemon._events[0]
    publisher._log._most = 20
    follower = follow(running)
    follower.catch_up()
    for prompt in range(40):
        save(running, np.arange(64) + prompt * 1000)
    assert running.stats().events[0].lost_changes > 0
    follower.listen(lambda: follower.held == held_by(running))


@pytest.mark.parametrize(
    ("url", "error"),
    [("tcp://0.0.0.0:5557", UsageError), ("ipc:///nowhere/at/all", StoreUnavailableError)],
)
def test_an_address_that_will_not_do_is_refused_in_a_line(tmp_path, url, error):
    settings = Settings(listen=(f"ipc://{tmp_path}/s",), host_bytes=1 << 20, events={"": url})
    with pytest.raises(error, match=url):
        RunningDaemon(settings)


def test_followers_of_older_vllm_get_arrays(tmp_path, follow):
    settings = Settings(
        listen=(f"ipc://{tmp_path}/s",),
        host_bytes=1 << 20,
        events_encoding="array",
        **endpoints(tmp_path),
    )
    running = RunningDaemon(settings)
    try:
        follower = follow(running)
        with connected(running) as store:
            store.save(range(16), pages_of(range(16), SPEC)).wait(10)
            key = store.prompt(range(16)).keys[0]
        told = []
        while len(told) < 1:
            assert follower.sub.poll(10_000)
            told += msgspec.msgpack.decode(follower.sub.recv_multipart()[2])[1]
            told = [event for event in told if event != ["AllBlocksCleared"]]
        assert told == [
            ["BlockStored", [block_hash(key)], None, list(range(16)), 16, None, "CPU", None, None]
        ]
    finally:
        running.stop()


def test_pages_named_by_a_hash_are_not_told():
    log = ChangeLog(lambda: None)
    for identity in (IDENTITY, HASHED):
        log.register(Registration(identity, 8192, 16))
        log.removed(Tier.HOST, identity.digest, bytes(16), bytes(64))
    assert {change.identity for change in log.take()} == {IDENTITY.digest}
