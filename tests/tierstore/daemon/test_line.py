"""Messages over a stream socket: what goes in comes out, whatever the socket does to it."""

from __future__ import annotations

import socket
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.wire.framing import LENGTH, FramedSocket, FramedSocketEnd
from tierstore.wire.messages import MAX_MESSAGE_BYTES


@pytest.fixture
def pair():
    with Pair() as pair:
        yield pair


class Pair:
    """Two ends. ``left`` and ``right`` are lines, ``sockets`` what they talk over."""

    def __init__(self, buffer_bytes=None):
        self.sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if buffer_bytes is not None:
            for each in self.sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self.left, self.right = map(FramedSocket, self.sockets)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.sockets:
            each.close()


def body(number, nbytes):
    return bytes([number % 251]) * nbytes


sizes = st.one_of(st.integers(0, 100), st.integers(60_000, 70_000), st.integers(0, 3 << 20))


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, max_size=12), st.integers(0, 1 << 16), st.randoms(use_true_random=False))
def test_messages_arrive_whole_and_in_order(lengths, buffer_bytes, rng):
    with Pair(buffer_bytes) as pair:
        wanted = [body(number, nbytes) for number, nbytes in enumerate(lengths)]
        waiting = list(wanted)
        arrived = []
        while waiting or pair.left.unsent or len(arrived) < len(wanted):
            match rng.randrange(3):
                case 0 if waiting and pair.left.send(waiting[0]):
                    waiting.pop(0)
                case 1:
                    assert pair.left.flush()
                case _:
                    arrived += [bytes(message) for message in pair.right.receive()]
        assert arrived == wanted


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=20), st.lists(st.integers(1, 30), min_size=1, max_size=50))
def test_messages_may_come_in_any_pieces(lengths, pieces):
    wanted = [body(number, nbytes) for number, nbytes in enumerate(lengths)]
    stream = b"".join(LENGTH.pack(len(each)) + each for each in wanted)
    arrived = []
    with Pair() as pair:
        while stream:
            for piece in pieces:
                pair.sockets[0].send(stream[:piece])
                stream = stream[piece:]
                arrived += [bytes(message) for message in pair.right.receive()]
        while messages := pair.right.receive():  # what is behind a long one is left for the next time
            arrived += map(bytes, messages)
    assert arrived == wanted


def test_what_was_sent_before_hanging_up_arrives(pair):
    assert pair.left.send(b"last")
    pair.sockets[0].close()
    assert [bytes(message) for message in pair.right.receive()] == [b"last"]
    with pytest.raises(FramedSocketEnd):
        pair.right.receive()
    assert not pair.right.send(b"anybody?")


@pytest.mark.parametrize("begun", [b"\x09\x00", LENGTH.pack(9) + b"123"])
def test_hanging_up_in_the_middle_is_an_end_and_no_message(pair, begun):
    pair.sockets[0].send(begun)
    assert pair.right.receive() == []
    pair.sockets[0].close()
    with pytest.raises(FramedSocketEnd):
        pair.right.receive()


def test_a_length_that_no_message_has_ends_the_line(pair):
    pair.sockets[0].send(LENGTH.pack(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(FramedSocketEnd):
        pair.right.receive()


def test_memory_comes_with_the_bytes_and_not_with_the_claim(pair):
    tracemalloc.start()
    try:
        pair.sockets[0].send(LENGTH.pack(MAX_MESSAGE_BYTES) + b"x")
        assert pair.right.receive() == []
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_who_does_not_read_is_not_written_for_without_end(pair):
    sent = 0
    while pair.left.send(bytes(1 << 20)):
        sent += 1
        assert sent < 100
    assert pair.left.unsent
    arrived = 0
    while arrived < sent:
        pair.left.flush()
        arrived += len(pair.right.receive())
    assert not pair.left.unsent
    assert pair.left.send(b"again")
