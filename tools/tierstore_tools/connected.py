"""``tierstore-bench tiers --store URL``: what a daemon's host tier takes and gives, and its lookups.

The bytes go the way an engine's go: a save reserves slots, copies into them and commits, a load is told where
the pages are and copies them out; over TCP they go as frames. Beside each figure is the limit, measured in
the same round: what memcpy moves with a thread for each client, over TCP what two bare ZMQ sockets move.
Beside the core-seconds of client and daemon are those of the copy itself, and beside saves what processes
reach that copy and make checksums with no daemon: two clients on two cores cannot come close to memcpy.

A daemon's arena is full for all but its first minutes, so before pages of a size are measured it is filled
with their like: every save makes others leave.

Lookups are of a prompt of 100K tokens, hashing included: as a new prompt (*whole*), and as one whose first
100K tokens the client has looked up before, with 1K new ones behind (*tail*). Requests are lookups of 1K
tokens by many clients at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore import Store
from tierstore.client.backend import RemoteBackend
from tierstore.errors import TierStoreError
from tierstore.spec import KVSpec
from tierstore.units import format_size
from tierstore.wire import messages
from tierstore_tools import requests
from tierstore_tools.connected_bytes import BoundRow, CostRow, Sample, connect, fill, measure
from tierstore_tools.requests import RequestsRow
from tierstore_tools.tiers import Progress, TierRow

_WAIT_S = 60.0
_PROMPT_TOKENS = 100_000
_TAIL_TOKENS = 1_000
_PROMPTS = 20
_CLIENTS = 5
_TURNS = 20
_AT_ONCE = (1, 2)  # clients that move bytes
_MANY = 64  # clients with small requests
_MANY_PROCESSES = 4
_MANY_S = 3.0


@dataclass(frozen=True, slots=True)
class LookupRow:
    """Milliseconds over ``lookups`` lookups, from the client's side."""

    prompt: str
    tokens: int
    lookups: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class ConnectedResult:
    """``rows`` like those of the embedded tiers, with tier ``daemon`` (``daemon ×2``: two clients at once);
    limits are medians over all rounds."""

    limits: dict[str, float]
    rows: tuple[TierRow, ...]
    costs: tuple[CostRow, ...]
    bounds: tuple[BoundRow, ...]
    lookups: tuple[LookupRow, ...]
    requests: tuple[RequestsRow, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "limits": self.limits,
            "rows": [asdict(row) for row in self.rows],
            "costs": [asdict(row) for row in self.costs],
            "bounds": [asdict(row) for row in self.bounds],
            "lookups": [asdict(row) for row in self.lookups],
            "requests": [asdict(row) for row in self.requests],
        }


def run(
    url: str,
    page_sizes: Sequence[int],
    *,
    total_bytes: int,
    rounds: int,
    progress: Progress = lambda _: None,
) -> ConnectedResult:
    """Measure the daemon at ``url``, whose host tier must hold ``total_bytes`` and more.

    Raises :class:`TierStoreError` when it is not there or does not keep what is saved.
    """
    daemon = _look_at(url)
    limits: dict[str, list[float]] = {}
    rows: list[TierRow] = []
    costs: list[CostRow] = []
    bounds: list[BoundRow] = []
    for page_bytes in page_sizes:
        progress(f"filling {format_size(daemon.host_bytes)} with {format_size(page_bytes)} pages")
        fill(url, page_bytes, daemon.host_bytes)
        for clients in _AT_ONCE if url.startswith("ipc://") else (1,):
            progress(f"{format_size(page_bytes)} pages, {clients} at once")
            sample = Sample(url, daemon.pid, page_bytes, total_bytes, rounds, clients)
            moved = measure(sample)
            limits.setdefault(sample.limit, []).extend(moved.limits)
            rows += moved.rows
            costs += moved.costs
            bounds += [moved.bound] if moved.bound is not None else []
    progress("lookups")
    lookups = _lookups(url)
    progress("requests")
    small = requests.measure(url, daemon.pid, clients=_MANY, processes=_MANY_PROCESSES, seconds=_MANY_S)
    medians = {name: statistics.median(values) for name, values in limits.items()}
    return ConnectedResult(medians, tuple(rows), tuple(costs), tuple(bounds), lookups, (small,))


class _Tier(msgspec.Struct):
    capacity_bytes: int


class _Tiers(msgspec.Struct):
    host: _Tier


class _Store(msgspec.Struct):
    tiers: _Tiers


class _Daemon(msgspec.Struct):
    """As much of a daemon's statistics as is of interest here."""

    pid: int
    store: _Store

    @property
    def host_bytes(self) -> int:
        return self.store.tiers.host.capacity_bytes


def _look_at(url: str) -> _Daemon:
    with connect(url, KVSpec.uniform(layers=1, kv_heads=1, head_dim=16, dtype="float16")) as store:
        assert isinstance(store.backend, RemoteBackend), "it was connected"
        answer = store.backend.connection.ask(messages.Stats(0), messages.StatsAnswer)
    if answer is None:
        raise TierStoreError(f"the daemon at {url} does not answer")
    return msgspec.json.decode(answer.json, type=_Daemon)


def _lookups(url: str) -> tuple[LookupRow, ...]:
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=16, dtype="float16")
    chunks = _PROMPT_TOKENS // spec.chunk_tokens
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(0, 1 << 17, chunks * spec.chunk_tokens, np.uint32) for _ in range(_PROMPTS)]
    page = bytes(spec.page_bytes)
    with connect(url, spec) as store:
        identity = store.identity
        for prompt in prompts:
            store.save(prompt, [page] * chunks).wait(_WAIT_S)
    whole: list[float] = []
    tails: list[float] = []
    for _ in range(_CLIENTS):  # each of which sees every prompt for the first time
        with connect(url, spec, identity) as store:
            whole += [_timed_lookup(store, prompt, len(prompt)) for prompt in prompts]
            for number in range(_TURNS):
                turn = np.concatenate([prompts[-1], np.full(_TAIL_TOKENS, number, np.uint32)])
                tails.append(_timed_lookup(store, turn, len(prompts[-1])))
    tokens = len(prompts[0])
    return (_lookup_row("whole", tokens, whole), _lookup_row("tail", tokens + _TAIL_TOKENS, tails))


def _timed_lookup(store: Store, tokens: npt.NDArray[np.uint32], held: int) -> float:
    start = time.perf_counter()
    hit = store.lookup(tokens)
    seconds = time.perf_counter() - start
    hit.release()
    if hit.tokens < held:
        raise TierStoreError(f"the daemon found {hit.tokens} of {held} tokens: give it more --host-bytes")
    return seconds


def _lookup_row(prompt: str, tokens: int, seconds: list[float]) -> LookupRow:
    p50, p99 = (1e3 * float(np.percentile(seconds, share)) for share in (50, 99))
    return LookupRow(prompt, tokens, len(seconds), p50, p99)
