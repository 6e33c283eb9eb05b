"""``tierstore-bench tiers --store URL``: what a daemon's host tier takes and gives, and its lookups.

The bytes go the way an engine's go: a save reserves slots, copies into them and commits, a load is told where
the pages are and copies them out. Beside each figure is one thread's memcpy, measured in the same round.
Lookups are of a prompt of 100K tokens, hashing included: as a new prompt (*whole*), and as one whose first
100K tokens the client has looked up before, with 1K new ones behind (*tail*).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from tierstore.errors import TierStoreError
from tierstore.keys import Identity
from tierstore.memory import Memory
from tierstore.spec import KVSpec
from tierstore.store import Store
from tierstore_tools import limits
from tierstore_tools.tiers import LAYER_BYTES, Progress, Rate, TierRow, row_of

_WAIT_S = 60.0
_PROMPT_TOKENS = 100_000
_TAIL_TOKENS = 1_000
_PROMPTS = 20
_CLIENTS = 5
_TURNS = 20


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
    """``rows`` like those of the embedded tiers, with tier ``daemon``; limits are medians over all rounds."""

    limits: dict[str, float]
    rows: tuple[TierRow, ...]
    lookups: tuple[LookupRow, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "limits": self.limits,
            "rows": [asdict(row) for row in self.rows],
            "lookups": [asdict(row) for row in self.lookups],
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
    rows: list[TierRow] = []
    memcpys: list[float] = []
    for page_bytes in page_sizes:
        puts, gets = [], []
        for round_ in range(rounds):
            progress(f"{page_bytes >> 10} KiB pages, round {round_ + 1} of {rounds}")
            memcpy = limits.memcpy(total_bytes, piece=page_bytes, passes=3)
            put, get = _put_and_get(url, page_bytes, total_bytes)
            memcpys.append(memcpy)
            puts.append((put, put.gb_per_s / memcpy))
            gets.append((get, get.gb_per_s / memcpy))
        rows.append(row_of(("daemon", "put"), page_bytes, puts, "memcpy_gb_per_s"))
        rows.append(row_of(("daemon", "get"), page_bytes, gets, "memcpy_gb_per_s"))
    progress("lookups")
    return ConnectedResult({"memcpy_gb_per_s": statistics.median(memcpys)}, tuple(rows), _lookups(url))


def _connect(url: str, spec: KVSpec, identity: Identity | None = None) -> Store:
    """By default under an identity that nobody has used: what earlier runs left must not be found."""
    if identity is None:
        identity = Identity.of(spec, model="tierstore-bench", revision=str(time.time_ns()))
    store = Store.connect(url, spec, identity=identity, lookup_s=10.0)
    store.wait_ready()
    return store


def _put_and_get(url: str, page_bytes: int, total_bytes: int) -> tuple[Rate, Rate]:
    spec = KVSpec.uniform(layers=page_bytes // LAYER_BYTES, kv_heads=1, head_dim=64, dtype="float16")
    count = total_bytes // page_bytes
    source, target = _buffers(count, page_bytes), _buffers(count, page_bytes)
    for number, page in enumerate(source):
        np.frombuffer(page, np.uint32)[:] = np.arange(page_bytes // 4, dtype=np.uint32) + number
    tokens = np.arange(count * spec.chunk_tokens)
    with _connect(url, spec) as store:
        put = Rate.of(lambda: store.save(tokens, source).wait(_WAIT_S), total_bytes)
        hit = store.lookup(tokens)
        if hit.tokens < len(tokens):
            raise TierStoreError(
                f"the daemon kept {hit.tokens} of {len(tokens)} tokens: give it more --host-bytes "
                f"(the pages of a round have {total_bytes} bytes)"
            )
        get = Rate.of(lambda: store.load(hit, target).wait(_WAIT_S), total_bytes)
        for saved, loaded in zip(source, target, strict=True):
            if saved != loaded:
                raise AssertionError("pages came back with other bytes than were put")
    return put, get


def _buffers(count: int, page_bytes: int) -> list[memoryview]:
    memory = Memory(count * page_bytes, shared=False)
    memory.populate()
    return [memory.view(number * page_bytes, page_bytes) for number in range(count)]


def _lookups(url: str) -> tuple[LookupRow, ...]:
    spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=16, dtype="float16")
    chunks = _PROMPT_TOKENS // spec.chunk_tokens
    numbers = np.random.default_rng(0)
    prompts = [numbers.integers(0, 1 << 17, chunks * spec.chunk_tokens, np.uint32) for _ in range(_PROMPTS)]
    page = bytes(spec.page_bytes)
    with _connect(url, spec) as store:
        identity = store.identity
        for prompt in prompts:
            store.save(prompt, [page] * chunks).wait(_WAIT_S)
    whole: list[float] = []
    tails: list[float] = []
    for _ in range(_CLIENTS):  # each of which sees every prompt for the first time
        with _connect(url, spec, identity) as store:
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
