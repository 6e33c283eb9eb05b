"""Clients that are nothing but a socket and the protocol: they say exactly what a test tells them to."""

from __future__ import annotations

import itertools
import mmap
import os
import select
import socket
from collections import deque
from dataclasses import asdict

import numpy as np
import xxhash
import zmq

from tierstore.keys import Identity, Prompt
from tierstore.wire import messages as p
from tierstore.wire.framing import LENGTH, FramedSocket

CHUNK_TOKENS = 16
PAGE_BYTES = 8192
IDENTITY = Identity(model="test", layout=f"chunk={CHUNK_TOKENS}")


def part(prompt: Prompt, number: int = 0, *, path: int = 0, known: int = 0) -> p.PromptPart:
    width = prompt.chunk_tokens * 4
    return p.PromptPart(
        number, b"".join(prompt.keys[known:]), prompt.token_bytes[known * width :], path, known
    )


def prompt_of(tokens, identity: Identity = IDENTITY, chunk_tokens: int = CHUNK_TOKENS) -> Prompt:
    return Prompt(identity, tokens, chunk_tokens=chunk_tokens)


def page_bytes(tokens, nbytes: int = PAGE_BYTES) -> bytes:
    """The bytes of the page whose prefix are ``tokens``."""
    seed = xxhash.xxh3_64_intdigest(np.asarray(tokens, np.uint32).tobytes())
    return np.random.default_rng(seed).bytes(nbytes)


def sums_of(pages) -> bytes:
    """Their checksums, as a Commit has them."""
    return np.asarray([xxhash.xxh3_64_intdigest(page) for page in pages], np.uint64).tobytes()


class ArenaConnection:
    """The arena mapped, and the connection that is this process's sign of life."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        header, fds, _, _ = socket.recv_fds(self.socket, p.ARENA_HEADER.size, 1)
        magic, self.nbytes, self.token = p.ARENA_HEADER.unpack(header)
        assert magic == p.ARENA_MAGIC
        self.map = mmap.mmap(fds[0], self.nbytes)
        os.close(fds[0])

    def close(self) -> None:
        self.socket.close()


class Client:
    """Over ZMQ, also on the daemon's own host. ``ask`` sends a request and returns its answer; ``tell`` sends
    without waiting."""

    def __init__(self, url: str, *, arena: bool | None = None, hello: bool = True, context=None, **options):
        self.url = url
        self._context = context or zmq.Context.instance()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(url)
        self.ids = itertools.count(1)
        local = url.startswith("ipc://") if arena is None else arena
        self.arena = ArenaConnection(url.removeprefix("ipc://") + ".arena") if local else None
        self.welcome = None
        if hello:
            self.hello()

    def hello(self):
        token = self.arena.token if self.arena is not None else b""
        self.welcome = self.ask(p.Hello(0, token, "test"))
        assert isinstance(self.welcome, p.Welcome), self.welcome
        return self.welcome

    def tell(self, message, *frames, version=p.VERSION):
        body = message if isinstance(message, bytes) else p.encode(message)
        self.socket.send_multipart([version, body, *frames], copy=True)

    def hear(self, timeout=10.0):
        """The next answer and the frames behind it; None when there is none in time."""
        if not self.socket.poll(timeout * 1000):
            return None, []
        version, body, *frames = self.socket.recv_multipart()
        assert version == p.VERSION
        return p.decode_answer(body), frames

    def ask_with_frames(self, message, *frames, timeout=10.0):
        message.id = next(self.ids)
        self.tell(message, *frames)
        while True:
            answer, behind = self.hear(timeout)
            if answer is None or answer.id == message.id:
                return answer, behind

    def ask(self, message, *frames, timeout=10.0):
        return self.ask_with_frames(message, *frames, timeout=timeout)[0]

    def register(self, identity=IDENTITY, page_bytes=PAGE_BYTES, chunk_tokens=CHUNK_TOKENS) -> int:
        answer = self.ask(p.Register(0, asdict(identity), page_bytes, chunk_tokens))
        assert isinstance(answer, p.Registered), answer
        return answer.identity

    def lookup(self, prompt, number=0, *, wait_s=5.0, max_tokens=None, path=0, known=0):
        limit = len(prompt) if max_tokens is None else max_tokens
        return self.ask(p.Find(0, part(prompt, number, path=path, known=known), limit, wait_s))

    def save(self, tokens, number=0, *, prompt=None, first=0, nbytes=PAGE_BYTES, wrong=()):
        """Reserve, write through the arena, commit. Returns the answer to Reserve."""
        prompt = prompt or prompt_of(tokens)
        chunks = -(-len(prompt) // prompt.chunk_tokens)
        reserved = self.ask(p.Reserve(0, part(prompt, number), first, chunks - first))
        if not isinstance(reserved, p.Reserved) or not reserved.reservation:
            return reserved
        checksums = []
        for position, offset in zip(positions(reserved), offsets(reserved.offsets), strict=True):
            data = page_bytes(tokens[: (first + position + 1) * prompt.chunk_tokens], nbytes)
            self.arena.map[offset : offset + nbytes] = data
            checksums.append(xxhash.xxh3_64_intdigest(data) ^ (position in wrong))
        committed = self.ask(
            p.Commit(0, reserved.reservation, reserved.positions, np.asarray(checksums, np.uint64).tobytes())
        )
        assert isinstance(committed, p.Committed), committed
        return reserved

    def load(self, lease, count, first=0, *, nbytes=PAGE_BYTES, wait_s=5.0) -> list[bytes]:
        located = self.ask(p.Locate(0, lease, first, count, wait_s))
        assert isinstance(located, p.Offsets), located
        return [self.arena.map[offset : offset + nbytes] for offset in offsets(located.offsets)]

    def drain(self):
        """Leave nothing unread."""
        while self.socket.poll(0):
            self.socket.recv_multipart(zmq.NOBLOCK)

    def close(self):
        self.socket.close(0)
        if self.arena is not None:
            self.arena.close()


class LineClient(Client):
    """Over the arena's own socket, as a client of ours does on the daemon's host."""

    def __init__(self, url: str, *, hello: bool = True):
        self.url = url
        self.ids = itertools.count(1)
        self.arena = ArenaConnection(url.removeprefix("ipc://") + ".arena")
        self.line = FramedSocket(self.arena.socket)
        self._heard = deque()
        self.welcome = None
        if hello:
            self.hello()

    def tell(self, message, *frames, version=p.VERSION):
        body = message if isinstance(message, bytes) else p.encode(message)
        self.send_bytes(LENGTH.pack(len(body)) + body)

    def send_bytes(self, data):
        """Whatever it is. Waits for as long as the daemon does not read."""
        while data:
            _, ready, _ = select.select([], [self.line], [], 10)
            assert ready, "the daemon does not read"
            data = data[self.arena.socket.send(data) :]

    def hear(self, timeout=10.0):
        while not self._heard:
            ready, _, _ = select.select([self.line], [], [], timeout)
            if not ready:
                return None, []
            self._heard.extend(self.line.receive())
        return p.decode_answer(self._heard.popleft()), []

    def drain(self):
        while self.hear(0)[0] is not None:
            pass

    def close(self):
        self.arena.close()


def positions(reserved) -> list[int]:
    return np.frombuffer(reserved.positions, np.uint32).tolist()


def offsets(data: bytes) -> list[int]:
    return np.frombuffer(data, np.uint64).tolist()
