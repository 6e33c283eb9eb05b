"""Daemons that answer wrongly, late or not at all."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import replace

import pytest

from tests.daemons import SPEC, TOKENS, load_bytes, pages_of
from tests.tierstore.daemon.client.fake_daemon import hit_found, slowly
from tierstore.keys import Identity
from tierstore.testing.clock import wait_until
from tierstore.wire import messages as p
from tierstore.wire.messages import Abort, FindHit, Offsets, Release, Reserve, Reserved

PAGE = SPEC.page_bytes


def found(tokens=70, tiers=(("host", 5),), lease=9, path=0, known=0):
    return lambda m: hit_found(m, tokens, tiers, lease, path, known)


def located(*offsets):
    return lambda m: Offsets(m.id, struct.pack(f"<{len(offsets)}Q", *offsets))


@pytest.mark.parametrize(
    "offsets",
    [
        (1 << 40, 0, 0, 0, 0),
        ((1 << 64) - 1, 0, 0, 0, 0),
        ((1 << 20) - PAGE + 1, 0, 0, 0, 0),
        (),
    ],
)
def test_offsets_outside_the_arena_are_not_read(fake, connect, offsets):
    daemon = fake()
    daemon.answers |= {FindHit: found(), p.Locate: located(*offsets)}
    store = connect(daemon.url)
    assert load_bytes(store, store.lookup(TOKENS))[0] == 0


def test_fewer_pages_than_asked_for_are_a_shorter_hit(fake, connect):
    daemon = fake()
    two, none = located(0, PAGE), located()
    daemon.answers |= {FindHit: found(), p.Locate: lambda m: none(m) if m.first else two(m)}
    store = connect(daemon.url)
    contents = pages_of(TOKENS)
    daemon.arena.view(0, 2 * PAGE)[:] = b"".join(contents[:2])
    assert load_bytes(store, store.lookup(TOKENS)) == (32, contents[:2])


@pytest.mark.parametrize(
    ("positions", "offsets"),
    [((0, 1), (0, 1 << 40)), ((0, 99), (0, PAGE)), ((0, 0), (0, PAGE)), ((0,), (0, PAGE)), ((0, 1), (0,))],
)
def test_reservations_that_make_no_sense_are_not_written_to(fake, connect, positions, offsets):
    daemon = fake()
    daemon.answers[Reserve] = lambda m: Reserved(
        m.id,
        7,
        struct.pack(f"<{len(positions)}I", *positions),
        struct.pack(f"<{len(offsets)}Q", *offsets),
        70,
    )
    store = connect(daemon.url)
    assert store.save(TOKENS, pages_of(TOKENS)).wait(5) == 0
    wait_until(lambda: daemon.of(Abort))
    assert not any(daemon.arena.view(0, 1 << 20))


def test_ragged_numbers_are_none(fake, connect):
    daemon = fake()
    daemon.answers |= {
        FindHit: found(),
        p.Locate: lambda m: Offsets(m.id, b"x" * 39),
        Reserve: lambda m: Reserved(m.id, 7, b"x" * 3, b"y" * 9, 70),
    }
    store = connect(daemon.url)
    assert load_bytes(store, store.lookup(TOKENS))[0] == 0
    assert store.save(TOKENS, pages_of(TOKENS)).wait(5) == 0


def test_a_bug_in_what_follows_an_answer_does_not_end_the_connection(fake, connect):
    daemon = fake()
    daemon.answers[FindHit] = found()
    store = connect(daemon.url)
    connection = store.backend.connection
    call = connection.call(connection.link, p.Ping(0), p.Pong, lambda answer, _: answer)
    call.on_end(lambda: 1 // 0) if not call.done else None
    call.wait(5)
    assert store.lookup(TOKENS).tokens == 70


@pytest.mark.parametrize(
    "answer",
    [found(tiers=[("host", 4)]), found(tokens=71, tiers=[("host", 5)]), found(tokens=0, tiers=[])],
)
def test_a_hit_that_does_not_add_up_is_a_miss(fake, connect, answer):
    daemon = fake()
    daemon.answers[FindHit] = answer
    store = connect(daemon.url)
    assert store.lookup(TOKENS).tokens == 0
    wait_until(lambda: [9] in [message.leases for message in daemon.of(Release)])


def test_what_comes_too_late_is_given_back(fake, connect, monkeypatch):
    monkeypatch.setattr("tierstore.client.writing._SAVE_S", 0.0)  # no longer than a lookup
    daemon = fake()
    daemon.answers |= {FindHit: slowly(0.4, found())}
    store = connect(daemon.url, lookup_s=0.2)
    assert store.lookup(TOKENS).tokens == 0
    wait_until(lambda: [9] in [message.leases for message in daemon.of(Release)])
    daemon.answers |= {Reserve: slowly(0.4, lambda m: Reserved(m.id, 7, b"\0" * 4, b"\0" * 8, 70))}
    wait_until(lambda: store.wait_connected(0))
    assert store.save(TOKENS, pages_of(TOKENS)).wait(5) == 0
    wait_until(lambda: daemon.of(Abort))


def test_a_forgotten_path_is_spelled_out_once(fake, connect):
    daemon = fake()
    daemon.answers[FindHit] = found(path=5, known=4)
    store = connect(daemon.url)
    store.lookup(TOKENS).release()
    daemon.answers[FindHit] = lambda m: (
        p.Refused(m.id, "path", "forgotten") if m.chains[0].path else found(path=6, known=4)(m)
    )
    assert store.lookup([*TOKENS, 1, 2]).tokens == 70
    first, second, third = (message.chains[0] for message in daemon.of(FindHit))
    assert (first.path, second.path, second.known, third.path) == (0, 5, 4, 0)
    assert second.tokens == first.tokens[4 * 64 :] + struct.pack("<2I", 1, 2)
    assert len(third.keys) == 4 * 16
    # The new path is used from then on.
    daemon.answers[FindHit] = found()
    store.lookup(TOKENS)
    assert daemon.of(FindHit)[-1].chains[0].path == 6
    # And when even the whole prompt is refused, it is a miss.
    daemon.answers[FindHit] = lambda m: p.Refused(m.id, "path", "forgotten")
    assert store.lookup(TOKENS).tokens == 0


def test_many_identities_are_registered_in_one_round_trip(fake, connect):
    """A daemon that does not answer before it has heard of all, and then from the last to the first."""
    daemon = fake()
    store = connect(daemon.url)
    others = [replace(store.identity, adapter=str(number)) for number in range(40)]
    for identity in others:
        store.register(identity)
    before = len(daemon.of(p.Register))
    wanted = {identity: number for number, identity in enumerate([store.identity, *others])}

    def all_at_once(m):
        new = daemon.of(p.Register)[before:]
        if len(new) % len(wanted):
            return None
        return [p.Registered(each.id, wanted[Identity(**each.identity)]) for each in reversed(new)]

    daemon.answers |= {
        p.Register: all_at_once,
        FindHit: lambda m: p.Refused(m.id, "connection", "who are you?"),
    }
    session = store.backend.connection.link
    assert store.lookup(TOKENS).tokens == 0
    wait_until(lambda: store.backend.connection.link not in (None, session))
    known = store.backend.connection.link.identities
    assert known == {identity.digest: number for identity, number in wanted.items()}


def test_a_session_that_is_refused_is_greeted_again(fake, connect):
    daemon = fake()
    store = connect(daemon.url)
    daemon.answers[FindHit] = lambda m: p.Refused(m.id, "connection", "who are you")
    assert store.lookup(TOKENS).tokens == 0
    daemon.answers[FindHit] = found()
    wait_until(lambda: store.lookup(TOKENS).tokens == 70)
    assert len(daemon.of(p.Hello)) == len(daemon.of(p.Register)) == 2


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\xa5Found\x01\x02", b"x" * 1000])
def test_garbage_ends_the_session(fake, connect, garbage):
    daemon = fake()
    store = connect(daemon.url)
    daemon.answers[FindHit] = lambda m: garbage
    assert store.lookup(TOKENS).tokens == 0
    assert store.stats().counters["connection"]["malformed_answers"] == 1
    daemon.answers[FindHit] = found()
    wait_until(lambda: store.lookup(TOKENS).tokens == 70)


@pytest.mark.parametrize("options", [{"magic": b"tierkv\0\1"}, {"header_bytes": 1 << 40}])
def test_an_arena_that_cannot_be_mapped_is_no_session(fake, connect, options):
    daemon = fake(**options)
    store = connect(daemon.url, connected=False)
    wait_until(lambda: store.stats().counters["connection"]["failed_handshakes"] > 2)
    assert store.lookup(TOKENS).tokens == 0
    assert not daemon.of(p.Hello)


def test_another_version_is_no_session(fake, connect):
    daemon = fake()
    daemon.answers[p.Hello] = lambda m: p.Refused(m.id, "version", "I speak another one")
    store = connect(daemon.url, connected=False)
    wait_until(lambda: len(daemon.of(p.Hello)) > 2)
    assert store.lookup(TOKENS).tokens == 0


def test_a_load_goes_on_while_pages_come_from_disk(fake, connect, monkeypatch):
    """Pages on disk are requested in batches. Two threads may send requests, in either order."""
    monkeypatch.setattr("tierstore.client.reading._DISK_BYTES", 2 * PAGE)
    daemon = fake()
    tokens = list(range(16 * 9))
    contents = pages_of(tokens)
    daemon.arena.view(0, 9 * PAGE)[:] = b"".join(contents)

    def answer(m):
        time.sleep(0.01)
        return located(*range(m.first * PAGE, (m.first + m.count) * PAGE, PAGE))(m)

    daemon.answers |= {FindHit: found(144, [("host", 3), ("disk", 6)]), p.Locate: answer}
    store = connect(daemon.url)
    assert load_bytes(store, store.lookup(tokens)) == (144, contents)
    assert sorted((m.first, m.count) for m in daemon.of(p.Locate)) == [(0, 3), (3, 2), (5, 2), (7, 2)]


def test_a_load_that_runs_out_of_time_brings_what_came(fake, connect, monkeypatch):
    monkeypatch.setattr("tierstore.client.reading._DISK_BYTES", 2 * PAGE)
    daemon = fake()
    contents = pages_of(TOKENS)
    daemon.arena.view(0, 5 * PAGE)[:] = b"".join(contents)

    over = threading.Event()

    def answer(m):
        if m.first:
            over.wait(60)
        return located(*range(m.first * PAGE, (m.first + m.count) * PAGE, PAGE))(m)

    daemon.answers |= {FindHit: found(70, [("disk", 5)]), p.Locate: answer}
    store = connect(daemon.url)
    assert load_bytes(store, store.lookup(TOKENS), deadline_s=2.0) == (32, contents[:2])
    over.set()
