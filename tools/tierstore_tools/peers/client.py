"""The client process of a peer: reads commands from stdin and writes answers to stdout, as JSON lines.

``main(PEER, SHAPE)`` with SHAPE a JSON :class:`Shape`. It runs in the peer's environment, so it imports no
tierstore module that the peer itself does not need. Prompts are numbered. The bytes of a prompt's pages
follow from its number. Every answer has the seconds and this process's core-seconds.

* ``["memcpy", n]`` copies a prompt's bytes from one buffer to the other.
* ``["save", n]`` saves prompt ``n`` and waits until the peer confirms it.
* ``["lookup", n]`` also answers the number of tokens that the peer has.
* ``["forget", n]`` makes it a client that has seen no prompt.
* ``["load", n]`` loads the pages into the other buffer, and also answers whether every byte is right.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS = 64
Words = npt.NDArray[np.uint32]
_WAIT_S = 120.0
_REDIS_AT_ONCE = 32  # pages in a pipeline
_LAYER_BYTES = 16 << 10  # a page has whole layers of this size, or is smaller than one
_LMCACHE_CHUNK_TOKENS = 256  # LMCache's default
_MOONCAKE_AT_ONCE_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    """The shape of all prompts: ``pages`` pages of ``page_bytes``, each of 64 tokens."""

    address: str
    page_bytes: int
    pages: int

    @property
    def tokens(self) -> int:
        return self.pages * CHUNK_TOKENS

    @property
    def nbytes(self) -> int:
        return self.pages * self.page_bytes


class PeerClient(ABC):
    """Two buffers of a prompt's size, and a peer that stores the first one. An error of the peer's own client
    ends the process, and the benchmark reports that."""

    shared_bytes = 0  # the engine's own memory that it shares with the peer

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.source = self._buffer()
        self.target = self._buffer()

    def _buffer(self) -> Words:
        return np.ones(self.shape.nbytes // 4, np.uint32)

    def fill(self, prompt: int) -> None:
        """Write that prompt's pages into the first buffer."""
        self.source[:] = self._bytes(prompt)

    def right(self, prompt: int) -> bool:
        """Return whether the second buffer has exactly that prompt's bytes."""
        return bool(np.array_equal(self.target, self._bytes(prompt)))

    def clear(self) -> None:
        """Zero the second buffer."""
        self.target[:] = 0

    def memcpy(self) -> None:
        for at in range(0, self.shape.nbytes, self.shape.page_bytes):
            ctypes.memmove(self.target.ctypes.data + at, self.source.ctypes.data + at, self.shape.page_bytes)

    def tokens(self, prompt: int) -> Words:
        """Return that prompt's token ids. No two prompts share a chunk."""
        return np.random.default_rng(prompt).integers(0, 32_000, self.shape.tokens, np.uint32)

    def pages(self, buffer: Words) -> list[memoryview]:
        data, size = memoryview(buffer.view(np.uint8).data), self.shape.page_bytes
        return [data[at : at + size] for at in range(0, self.shape.nbytes, size)]

    def names(self, prompt: int) -> list[str]:
        """Return the names of a prompt's pages, for stores of named objects."""
        return [
            f"tierstore-bench/{self.shape.page_bytes}/{prompt}/{page}" for page in range(self.shape.pages)
        ]

    def _bytes(self, prompt: int) -> Words:
        count = self.shape.nbytes // 4
        return np.arange(prompt * 0x01000193, prompt * 0x01000193 + count, dtype=np.uint64).astype(np.uint32)

    def forget(self, prompt: int) -> None:
        """Become a client that has seen no prompt yet. Most clients remember none."""
        return

    @abstractmethod
    def save(self, prompt: int) -> None:
        """Send the first buffer's pages to the peer, and wait until it confirms them."""

    @abstractmethod
    def lookup(self, prompt: int) -> int:
        """Return how many leading tokens of the prompt the peer has."""

    @abstractmethod
    def load(self, prompt: int) -> None:
        """Load the pages that the last lookup found into the second buffer."""


class Tierstore(PeerClient):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import tierstore
        from tierstore.keys import Identity
        from tierstore.spec import KVSpec

        layers = max(shape.page_bytes // _LAYER_BYTES, 1)
        dim = shape.page_bytes // layers // CHUNK_TOKENS // 4  # K and V, two bytes each
        spec = KVSpec.uniform(layers=layers, kv_heads=1, head_dim=dim, dtype="float16")
        identity = Identity.of(spec, model="tierstore-bench peers", revision="1")
        self._connect = partial(tierstore.connect, shape.address, spec, identity=identity, lookup_s=_WAIT_S)
        self._store: Any = None
        self.forget(0)

    def forget(self, prompt: int) -> None:
        if self._store is not None:
            self._store.close()
        self._hit: Any = None
        self._store = self._connect()
        self._store.wait_connected(_WAIT_S)
        self._store.wait_ready()

    def save(self, prompt: int) -> None:
        self._store.save(self.tokens(prompt), self.pages(self.source)).wait(_WAIT_S)

    def lookup(self, prompt: int) -> int:
        if self._hit is not None:
            self._hit.release()
        self._hit = self._store.lookup(self.tokens(prompt))
        return int(self._hit.tokens)

    def load(self, prompt: int) -> None:
        self._store.load(self._hit, self.pages(self.target)).wait(_WAIT_S)


class Redis(PeerClient):
    """Pages are named values, in pipelines: ``SET``, ``EXISTS``, ``GET``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        import redis

        self._redis: Any = redis.Redis(unix_socket_path=shape.address, socket_timeout=_WAIT_S)
        self._redis.ping()

    def save(self, prompt: int) -> None:
        named = list(zip(self.names(prompt), self.pages(self.source), strict=True))
        for first in range(0, len(named), _REDIS_AT_ONCE):
            pipeline = self._redis.pipeline(transaction=False)
            for name, page in named[first : first + _REDIS_AT_ONCE]:
                pipeline.set(name, page)
            pipeline.execute()

    def lookup(self, prompt: int) -> int:
        pipeline = self._redis.pipeline(transaction=False)
        for name in self.names(prompt):
            pipeline.exists(name)
        return _leading([bool(found) for found in pipeline.execute()])

    def load(self, prompt: int) -> None:
        named = list(zip(self.names(prompt), self.pages(self.target), strict=True))
        for first in range(0, len(named), _REDIS_AT_ONCE):
            some = named[first : first + _REDIS_AT_ONCE]
            values = self._redis.mget([name for name, _ in some])
            for (_, page), value in zip(some, values, strict=True):
                if value is not None:
                    page[:] = value


class LMCache(PeerClient):
    """Uses the client of LMCache's own ``lmcache bench server``. The engine's memory has the layout that its
    format moves fastest: one layer, in blocks of one chunk, so keys and values of a chunk are one piece
    each."""

    def __init__(self, shape: Shape) -> None:
        from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
        from lmcache.cli.commands.bench.server_bench.config import BenchConfig

        super().__init__(shape)
        self._chunks = shape.tokens // _LMCACHE_CHUNK_TOKENS
        values = shape.page_bytes // CHUNK_TOKENS // 4  # a token's keys, two bytes each
        blocks = 2 * self._chunks + 1  # block 0 is reserved
        config = BenchConfig(
            rpc_url=f"tcp://{shape.address}",
            http_url="",
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=shape.tokens,
            kvcache_shape_spec=f"(2,{blocks},{_LMCACHE_CHUNK_TOKENS},1,{values}):float16:1",
            num_blocks=blocks,
            block_size=_LMCACHE_CHUNK_TOKENS,
        )
        self._client = ServerBenchClient(config, lambda _: None)
        self._client.start()
        (worker,) = self._client._workers
        (memory,) = worker.kv_caches.values()
        self._planes: Words = memory.view(_torch().int32).reshape(2, blocks, -1).numpy().view(np.uint32)
        self.shared_bytes = self._planes.nbytes
        self._request = RequestContext
        self._rpc = self._client._req_client
        self._asked = 0
        self._open: Any = None

    def fill(self, prompt: int) -> None:
        super().fill(prompt)
        self._part(1)[:] = self.source.reshape(self._part(1).shape)

    def right(self, prompt: int) -> bool:
        self.target[:] = self._part(1 + self._chunks).reshape(-1)
        return super().right(prompt)

    def clear(self) -> None:
        super().clear()
        self._part(1 + self._chunks)[:] = 0

    def save(self, prompt: int) -> None:
        request = self._made(prompt, first=1)
        done = self._client.store(request, 0, request.num_full_tokens)
        if done is None or not done.succeeded:
            raise RuntimeError("LMCache did not store")
        self._client.end_session(request)

    def lookup(self, prompt: int) -> int:
        from lmcache.cli.commands.bench.server_bench import helpers

        if self._open is not None:
            self._client.end_session(self._open)
        self._open = request = self._made(prompt, first=1 + self._chunks)
        key = helpers._make_key(request.token_ids, request.request_id, start=0, end=request.num_full_tokens)
        helpers._send_lookup(self._rpc, key)
        ends = time.monotonic() + _WAIT_S
        while time.monotonic() < ends:  # LMCache's own client sleeps 50 ms between two queries
            found = self._rpc.query_prefetch_status(request.request_id).result(timeout=_WAIT_S)
            if found is not None:
                return int(found) * _LMCACHE_CHUNK_TOKENS
        raise RuntimeError("LMCache did not answer")

    def load(self, prompt: int) -> None:
        self._client.retrieve(self._open, 0, self._open.num_full_tokens)

    def _part(self, first: int) -> Words:
        part: Words = self._planes[:, first : first + self._chunks]
        return part

    def _made(self, prompt: int, *, first: int) -> Any:
        self._asked += 1
        tokens = self.shape.tokens
        ids = tuple(map(int, self.tokens(prompt)))
        name = f"{os.getpid()}-{self._asked}"
        return self._request(
            prompt, name, "peers", ids, tokens, self._chunks, _LMCACHE_CHUNK_TOKENS, first, self._chunks
        )


class Mooncake(PeerClient):
    """A client of the store that lends no memory. Both buffers are registered, so no copy is staged."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", shape.address)
        if code:
            raise RuntimeError(f"Mooncake's master does not answer ({code})")
        for buffer in (self.source, self.target):
            self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)

    def save(self, prompt: int) -> None:
        self._in_batches(self._store.batch_put_from, prompt, self.source)

    def lookup(self, prompt: int) -> int:
        return _leading([found == 1 for found in self._store.batch_is_exist(self.names(prompt))])

    def load(self, prompt: int) -> None:
        self._in_batches(self._store.batch_get_into, prompt, self.target)

    def _in_batches(self, move: Any, prompt: int, buffer: Words) -> None:
        size, names = self.shape.page_bytes, self.names(prompt)
        at_once = max(_MOONCAKE_AT_ONCE_BYTES // size, 1)
        for first in range(0, len(names), at_once):
            some = range(first, min(first + at_once, len(names)))
            addresses = [buffer.ctypes.data + page * size for page in some]
            move([names[page] for page in some], addresses, [size] * len(some))


CLIENTS: dict[str, type[PeerClient]] = {
    "tierstore": Tierstore,
    "lmcache": LMCache,
    "redis": Redis,
    "mooncake": Mooncake,
}


def _torch() -> Any:
    import torch

    return torch


def _leading(found: list[bool]) -> int:
    """Return the tokens of the pages before the first missing one."""
    return (found.index(False) if False in found else len(found)) * CHUNK_TOKENS


def _do(client: PeerClient, command: str, prompt: int) -> dict[str, object]:
    if command in ("memcpy", "save"):
        client.fill(prompt)
    if command == "load":
        client.clear()
    cpu, begun = time.process_time(), time.perf_counter()
    found = getattr(client, command)(*(() if command == "memcpy" else (prompt,)))
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    answer: dict[str, object] = {"seconds": seconds, "cpu_s": cpu}
    if command == "lookup":
        answer["tokens"] = found
    if command == "load":
        answer["right"] = client.right(prompt)
    return answer


def main(peer: str, shape: str) -> None:
    """Serve commands until stdin ends. Exits without the libraries' cleanup, which may hang or crash."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to stdout: send that to stderr
    client = CLIENTS[peer](Shape(**json.loads(shape)))
    answers.write(json.dumps({"shared_bytes": client.shared_bytes}) + "\n")
    answers.flush()
    for line in sys.stdin:
        command, prompt = json.loads(line)
        answers.write(json.dumps(_do(client, command, prompt)) + "\n")
        answers.flush()
    os._exit(0)
