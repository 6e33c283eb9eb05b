"""What one client, or several at once, move to and from a daemon's host tier, beside what the machine moves
without one. In each round a client connects, and then saves and loads several times: an engine keeps its
connection for hours, and what it moves first is slower over TCP (windows and memory have to grow).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

import tierstore
from tierstore import copying
from tierstore.errors import TierStoreError
from tierstore.keys import Identity
from tierstore.memory import Memory
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore_tools.limits import libc_copy
from tierstore_tools.tiers import LAYER_BYTES, TierRow
from tierstore_tools.together import Meet, Together, cpu_seconds
from tierstore_tools.zmq_pair import ZmqPair

_WAIT_S = 60.0
_CONNECT_S = 10.0
_PASSES = 3  # of the copies, and of saves and loads
_FILL_BYTES = 256 << 20
_CHECKED_BYTES = 4 << 20  # in one call, as in a save


@dataclass(frozen=True, slots=True)
class Sample:
    """What each of ``clients`` processes is to do. ``pid`` is the daemon's."""

    url: str
    pid: int
    page_bytes: int
    total_bytes: int  # of all clients together
    rounds: int
    clients: int = 1

    @property
    def count(self) -> int:
        """Pages of one client."""
        return self.total_bytes // self.clients // self.page_bytes

    @property
    def nbytes(self) -> int:
        """Of one client."""
        return self.count * self.page_bytes

    @property
    def limit(self) -> str:
        if self.url.startswith("tcp://"):
            return "zmq_pair_gb_per_s"
        return "memcpy_gb_per_s" if self.clients == 1 else f"memcpy_{self.clients}_gb_per_s"


@dataclass(frozen=True, slots=True)
class CostRow:
    """Core-seconds per GB: of the clients, of the daemon, and of nothing but the copy."""

    clients: int
    op: str
    page_bytes: int
    client: float
    daemon: float
    copy: float
    beyond_copy: float


@dataclass(frozen=True, slots=True)
class BoundRow:
    """What so many bare processes reach, each with one thread, that do to shared memory what a save has to do
    (copy a page and make its checksum) and speak to nobody. ``copy_fraction`` is that of what they reach
    without the checksum, ``saved_fraction`` what saves came to, of the bound."""

    clients: int
    page_bytes: int
    gb_per_s: float
    copy_fraction: float
    saved_fraction: float


@dataclass(frozen=True, slots=True)
class Moved:
    """``limits`` are GB/s by round. No ``bound`` over TCP."""

    limits: list[float]
    rows: list[TierRow]
    costs: list[CostRow]
    bound: BoundRow | None


def measure(sample: Sample) -> Moved:
    """Raises :class:`TierStoreError` when the daemon is not there or does not keep what is saved."""
    with ExitStack() as stack:
        pair = None
        if sample.limit == "zmq_pair_gb_per_s":
            pair = stack.enter_context(ZmqPair(sample.page_bytes, sample.nbytes))
        clients = Together(_client, [(sample, pair)] * sample.clients).run()
    rounds = [_joined(each, sample) for each in zip(*clients, strict=True)]
    limits = [each.limit for each in rounds]
    rows, costs = [], []
    for op in ("put", "get"):
        ops = [each.op(op) for each in rounds]
        rate = statistics.median(each.gb_per_s for each in ops)
        fraction = statistics.median(each.gb_per_s / limit for each, limit in zip(ops, limits, strict=True))
        client = statistics.median(each.cpu_s for each in ops)
        daemon = statistics.median(each.daemon_cpu_s for each in ops)
        copy = statistics.median(each.copy.cpu_s for each in rounds)
        tier = "daemon" if sample.clients == 1 else f"daemon ×{sample.clients}"
        us_per_page = sample.page_bytes / rate / 1e3
        rows.append(
            TierRow(tier, op, sample.page_bytes, rate, us_per_page, fraction, sample.limit, client + daemon)
        )
        costs.append(
            CostRow(sample.clients, op, sample.page_bytes, client, daemon, copy, client + daemon - copy)
        )
    return Moved(limits, rows, costs, _bound(rounds, sample) if pair is None else None)


def _bound(rounds: Sequence[_Joined], sample: Sample) -> BoundRow:
    return BoundRow(
        sample.clients,
        sample.page_bytes,
        statistics.median(each.checked.gb_per_s for each in rounds),
        statistics.median(each.checked.gb_per_s / each.copy.gb_per_s for each in rounds),
        statistics.median(each.put.gb_per_s / each.checked.gb_per_s for each in rounds),
    )


def fill(url: str, page_bytes: int, nbytes: int) -> None:
    """Save so many bytes that nobody asks for again."""
    spec = _spec(page_bytes)
    page = memoryview(bytes(page_bytes))
    with connect(url, spec) as store:
        for start in range(0, nbytes, _FILL_BYTES):
            count = max(min(_FILL_BYTES, nbytes - start) // page_bytes, 1)
            prompt = np.arange(count * spec.chunk_tokens) + start // page_bytes
            store.save(prompt, [page] * count).wait(_WAIT_S)


# -- all clients together ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cost:
    """What moving bytes took: GB/s, and core-seconds per GB."""

    gb_per_s: float
    cpu_s: float
    daemon_cpu_s: float


@dataclass(frozen=True, slots=True)
class _Joined:
    """One round, of all clients."""

    limit: float
    copy: _Cost
    checked: _Cost  # the copy with a checksum
    put: _Cost
    get: _Cost

    def op(self, name: str) -> _Cost:
        return self.put if name == "put" else self.get


def _joined(clients: Sequence[_Round], sample: Sample) -> _Joined:
    copy = _middle([each.copies for each in clients], sample)
    checked = _middle([each.checked for each in clients], sample)
    put = _middle([each.put for each in clients], sample)
    get = _middle([each.get for each in clients], sample)
    return _Joined(clients[0].bare_gb_per_s or copy.gb_per_s, copy, checked, put, get)


def _middle(clients: Sequence[Sequence[_Span]], sample: Sample) -> _Cost:
    """Of what all clients did several times."""
    costs = [_cost(spans, sample) for spans in zip(*clients, strict=True)]
    return sorted(costs, key=lambda each: each.gb_per_s)[len(costs) // 2]


def _cost(spans: Sequence[_Span], sample: Sample) -> _Cost:
    gb = sample.nbytes * len(spans) / 1e9
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    # Every client has seen all of the daemon's work: they met before and afterwards.
    return _Cost(gb / seconds, sum(span.cpu_s for span in spans) / gb, spans[0].daemon_cpu_s / gb)


# -- one client ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """When something was done, by a clock that all processes share, and its core-seconds."""

    start: float
    end: float
    cpu_s: float
    daemon_cpu_s: float


@dataclass(frozen=True, slots=True)
class _Round:
    """What one client saw in a round. ``bare_gb_per_s``: of two bare sockets (over TCP)."""

    copies: list[_Span]
    checked: list[_Span]
    put: list[_Span]
    get: list[_Span]
    bare_gb_per_s: float


def _client(meet: Meet, sample: Sample, pair: ZmqPair | None) -> list[_Round]:
    return [_Client(meet, sample, number).round(pair) for number in range(sample.rounds)]


class _Client:
    """One client, for one round."""

    def __init__(self, meet: Meet, sample: Sample, number: int) -> None:
        self._meet = meet
        self._sample = sample
        self._spec = _spec(sample.page_bytes)
        self._source, self._target = self._memory(), self._memory()
        self._slots = self._memory(shared=True)  # as the arena is
        np.frombuffer(self._source.view(0, sample.nbytes), np.uint32)[:] = np.arange(
            number, sample.nbytes // 4 + number, dtype=np.uint32
        )

    def _memory(self, *, shared: bool = False) -> Memory:
        made = Memory(self._sample.nbytes, shared=shared)
        made.populate()
        return made

    def _pages(self, of: Memory) -> list[memoryview]:
        size = self._sample.page_bytes
        return [of.view(number * size, size) for number in range(self._sample.count)]

    def round(self, pair: ZmqPair | None) -> _Round:
        """Raises :class:`TierStoreError`."""
        copies = [self._span(self._copy) for _ in range(_PASSES)]
        checked = [self._span(self._copy_and_hash) for _ in range(_PASSES)]
        bare = pair.gb_per_s() if pair is not None else 0.0
        with connect(self._sample.url, self._spec) as store:
            moved = [self._there_and_back(store, number) for number in range(_PASSES)]
        return _Round(copies, checked, [put for put, _ in moved], [get for _, get in moved], bare)

    def _there_and_back(self, store: Store, prompt: int) -> tuple[_Span, _Span]:
        tokens = np.arange(self._sample.count * self._spec.chunk_tokens) + prompt
        source, target = self._pages(self._source), self._pages(self._target)
        self._target.view(0, self._sample.nbytes)[:] = bytes(self._sample.nbytes)
        put = self._span(lambda: store.save(tokens, source).wait(_WAIT_S))
        with store.lookup(tokens) as hit:
            if hit.tokens < len(tokens):
                raise TierStoreError(
                    f"the daemon kept {hit.tokens} of {len(tokens)} tokens: give it more --host-bytes "
                    f"(the pages of a round have {self._sample.total_bytes} bytes)"
                )
            get = self._span(lambda: store.load(hit, target).wait(_WAIT_S))
        if any(saved != loaded for saved, loaded in zip(source, target, strict=True)):
            raise AssertionError("pages came back with other bytes than were put")
        return put, get

    def _copy(self) -> None:
        sample = self._sample
        libc_copy(self._target.address, self._source.address, sample.nbytes, piece=sample.page_bytes)

    def _copy_and_hash(self) -> None:
        to, of, size = self._slots.address, self._source.address, self._sample.page_bytes
        at_once = max(_CHECKED_BYTES // size, 1)
        for first in range(0, self._sample.count, at_once):
            pages = range(first, min(first + at_once, self._sample.count))
            copying.copy_and_hash(((to + page * size, of + page * size) for page in pages), size)

    def _span(self, work: Callable[[], object]) -> _Span:
        """Do it at the same time as the other clients."""
        self._meet()
        daemon, cpu, start = cpu_seconds(self._sample.pid), time.process_time(), time.perf_counter()
        work()
        end, cpu = time.perf_counter(), time.process_time() - cpu
        self._meet()
        return _Span(start, end, cpu, cpu_seconds(self._sample.pid) - daemon)


def _spec(page_bytes: int) -> KVSpec:
    return KVSpec.uniform(layers=page_bytes // LAYER_BYTES, kv_heads=1, head_dim=64, dtype="float16")


def connect(url: str, spec: KVSpec, identity: Identity | None = None) -> Store:
    """By default under an identity that nobody has used: what earlier runs left must not be found. Copies are
    as fast as they get. Raises :class:`TierStoreError` when there is no daemon."""
    if identity is None:
        identity = Identity.of(spec, model="tierstore-bench", revision=str(time.time_ns()))
    store = tierstore.connect(url, spec, identity=identity, lookup_s=_CONNECT_S)
    if not store.wait_connected(_CONNECT_S):
        store.close()
        raise TierStoreError(f"there is no daemon at {url}")
    store.wait_ready()
    return store
