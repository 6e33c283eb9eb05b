"""Wire fuzzing: messages that were messages once. The daemon stays up, and what it says stays true."""

from __future__ import annotations

import random
import time
from dataclasses import asdict

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tierstore.daemon.server.client import IDENTITY, page_bytes, part, prompt_of
from tierstore.daemon.server import _id, _tag
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.wire import messages as p

TOKENS = list(range(5 * 16))
PROMPT = prompt_of(TOKENS)
STATES = Identity(model="test", layout=KVSpec.opaque(8192, chunk_tokens=16).describe())
NAMED = [p.NamedPart(1, "state", 0, b"\x10\0\0\0"), p.NamedPart(1, "window", 20)]
NAMED.append(p.NamedPart(1, "cross", 0, b"", b"\x05\0\0\0\x10\0\0\0", bytes(32)))
SEEDS = [
    p.Hello(1, b"t" * 16, "x"),
    p.Hello(1),
    p.Bye(),
    p.Register(2, asdict(IDENTITY), 8192, 16),
    p.Ping(3),
    p.Find(4, part(PROMPT), 80, 0.0),
    p.Find(4, part(PROMPT, path=1, known=2), 80, 0.01, [1, 2]),
    p.FindHit(4, [part(PROMPT)], [16], NAMED, bytes(5 * 32), bytes(32), b"", 80, 0.0),
    p.FindHit(4, [part(PROMPT, path=1, known=2)], [0], [], b"", b"", b"", 77, 0.01, [1, 2]),
    p.FindHit(4, [], [], NAMED, bytes(4 * 32), bytes(32), bytes(40), 74, 0.0),
    p.Prefetch(5, 1, 0.0),
    p.Locate(6, 1, 0, 5, 0.0),
    p.Fetch(7, 1, 0, 5, 0.0),
    p.Release([1, 2, 3]),
    p.Reserve(8, part(PROMPT), 0, 5),
    p.Write(9, 1, 0),
    p.Commit(10, 1, bytes(8), bytes(16)),
    p.Abort(1),
    p.Pin(11, part(PROMPT)),
    p.Pin(11, part(PROMPT), True),
    p.Evict(12, "disk", 0),
    p.Flush(13, 0.0),
    p.Stats(14),
]
BODIES = [p.encode(seed) for seed in SEEDS]
INTERESTING = [
    b"\xff" * 8,
    b"\x00",
    b"\xc0",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
    b"\xcf" + b"\xff" * 8,
    b"\x90" * 40,
]


def mutated(rng: random.Random) -> bytes:
    body = bytearray(rng.choice(BODIES))
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(len(body) + 1)
        match rng.randrange(5):
            case 0 if at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(body):
                body[at] = rng.randrange(256)
            case 2:
                del body[at : at + rng.randrange(1, 9)]
            case 3:
                body[at:at] = rng.choice(INTERESTING)
            case _:
                other = rng.choice(BODIES)
                start = rng.randrange(len(other))
                body[at : at + rng.randrange(20)] = other[start : start + rng.randrange(1, 40)]
    return bytes(body)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.randoms(use_true_random=False).map(mutated)))
def test_the_decoder_raises_one_kind_of_error(body):
    _tag(body)
    number = _id(body)
    assert number is None or number >= 0
    try:
        message = p.decode_request(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    assert p.decode_request(p.encode(message)) == message


@pytest.mark.parametrize("seed", BODIES)
def test_the_id_of_a_cut_message_can_be_read(seed):
    message = p.decode_request(seed)
    if not isinstance(message, p.OneWay):
        assert _id(seed[: 3 + len(_tag(seed))]) == message.id


def campaign(start, connect, messages: int, seed: int) -> float:
    """Mutated messages from clients with a session and without, over ZMQ and over the arena's socket, beside
    an honest client that goes on looking up what it saved. Returns the seconds it took."""
    daemon = start(disk=True, pages=64, lease_s=1.0)
    honest = connect(daemon.url, line=True)
    honest.register()
    honest.save(TOKENS)
    assert honest.ask(p.Flush(0, 10.0)).done
    honest.ask(p.Pin(0, part(PROMPT)))
    mine = list(range(5000, 5080))
    honest.save(mine)
    rude = [
        connect(daemon.url),
        connect(daemon.url, hello=False, arena=False),
        connect(daemon.url, line=True),
        connect(daemon.url, line=True, hello=False),
    ]
    for each in (rude[0], rude[2]):
        each.register()
        assert each.register(STATES) == 1
    rng = random.Random(seed)
    started = time.monotonic()
    sent = 0
    while sent < messages:
        for _ in range(500):
            client = rng.choice(rude)
            frames = [rng.randbytes(rng.choice([0, 1, 8192])) for _ in range(rng.choice([0, 0, 0, 0, 1, 3]))]
            version = p.VERSION if rng.random() < 0.98 else rng.randbytes(rng.randrange(3))
            client.tell(mutated(rng), *frames, version=version)
            sent += 1
        for client in rude:
            client.drain()
        found = honest.lookup(PROMPT)
        assert isinstance(found, p.Found), found
        pages = honest.load(found.lease, 5, wait_s=5.0)
        assert pages == [page_bytes(TOKENS[:end]) for end in range(16, 16 * len(pages) + 1, 16)]
        honest.tell(p.Release([found.lease]))
    took = time.monotonic() - started
    stats = daemon.stats()
    assert stats.service.failed_requests == 0, "a message was a bug of ours"
    assert stats.server.malformed > messages / 4
    assert stats.store.counters["damaged_pages"] == 0
    for client in rude:
        client.close()
    honest.ask(p.Pin(0, part(PROMPT), True))
    honest.close()
    daemon.wait_for(lambda stats: stats.server.arena_connections == 0)
    if not stats.service.clients:
        daemon.check()
    return took


def test_the_live_socket_takes_mutated_messages(start, connect):
    campaign(start, connect, 15_000, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_live_socket_takes_a_million_mutated_messages(start, connect):
    took = campaign(start, connect, 1_000_000, seed=2)
    print(f"{took:.0f} s")  # noqa: T201


def test_a_storm_of_noise_does_not_stop_the_others(start, connect):
    """Frames that are not even the beginning of a message, as fast as one process can send them."""
    daemon = start()
    client, noise = connect(daemon.url), connect(daemon.url, hello=False, arena=False)
    client.register()
    data = np.random.default_rng(0).bytes(4096)
    for round_ in range(50):
        for at in range(200):
            noise.socket.send_multipart([data[at : at + 7], data[at : at + round_]])
        assert isinstance(client.ask(p.Ping(0)), p.Pong)
    assert daemon.stats().server.malformed > 0
