"""The daemon over its real sockets, spoken to by a client that is nothing but a DEALER."""

from __future__ import annotations

import os
import socket
import stat
import time
from dataclasses import asdict, replace

import pytest
import zmq

from tests.tierstore.daemon.server.client import (
    CHUNK_TOKENS,
    IDENTITY,
    PAGE_BYTES,
    ArenaConnection,
    Client,
    offsets,
    page_bytes,
    part,
    positions,
    prompt_of,
    sums_of,
)
from tierstore.errors import StoreUnavailableError, UsageError
from tierstore.testing.clock import ManualClock
from tierstore.wire import messages as p

TOKENS = list(range(100, 100 + 5 * CHUNK_TOKENS + 7))
PAGES = [page_bytes(TOKENS[: end * CHUNK_TOKENS]) for end in range(1, 7)]


def test_what_one_client_saves_another_one_loads(start, connect):
    daemon = start()
    first, second = connect(daemon.url), connect(daemon.url)
    first.register()
    reserved = first.save(TOKENS)
    assert reserved.stored_tokens == len(TOKENS)
    second.register()
    found = second.lookup(prompt_of(TOKENS))
    assert (found.tokens, found.tail_tokens, found.tiers) == (len(TOKENS), 7, [("host", 6)])
    assert second.load(found.lease, 6) == PAGES
    assert second.load(found.lease, 2, first=3) == PAGES[3:5]
    assert first.save(TOKENS).reservation == 0  # it is all there
    second.tell(p.Release([found.lease]))
    daemon.wait_for(lambda stats: stats.service.leases == 0)
    daemon.check()


def test_a_prompt_that_parts_inside_a_chunk_is_found_up_to_there(start, connect):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    other = [*TOKENS[: 2 * CHUNK_TOKENS + 5], 7, 7, 7, *range(CHUNK_TOKENS)]
    found = client.lookup(prompt_of(other))
    assert (found.tokens, found.tail_tokens, found.known) == (2 * CHUNK_TOKENS + 5, 5, 2)
    found = client.lookup(prompt_of(TOKENS), max_tokens=20)
    assert (found.tokens, found.tail_tokens) == (20, 4)
    assert client.lookup(prompt_of([1, 2, 3])).lease == 0


def test_a_remembered_path_stands_for_the_beginning_of_a_prompt(start, connect):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    assert found.known == 5
    longer = TOKENS[: 5 * CHUNK_TOKENS] + list(range(40))
    again = client.lookup(prompt_of(longer), path=found.path, known=5)
    assert (again.tokens, again.path) == (5 * CHUNK_TOKENS, found.path)
    assert client.load(again.lease, 5) == PAGES[:5]
    shorter = TOKENS[: 3 * CHUNK_TOKENS] + list(range(40))
    again = client.lookup(prompt_of(shorter), path=found.path, known=3)
    assert again.tokens == 3 * CHUNK_TOKENS
    # Saved behind a path, and found behind it.
    reserved = client.ask(p.Reserve(0, part(prompt_of(longer), path=found.path, known=5), 5, 3))
    assert positions(reserved) == [0, 1, 2]
    client.tell(p.Abort(reserved.reservation))
    assert client.lookup(prompt_of(TOKENS), max_tokens=33, path=found.path, known=5).tokens == 33


def test_the_paths_of_several_prompts_in_many_identities_are_remembered(start, connect):
    """An engine asks for each prompt once for each of its workers and KV cache groups."""
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    paths = [client.lookup(prompt_of(TOKENS)).path for _ in range(8 * 56)]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert client.lookup(prompt_of(TOKENS), path=path, known=5).tokens == len(TOKENS)


def test_pages_of_another_size_make_room_and_no_more_of_them_than_it_takes(start, connect):
    daemon = start(pages=256)
    client = connect(daemon.url)
    client.register()
    prompts = [list(range(1000 * n, 1000 * n + 16 * CHUNK_TOKENS)) for n in range(16)]
    for prompt in prompts:
        client.save(prompt)
    large = client.register(replace(IDENTITY, model="large"), 8 * PAGE_BYTES)
    prompt = prompt_of(TOKENS[: 4 * CHUNK_TOKENS], replace(IDENTITY, model="large"))
    reserved = client.save(prompt.tokens, large, prompt=prompt, nbytes=8 * PAGE_BYTES)
    assert positions(reserved) == [0, 1, 2, 3]
    evicted = daemon.stats().store.counters["evicted_pages"]["host"]
    assert 4 * 8 <= evicted <= 4 * 8 + 7
    gone = evicted // 16  # whole prompts; of the next one its end
    assert [client.lookup(prompt_of(each)).tokens for each in prompts[:gone]] == [0] * gone
    assert all(client.lookup(prompt_of(each)).tokens == len(each) for each in prompts[gone + 1 :])


@pytest.mark.parametrize("first", [0, 1, 2, 4])
def test_what_a_path_stands_for_is_never_saved_in_another_place(start, connect, first):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    pages = daemon.stats().store.pages
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS), path=found.path, known=2), first, 5 - first))
    if isinstance(reserved, p.Reserved):  # the daemon may know these pages, or refuse to be asked
        assert reserved.reservation == 0
    else:
        assert reserved.kind in ("path", "usage")
    assert daemon.stats().store.pages == pages


def test_a_page_that_matches_in_part_is_not_pinned(start, connect):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    other = [*TOKENS[: 2 * CHUNK_TOKENS + 5], *range(CHUNK_TOKENS)]
    assert client.ask(p.Pin(0, part(prompt_of(other)))).tokens == 2 * CHUNK_TOKENS
    assert client.ask(p.Evict(0, "host", -1)).pages == 4
    assert client.ask(p.Pin(0, part(prompt_of(other)), True)).tokens == 2 * CHUNK_TOKENS


def test_a_path_whose_pages_have_left_leads_to_what_is_there(start, connect):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    client.tell(p.Release([found.lease]))
    assert client.ask(p.Evict(0, "host", -1)).pages == 6
    assert client.lookup(prompt_of(TOKENS), path=found.path, known=5).tokens == 0
    client.save(TOKENS[: 2 * CHUNK_TOKENS])
    again = client.lookup(prompt_of(TOKENS), path=found.path, known=5)
    assert (type(again), again.kind) == (p.Refused, "path")  # the first answer was the last that knew it
    assert client.lookup(prompt_of(TOKENS), path=4711, known=1).kind == "path"


def test_leased_pages_stay_and_others_make_room(start, connect):
    daemon = start(pages=8)
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    other = list(range(1000, 1000 + 6 * CHUNK_TOKENS))
    assert client.save(other).stored_tokens == 2 * CHUNK_TOKENS
    assert client.load(found.lease, 6) == PAGES
    client.tell(p.Release([found.lease]))
    assert client.save(other).stored_tokens == 6 * CHUNK_TOKENS


def test_a_lookup_gives_leases_back_whatever_its_answer(start, connect):
    daemon = start(pages=8)
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    first, second = client.lookup(prompt_of(TOKENS)), client.lookup(prompt_of(TOKENS))
    found = client.ask(p.Find(0, part(prompt_of(TOKENS)), len(TOKENS), 0.0, [first.lease, 4711]))
    assert client.load(first.lease, 6) == []
    assert client.load(second.lease, 6) == client.load(found.lease, 6) == PAGES
    refused = client.ask(p.Find(0, part(prompt_of(TOKENS)), -1, 0.0, [second.lease, found.lease]))
    assert refused.kind == "usage"
    assert client.save(list(range(1000, 1000 + 8 * CHUNK_TOKENS))).stored_tokens == 8 * CHUNK_TOKENS


def test_pages_behind_those_of_a_lease_are_none(start, connect):
    daemon = start(disk=True)
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    assert client.ask(p.Flush(0, 30.0)).done
    client.ask(p.Evict(0, "host", -1))
    found = client.lookup(prompt_of(TOKENS[:CHUNK_TOKENS]))
    for first in (1, 2, 1 << 40):
        assert client.ask(p.Locate(0, found.lease, first, 2, 1.0)).offsets == b""
    assert daemon.stats().service.failed_requests == 0


def test_a_lease_ends_by_itself(start, connect):
    daemon = start(pages=8, lease_s=0.1)
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    found = client.lookup(prompt_of(TOKENS))
    time.sleep(0.15)
    assert client.load(found.lease, 6) == []
    assert client.save(list(range(1000, 1000 + 8 * CHUNK_TOKENS))).stored_tokens == 8 * CHUNK_TOKENS


def test_pages_come_back_from_disk_after_a_restart(start, connect, tmp_path):
    daemon = start(disk=True)
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    assert client.ask(p.Flush(0, 10.0)).done
    client.close()
    daemon.stop()

    daemon = start(disk=True)
    client = connect(daemon.url)
    client.register()
    found = client.lookup(prompt_of(TOKENS))
    assert (found.tokens, found.tiers) == (len(TOKENS), [("disk", 6)])
    assert client.ask(p.Prefetch(0, found.lease, 5.0)).pages == 6
    assert client.load(found.lease, 6) == PAGES
    client.tell(p.Release([found.lease]))
    assert client.ask(p.Evict(0, "host", -1)).pages == 6
    found = client.lookup(prompt_of(TOKENS))
    assert found.tiers == [("disk", 6)]
    assert client.load(found.lease, 4, first=2) == PAGES[2:]  # without a prefetch
    assert client.load(found.lease, 6) == PAGES
    # What is on disk and unloaded is not stored twice.
    before = daemon.stats().store.tiers["disk"].pages
    client.save(TOKENS)
    assert client.ask(p.Flush(0, 10.0)).done
    assert daemon.stats().store.tiers["disk"].pages == before == 6
    client.close()
    daemon.wait_for(lambda stats: stats.service.connections == 0)
    daemon.check()


def test_an_arena_full_of_leased_pages_answers_with_what_fits(start, connect):
    daemon = start(disk=True, pages=16)
    client = connect(daemon.url)
    client.register()
    prompts = [list(range(start, start + 6 * CHUNK_TOKENS)) for start in (1000, 2000, 3000)]
    for tokens in prompts:
        client.save(tokens)
        assert client.ask(p.Flush(0, 10.0)).done
    client.ask(p.Evict(0, "host", -1))
    one, two, three = (client.lookup(prompt_of(tokens)) for tokens in prompts)
    assert len(client.load(one.lease, 6)) == len(client.load(two.lease, 6)) == 6
    assert len(client.load(three.lease, 6, wait_s=0.3)) == 4
    client.tell(p.Release([one.lease]))
    assert len(client.load(three.lease, 6)) == 6


def test_a_page_with_a_wrong_checksum_is_dropped_everywhere(start, connect):
    daemon = start(disk=True)
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS, wrong=[2])
    found = client.lookup(prompt_of(TOKENS))
    assert client.ask(p.Flush(0, 10.0)).done
    daemon.wait_for(lambda stats: stats.store.counters["damaged_pages"] == 1)
    assert client.lookup(prompt_of(TOKENS)).tokens == 2 * CHUNK_TOKENS
    assert daemon.stats().store.tiers["disk"].pages == 2
    if found.tokens == len(TOKENS):  # it came before the writer: under a lease the bytes stay where they are
        assert client.load(found.lease, 2) == PAGES[:2]
        client.tell(p.Release([found.lease]))
    client.ask(p.Evict(0, "host", -1))
    client.save(TOKENS)
    assert client.ask(p.Flush(0, 10.0)).done
    assert client.lookup(prompt_of(TOKENS)).tokens == len(TOKENS)
    client.close()
    daemon.wait_for(lambda stats: stats.service.connections == 0)
    daemon.check()


def test_pins_hold_until_they_are_undone(start, connect):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    assert client.ask(p.Pin(0, part(prompt_of(TOKENS)))).tokens == 5 * CHUNK_TOKENS
    assert client.ask(p.Evict(0, "host", -1)).pages == 1
    assert client.lookup(prompt_of(TOKENS)).tokens == 5 * CHUNK_TOKENS
    assert client.ask(p.Pin(0, part(prompt_of(TOKENS)), True)).tokens == 5 * CHUNK_TOKENS


# -- over TCP ------------------------------------------------------------------------------------------


def test_pages_travel_over_tcp(start, connect):
    daemon = start(listen=("tcp://127.0.0.1:0",))
    client = connect(daemon.address)
    client.register()
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6))
    assert positions(reserved) == list(range(6))
    assert isinstance(client.ask(p.Write(0, reserved.reservation, 0), *PAGES[:4]), p.Written)
    assert isinstance(client.ask(p.Write(0, reserved.reservation, 4), *PAGES[4:]), p.Written)
    assert client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of(PAGES))).pages == 6
    found = client.lookup(prompt_of(TOKENS))
    fetched, frames = client.ask_with_frames(p.Fetch(0, found.lease, 1, 5, 5.0))
    assert (fetched.pages, frames) == (5, PAGES[1:])
    assert fetched.checksums == sums_of(PAGES[1:])
    client.tell(p.Release([found.lease]))
    daemon.wait_for(lambda stats: not stats.service.leases and not stats.service.sending_bytes)
    daemon.check()


def test_what_came_over_tcp_is_held_against_its_checksum(start, connect):
    daemon = start(listen=("tcp://127.0.0.1:0",))
    client = connect(daemon.address)
    client.register()
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6))
    came = [*PAGES[:2], PAGES[3], *PAGES[3:5]]  # one with other bytes, and one that never comes
    assert isinstance(client.ask(p.Write(0, reserved.reservation, 0), *came), p.Written)
    assert client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of(PAGES))).pages == 4
    assert daemon.stats().store.counters["torn_pages"] == 2
    found = client.lookup(prompt_of(TOKENS))
    assert found.tokens == 2 * CHUNK_TOKENS
    client.tell(p.Release([found.lease]))
    daemon.wait_for(lambda stats: stats.service.leases == 0)
    daemon.check()


def test_a_tcp_client_that_falls_silent_is_given_up(start, connect, monkeypatch):
    daemon = start(listen=("tcp://127.0.0.1:0",))
    clock = ManualClock(daemon.loop.time())
    monkeypatch.setattr(daemon.loop, "time", clock)
    client = connect(daemon.address)
    client.register()
    assert client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6)).reservation
    for _ in range(4):
        clock.advance(0.6 * p.SILENCE_S)
        assert isinstance(client.ask(p.Ping(0)), p.Pong)
    assert daemon.stats().service.reservations == 1
    clock.advance(1.1 * p.SILENCE_S)
    daemon.wait_for(lambda stats: stats.service.connections == 0)
    daemon.check()
    assert client.ask(p.Ping(0)).kind == "connection"


def test_a_tcp_client_that_says_bye_is_gone_at_once(start, connect):
    daemon = start(listen=("tcp://127.0.0.1:0",))
    client = connect(daemon.address)
    client.register()
    assert client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6)).reservation
    client.tell(p.Bye())
    daemon.wait_for(lambda stats: not stats.service.connections)
    assert daemon.stats().server.silent_clients == 0
    daemon.check()
    assert client.ask(p.Ping(0)).kind == "connection"
    client.tell(p.Bye())  # has no answer
    client.hello()  # and it may come back
    assert client.register() == 0


def test_a_process_that_has_mapped_the_arena_ends_by_hanging_up(start, connect):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    client.save(TOKENS)
    client.tell(p.Bye())
    assert client.lookup(prompt_of(TOKENS)).tokens == len(TOKENS)


def test_a_client_that_does_not_read_costs_a_window_and_nobody_else(start, connect):
    nbytes = 4 << 20
    daemon = start(listen=("tcp://127.0.0.1:0",), host_bytes=64 << 20, reserve_bytes=64 << 20)
    slow, other = connect(daemon.address), connect(daemon.address)
    prompt = prompt_of(range(4 * CHUNK_TOKENS))
    for client in (slow, other):
        client.register(page_bytes=nbytes)
    reserved = other.ask(p.Reserve(0, part(prompt), 0, 4))
    for position in range(4):
        assert isinstance(other.ask(p.Write(0, reserved.reservation, position), bytes(nbytes)), p.Written)
    sums = sums_of([bytes(nbytes)] * 4)
    other.ask(p.Commit(0, reserved.reservation, reserved.positions, sums))
    found = slow.lookup(prompt)
    for number in range(1000, 1010):
        slow.tell(p.Fetch(number, found.lease, 0, 4, 30.0))
    daemon.wait_for(lambda stats: stats.service.requests.get("Fetch") == 10)
    daemon.wait_for(lambda stats: stats.service.sending_bytes >= 32 << 20)
    assert isinstance(other.ask(p.Ping(0)), p.Pong)  # while the Fetches wait
    assert daemon.stats().service.sending_bytes == 32 << 20
    pages = [slow.hear()[0].pages for _ in range(5)]  # now it reads, and is sent more
    assert pages == [4] * 5
    slow.close()  # what ZMQ held for it is free, and what it waited for is given up
    daemon.wait_for(lambda stats: stats.service.connections <= 1)
    daemon.wait_for(lambda stats: not stats.service.sending_bytes)


def test_a_fetch_is_answered_when_its_time_is_over(start, connect):
    nbytes = 16 << 20
    daemon = start(listen=("tcp://127.0.0.1:0",), host_bytes=64 << 20, reserve_bytes=64 << 20)
    client = connect(daemon.address, rcvhwm=1)
    prompt = prompt_of(range(CHUNK_TOKENS))
    client.register(page_bytes=nbytes)
    reserved = client.ask(p.Reserve(0, part(prompt), 0, 1))
    client.ask(p.Write(0, reserved.reservation, 0), bytes(nbytes))
    client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums_of([bytes(nbytes)])))
    found = client.lookup(prompt)
    for number in range(1000, 1009):
        client.tell(p.Fetch(number, found.lease, 0, 1, 0.5))
    time.sleep(1.0)
    answers = [client.hear()[0] for _ in range(9)]
    assert sorted(answer.id for answer in answers) == list(range(1000, 1009))
    assert {answer.pages for answer in answers} == {0, 1}


# -- what must not work ----------------------------------------------------------------------------------


def test_messages_of_another_version_are_refused(start, connect):
    daemon = start()
    client = connect(daemon.url, hello=False)
    client.tell(p.Hello(1), version=bytes([p.VERSION[0] + 1]))
    answer, _ = client.hear()
    assert (type(answer), answer.kind) == (p.Refused, "version")


def test_the_first_message_is_hello(start, connect):
    daemon = start()
    client = connect(daemon.url, hello=False)
    assert client.ask(p.Ping(0)).kind == "connection"
    assert client.ask(p.Hello(0, b"not a token 1234")).kind == "connection"
    client.tell(p.Release([1]))
    client.hello()
    assert isinstance(client.ask(p.Ping(0)), p.Pong)


def test_after_a_restart_the_session_is_unknown(start, connect):
    daemon = start(listen=("tcp://127.0.0.1:0",))
    client = connect(daemon.address)
    address = daemon.address
    daemon.stop()
    start(listen=(address,))
    assert client.ask(p.Ping(0)).kind == "connection"
    client.hello()
    assert client.lookup(prompt_of(TOKENS)).kind == "identity"


def test_hello_once_more_keeps_what_a_process_holds(start, connect):
    """It may be writing to its slots."""
    daemon = start()
    client = connect(daemon.url)
    client.register()
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6))
    again = Client(client.url, hello=False, arena=False)
    again.arena = client.arena
    assert again.hello().connection == client.welcome.connection
    client.socket.close(0)
    assert daemon.stats().service.reservations == 1
    sums = bytes(8 * len(positions(reserved)))
    assert again.ask(p.Commit(0, reserved.reservation, reserved.positions, sums)).pages == 6
    again.close()


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (p.Find(0, p.PromptPart(0, b"", b""), -1, 1.0), "usage"),
        (p.Find(0, p.PromptPart(0, b"", b""), 1, float("nan")), "usage"),
        (p.Find(0, p.PromptPart(0, b"", b""), 1, -1.0), "usage"),
        (p.Find(0, p.PromptPart(0, b"x" * 16, b""), 1, 1.0), "usage"),
        (p.Find(0, p.PromptPart(0, b"", b"123"), 1, 1.0), "usage"),
        (p.Find(0, p.PromptPart(0, b"", b"", 0, -1), 1, 1.0), "usage"),
        (p.Find(0, p.PromptPart(1, b"", b""), 1, 1.0), "identity"),
        (p.Find(0, p.PromptPart(-1, b"", b""), 1, 1.0), "identity"),
        (p.Find(0, p.PromptPart(0, b"", b"", 9, 1), 1, 1.0), "path"),
        (p.Reserve(0, p.PromptPart(0, b"", b"1234"), 0, 2), "usage"),
        (p.Reserve(0, p.PromptPart(0, b"", b"1234"), -1, 1), "usage"),
        (p.Commit(0, 1, b"", b""), "usage"),
        (p.Write(0, 1, 0), "usage"),
        (p.Locate(0, 1, -1, 1, 1.0), "usage"),
        (p.Flush(0, 1e9), "usage"),
        (p.Evict(0, "cellar", 1), "usage"),
        (p.Register(0, {"model": "x"}, 8192, 16), "usage"),
        (p.Register(0, {"model": "x", "layout": "y", "colour": "z"}, 8192, 16), "usage"),
        (p.Register(0, {"model": "x" * 9999, "layout": "y"}, 8192, 16), "usage"),
        (p.Register(0, {"model": "x", "layout": "y"}, 0, 16), "usage"),
        (p.Register(0, asdict(IDENTITY), PAGE_BYTES * 2, 16), "usage"),
        (p.Register(0, {"model": "x", "layout": "y", "tenant": '["bob"]'}, 8192, 16), "usage"),
        (p.Hello(0), None),
    ],
)
def test_requests_that_make_no_sense_are_refused(start, connect, request_, kind):
    daemon = start()
    client = connect(daemon.url)
    client.register()
    answer = client.ask(request_)
    assert getattr(answer, "kind", None) == kind, answer
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    assert daemon.stats().service.failed_requests == 0


def test_a_reservation_ends_once(start, connect):
    daemon = start()
    client, other = connect(daemon.url), connect(daemon.url)
    client.register()
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6))
    sums = bytes(6 * 8)
    assert other.ask(p.Commit(0, reserved.reservation, reserved.positions, sums)).kind == "usage"
    twice = reserved.positions[:4] * 2
    assert client.ask(p.Commit(0, reserved.reservation, twice, bytes(16))).kind == "usage"
    assert client.ask(p.Commit(0, reserved.reservation, reserved.positions[:8], bytes(16))).pages == 2
    assert client.ask(p.Commit(0, reserved.reservation, reserved.positions, sums)).kind == "usage"
    assert client.lookup(prompt_of(TOKENS)).tokens == 2 * CHUNK_TOKENS


def test_a_client_reserves_within_its_bound(start, connect):
    daemon = start(reserve_bytes=4 * PAGE_BYTES)
    client = connect(daemon.url)
    client.register()
    assert client.welcome.reserve_bytes == 4 * PAGE_BYTES
    reserved = client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6))
    assert positions(reserved) == [0, 1, 2, 3]
    assert reserved.stored_tokens == 4 * CHUNK_TOKENS
    client.tell(p.Abort(reserved.reservation))
    assert len(offsets(client.ask(p.Reserve(0, part(prompt_of(TOKENS)), 0, 6)).offsets)) == 4


def test_malformed_messages_are_counted_and_the_rest_goes_on(start, connect):
    daemon = start()
    client = connect(daemon.url)
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.linger = 0
    raw.connect(daemon.url)
    for frames in ([b""], [b"", b""], [p.VERSION], [p.VERSION, b""], [p.VERSION, b"\xc1" * 100]):
        raw.send_multipart(frames)
    daemon.wait_for(lambda stats: stats.server.malformed == 5)
    client.tell(b"\x92\xa4Ping\xcd\x12\x34"[:-1])
    client.tell(b"\x92\xa6Lookup\xcd\x12\x34")
    answer, _ = client.hear()
    assert (answer.id, answer.kind) == (0x1234, "usage")
    # Far too large for what it is: not even decoded.
    client.tell(b"\x92\xa7Release\xdd\x00\x01\x86\xa0" + b"\x01" * 100_000)
    daemon.wait_for(lambda stats: stats.server.malformed == 8)
    assert client.ask(p.Ping(0), b"a frame too many").kind == "usage"
    assert isinstance(client.ask(p.Ping(0)), p.Pong)
    raw.close(0)


def test_an_oversized_frame_ends_the_connection(start, connect):
    daemon = start()
    client, rude = connect(daemon.url), connect(daemon.url)
    rude.tell(p.encode(p.Ping(1)), bytes(p.MAX_MESSAGE_BYTES + 1))
    assert rude.hear(0.5) == (None, [])
    assert isinstance(client.ask(p.Ping(0)), p.Pong)


# -- sockets ---------------------------------------------------------------------------------------------


def test_the_sockets_are_the_users_own(start, tmp_path):
    start()
    for name in ("s", "s.arena", "s.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name


def test_a_living_daemons_socket_is_not_taken_over(start, connect):
    daemon = start()
    with pytest.raises(StoreUnavailableError, match="listens at"):
        start()
    assert isinstance(connect(daemon.url).ask(p.Ping(0)), p.Pong)


def test_a_dead_daemons_socket_is_replaced_and_a_file_is_not(start, connect, tmp_path):
    for name in ("s", "s.arena"):
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(tmp_path / name))
        stale.close()
    daemon = start()
    assert isinstance(connect(daemon.url).ask(p.Ping(0)), p.Pong)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        start(listen=(f"ipc://{tmp_path}/file",))
    assert (tmp_path / "file").read_text() == "precious"


def test_sockets_are_gone_after_the_end_and_clients_hear_of_it(start, connect, tmp_path):
    daemon = start()
    arena = ArenaConnection(f"{tmp_path}/s.arena")
    daemon.stop()
    assert arena.socket.recv(1) == b""
    arena.close()
    assert sorted(os.listdir(tmp_path)) == ["s.lock"]


def test_the_open_network_needs_keys(start):
    with pytest.raises(UsageError, match="keygen"):
        start(listen=("tcp://0.0.0.0:0",))
    with pytest.raises(UsageError, match="write ipc://PATH"):
        start(listen=("udp://127.0.0.1:1",))
